"""Reads every merge record, and holds it against all logs and signed versions.

the learner's journal        --> a group or contribution is in one record; its groups are its step's
checkpoint and contributions --> summed once more, have the root that was signed
the learner's log            --> no group is dealt again once its record is durable
contributors' logs           --> what they were told is merged is in that record, what was refused in none
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench.kill_lab.stage import Stage
from bench.kill_lab.truth import Words
from bench.kill_lab.witness import Witness, events_of
from deploy.runs.run_directory import LEARNER
from learner.merging.changes.coder import decode_tensors
from learner.merging.changes.word_changes import WordsBefore
from learner.merging.merge_settings import MergeSettings
from node.weights.format.layout import Layout, TensorSpec

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """A contribution as a merge record has it."""

    told: Mapping[str, Any]
    """Contributor, number and report, as the journal has them."""
    payload: bytes

    @classmethod
    def of(cls, header: bytes, payload: bytes) -> "Merged":
        """Read a row of the journal."""
        about, _, report = header.partition(b"\n")
        return cls(json.loads(report) | json.loads(about), payload)

    @property
    def key(self) -> tuple[str, int]:
        return self.told["contributor"], self.told["number"]

    @property
    def group_ids(self) -> tuple[str, ...]:
        """Groups of its steps."""
        return tuple(group["group_id"] for step in self.told["steps"] for group in step["groups"])

    def weight(self, weighting: str) -> float:
        """Return its weight: the groups of its steps, or tokens^2 over all that it consumed."""
        told, trained = self.told, len(self.group_ids)
        if weighting == "groups":
            return float(trained)
        tokens = told.get("tokens") or sum(step["numbers"]["tokens"] for step in told["steps"])
        taught_nothing = len(told.get("uninformative", ())) + len(told.get("not_finite", ()))
        return float(tokens**2 / max(1, trained + taught_nothing))


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge record."""

    version: int
    settings: MergeSettings
    merged: tuple[Merged, ...]


def read_merges(path: Path, *, after: int) -> Iterator[Merge]:
    """Yield the merges of later versions in a learner's journal, in order.

    Raises:
        sqlite3.OperationalError: it is not there yet, or its learner was killed as it wrote.
    """
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as journal:
        for number, text in journal.execute("SELECT number, text FROM entries ORDER BY number").fetchall():
            step = json.loads(text).get("step")
            if step is not None and step["line"]["version"] > after:
                of_entry = "SELECT header, columns FROM groups WHERE entry = ? ORDER BY place"
                rows = journal.execute(of_entry, (number,)).fetchall()
                settings = MergeSettings.model_validate(step["settings"]["merge"])
                yield Merge(step["line"]["version"], settings, tuple(Merged.of(*row) for row in rows))


