"""Decides which contributor trains on which group; pure.

    admitted --deal--------> held --hand_in--> handed in --consumed--> gone: in a merge that is durable
    claimed --found-------^  |                 |
       ^---------------------'-----------------'  given back: its contributor is gone, has started again,
                                                  or was refused

A group is with one contributor or with none. What a contributor says of itself is believed for groups that
nobody else has: after a restart of the learner it claims them, and the coordinator delivers them again. Each
contributor may hold its share of the room, so that neither a slow nor a greedy one keeps the others from
theirs.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from node.errors import Reason, RefusedError
from node.values.groups.rollout import RolloutGroup


@dataclass(slots=True)
class _Hand:
    """The stream and the credits of one contributor."""

    stream: object | None = None
    """None: it is not connected."""
    gone_since_s: float = 0.0
    credits: int = 0
    newest_deal: int = 0
    """The number of its newest batch among all that were dealt; 0: it has had none."""


@dataclass(slots=True)
class _Dealt:
    """A group that is with a contributor."""

    contributor: str
    group: RolloutGroup | None
    """None: claimed."""
    is_handed_in: bool = False

    @property
    def is_held(self) -> bool:
        """Whether it is here, and in no contribution."""
        return self.group is not None and not self.is_handed_in


@dataclass(frozen=True, slots=True)
class DealRules:
    """Sizes and times of a run's deals."""

    batch_groups: int
    local_steps: int
    capacity_groups: int
    """Groups that the learner holds at most, those dealt among them."""
    member_timeout_s: float
    quorum: float
    """Share of the contributors that a merge waits for."""
    max_staleness_versions: int
    restart_wait_s: float
    """After its start the learner deals nothing for so long: contributors say what they hold."""

    @property
    def hand_groups(self) -> int:
        """Groups of one contribution."""
        return self.batch_groups * self.local_steps

    @property
    def most_held_groups(self) -> int:
        """Groups that a contributor has at most: on their way, trained on, the next batch, and one more."""
        return min(self.capacity_groups, 2 * (self.hand_groups + self.batch_groups))

    @property
    def most_contributors(self) -> int:
        """As many as can all hold the groups of a contribution."""
        return self.capacity_groups // self.hand_groups


