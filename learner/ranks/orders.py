"""Orders: what the first rank has the others do, as JSON and arrays; nothing is pickled.

The others wait for the next order for as long as the first has nothing to do. If it ends, its connections
are closed, and that ends the wait. Nothing else waits for longer than the limit: neither the first rank until
an order is taken, nor any rank in the exchanges that an order begins.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from learner.config import LearnerConfig
from learner.objective.menu import MENU
from learner.step_settings import StepSettings
from node.errors import StartupError
from node.rollout import EncodedGroup, RolloutGroup
from node.wire.rollouts import group_from_wire, group_to_wire

ANY_TIME: Final = timedelta(days=365)
"""Longest wait for an order."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Something to do, and what it takes."""

    name: str
    values: Mapping[str, Any]
    blobs: Sequence[bytes] = ()

    def to_bytes(self) -> bytes:
        """Return it encoded."""
        told = {"name": self.name, "values": self.values, "blobs": [len(blob) for blob in self.blobs]}
        header = json.dumps(told).encode()
        return b"".join([len(header).to_bytes(8, "little"), header, *self.blobs])

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return what ``to_bytes`` encoded."""
        start = 8 + int.from_bytes(data[:8], "little")
        told = json.loads(data[8:start])
        ends = itertools.accumulate(told["blobs"], initial=start)
        return cls(told["name"], told["values"], [data[a:b] for a, b in itertools.pairwise(ends)])


class OrderStream:
    """Orders in sequence, from the first rank to all others, for one thread of each."""

    def __init__(self, *, limit_s: float | None = None) -> None:
        """Make process groups for it: every rank does, in the same sequence.

        Args:
            limit_s: longest wait for others, but for that for an order; None: torch's own.
        """
        self.limit_s = limit_s
        limit = None if limit_s is None else timedelta(seconds=limit_s)
        self._group: ProcessGroup = dist.new_group(backend="gloo", timeout=ANY_TIME)
        self.exchanges: ProcessGroup = dist.new_group(backend="gloo", timeout=limit)
        """All ranks, for what an order has them do together."""

    def send(self, order: Order, *, limit_s: float | None = None) -> None:
        """Tell all others. First rank.

        Args:
            limit_s: longest wait until they take it; None: the stream's.
        Raises:
            RuntimeError: another rank did not take it within the limit, or is gone.
        """
        limit_s = limit_s or self.limit_s
        limit = ANY_TIME if limit_s is None else timedelta(seconds=limit_s)
        data = torch.frombuffer(bytearray(order.to_bytes()), dtype=torch.uint8)
        for part in (torch.tensor([len(data)]), data):
            sent = dist.broadcast(part, src=0, group=self._group, async_op=True)
            assert sent is not None
            sent.wait(limit)

    def receive(self) -> Order:
        """Wait for the next order. Others."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._group)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._group)
        return Order.from_bytes(data.numpy().tobytes())


@dataclass(frozen=True, slots=True, eq=False)
class StepOrder:
    """The arguments of a ``train_step``."""

    groups: Sequence[RolloutGroup]
    version: int
    settings: StepSettings
    expected_kl_nats: Sequence[NDArray[np.float64]] | None
    has_reference: bool

    @property
    def order(self) -> Order:
        """The order that says it."""
        encoded = [group_to_wire(group) for group in self.groups]
        expected = self.expected_kl_nats
        values = {
            "version": self.version,
            "settings": self.settings.model_dump(),
            "groups": len(encoded),
            "has_expected": expected is not None,
            "has_reference": self.has_reference,
        }
        blobs = [part for group in encoded for part in group.parts]
        blobs += [np.asarray(nats, "<f8").tobytes() for nats in expected or ()]
        return Order("step", values, blobs)

    @classmethod
    def of(cls, order: Order, config: LearnerConfig) -> Self:
        """Read an order; objectives of one's own are those of the configuration.

        Raises:
            StartupError: the objective is neither built in nor configured.
        """
        told = order.values
        settings = StepSettings.model_validate(told["settings"])
        if settings.objective not in MENU and settings.objective != config.objective:
            raise StartupError(
                f"the first rank's objective is {settings.objective!r}, this one's {config.objective!r}",
                fix="Start all ranks with one configuration.",
            )
        count = told["groups"]
        parts = iter(order.blobs[: 2 * count])
        expected = [np.frombuffer(blob, "<f8") for blob in order.blobs[2 * count :]]
        return cls(
            [
                group_from_wire(EncodedGroup(header, columns))
                for header, columns in zip(parts, parts, strict=True)
            ],
            version=told["version"],
            settings=settings,
            expected_kl_nats=expected if told["has_expected"] else None,
            has_reference=told["has_reference"],
        )
