"""Converts the ledger of an older release, whose every kind of fact had a table of its own.

    schema 1    release 0.2.0
    schema 2    0.3 before facts: the same tables, more columns
    schema 3    five tables: ``ledger_schema``

Of evaluations, a score stays where it has the coverage that we ask for. The answers, one by one, go, and so
does what is under way, and what samplers said of the task.
Columns are taken by name, and one that a release did not have yet has its field's default.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from node.coordinator.ledger.fact_rows import Owner
from node.coordinator.work.samplers.sampler_standing import Standing
from node.coordinator.work.samplers.tallies import Tally
from node.coordinator.work.slots.slot_generations import Generation
from node.coordinator.work.terms.group_check import NotedOptions
from node.coordinator.work.terms.model_check import Learner
from node.coordinator.work.terms.run_data import DataSeen
from node.values.evaluation import Evaluation
from node.values.fact import Fact, MalformedFactError
from node.values.groups.failure import BadPrompt, Failure
from node.values.groups.verdict import Verdict

OLDER: Final = (1, 2)

Execute = Callable[[str], Any]
"""Runs a query on either engine's connection; returns its cursor."""


def facts_of_older(execute: Execute) -> Iterator[Fact]:
    """Yield the facts of a ledger of an older schema.

    Raises:
        MalformedFactError: a row is not one of its release.
    """
    for table, facts in _FACTS.items():
        try:
            yield from facts(execute)
        except (ValueError, TypeError, LookupError) as error:
            raise MalformedFactError(
                f"table {table!r} has a row that no release has written: {error}"
            ) from error


def _rows(execute: Execute, table: str) -> list[dict[str, Any]]:
    cursor = execute(f"SELECT * FROM {table}")
    names = [column[0] for column in cursor.description]
    rows = (dict(zip(names, row, strict=True)) for row in cursor.fetchall())
    return [{name: value for name, value in row.items() if name != "only"} for row in rows]


def _generations(execute: Execute) -> Iterator[Fact]:
    for row in _rows(execute, "generations"):
        first, last = row.pop("lost_first_version"), row.pop("lost_last_version")
        yield Generation(**row, lost_versions=None if first is None else range(first, last + 1))


def _bad_prompts(execute: Execute) -> Iterator[Fact]:
    for row in _rows(execute, "bad_prompts"):
        said_by = tuple(json.loads(row["said_by"]))
        yield BadPrompt(**{**row, "reason": Failure(row["reason"]), "said_by": said_by})


def _tallies(execute: Execute) -> Iterator[Fact]:
    staleness = {row["sampler_id"]: row["versions"] for row in _rows(execute, "staleness")}
    verdicts: dict[str, dict[Verdict, int]] = {name: {} for name in staleness}
    for row in _rows(execute, "verdicts"):
        verdicts.setdefault(row["sampler_id"], {})[Verdict(row["verdict"])] = row["n"]
    for name, counts in sorted(verdicts.items()):
        yield Tally(name, counts, staleness.get(name, 0))


def _evaluations(execute: Execute) -> Iterator[Fact]:
    for row in _rows(execute, "evaluations"):
        kept = {name: value for name, value in row.items() if name not in _OF_OLDER_EVALUATIONS}
        evaluation = Evaluation(**kept)
        if evaluation.finished_at_s:
            yield evaluation if evaluation.is_covered else replace(evaluation, **_NO_SCORE)


_OF_OLDER_EVALUATIONS: Final = ("dropped_prompts", "left_out", "disputed_by")

_NO_SCORE: Final[Mapping[str, Any]] = {
    "reward_mean": None,
    "reward_standard_error": None,
    "cut_ratio": None,
    "tokens_mean": None,
    "metrics": "",
}

_FACTS: Final[dict[str, Callable[[Execute], Iterator[Fact]]]] = {
    "run": lambda execute: (Owner(**row) for row in _rows(execute, "run")),
    "learner": lambda execute: (Learner(**row) for row in _rows(execute, "learner")),
    "data": lambda execute: (DataSeen(**row) for row in _rows(execute, "data")),
    "task_options": lambda execute: (NotedOptions(**row) for row in _rows(execute, "task_options")),
    "generations": _generations,
    "standings": lambda execute: (Standing(**row) for row in _rows(execute, "standings")),
    "bad_prompts": _bad_prompts,
    "verdicts": _tallies,
    "evaluations": _evaluations,
}

GONE: Final = (*_FACTS, "staleness", "evaluation_slots", "evaluation_scores", "task", "size_words")
"""Tables that are facts now, or nothing."""
