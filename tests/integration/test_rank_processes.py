"""A daemon that starts the other ranks, and what it says when it loses one."""

import json
import os
import re
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

import pytest

from bench.forked_context import forked_context
from node.exit_code import ExitCode
from node.process.daemon import SIGNALS
from support.rank_processes import lead, meet_in_vain, serve
from support.tiny_model import make_tiny_model

STOPPED: Final = "is stopped: continue it with kill -CONT"

pytestmark = [
    pytest.mark.timeout(280),  # several processes, on two cores that other tests use too
    pytest.mark.usefixtures("warm_server"),
]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", hidden=32, layers=2)


@pytest.mark.parametrize(
    ("layout", "fault", "said"),
    [
        ({"dp_shard": 2}, "memory", [r"ran out of memory.*lower learner.micro_batch_tokens"]),
        ({"pp": 2}, "step", [STOPPED, "was killed"]),
        ({"dp_shard": 2}, "words", [STOPPED, "was killed"]),
        ({"pp": 2}, "save", [STOPPED, "was killed"]),
    ],
    ids=["without memory", "stopped in a step", "stopped as it publishes", "stopped as it saves"],
)
def test_a_rank_that_is_told_takes_the_same_steps_and_is_named_when_it_is_lost(
    layout: dict[str, int], fault: str, said: list[str], model_dir: Path, tmp_path: Path
) -> None:
    first = forked_context().Process(target=lead, args=(layout, fault, model_dir, tmp_path / "told"))
    first.start()
    first.join()
    assert first.exitcode == 0
    told = json.loads((tmp_path / "told").read_text())
    # Masters differ by the rounding of float32 sums, which a few words of bfloat16 show.
    assert told["differing_words"] < 0.01
    for pattern, text in zip(said, told["said"], strict=True):
        assert re.search(rf"rank 1 \(process {told['pid']}\) {pattern}", text)


@dataclass(frozen=True)
class Daemon:
    """A daemon that waits for a rank, which is stopped before it comes."""

    process: BaseProcess
    told: Connection
    rank_pid: int
    rank_ending: select.poll

    @classmethod
    @contextmanager
    def started(cls, model_dir: Path) -> Iterator["Daemon"]:
        context = forked_context()
        told, tells = context.Pipe(duplex=False)
        process = context.Process(target=meet_in_vain, args=(model_dir, tells))
        process.start()
        rank_pid = told.recv()
        assert isinstance(rank_pid, int)
        descriptor, ending = os.pidfd_open(rank_pid), select.poll()
        ending.register(descriptor, select.POLLIN)
        try:
            yield cls(process, told, rank_pid, ending)
        finally:
            os.close(descriptor)
            process.kill()
            process.join()

    def is_without_orphan(self) -> bool:
        """Wait for the rank to end, at most half a minute."""
        return bool(self.rank_ending.poll(30_000))


def test_a_daemon_that_is_told_to_stop_while_ranks_meet_ends_with_them(model_dir: Path) -> None:
    with Daemon.started(model_dir) as daemon:
        daemon.process.terminate()
        daemon.process.join(30)
        assert daemon.process.exitcode == 0
        assert daemon.is_without_orphan()


def test_a_rank_that_dies_before_ranks_have_met_is_named(model_dir: Path) -> None:
    with Daemon.started(model_dir) as daemon:
        os.kill(daemon.rank_pid, signal.SIGKILL)
        said = daemon.told.recv()
        daemon.process.join(30)
        assert daemon.process.exitcode == ExitCode.COULD_NOT_START
        assert f"rank 1 (process {daemon.rank_pid}) was killed" in str(said)
        assert "before all ranks had met" in str(said)


def test_a_rank_whose_daemon_was_killed_before_they_met_ends(model_dir: Path) -> None:
    with Daemon.started(model_dir) as daemon:
        daemon.process.kill()
        daemon.process.join()
        os.kill(daemon.rank_pid, signal.SIGCONT)
        assert daemon.is_without_orphan()


def test_signals_that_reach_all_ranks_drain_the_first_which_ends_the_others(model_dir: Path) -> None:
    context = forked_context()
    told, tells = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(model_dir, tells))
    process.start()
    rank_pid = told.recv()
    for number in SIGNALS:
        os.kill(rank_pid, number)
    process.terminate()
    assert told.recv() == 0
    process.join()
    assert process.exitcode == ExitCode.DRAINED
