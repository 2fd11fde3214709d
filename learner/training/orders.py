"""Orders: what the first rank has every rank's ``Trainer`` do, as JSON and arrays; nothing is pickled."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from learner.objective.menu import MENU
from learner.step_settings import StepSettings
from node.errors import StartupError
from node.rollout import EncodedGroup, RolloutGroup
from node.wire.rollouts import group_from_wire, group_to_wire


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


@dataclass(frozen=True, slots=True, eq=False)
class StepOrder:
    """A step to take."""

    groups: Sequence[RolloutGroup]
    """Admitted, whole, at least one."""
    version: int
    """The learner's before the step."""
    settings: StepSettings

    @property
    def order(self) -> Order:
        """The order that says it."""
        encoded = [group_to_wire(group) for group in self.groups]
        values = {
            "version": self.version,
            "settings": self.settings.model_dump(),
        }
        blobs = [part for group in encoded for part in group.parts]
        return Order("step", values, blobs)

    @classmethod
    def of(cls, order: Order, *, objective: str) -> Self:
        """Read an order.

        Args:
            objective: the configured one; another that is not built in is not imported.
        Raises:
            StartupError: the order's objective is neither built in nor configured.
        """
        told = order.values
        settings = StepSettings.model_validate(told["settings"])
        if settings.objective not in MENU and settings.objective != objective:
            raise StartupError(
                f"the first rank's objective is {settings.objective!r}, this one's {objective!r}",
                fix="Start all ranks with one configuration.",
            )
        parts = iter(order.blobs)
        return cls(
            [
                group_from_wire(EncodedGroup(header, columns))
                for header, columns in zip(parts, parts, strict=True)
            ],
            version=told["version"],
            settings=settings,
        )