class MergeWitness(Witness):
    """A witness of a run whose learner merges."""

    def __init__(self, stage: Stage, *, public_key: bytes, log_of: dict[str, Path]) -> None:
        super().__init__(stage, public_key=public_key, log_of=log_of)
        self._log_of = log_of
        self._records: dict[int, dict[tuple[str, int], tuple[str, ...]]] = {}
        """Version -> contributor and number of each contribution -> groups of its steps."""
        self._summed: dict[int, bytes] = {}
        """Version -> root of the sum of its contributions."""
        self._figures: Counter[str] = Counter()

    def merges(self) -> dict[str, int]:
        """Return figures of what was compared."""
        return {
            "merge_records": len(self._records),
            "contributions": sum(map(len, self._records.values())),
            "versions_summed_again": len(self._summed),
            **{key: self._figures[key] for key in ("dealt", "dealt_again", "told_merged", "told_refused")},
        }

    def examine(self, name: str) -> None:
        """Look at the disk of a process that was just killed. Blocking."""
        super().examine(name)
        if name == LEARNER:
            self._sum_again()

    def conclude(self) -> None:
        """Hold every claim against what was signed; once, at the end."""
        super().conclude()
        self._sum_again()
        for version in self._roots.keys() - {0} - self._records.keys():
            self._violate(f"version {version} was signed without a merge record")
        for version, root in self._summed.items():
            if self._roots.get(version, root) != root:
                self._violate(f"version {version} is not the sum of its contributions")
        if self.replays.inexact:
            self._violate(f"{self.replays.inexact} restarts did not merge to the published words again")
        groups, contributions = dict[str, int](), dict[tuple[str, int], int]()
        for version, record in self._records.items():
            if sorted(chain(*record.values())) != sorted(self._journaled[version]):
                self._violate(f"version {version} has other groups than its contributions")
            for (name, number), group_ids in record.items():
                if contributions.setdefault((name, number), version) != version:
                    self._violate(f"contribution {number} of {name} was merged twice")
                for group_id in group_ids:
                    if (home := groups.setdefault(group_id, version)) != version:
                        self._violate(f"group {group_id} is in two records: {home} and {version}")
        self._check_deals(groups)
        for name in self._stage.plan.contributors:
            self._check_answers(name, contributions)

    def _read_journal(self) -> None:
        super()._read_journal()
        with suppress(sqlite3.OperationalError):
            for merge in read_merges(self._journal, after=max(self._records, default=0)):
                self._records[merge.version] = {one.key: one.group_ids for one in merge.merged}

    def _check_deals(self, homes: Mapping[str, int]) -> None:
        durable, dealt = 0, Counter[str]()
        for event in events_of(self._log_of[LEARNER]):
            if event["event"] in ("step", "restored"):
                durable = max(durable, event["version"])
            elif event["event"] == "batch dealt":
                dealt.update(event["group_ids"])
                for group_id in event["group_ids"]:
                    if homes.get(group_id, durable + 1) <= durable:
                        self._violate(f"group {group_id} was dealt after version {homes[group_id]} had it")
        self._figures["dealt"] = len(dealt)
        self._figures["dealt_again"] = sum(times > 1 for times in dealt.values())

    def _check_answers(self, name: str, homes: Mapping[tuple[str, int], int]) -> None:
        steps: dict[int, int] = {}
        for event in events_of(self._log_of[name]):
            home = homes.get((name, number := event.get("number", 0)))
            match event["event"]:
                case "contribution handed in":
                    steps[number] = event["steps"]
                case "contribution merged" if steps.get(number):
                    self._figures["told_merged"] += 1
                    if home != event["version"]:
                        told = f"version {event['version']} has its contribution {number}"
                        self._violate(f"{name} was told that {told}, which is in {home}")
                case "contribution refused, its groups are dealt again":
                    self._figures["told_refused"] += 1
                    if home is not None:
                        self._violate(f"{name} was refused contribution {number}, which was merged")

    @property
    def _journal(self) -> Path:
        return self._stage.state(LEARNER) / "journal.sqlite"

    def _sum_again(self) -> None:
        """Sum contributions again, from the checkpoint before the newest, or from the base."""
        checkpoints = sorted((self._stage.state(LEARNER) / "checkpoints").glob("0*"))
        version, masters, momentum = 0, _tensors(self._stage.model), Tensors()
        if len(checkpoints) > 1:
            at = checkpoints[-2]
            version, masters, momentum = int(at.name), _tensors(at / "masters"), _tensors(at / "optimizer")
        with suppress(sqlite3.OperationalError):
            for merge in read_merges(self._journal, after=version):
                if merge.version != version + 1:
                    return  # the journal begins later
                version = merge.version
                add_mean(masters, momentum, merge, self._model.rounded(masters))
                root = self._model.root(self._model.rounded(masters))
                if self._summed.setdefault(version, root) != root:
                    self._violate(f"version {version} was summed to two roots")


def add_mean(masters: Tensors, momentum: Tensors, merge: Merge, words: Words) -> None:
    """Move masters by the mean of contributions, in float64: theta <- theta - gamma (D + beta m).

    Each contribution is of all tensors.
    """
    settings = merge.settings
    shapes = {name: tensor.shape for name, tensor in masters.items()}
    layout = Layout.of(TensorSpec(name, tuple(shape)) for name, shape in shapes.items())
    before = WordsBefore(layout, lambda frame: words[layout.frames[frame].slice])
    weights = [one.weight(settings.weighting) for one in merge.merged]
    sums = Tensors()
    for weight, one in zip(weights, merge.merged, strict=True):
        changes = decode_tensors(one.payload, settings, shapes, words_before=before) if one.payload else ()
        for name, change in changes:
            part = change * (weight / sum(weights))
            sums[name] = sums[name] + part if name in sums else part
    for name, total in sums.items():
        towards = -total
        if beta := settings.outer_momentum:
            key = f"momentum/{name}"
            memory = momentum.get(key, torch.zeros_like(masters[name])).double() * beta + towards
            momentum[key] = memory.float()
            towards = towards + memory * beta
        masters[name] = (masters[name].double() - towards * settings.outer_rate).float()


def _tensors(directory: Path) -> Tensors:
    files = map(load_file, directory.glob("*.safetensors"))
    return {name: tensor.float() for file in files for name, tensor in file.items()}
