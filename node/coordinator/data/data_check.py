"""The data as a dry run checks them: rows that cannot be used, other rows than the run's, long prompts.

Reads what a start reads, and the ledger of a run that has begun; changes nothing. The work is bounded: see
``CHECK_S`` for rows, and ``COUNTING_S`` for the tokens of prompts.
"""

import importlib.util
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from node.checks.check import Check, Finding, Grade, Needs
from node.coordinator.data.data_config import DataConfig
from node.coordinator.data.row_sources import open_rows, scratch_directory
from node.coordinator.data.rows import RowCheck, Rows
from node.coordinator.ledger.ledger_check import data_of
from node.coordinator.work.terms.run_data import NO_DATA, DataSeen, agreed_data
from node.errors import ConfigError
from node.questions.messages import content_text
from node.questions.question import question_of
from node.tasks.task_options import QuestionOptions, TaskOptions
from node.values import limits

COUNTING_S: Final = 60.0
"""Longest time to count the tokens of prompts, some hundred thousand of them."""


@dataclass(frozen=True, slots=True)
class DataUse:
    """The run's use of its data."""

    options: TaskOptions | None
    """None: of a custom task."""
    columns: Mapping[str, str]
    max_new_tokens: int
    ledger: Path | None
    """The run's, where it is a file; there may be none yet."""
    model_dir: Path | None
    """The model whose tokenizer counts; None: there is none at hand."""


def data_check(data: DataConfig, use: DataUse, *, told: Callable[[str], None], after: Check) -> Check:
    """Return the check of the data, as far as it can be made without samplers.

    Args:
        told: Called now and then with how far it is, where there are many rows.
        after: The check of the packages that read them.
    """
    return Check("data", Needs.DATA, partial(_data, data, use, told=told), after=(after,))


def _data(data: DataConfig, use: DataUse, *, told: Callable[[str], None]) -> Iterator[Finding]:
    """Read the data as a start does, and check every row; blocking.

    Raises:
        ConfigError: rows cannot be used, or they are not those that the run began with.
        StartupError: they cannot be read.
    """
    known, next_slot = (NO_DATA, 0) if use.ledger is None else _known(use.ledger)
    check = RowCheck(use.options, told=lambda rows: told(f"{rows} rows of {data.file.name} checked so far"))
    scratch = scratch_directory()
    rows = open_rows(
        data, scratch=scratch, columns=use.columns, known=known if next_slot else NO_DATA, check=check
    )
    try:
        agreed_data(known, rows.seen, known_part=rows.known_part, next_slot=next_slot)
        if rows.tally.unusable:
            raise ConfigError(
                key="coordinator.data.file",
                value=str(data.file),
                source="the configuration",
                rule=f"{rows.tally.summary()} (the first row of a file is row 0)",
                fix="Correct or remove these rows, or change coordinator.task_options. A run that has begun "
                "leaves them out.",
            )
        for warning in _warnings(rows, use):
            yield Finding("data", Grade.WARN, warning)
        yield Finding("data", Grade.OK, _said(data, use, rows, has_begun=bool(next_slot)))
    finally:
        rows.close()


def _known(ledger: Path) -> tuple[DataSeen, int]:
    try:
        return data_of(ledger)
    except FileNotFoundError:
        return NO_DATA, 0
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            key="node.state_dir",
            value=str(ledger.parent.parent),
            source="the configuration",
            rule=f"the ledger in it cannot be read: {error}",
            fix="Run heterorl-node ledger check on it.",
        ) from error


def _said(data: DataConfig, use: DataUse, rows: Rows, *, has_begun: bool) -> str:
    checked = rows.tally.checked
    if checked == len(rows):
        which = f"all {checked} rows" if checked > 1 else "the only row"
    else:
        which = f"the first {checked} of {len(rows)} rows"
    what = "what they mean is the task's own" if use.options is None else use.options.said_of_rows
    same = ""
    if use.ledger is None:
        same = "; not compared with those that the run began with, which a database holds"
    elif has_begun:
        same = "; they are those that the run began with"
    return f"{which} of {data.file.name} ({what}{same})"


def _warnings(rows: Rows, use: DataUse) -> list[str]:
    if use.model_dir is None or not isinstance(use.options, QuestionOptions):
        return []
    try:
        described = json.loads((use.model_dir / "config.json").read_bytes())
    except (OSError, ValueError):
        return []  # the check of the model says so
    context = described.get("text_config", described).get("max_position_embeddings", limits.PROMPT_TOKENS)
    most = min(int(context) - use.max_new_tokens, use.options.max_prompt_tokens or limits.PROMPT_TOKENS)
    warning = _overlong(rows, use.options, tokenizer_file=use.model_dir / "tokenizer.json", most=most)
    return [warning] if warning else []


def _overlong(rows: Rows, options: QuestionOptions, *, tokenizer_file: Path, most: int) -> str:
    """Return a warning of the prompts of more than ``most`` tokens; empty where there are none.

    What a chat template adds is not counted; without the package ``tokenizers`` nothing is.
    """
    if importlib.util.find_spec("tokenizers") is None or not tokenizer_file.is_file():
        return ""
    from tokenizers import Tokenizer  # samplers and learners have it

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    until_s = time.monotonic() + COUNTING_S
    long, first, counted = 0, "", 0
    for index in range(len(rows)):
        if index % 1000 == 0 and time.monotonic() > until_s:
            break
        counted += 1
        text = _text(rows.row(index), options)
        if (tokens := len(tokenizer.encode(text, add_special_tokens=False).ids)) > most:
            long += 1
            first = first or f"the first is row {index} with {tokens}"
    if not long:
        return ""
    return (
        f"{long} of {counted} prompts have more than {most} tokens, which is what model, "
        f"max_new_tokens and max_prompt_tokens leave; {first}. "
        "They are set aside one by one during the run: shorten or remove these rows, or lower "
        "coordinator.max_new_tokens"
    )


def _text(row: bytes, options: QuestionOptions) -> str:
    question = question_of(json.loads(row), options)
    if not isinstance(question, str):
        question = "\n".join(map(content_text, question))
    return f"{options.system}\n{question}" if options.system else question
