"""Which groups repeat completions that were delivered before, by whomever; pure.

Two draws from one policy are the same tokens with the probability of those tokens. A completion of
``LEAST_NATS`` of surprisal is therefore never drawn twice in a run: whoever hands it in again, for the same
prompt, has not drawn it. Shorter ones, and those drawn near temperature 0, say nothing.

The later of two groups is the copy. Nobody but the coordinator, and the relay that a group takes, sees
another's tokens in time to hand them in first.
"""

import hashlib
from collections import Counter, OrderedDict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from node.rollout import RolloutGroup

LEAST_NATS: Final = 48.0
"""e^-48 is 1.4e-21: 65 536 remembered completions and a thousand million new ones meet with 1e-7."""

NATS_OF_A_REAL: Final = 16.0
"""Values of float32 in [0, 1] are 2^-24 apart at most: the surprisal of one is that of its density, and
log 2^24 = 16.6 more."""

COMPLETIONS: Final = 65_536
"""Completions remembered, the newest: some 10 MB."""

COPIES: Final = 3
"""Groups after which a sampler is quarantined. One may come of a fixed ``sampler.seed`` and a restart."""


class Copies:
    """Digests of the completions delivered to this process."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, tuple[str, str]] = OrderedDict()
        """Digest -> the group it came in first, and its sampler."""
        self._copies: Counter[str] = Counter()

    def add(self, group: RolloutGroup) -> str:
        """Remember a group; return of which other group it is a copy, for people, or "" if it is none."""
        prompt = group.prompt_token_ids.tobytes()
        for number, one in enumerate(group.completions):
            surprisal = -float(one.of_drawn(one.behaviour_logprob).sum(dtype=float))
            drawn: NDArray[np.generic] = one.token_ids
            if one.actions is not None:
                drawn, surprisal = one.actions, surprisal + NATS_OF_A_REAL * len(one.actions)
            if surprisal < LEAST_NATS:
                continue
            digest = hashlib.blake2b(prompt + b"|" + drawn.tobytes(), digest_size=12).digest()
            first, sampler_id = self._seen.setdefault(digest, (group.group_id, group.sampler_id))
            if first != group.group_id:
                self._copies[group.sampler_id] += 1
                return f"completion {number} is that of group {first}, which {sampler_id} drew"
            while len(self._seen) > COMPLETIONS:
                self._seen.popitem(last=False)
        return ""

    def is_copier(self, sampler_id: str) -> bool:
        """Whether a sampler has handed in so many copies that it is quarantined."""
        return self._copies[sampler_id] >= COPIES

    def forgive(self, sampler_id: str) -> None:
        """Hold no copies against a sampler from before."""
        del self._copies[sampler_id]
