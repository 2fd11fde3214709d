"""Where a measurement finds what it needs: versions, a run, a place for its processes' state."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.shared.played_run import PlayedRun
from bench.sync_lab.peers import Fleet, Process
from bench.sync_lab.versions import Model, Training, publish_versions

Facts = dict[str, Any]
"""One measurement: a line of JSON."""


@dataclass(slots=True)
class Lab:
    """A directory, and what was made in it."""

    directory: Path
    is_quick: bool
    run: PlayedRun
    _trainings: dict[tuple[Model, int, int], Training] = field(default_factory=dict)

    def training(self, model: Model, *, steps: int, keyframes: int) -> Training:
        """Return versions of a model, made once: each step changes 1 % of the words."""
        key = (model, steps, keyframes)
        if key not in self._trainings:
            self._trainings[key] = publish_versions(
                self.directory / f"training-{len(self._trainings)}",
                model,
                run_id=self.run.authority.run_id,
                key=self.run.signing_key(),
                steps=steps,
                keyframes=keyframes,
                density=0.01,
            )
        return self._trainings[key]

    @contextmanager
    def fleet(self) -> Iterator[Fleet]:
        """Return a place for the processes of one measurement; it is empty again afterwards."""
        directory = self.directory / "work"
        directory.mkdir()
        try:
            yield Fleet(self.run, directory)
        finally:
            shutil.rmtree(directory)


@dataclass(frozen=True, slots=True)
class Sync:
    """One version at one receiver: seconds since the hub announced it."""

    verified_s: float
    served_s: float
    received_bytes: int
    """By this receiver since its start, repeats included."""


def put(hub: Process, name: str) -> float:
    """Store an artifact at the hub; return the monotonic second at which it announced it."""
    hub.tell(put=name)
    return float(hub.answer("announced_s")["announced_s"])


def syncs(
    receivers: Process, *, version: int, announced_s: float, count: int = 1, timeout_s: float = 180
) -> list[Sync]:
    """Wait until ``count`` receivers hold a version.

    Raises:
        TimeoutError: they do not in time.
    """
    done: list[Sync] = []
    while len(done) < count:
        line = receivers.answer("held", timeout_s=timeout_s)
        if line["held"] == version:
            verified_s, served_s = (line[key] - announced_s for key in ("verified_s", "served_s"))
            done.append(Sync(verified_s, served_s, line["received_bytes"]))
    return done


def is_exact(receivers: Process, training: Training) -> bool:
    """Say whether every receiver holds the words of the last version."""
    receivers.tell(compare=str(training.directory / "words.npy"))
    return bool(receivers.answer("is_exact")["is_exact"])


def watched_bytes(receivers: Process, *, until_bytes: int, until_s: float) -> list[tuple[float, int]]:
    """Return (monotonic seconds, payload bytes received), ten times a second, until so many or so late."""
    progress: list[tuple[float, int]] = []
    while not progress or (progress[-1][0] < until_s and progress[-1][1] < until_bytes):
        receivers.tell(count=True)
        line = receivers.answer("now_s")
        progress.append((line["now_s"], line["received_bytes"]))
        time.sleep(0.1)
    return progress


def percentile(values: list[float], share: float) -> float:
    """Return the value that ``share`` of the values do not exceed."""
    return float(np.quantile(values, share, method="higher"))
