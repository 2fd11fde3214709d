"""Moments at which a process is killed: a file appears or changes, a log says something, or any time."""

import glob
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

POLL_S: Final = 0.001
"""Shorter than any fsync that a moment lies within."""


@dataclass(frozen=True, slots=True)
class Instant:
    """A moment in the life of a process, told by what happens to files of its state directory."""

    name: str
    pattern: str = ""
    """Pattern of the files, below ``<state>/<role>``. Empty: none, any time will do."""
    is_change: bool = False
    """Whether a file has to change, rather than to appear."""
    event: str = ""
    """The files are logs, and one of them has to tell of this event."""
    after_s: float = 0.004
    """The kill comes up to this long after the moment."""


ANY_TIME: Final = Instant("any time")
STARTING: Final = Instant("starting")

_SAMPLER: Final = (
    Instant("artifact begun", "delta_log/*"),
    Instant("payload staged", "delta_log/*/frames", is_change=True),
    Instant("mark being written", ".high_water.json.new"),
    Instant("version believed", "high_water.json", is_change=True),
    Instant("copy being written", ".held.words.new"),
    Instant("copy written", "held.words", is_change=True),
)
_RELAY: Final = (
    Instant("artifact being made or removed", "versions/scratch/*"),
    Instant("artifact begun", "versions/incoming/*"),
    Instant("payload stored", "versions/incoming/*/frames", is_change=True),
    Instant("artifact whole", "versions/complete/*"),
    Instant("mark being written", "versions/.head.json.new"),
)
_LEARNER: Final = (
    Instant("journal entry being written", "journal.sqlite-journal", is_change=True),
    Instant("journal entry written", "journal.sqlite", is_change=True),
    Instant("checkpoint being written", "checkpoints/staged-*"),
    Instant("checkpoint written", "checkpoints/0*"),
    Instant("step logged", "steps.jsonl", is_change=True),
    Instant("artifact begun", "published/incoming/*"),
    Instant("payload stored", "published/incoming/*/frames", is_change=True),
    Instant("artifact whole", "published/complete/*"),
    Instant("mark being written", "published/.head.json.new"),
)
_COORDINATOR: Final = (
    Instant("ledger written", "ledger.sqlite-wal", is_change=True),
    Instant("artifact begun", "versions/incoming/*"),
    Instant("artifact whole", "versions/complete/*"),
    Instant("mark being written", "versions/.head.json.new"),
)
_OWN_LOG: Final = "../../../logs/{name}.log"
_CONTRIBUTORS_LOGS: Final = "../../../logs/contributor-*.log"
_CONTRIBUTOR: Final = (
    Instant("batch trained on", _OWN_LOG, event="batch trained on", after_s=0.2),
    Instant("payload under way", _OWN_LOG, event="contribution handed in", after_s=2.0),
    Instant("contribution answered", _OWN_LOG, event="contribution merged", after_s=0.2),
    Instant("artifact begun", "versions/incoming/*"),
    Instant("artifact whole, about to be adopted", "versions/complete/*", after_s=0.2),
    Instant("version adopted", _OWN_LOG, event="trains from a version"),
)
MERGING_LEARNER: Final = (
    Instant("batch dealt", _OWN_LOG, event="batch dealt"),
    Instant("payload under way", _CONTRIBUTORS_LOGS, event="contribution handed in", after_s=2.0),
)
"""More moments of a learner that merges."""

INSTANTS: Final[Mapping[str, tuple[Instant, ...]]] = {
    "sampler": _SAMPLER,
    "relay": _RELAY,
    "learner": _LEARNER,
    "coordinator": _COORDINATOR,
    "contributor": _CONTRIBUTOR,
}


def choose(instants: Sequence[Instant], draw: random.Random) -> Instant:
    """Draw a moment: a fifth of them any time, a tenth while it starts, the others at what it writes."""
    share = draw.random()
    if share < 0.2:
        return ANY_TIME
    return STARTING if share < 0.3 else draw.choice(instants)


def wait_for(instant: Instant, state: Path, *, timeout_s: float, name: str = "") -> bool:
    """Wait until it has come to process ``name``; False if it does not in time. Blocking: for a thread."""
    pattern = str(state / instant.pattern.format(name=name))
    before = _look(pattern)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        now = _look(pattern)
        if instant.event:
            has_come = any(_tells(log, before.get(log, (0, 0)), now[log], instant.event) for log in now)
        elif instant.is_change:
            has_come = bool(now.items() - before.items())
        else:
            has_come = bool(now.keys() - before.keys())
        if has_come:
            return True
        before = now
        time.sleep(POLL_S)
    return False


def _look(pattern: str) -> dict[str, tuple[int, int]]:
    seen = {}
    for path in glob.iglob(pattern):
        try:
            status = os.stat(path)
        except OSError:
            continue
        seen[path] = (status.st_mtime_ns, status.st_size)
    return seen


def _tells(log: str, before: tuple[int, int], now: tuple[int, int], event: str) -> bool:
    """Return whether a log tells of an event in what was written between two looks."""
    if before == now:
        return False
    with open(log, "rb") as file:
        file.seek(before[1])
        return f'"{event}"'.encode() in file.read(now[1] - before[1])
