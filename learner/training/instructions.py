"""Instructions: what the first rank has other ranks do, as JSON and arrays; nothing is pickled."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from learner.objective.menu import MENU
from learner.step_settings import StepSettings
from node.errors import StartupError
from node.rollout import EncodedGroup, RolloutGroup
from node.wire.rollouts import group_from_wire, source_of


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
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
class StepInputs:
    """A step to take."""

    groups: Sequence[RolloutGroup]
    """Admitted, whole, at least one."""
    version: int
    """The learner's before the step."""
    settings: StepSettings
    expected_kl_nats: Sequence[NDArray[np.float64]] | None = None
    """See ``objective_batch``."""

    @property
    def instruction(self) -> Instruction:
        """The step as it is sent to the other ranks."""
        encoded = [source_of(group) for group in self.groups]
        expected = self.expected_kl_nats
        values = {
            "version": self.version,
            "settings": self.settings.model_dump(),
            "groups": len(encoded),
            "has_expected": expected is not None,
        }
        blobs = [part for group in encoded for part in group.parts]
        blobs += [np.asarray(nats, "<f8").tobytes() for nats in expected or ()]
        return Instruction("step", values, blobs)

    @classmethod
    def of(cls, instruction: Instruction, *, objective: str) -> Self:
        """Read an instruction.

        Args:
            objective: the configured one; another that is not built in is not imported.
        Raises:
            StartupError: its objective is neither built in nor configured.
        """
        told = instruction.values
        settings = StepSettings.model_validate(told["settings"])
        if settings.objective not in MENU and settings.objective != objective:
            raise StartupError(
                f"the first rank's objective is {settings.objective!r}, this one's {objective!r}",
                fix="Start all ranks with one configuration.",
            )
        count = told["groups"]
        parts = iter(instruction.blobs[: 2 * count])
        expected = [np.frombuffer(blob, "<f8") for blob in instruction.blobs[2 * count :]]
        return cls(
            [
                group_from_wire(EncodedGroup(header, columns)).without_abstained()
                for header, columns in zip(parts, parts, strict=True)
            ],
            version=told["version"],
            settings=settings,
            expected_kl_nats=expected if told["has_expected"] else None,
        )
