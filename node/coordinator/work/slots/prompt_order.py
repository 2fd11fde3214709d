"""Which prompt each slot of training asks for: a permutation of all prompts in each epoch; pure."""

import hashlib
from dataclasses import dataclass
from typing import Final

from node.coordinator.work.slots.slot import Slot, SlotState
from node.coordinator.work.terms.run_data import DataSeen

_ROUNDS: Final = 4
"""Luby-Rackoff: four Feistel rounds of a good function are a strong permutation."""


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """The order of one run."""

    prompts: int | None
    """How many may be trained on; None where no new slot is to be leased."""
    seed: int
    data: DataSeen

    def unused(self, number: int) -> Slot:
        """Return a slot that was never leased. Without prompts, its prompt is for people only."""
        prompt_index = 0
        if self.prompts is not None:
            first, n = self.data.held_out_at, self.data.evaluation_rows
            prompt_index = prompt_of_slot(
                number,
                prompts=self.prompts,
                seed=self.seed,
                first_slot=self.data.first_slot,
                held_out=range(first, first + n),
            )
        return Slot(number, prompt_index, SlotState.AVAILABLE, attempts=(), granted=0)


def prompt_of_slot(
    slot: int, *, prompts: int, seed: int, first_slot: int = 0, held_out: range = range(0)
) -> int:
    """Return the prompt that a slot asks for: a number below ``prompts``, those held out left out.

    Where prompts were added, the slots from ``first_slot`` on begin another epoch, of all of them. Otherwise
    slots [e * prompts, (e + 1) * prompts) are epoch e: a permutation of all prompts, by a
    Feistel network over the next even number of bits; results out of range are permuted again
    (cycle walking, fewer than four turns on average).
    """
    epoch, place = divmod(slot - first_slot, prompts)
    half_bits = max(1, ((prompts - 1).bit_length() + 1) // 2)
    turn = f"{seed}/{epoch}" if not first_slot else f"{seed}/{first_slot}/{epoch}"
    key = hashlib.blake2b(turn.encode(), digest_size=32).digest()
    while True:
        place = _permuted(place, half_bits, key)
        if place < prompts:
            return place if place < held_out.start else place + len(held_out)


def _permuted(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(_ROUNDS):
        message = number.to_bytes(1) + right.to_bytes(8)
        digest = hashlib.blake2b(message, key=key, digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest) & mask)
    return left << half_bits | right
