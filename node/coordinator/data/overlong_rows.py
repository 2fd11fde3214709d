"""Prompts that are too long for the model, found before a run: only a dry run looks for them."""

import importlib.util
import json
from pathlib import Path

from node.coordinator.data.rows import Rows
from node.task_options import JsonlOptions, column_of


def overlong(rows: Rows, options: JsonlOptions, *, tokenizer_file: Path, most: int) -> str:
    """Return a warning of the prompts of more than ``most`` tokens; empty where there are none.

    What a chat template adds is not counted. Without the package ``tokenizers`` nothing is.
    """
    if importlib.util.find_spec("tokenizers") is None:
        return ""
    from tokenizers import Tokenizer  # samplers and learners have it

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    lengths = [
        len(tokenizer.encode(_text(json.loads(rows.row(index)), options), add_special_tokens=False).ids)
        for index in range(len(rows))
    ]
    long = [index for index, tokens in enumerate(lengths) if tokens > most]
    if not long:
        return ""
    return (
        f"{len(long)} of {len(rows)} prompts have more than {most} tokens, which is what model, "
        f"max_new_tokens and max_prompt_tokens leave; the first is row {long[0]} with {lengths[long[0]]}. "
        "They are set aside one by one during the run: shorten or remove these rows, or lower "
        "coordinator.max_new_tokens"
    )


def _text(row: object, options: JsonlOptions) -> str:
    assert isinstance(row, dict), "every row was checked"
    question = column_of(row, options.messages or options.prompt)
    if isinstance(question, list):
        question = "\n".join(str(message.get("content")) for message in question)
    return f"{options.system}\n{question}" if options.system else str(question)
