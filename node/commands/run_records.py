"""The records of a run as a report needs them: the learner's log of steps, the coordinator's ledger."""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from node.coordinator.ledger.ledger_check import facts_in, read_evaluations, reading
from node.coordinator.ledger.ledger_schema import owner_of
from node.coordinator.ledger.ledger_story import log_lines
from node.coordinator.work.tallies import Tally
from node.errors import StartupError
from node.process.last_start import FILE_NAME as LAST_START
from node.run import Evaluation

CURVES: Final = (
    "reward_mean",
    "kl_nats",
    "ess_ratio",
    "clip_fraction",
    "staleness_mean_versions",
    "staleness_max_versions",
    "learning_rate",
    "step_s",
    "groups_wait_s",
)
"""Numbers of a step's line that are drawn."""


@dataclass(slots=True)
class Records:
    """A run's records, as far as they were found."""

    run_id: str = ""
    """Empty: no ledger was found."""
    steps: int = 0
    tokens: int = 0
    first_s: float | None = None
    """Unix seconds of the first step and, below, of the last; None: no step was found."""
    last_s: float | None = None
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By name in ``CURVES``: (version, value)."""
    grader_metrics: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    announcement_lag_s: list[tuple[float, float]] = field(default_factory=list)
    """(version, seconds from the step's end to its announcement), by learner's and coordinator's clocks."""
    events: list[tuple[int, str]] = field(default_factory=list)
    """(version, rollback or change of settings)."""
    trained: Counter[str] = field(default_factory=Counter)
    """Groups trained on, by sampler; and the versions they were stale together."""
    staleness: Counter[str] = field(default_factory=Counter)
    verdicts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Groups by sampler and verdict, as the ledger has them."""
    slots: dict[str, int] = field(default_factory=dict)
    evaluations: tuple[Evaluation, ...] = ()
    settings: dict[str, object] = field(default_factory=dict)
    """Settings of both roles at their last starts, but for secrets."""


def read_records(learner: Path | None, ledger: Path | None) -> Records:
    """Read what there is.

    Args:
        learner: a directory with steps.jsonl.
        ledger: a ledger or a copy of one.
    Raises:
        StartupError: one of them is damaged.
    """
    records, made_at_s = Records(), dict[int, float]()
    if learner is not None:
        _read_steps(learner / "steps.jsonl", records, made_at_s)
        records.settings |= _settings(learner)
    if ledger is not None:
        _read_ledger(ledger, records, made_at_s)
        records.settings |= _settings(ledger.parent)
    return records


def _read_steps(log: Path, records: Records, made_at_s: dict[int, float]) -> None:
    for line in log_lines(log):
        version, at_s = line["version"], line.get("at_s", 0.0)
        records.first_s = at_s if records.first_s is None else records.first_s
        records.last_s = made_at_s[version] = at_s
        records.events += ((version, what) for what in _events(line))
        if line.get("restored_version") is not None:
            continue
        records.steps += 1
        records.tokens += line.get("tokens", 0)
        for name in CURVES:
            if (value := line.get(name)) is not None:
                records.curves.setdefault(name, []).append((version, value))
        for name, value in line.get("grader_metrics", {}).items():
            records.grader_metrics.setdefault(name, []).append((version, value))
        for group in line["groups"]:
            records.trained[group["sampler_id"]] += 1
            records.staleness[group["sampler_id"]] += group["staleness_versions"]


def _events(line: Mapping[str, Any]) -> Iterator[str]:
    if (restored := line.get("restored_version")) is not None:
        yield f"rollback to version {restored}"
    for key, (was, is_now) in line.get("changed_settings", {}).items():
        yield f"{key} {was} -> {is_now}"


def _read_ledger(path: Path, records: Records, made_at_s: Mapping[int, float]) -> None:
    records.evaluations = tuple(one for one in read_evaluations(path) if one.finished_at_s and one.has_score)
    try:
        with reading(path) as connection:
            connection.execute("BEGIN")  # a snapshot: a coordinator may go on writing
            records.run_id = owner_of(connection.execute)
            for tally in facts_in(connection, Tally):
                records.verdicts[tally.sampler_id] = {
                    verdict.value: n for verdict, n in tally.verdicts.items()
                }
            records.slots = dict(connection.execute("SELECT state, count(*) FROM slots GROUP BY state"))
            announced = connection.execute("SELECT number, at_s FROM versions ORDER BY number")
            records.announcement_lag_s = [
                (number, at_s - made_at_s[number]) for number, at_s in announced if number in made_at_s
            ]
    except (sqlite3.Error, ValueError) as error:
        raise StartupError(
            f"the ledger {path} cannot be read: {error}", fix="`heterorl-node ledger verify` says more."
        ) from error


def _settings(state: Path) -> dict[str, object]:
    with suppress(OSError, ValueError):
        found = json.loads((state / LAST_START).read_bytes())
        return found if isinstance(found, dict) else {}
    return {}
