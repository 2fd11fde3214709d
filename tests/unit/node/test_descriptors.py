"""How many files a process may open, and for how many peers that is enough."""

import os
import resource
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from node.system import descriptors


@pytest.mark.parametrize(("soft", "hard", "expected"), [(64, 128, 128), (128, 128, 128)])
def test_the_soft_limit_is_raised_to_the_hard_one(soft: int, hard: int, expected: int) -> None:
    program = "from node.system import descriptors; print(descriptors.raise_limit(), descriptors.limit())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert done.stdout.split() == [str(expected)] * 2


@pytest.mark.parametrize("counts", [True, False])
def test_open_files_are_counted_by_the_kernel_or_by_their_list(
    counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not counts:
        monkeypatch.setattr(os, "stat", lambda _: SimpleNamespace(st_size=0))  # as before Linux 6.2
    before = descriptors.open_now()
    descriptor = os.open("/dev/null", os.O_RDONLY)
    try:
        assert descriptors.open_now() == before + 1
    finally:
        os.close(descriptor)


def test_where_they_cannot_be_counted_all_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> Any:
        raise OSError

    monkeypatch.setattr(os, "stat", fail)
    monkeypatch.setattr(os, "listdir", fail)
    assert descriptors.open_now() == descriptors.limit()


@pytest.mark.parametrize(("most", "kept", "peers"), [(256, 32, 40), (1024, 128, 208), (65_536, 512, 16_240)])
def test_a_reserve_is_kept_and_four_connections_are_a_peer(most: int, kept: int, peers: int) -> None:
    assert descriptors.reserve(most) == kept
    assert descriptors.peers_with_room(most) == peers
