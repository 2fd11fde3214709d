"""Writes down what every process claims and what lies on its disk, and says what contradicts the truth.

manifests that left the learner's hands    --> one root for each version, for ever; a delta to each version
the learner's checkpoints, by their words  --> have the root that was signed for their number
the learner's log of steps                 --> every version once, every slot trained on once
the learner's journal                      --> the same groups in every version as in the log, for ever
samplers' logs, the coordinator's table    --> name no version with another root, and none older than before
a killed sampler's copy, by its words      --> has the root that was signed
a killed sampler's, relay's, learner's payloads --> what is whole is what was signed
"""

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from bench.kill_lab.plan import RELAY
from bench.kill_lab.stage import Stage
from bench.kill_lab.truth import Model, OnDisk, read_artifacts, read_copy, read_journal, read_manifest
from deploy.runs.run_directory import COORDINATOR, LEARNER, role_of
from node.identity.run_description import RunDescription
from node.values.roles import Role
from node.values.run import RunStatus

_BASE: Final = 0
_KEYFRAME: Final = -1
"""Base version of an artifact that has none."""


@dataclass(slots=True)
class _Log:
    """Everything one sampler has said so far."""

    path: Path
    read_bytes: int = 0
    newest: int = -1
    has_begun: bool = False
    """Whether it has served a version since it was started last."""
    promised: int = 0
    """Version on its disk at its last kill: it begins with this one or a newer one."""


@dataclass(slots=True)
class Replays:
    """Starts of a learner that had taken steps, as its log tells of them."""

    exact: int = 0
    """The published words came out again."""
    inexact: int = 0
    unpublished: int = 0
    """Nothing was published since the checkpoint: there was nothing to compare."""
    steps: int = 0
    """Taken again, in all of them."""
    longest_s: float = 0.0


@dataclass(slots=True)
class Looked:
    """How often each thing was compared."""

    claims: int = 0
    checkpoints: int = 0
    copies: int = 0
    payload_bytes: int = 0
    journaled: int = 0
    """Steps seen in the journal."""
    starts_with_a_version: int = 0
    groups: int = 0


