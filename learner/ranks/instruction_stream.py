"""Instructions on their way from the first rank to the others.

The others wait for the next instruction for as long as the first has nothing to do. If it ends, its
connections are closed, and that ends the wait. Nothing else waits for longer than the limit: neither the
first rank until an instruction is taken, nor any rank in the exchanges that it begins.
"""

from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from learner.model.rank_exchanges import Instruction

ANY_TIME: Final = timedelta(days=365)
"""Longest wait for an instruction."""


class InstructionStream:
    """Instructions in sequence, from the first rank to all others, for one thread of each."""

    def __init__(self, *, limit_s: float | None = None) -> None:
        """Make process groups for it: every rank does, in the same sequence.

        Args:
            limit_s: longest wait for others, but for that for an instruction; None: torch's own.
        """
        self.limit_s = limit_s
        limit = None if limit_s is None else timedelta(seconds=limit_s)
        self._group: ProcessGroup = dist.new_group(backend="gloo", timeout=ANY_TIME)
        self.exchanges: ProcessGroup = dist.new_group(backend="gloo", timeout=limit)
        """All ranks, for what an instruction has them do together."""

    def send(self, instruction: Instruction, *, limit_s: float | None = None) -> None:
        """Tell all others. First rank.

        Args:
            limit_s: longest wait until they take it; None: the stream's.
        Raises:
            RuntimeError: another rank did not take it within the limit, or is gone.
        """
        limit_s = limit_s or self.limit_s
        limit = ANY_TIME if limit_s is None else timedelta(seconds=limit_s)
        data = torch.frombuffer(bytearray(instruction.to_bytes()), dtype=torch.uint8)
        for part in (torch.tensor([len(data)]), data):
            sent = dist.broadcast(part, src=0, group=self._group, async_op=True)
            assert sent is not None
            sent.wait(limit)

    def receive(self) -> Instruction:
        """Wait for the next instruction. Others."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._group)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._group)
        return Instruction.from_bytes(data.numpy().tobytes())
