"""The records of a run on disk, as values: the learner's step log and the coordinator's ledger."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Final

from node.coordinator.ledger.ledger_check import reading
from node.coordinator.ledger.ledger_export import rows
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.work.samplers.tallies import Tally
from node.coordinator.work.slots.slot import parse_group_id
from node.step_log_parts import log_lines

_OF_A_GROUP: Final = ("group_id", "sampler_id", "staleness_versions")


@dataclass(frozen=True, slots=True)
class Trained:
    """A group that a step consumed."""

    group_id: str
    sampler_id: str
    staleness_versions: int

    @property
    def slot(self) -> int:
        return self._parts[0]

    @property
    def attempt(self) -> int:
        """1 unless an earlier lease of the slot failed."""
        return self._parts[1]

    @property
    def _parts(self) -> tuple[int, int]:
        parts = parse_group_id(self.group_id)
        if parts is None:
            raise ValueError(f"{self.group_id!r} is not the id of a group")
        return parts


@dataclass(frozen=True, slots=True)
class Step:
    """One gradient step, as the learner logged it."""

    version: int
    at_s: float
    reward_mean: float
    kl_nats: float
    ess_ratio: float
    staleness_mean_versions: float
    step_s: float
    groups: tuple[Trained, ...]

    @classmethod
    def parse(cls, line: str | bytes) -> "Step":
        """Read one line of ``steps.jsonl``."""
        fields = json.loads(line)
        groups = tuple(
            Trained(group["group_id"], group["sampler_id"], group["staleness_versions"])
            for group in fields["groups"]
        )
        numbers = {name: fields[name] for name in cls.__slots__ if name != "groups"}
        return cls(**numbers, groups=groups)


class StepTail:
    """The steps logged so far, read as the file grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self.steps: list[Step] = []

    def read(self) -> list[Step]:
        """Read new complete lines; return all steps, oldest first."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read_bytes += len(whole) + len(newline)
            self.steps += map(Step.parse, whole.splitlines())
        return self.steps


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """The coordinator's ledger after its end."""

    steps: Mapping[int, tuple[str, ...]]
    """Version -> ids of the groups it was trained on."""
    slots: Mapping[str, int]
    """State -> number of slots."""
    verdicts: Mapping[str, Mapping[str, int]]
    """Sampler -> verdict -> number of groups."""
    roots: Mapping[int, str]
    """Version -> the root that the learner signed, in hexadecimal."""


def read_ledger(path: Path, *, run_id: str) -> LedgerRecord:
    """Read the ledger of a coordinator that has ended."""
    ledger = Ledger.open(path, run_id=run_id)
    try:
        balance = ledger.balance()
    finally:
        ledger.close()
    with reading(path) as connection:
        steps = {
            version: tuple(json.loads(group_ids))
            for version, group_ids in connection.execute("SELECT version, group_ids FROM steps")
        }
        signed = connection.execute("SELECT number, root FROM versions")
        roots = {number: root.hex() for number, root in signed}
    slots = {state.value: n for state, n in balance.slots.settled.items()}
    for slot in balance.slots.open_ones:
        slots[slot.state.value] = slots.get(slot.state.value, 0) + 1
    verdicts = {
        tally.sampler_id: {verdict.value: n for verdict, n in tally.verdicts.items()}
        for tally in balance.of(Tally)
    }
    return LedgerRecord(steps, slots, verdicts, roots)


def differing_groups(ledger: Path, log: Path) -> list[str]:
    """Return the groups that ledger and learner's log tell differently, up to the ledger's newest step.

    The log may be ahead: a learner tells of a step once it is durable. Both must begin with the run.
    """
    last = max((step["version"] for step in rows(ledger, "steps")), default=0)
    told = list(rows(ledger, "trained"))
    logged = [
        {"version": line["version"], **{name: group[name] for name in _OF_A_GROUP}}
        for line in log_lines(log)
        if line["version"] <= last
        for group in line["groups"]
    ]
    pairs = zip_longest(told, logged)
    return [f"{ours} in the ledger, {theirs} in the log" for ours, theirs in pairs if ours != theirs]