class Witness:
    """Not concerned with what the code under test thinks of itself."""

    @classmethod
    def of(cls, stage: Stage) -> Self:
        """Return a witness who knows the run's public key and reads every daemon's log."""
        logs = {name: stage.root / "logs" / f"{name}.log" for name in stage.plan.daemons}
        public_key = RunDescription.load(stage.run_file).learner_public_key
        return cls(stage, public_key=public_key, log_of=logs)

    def __init__(self, stage: Stage, *, public_key: bytes, log_of: dict[str, Path]) -> None:
        """Begin when the base model is there."""
        self._stage = stage
        self._public_key = public_key
        self._model = Model(stage.model / "model.safetensors")
        base = self._model.root(self._model.words(stage.model / "model.safetensors"))
        self._lock = threading.Lock()
        self._roots = {_BASE: base}
        self._claims: set[tuple[str, int, bytes]] = set()
        self._manifests: set[tuple[Path, int]] = set()
        self._checkpoints: set[str] = set()
        self._journaled: dict[int, tuple[str, ...]] = {}
        """Version -> the groups it was first seen to be made of."""
        self._epochs: dict[int, int] = {}
        self._logs = {name: _Log(log_of[name]) for name in stage.plan.samplers}
        self._learner_log = log_of.get(LEARNER)
        self.replays = Replays()
        self._deltas: set[int] = set()
        """Versions of which a delta was signed."""
        self.acknowledged: dict[str, str] = {}
        """Groups a sampler was told are in safe keeping: id -> sampler."""
        self.violations: list[str] = []
        self.looked = Looked()

    @property
    def versions(self) -> int:
        """How many versions were signed."""
        return len(self._roots) - 1

    def look(self) -> None:
        """Read what is new in stores, checkpoints and logs. Blocking; from any thread."""
        with self._lock:
            self._read_manifests()
            self._read_checkpoints()
            self._read_journal()
            for name in self._logs:
                self._read_log(name)

    def hear(self, status: RunStatus) -> None:
        """Take the coordinator's table: what each sampler says in its heartbeats."""
        for peer in status.peers:
            if peer.role in (Role.SAMPLER, Role.CONTRIBUTOR) and peer.held is not None and peer.held.root:
                self._claims.add((f"{peer.node_id} in a heartbeat", peer.held.number, peer.held.root))

    def examine(self, name: str) -> None:
        """Look at the disk of a process that was just killed. Blocking."""
        self.look()
        artifacts = read_artifacts(self._artifact_directories(name), self._public_key)
        self.looked.payload_bytes += sum(artifact.intact_bytes for artifact in artifacts)
        if role_of(name) == "sampler":
            self._examine_sampler(name, artifacts)
        else:
            store = self._stage.state(name) / ("published" if name == LEARNER else "versions")
            for whole in read_artifacts((store / "complete").iterdir(), self._public_key):
                if not whole.is_whole:
                    self._violate(f"{name}: complete version {whole.signed.version} has wrong payloads")

    def conclude(self) -> None:
        """Hold every claim against what was signed; once, at the end."""
        self.look()
        self._check_lineage()
        self._read_restarts()
        for version in self._roots.keys() - {_BASE} - self._deltas:
            self._violate(f"version {version} was signed as a keyframe only")
        for who, number, root in sorted(self._claims):
            self.looked.claims += 1
            if self._roots.get(number) != root:
                signed = self._roots.get(number, b"").hex() or "nothing"
                self._violate(f"{who}: version {number} with root {root.hex()}, signed was {signed}")

    def _examine_sampler(self, name: str, artifacts: Sequence[OnDisk]) -> None:
        copy = read_copy(self._stage.state(name) / "held.words")
        version = _BASE
        if copy is not None:
            version, said, words = copy
            self.looked.copies += 1
            root = self._model.root(words)
            if root != said or root != self._roots.get(version):
                self._violate(f"{name}: its copy of version {version} has root {root.hex()}")
        log = self._logs[name]
        log.promised = max(_reached(version, artifacts), _reached(_BASE, artifacts))
        log.has_begun = False

    def _read_manifests(self) -> None:
        for name in (LEARNER, COORDINATOR, RELAY):
            for directory in self._artifact_directories(name):
                path = directory / "manifest"
                try:
                    seen = (path, path.stat().st_mtime_ns)
                    if seen in self._manifests:
                        continue
                    signed = read_manifest(path.read_bytes(), self._public_key)
                except OSError:
                    continue
                if signed is None:
                    continue  # half written
                self._manifests.add(seen)
                if signed.base_version != _KEYFRAME:
                    self._deltas.add(signed.version)
                if name == LEARNER and directory.parent.name == "incoming":
                    continue  # nobody was told
                if self._roots.setdefault(signed.version, signed.root) != signed.root:
                    self._violate(f"version {signed.version} was signed with two roots")
                self._epochs.setdefault(signed.version, signed.learner_epoch)

    def _read_checkpoints(self) -> None:
        for directory in (self._stage.state(LEARNER) / "checkpoints").glob("0*"):
            number = int(directory.name)
            if directory.name in self._checkpoints or number not in self._roots:
                continue
            try:
                words = self._model.words(*(directory / "masters").iterdir())
            except (OSError, ValueError):
                continue  # removed meanwhile
            self._checkpoints.add(directory.name)
            self.looked.checkpoints += 1
            if self._model.root(words) != self._roots[number]:
                self._violate(f"version {number} was signed with another root than its checkpoint has")

    def _read_journal(self) -> None:
        for version, groups in read_journal(self._stage.state(LEARNER) / "journal.sqlite").items():
            if self._journaled.setdefault(version, groups) != groups:
                self._violate(f"version {version} is of other groups in the journal than before")
        self.looked.journaled = len(self._journaled)

    def _check_lineage(self) -> None:
        """Read the learner's own log of steps: each version once, in order, and each slot once."""
        path = self._stage.state(LEARNER) / "steps.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        versions = [line["version"] for line in lines]
        if versions != list(range(1, len(versions) + 1)):
            self._violate(f"the log of steps has versions {versions[-20:]} at its end")
        for line in lines:
            groups = tuple(group["group_id"] for group in line["groups"])
            if self._journaled.get(line["version"], groups) != groups:
                self._violate(f"version {line['version']} is of other groups in the log than in the journal")
        epochs = [epoch for _, epoch in sorted(self._epochs.items())]
        if epochs != sorted(epochs):
            self._violate(f"a newer version was signed under an older epoch: {epochs}")
        slots = Counter(group["group_id"].partition(".")[0] for line in lines for group in line["groups"])
        for slot, times in slots.items():
            if times > 1:
                self._violate(f"slot {slot} was trained on {times} times")
        self.looked.groups = sum(slots.values())

    def _read_restarts(self) -> None:
        if self._learner_log is None:
            return
        for event in events_of(self._learner_log):
            if event["event"] == "restored":
                outcome = event["words"]
                setattr(self.replays, outcome, getattr(self.replays, outcome) + 1)
                self.replays.steps += event["version"] - event["checkpoint_version"]
                self.replays.longest_s = max(self.replays.longest_s, event["took_s"])

    def _read_log(self, name: str) -> None:
        log = self._logs[name]
        with log.path.open("rb") as file:
            file.seek(log.read_bytes)
            whole, newline, _ = file.read().rpartition(b"\n")
        log.read_bytes += len(whole) + len(newline)
        for event in _events_in(whole):
            if event["event"] == "version held":
                self._note_held(name, event)
            elif event["event"] == "group" and event["verdict"] == "spooled":
                self.acknowledged[event["group_id"]] = name

    def _note_held(self, name: str, event: dict[str, Any]) -> None:
        log, version = self._logs[name], int(event["version"])
        if version < log.newest:
            self._violate(f"{name} served version {version} after version {log.newest}")
        if not log.has_begun:
            self.looked.starts_with_a_version += version > _BASE
            if version < log.promised:
                self._violate(f"{name} began with version {version}, its disk had {log.promised}")
        log.newest = max(log.newest, version)
        log.has_begun = True
        self._claims.add((f"{name} in its log", version, bytes.fromhex(event["root"])))

    def _artifact_directories(self, name: str) -> list[Path]:
        state = self._stage.state(name)
        patterns = {
            "learner": ("published/complete/*", "published/incoming/*"),
            "sampler": ("delta_log/*",),
        }.get(role_of(name), ("versions/complete/*", "versions/incoming/*"))
        return [path for pattern in patterns for path in state.glob(pattern)]

    def _violate(self, what: str) -> None:
        if what not in self.violations:
            self.violations.append(what)


def events_of(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a daemon's log."""
    return _events_in(log.read_bytes())


def _events_in(text: bytes) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # a warning of a library's
        if isinstance(event, dict) and "event" in event:
            yield event


def _reached(start: int, artifacts: Iterable[OnDisk]) -> int:
    """Return the newest version that whole artifacts lead to."""
    reached = {start, _KEYFRAME}
    for artifact in sorted(artifacts, key=lambda one: (one.signed.version, one.signed.base_version)):
        if artifact.signed.base_version in reached and artifact.is_whole:
            reached.add(artifact.signed.version)
    return max(reached)


def lost_groups(acknowledged: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the groups in safe keeping that nobody knows of any more."""
    return sorted(set(acknowledged) - set(known))
