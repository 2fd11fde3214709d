"""Processes of ranks on this host, and why one does not answer: killed, stopped, out of memory."""

import hashlib
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import torch
import torch.distributed as dist

from learner.ranks.errors import MEMORY_FIX, OUT_OF_MEMORY


@dataclass(frozen=True, slots=True)
class Child:
    """A rank that this process started."""

    rank: int
    process: Popen[bytes]

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def fate(self) -> str:
        """Why it does not answer, in words; empty while it runs."""
        code = self.process.poll()
        who = f"rank {self.rank} (process {self.pid})"
        if code is None:
            is_stopped = _state(self.pid) in ("T", "t")
            return f"{who} is stopped: continue it with kill -CONT" if is_stopped else ""
        if code == -signal.SIGKILL:
            return f"{who} was killed, by a person or for want of memory: see dmesg"
        if code == OUT_OF_MEMORY:
            return f"{who} ran out of memory, see its log: {MEMORY_FIX}"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}, see its log"
        return f"{who} ended {how}"


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A rank of this host that torchrun started."""

    rank: int
    pid: int

    @property
    def fate(self) -> str:
        """As ``Child.fate``."""
        who = f"rank {self.rank} (process {self.pid})"
        state = _state(self.pid)
        if state in ("", "Z", "X"):
            return f"{who} ended: see its log, and dmesg if that says nothing"
        return f"{who} is stopped: continue it with kill -CONT" if state in ("T", "t") else ""


def neighbours() -> list[Neighbour]:
    """Tell all ranks this one's process, and return those of its host; every rank calls this."""
    told = torch.tensor([_place(), os.getpid()])
    every = [torch.zeros_like(told) for _ in range(dist.get_world_size())]
    dist.all_gather(every, told)
    return [
        Neighbour(rank, int(pid))
        for rank, (place, pid) in enumerate(every)
        if int(place) == _place() and int(pid) != os.getpid()
    ]


def _place() -> int:
    """Return a number of this host's processes: containers count theirs by themselves."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/pid").readlink())
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _state(pid: int) -> str:
    """Return the letter that the kernel has for what a process does; empty if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
