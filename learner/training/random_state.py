"""The random state of torch before a step: the CPU generator's, and that of the policy's CUDA device.

Its bytes are in the journal, the CPU's first. Only an objective of one's own draws in a step, if it does. The
states of other ranks are not kept.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from node.errors import StartupError


@dataclass(frozen=True, slots=True)
class RandomState:
    """States of generators, as torch encodes them."""

    cpu: bytes
    cuda: bytes = b""
    """Empty: the policy does not compute on CUDA."""

    @classmethod
    def on(cls, device: torch.device) -> Self:
        """Read the states that a step on ``device`` begins with."""
        cuda = _bytes_of(torch.cuda.get_rng_state(device)) if device.type == "cuda" else b""
        return cls(_bytes_of(torch.get_rng_state()), cuda)

    @classmethod
    def from_bytes(cls, states: bytes, *, cuda_bytes: int) -> Self:
        """Read both, one after the other, of which the last ``cuda_bytes`` are CUDA's."""
        at = len(states) - cuda_bytes
        return cls(states[:at], states[at:])

    def to_bytes(self) -> bytes:
        """Return both, one after the other."""
        return self.cpu + self.cuda

    def restore(self, device: torch.device) -> None:
        """Set the generators of a step on ``device`` to this state; CUDA's only if it was CUDA then, too.

        Raises:
            StartupError: torch does not take them.
        """
        try:
            torch.set_rng_state(_tensor_of(self.cpu))
            if self.cuda and device.type == "cuda":
                torch.cuda.set_rng_state(_tensor_of(self.cuda), device)
        except (RuntimeError, TypeError) as error:
            raise StartupError(
                f"torch {torch.__version__} does not take a random state of {len(self.cpu)} bytes, and of "
                f"{len(self.cuda)} for CUDA, from the journal: {error}",
                fix="Start the learner with the version of torch that the journal was written with.",
            ) from error


def _bytes_of(state: Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _tensor_of(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
