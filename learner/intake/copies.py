"""Which groups repeat what was delivered before, by whomever; pure.

Two draws from one policy are the same tokens with the probability of those tokens. A completion of
``LEAST_NATS`` of surprisal is therefore never drawn twice in a run: whoever hands it in again, for the same
prompt, has not drawn it. Nor has a whole group, of the same completions in the same order. Shorter ones, and
those drawn near temperature 0, prove nothing by themselves.

Whole groups of short answers are evidence all the same. Of N that are remembered of a prompt, an honest
sampler draws one of surprisal S with e^-S: a bet on any of them that pays e^S / N wins nothing on average.
``REPEATED_SHARE`` of the stake is bet on each group, and the first stake is spread over all moments at which
a sampler may begin to repeat. So an honest sampler's stake reaches 1 / ``FALSE_ALARM`` in a whole run with
probability ``FALSE_ALARM`` at most (Ville's inequality), however sure the policy becomes of its answers.

The later of two groups is the copy. Nobody but the coordinator, and the relay that a group takes, sees
another's tokens in time to hand them in first.
"""

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from node.values.groups.rollout import Completion, RolloutGroup

LEAST_NATS: Final = 48.0
"""e^-48 is 1.4e-21: 65 536 remembered completions and a thousand million new ones meet with 1e-7."""

NATS_OF_A_REAL: Final = 16.0
"""Values of float32 in [0, 1] are 2^-24 apart at most: the surprisal of one is that of its density, and
log 2^24 = 16.6 more."""

COMPLETIONS: Final = 65_536
"""Completions remembered, the newest, and as many groups: some 10 MB each."""

COPIES: Final = 3
"""Groups after which a sampler is quarantined. One may come of a fixed ``sampler.seed`` and a restart."""

REPEATED_SHARE: Final = 0.1
"""A sampler that repeats one group in ten is found, too: what a bet wins outlasts nine that are lost."""

FALSE_ALARM: Final = 1e-6

MOST_ODDS: Final = 1000.0
"""Most that a group pays, so that one alone proves nothing."""


@dataclass(slots=True)
class _Bet:
    """A bet that a sampler repeats groups."""

    stake: float = 0.0
    groups: int = 0
    repeated: int = 0

    @property
    def is_won(self) -> bool:
        return self.stake * FALSE_ALARM >= 1.0

    def settle(self, odds: float) -> None:
        """Note a group; ``odds``: what a stake on its being a repetition has paid, 0 if it is none."""
        begins_now = 1.0 / ((self.groups + 1) * (self.groups + 2))
        self.stake = (self.stake + begins_now) * (1.0 + REPEATED_SHARE * (min(odds, MOST_ODDS) - 1.0))
        self.groups, self.repeated = self.groups + 1, self.repeated + (odds > 0.0)


class Copies:
    """Digests of the completions and groups delivered to this process."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, tuple[str, str]] = OrderedDict()
        """Digest -> the group it came in first, and its sampler."""
        self._groups: OrderedDict[bytes, tuple[str, bytes]] = OrderedDict()
        """Digest -> the group that came first, and the digest of its prompt."""
        self._of_prompt: Counter[bytes] = Counter()
        """Digest of a prompt -> how many of ``_groups`` are for it."""
        self._copies: Counter[str] = Counter()
        self._bets: dict[str, _Bet] = {}

    def add(self, group: RolloutGroup) -> str:
        """Remember a group; return of which other group it is a copy, for people, or "" if it may be none."""
        prompt, drawn = group.prompt_token_ids.tobytes(), [_drawn(one) for one in group.completions]
        for number, (values, nats) in enumerate(drawn):
            if nats < LEAST_NATS:
                continue
            here = (group.group_id, group.sampler_id)
            first, sampler_id = self._seen.setdefault(_digest(prompt, values), here)
            if first != group.group_id:
                self._copies[group.sampler_id] += 1
                return f"completion {number} is that of group {first}, which {sampler_id} drew"
            while len(self._seen) > COMPLETIONS:
                self._seen.popitem(last=False)
        return self._add_whole(group, _digest(prompt), drawn)

    def is_copier(self, sampler_id: str) -> bool:
        """Whether a sampler has handed in so many copies that it is quarantined."""
        bet = self._bets.get(sampler_id)
        return self._copies[sampler_id] >= COPIES or (bet is not None and bet.is_won)

    def forgive(self, sampler_id: str) -> None:
        """Hold no copies against a sampler from before."""
        del self._copies[sampler_id]
        self._bets.pop(sampler_id, None)

    def _add_whole(self, group: RolloutGroup, prompt: bytes, drawn: Sequence[tuple[bytes, float]]) -> str:
        digest = _digest(prompt, *(_digest(values) for values, _ in drawn))
        known, (first, _) = self._of_prompt[prompt], self._groups.get(digest, ("", b""))
        if first == group.group_id:
            return ""
        if not first:
            self._groups[digest] = (group.group_id, prompt)
            self._of_prompt[prompt] += 1
            self._forget_oldest()
        if not known:  # nothing could be repeated
            return ""
        bet = self._bets.setdefault(group.sampler_id, _Bet())
        nats = sum(nats for _, nats in drawn) - math.log(known)
        bet.settle(math.exp(min(nats, LEAST_NATS)) if first else 0.0)
        if first and nats >= LEAST_NATS:
            self._copies[group.sampler_id] += 1
            return f"it is group {first} again"
        if first and bet.is_won:
            return f"it is group {first} again, and so are {bet.repeated - 1} of its {bet.groups - 1} others"
        return ""

    def _forget_oldest(self) -> None:
        while len(self._groups) > COMPLETIONS:
            _, (_, prompt) = self._groups.popitem(last=False)
            self._of_prompt[prompt] -= 1
            if not self._of_prompt[prompt]:
                del self._of_prompt[prompt]


def _drawn(one: Completion) -> tuple[bytes, float]:
    """Return what was drawn, and its surprisal in nats."""
    nats = -float(one.of_drawn(one.behaviour_logprob).sum(dtype=float))
    if one.actions is None:
        return one.token_ids.tobytes(), nats
    return one.actions.tobytes(), nats + NATS_OF_A_REAL * len(one.actions)


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"|".join(parts), digest_size=12).digest()