class Deals:
    """The account of who has which group. Times are monotonic seconds."""

    def __init__(self, rules: DealRules, *, now: float) -> None:
        """Begin at the learner's start, at which nobody is known to hold anything."""
        self._rules = rules
        self._hands: dict[str, _Hand] = {}
        self._batches = 0
        """Dealt so far."""
        self._dealt: dict[str, _Dealt] = {}
        """By group id."""
        self._deals_from_s = now + rules.restart_wait_s
        self._claims_until_s = now + rules.restart_wait_s + rules.member_timeout_s

    @property
    def contributors(self) -> tuple[str, ...]:
        """Names of all that are connected, sorted."""
        return tuple(sorted(name for name, one in self._hands.items() if one.stream is not None))

    @property
    def known(self) -> tuple[str, ...]:
        """Names of all that are connected, or have something here."""
        return tuple(self._hands)

    @property
    def held_groups(self) -> int:
        """Groups that are with contributors, or in contributions."""
        return sum(one.group is not None for one in self._dealt.values())

    @property
    def version_groups(self) -> int:
        """Groups that a version consumes with the contributors that are there, as leases go by it.

        Those of a quorum, which is the least, so that no group grows too stale behind the others; but so many
        that within the bound on staleness there are a contribution's groups for everybody, since contributors
        with a part each would wait for each other.
        """
        present = max(1, len(self._hands))
        of_everybody = math.ceil(present / (self._rules.max_staleness_versions + 1))
        return max(math.ceil(self._rules.quorum * present), of_everybody) * self._rules.hand_groups

    def connect(
        self,
        name: str,
        stream: object,
        held_ids: Sequence[str],
        *,
        was_trained: Callable[[str], bool],
        now: float,
    ) -> tuple[tuple[str, ...], list[RolloutGroup]]:
        """Note a contributor's newest stream; return what it no longer trains on, and what goes back.

        Args:
            held_ids: what it says it holds, handed in or not.
            was_trained: returns whether a group is in a merge already.
        Raises:
            RefusedError: BUSY; there is no room for one more.
        """
        if name not in self._hands and len(self._hands) >= (most := self._rules.most_contributors):
            raise RefusedError(
                Reason.BUSY,
                f"the learner has room for {most} contributors of {self._rules.hand_groups} groups each "
                f"in learner.buffer_groups = {self._rules.capacity_groups}",
                fix="raise learner.buffer_groups",
            )
        before = self._hands.get(name, _Hand())
        self._hands[name] = _Hand(stream, newest_deal=before.newest_deal)
        said = dict.fromkeys(held_ids)
        claims = [one for one in self._ids_of(name) if self.is_claimed(one)]
        back = self._popped(dict.fromkeys([*self.unsaid(name, held_ids), *claims]))
        room = self._rules.most_held_groups - len(self._ids_of(name)) if now < self._deals_from_s else 0
        taken = []
        for group_id in said:
            known = self._dealt.get(group_id)
            if known is None and room > 0 and not was_trained(group_id):
                self._dealt[group_id] = _Dealt(name, None)
                room -= 1
            elif known is None or known.contributor != name:
                taken.append(group_id)
        return tuple(taken), back

    def unsaid(self, name: str, held_ids: Iterable[str]) -> list[str]:
        """Return the groups of a contributor, in no contribution, that it does not say it holds."""
        said = frozenset(held_ids)
        return [one for one in self._ids_of(name) if one not in said and not self._dealt[one].is_handed_in]

    def forget(self, name: str) -> list[RolloutGroup]:
        """Forget a contributor; return all that it had, handed in or not."""
        self._hands.pop(name, None)
        return self._popped(self._ids_of(name))

    def disconnect(self, name: str, stream: object, *, now: float) -> None:
        """Note that a stream has ended; an older one's end means nothing."""
        hand = self._hands.get(name)
        if hand is not None and hand.stream is stream:
            self._hands[name] = _Hand(gone_since_s=now, newest_deal=hand.newest_deal)

    def credit(self, name: str, groups: int) -> None:
        """Note that a contributor has room for more groups."""
        hand = self._hands[name]
        hand.credits = min(hand.credits + groups, self._rules.capacity_groups)

    def takers(self, *, now: float) -> list[str]:
        """Return who asks for a batch; first the one that has been without the longest.

        By the groups that each has, one with a part of a contribution would come after all that have just
        handed theirs in, each time.
        """
        return sorted(self.asking(now=now), key=lambda name: (self._hands[name].newest_deal, name))

    def asking(self, *, now: float) -> frozenset[str]:
        """Return the contributors that have room, and a share left, for a batch."""
        rules, counts = self._rules, self._counts()
        within_bound = (rules.max_staleness_versions + 1) * self.version_groups
        share = max(rules.hand_groups, min(rules.capacity_groups, within_bound) // max(1, len(self._hands)))
        return frozenset(
            name
            for name, hand in self._hands.items()
            if now >= self._deals_from_s
            and hand.credits >= rules.batch_groups
            and counts[name] + rules.batch_groups <= share
        )

    def deal(self, name: str, batch: Sequence[RolloutGroup]) -> None:
        """Note that groups go to a contributor."""
        self._dealt |= {group.group_id: _Dealt(name, group) for group in batch}
        self._batches += 1
        self._hands[name].credits -= len(batch)
        self._hands[name].newest_deal = self._batches

    def found(self, group: RolloutGroup) -> str:
        """Take a group that has come for who claims it, to be sent to it; return who that is."""
        place = self._dealt[group.group_id]
        place.group = group
        self._hands[place.contributor].credits -= 1
        return place.contributor

    def is_claimed(self, group_id: str) -> bool:
        """Whether a group that has not come since the start is somebody's."""
        return group_id in self._dealt and self._dealt[group_id].group is None

    def awaits(self, name: str, group_ids: Iterable[str]) -> bool:
        """Whether some of a contributor's groups have yet to be delivered here."""
        return any(self.is_claimed(one) and self._dealt[one].contributor == name for one in group_ids)

    def objection(self, name: str, group_ids: Sequence[str]) -> str:
        """Return why a contribution of these groups cannot be taken; empty: it can."""
        if len(set(group_ids)) != len(group_ids):
            return "it names a group twice"
        foreign = set(group_ids).difference(self.held_by(name))
        return f"it names {len(foreign)} groups that {name} does not hold" if foreign else ""

    def passed_over(self, name: str, group_ids: Collection[str]) -> list[str]:
        """Return the groups that a contributor does not have, as these show, which it is handing in.

        It trains on groups in the order in which they were dealt, or in which it said that it has them.
        """
        own = [one for one in self._ids_of(name) if not self._dealt[one].is_handed_in]
        last = max((number for number, one in enumerate(own) if one in group_ids), default=0)
        return [one for one in own[:last] if one not in group_ids]

    def hand_in(self, name: str, group_ids: Sequence[str]) -> dict[str, RolloutGroup]:
        """Note that a contribution to which there is no objection has come; return its groups."""
        for group_id in group_ids:
            self._dealt[group_id].is_handed_in = True
        return self.handed_in(name)

    def held_by(self, name: str) -> list[str]:
        """Return the groups that a contributor was dealt and that are in no contribution."""
        return [group_id for group_id in self._ids_of(name) if self._dealt[group_id].is_held]

    def handed_in(self, name: str) -> dict[str, RolloutGroup]:
        """Return the groups of a contributor's contribution."""
        mine = ((group_id, self._dealt[group_id]) for group_id in self._ids_of(name))
        return {one: place.group for one, place in mine if place.is_handed_in and place.group is not None}

    def consumed(self, name: str, group_ids: Iterable[str]) -> None:
        """Forget groups of a contribution whose merge is durable."""
        self.give_back(name, group_ids)

    def give_back(self, name: str, group_ids: Iterable[str]) -> list[RolloutGroup]:
        """Return those of some groups that a contributor has, to be dealt again."""
        own = set(self._ids_of(name))
        return self._popped([one for one in dict.fromkeys(group_ids) if one in own])

    def expire(self, *, now: float) -> list[RolloutGroup]:
        """Return the groups of contributors that have been gone for too long; what they handed in stays."""
        back: list[RolloutGroup] = []
        if now >= self._claims_until_s:
            self._popped([one for one in self._dealt if self.is_claimed(one)])
        for name, hand in list(self._hands.items()):
            if hand.stream is None and now >= hand.gone_since_s + self._rules.member_timeout_s:
                back += self._popped([one for one in self._ids_of(name) if not self._dealt[one].is_handed_in])
                if not self._ids_of(name):
                    del self._hands[name]
        return back

    def waited_for(self, *, has_room: bool) -> frozenset[str]:
        """Return the contributors whose next contribution can come.

        Args:
            has_room: whether more groups can be delivered here. Without, a hand that is not full stays so.
        """
        places = self._dealt.values()
        claim = {one.contributor for one in places if one.group is None}
        held = Counter(one.contributor for one in places if one.is_held)
        least = 1 if has_room else self._rules.hand_groups
        return frozenset(name for name in self._hands if name in claim or held[name] >= least)

    def next_event_s(self, *, now: float) -> float | None:
        """Return when ``takers`` or ``expire`` may have another answer by time alone; None: never."""
        times = [
            hand.gone_since_s + self._rules.member_timeout_s
            for name, hand in self._hands.items()
            if hand.stream is None and not (self.handed_in(name) and not self.held_by(name))
        ]
        times += [self._deals_from_s] if now < self._deals_from_s else []
        times += [self._claims_until_s] if any(map(self.is_claimed, self._dealt)) else []
        return min(times, default=None)

    def _counts(self) -> Counter[str]:
        return Counter(one.contributor for one in self._dealt.values())

    def _ids_of(self, name: str) -> list[str]:
        return [group_id for group_id, one in self._dealt.items() if one.contributor == name]

    def _popped(self, group_ids: Iterable[str]) -> list[RolloutGroup]:
        """Forget where some groups are; return those that are here."""
        places = [self._dealt.pop(group_id) for group_id in group_ids]
        return [one.group for one in places if one.group is not None]
