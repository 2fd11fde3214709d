"""One process per state directory, whatever becomes of the one that has it."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from node.errors import StartupError
from node.system.file_lock import LOCK_FILE, lock_state_directory
from support.refusals import cannot_start

_HOLD = """
import sys
from pathlib import Path
from node.system.file_lock import lock_state_directory
lock_state_directory(Path(sys.argv[1]))
print("held", flush=True)
{then}
sys.stdin.read()
"""


def hold(directory: Path, *, then: str = "") -> "subprocess.Popen[str]":
    """Start a process that holds the lock until its standard input ends."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD.format(then=then), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": path},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_directory_is_its_processs_until_that_has_ended_and_others_are_free(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with hold(tmp_path) as holder:
        with pytest.raises(StartupError) as caught:
            lock_state_directory(tmp_path)
        lock_state_directory(tmp_path / "other")
        holder.kill()
    assert caught.value.what == (
        f"The state directory {tmp_path} is in use by process {holder.pid} on {socket.gethostname()}"
    )
    assert "node.state_dir" in caught.value.fix
    assert (tmp_path / LOCK_FILE).read_text().split()[0] == str(holder.pid)
    lock_state_directory(tmp_path)
    assert (tmp_path / LOCK_FILE).read_text().split() == [str(os.getpid()), socket.gethostname()]


def test_a_child_does_not_keep_the_lock_of_a_parent_that_is_gone(tmp_path: Path) -> None:
    then = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)"
    )
    with hold(tmp_path, then=then) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, signal.SIGSTOP)  # so that the end of its input does not end it
        try:
            parent.kill()
            parent.wait(10)
            lock_state_directory(tmp_path)
        finally:
            os.kill(child, signal.SIGKILL)


def test_roles_of_one_process_may_share_a_directory(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    lock_state_directory(tmp_path)
    lock_state_directory(tmp_path / "link")


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", flock)
    with cannot_start("Operation not supported") as caught:
        lock_state_directory(tmp_path)
    assert "supports flock" in caught.value.fix


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with cannot_start("No such file") as caught:
        lock_state_directory(tmp_path / "missing")
    assert "node.state_dir" in caught.value.fix


def test_a_full_disk_does_not_keep_the_lock_from_being_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    lock_state_directory(tmp_path)
    assert (tmp_path / LOCK_FILE).read_bytes() == b""
