"""Decides which contributor trains on which group; pure.

    admitted --deal--> held --hand_in--> handed in --consumed--> gone: in a merge that is durable
                 ^       |                  |
                 '-------+--- given back ---'    its contributor is gone, started again, or was refused

A group is with one contributor or with none. What a contributor says of itself is believed for groups that
nobody else has: after a restart of the learner, that is how its groups are found again. Each contributor may
hold its share of the room, so that neither a slow nor a greedy one keeps the others from theirs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from node.errors import Reason, RefusedError
from node.values.groups.rollout import RolloutGroup


@dataclass(slots=True)
class _Hand:
    """The groups of one contributor."""

    stream: object | None = None
    """None: it is not connected."""
    gone_since_s: float = 0.0
    credits: int = 0
    held: dict[str, RolloutGroup] = field(default_factory=dict)
    """Dealt, and in no contribution that has come."""
    handed_in: dict[str, RolloutGroup] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)
    """It says that it holds them, and they have not been delivered here since the start."""

    @property
    def groups(self) -> int:
        return len(self.held) + len(self.handed_in) + len(self.claimed)


@dataclass(frozen=True, slots=True)
class DealRules:
    """Sizes and times of a run's deals."""

    batch_groups: int
    local_steps: int
    capacity_groups: int
    """Groups that the learner holds at most, those dealt among them."""
    member_timeout_s: float
    restart_wait_s: float
    """After its start the learner deals nothing for so long: contributors say what they hold."""

    @property
    def hand_groups(self) -> int:
        """Groups of one contribution."""
        return self.batch_groups * self.local_steps

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
        self._deals_from_s = now + rules.restart_wait_s
        self._claims_until_s = now + rules.restart_wait_s + rules.member_timeout_s

    @property
    def contributors(self) -> tuple[str, ...]:
        """Names of all that are connected, sorted."""
        return tuple(sorted(name for name, hand in self._hands.items() if hand.stream is not None))

    @property
    def held_groups(self) -> int:
        """Groups that are with contributors, or in contributions."""
        return sum(len(hand.held) + len(hand.handed_in) for hand in self._hands.values())

    @property
    def version_groups(self) -> int:
        """Groups of a contribution from everybody."""
        return self._rules.hand_groups * max(1, len(self._hands))

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
        hand = self._hands.get(name)
        if hand is None:
            if len(self._hands) >= (most := self._rules.most_contributors):
                raise RefusedError(
                    Reason.BUSY,
                    f"the learner has room for {most} contributors of {self._rules.hand_groups} groups each "
                    f"in learner.buffer_groups = {self._rules.capacity_groups}",
                    fix="raise learner.buffer_groups",
                )
            hand = self._hands[name] = _Hand()
        hand.stream, hand.credits, hand.claimed = stream, 0, set()
        said = dict.fromkeys(held_ids)
        taken = []
        for group_id in said:
            if group_id in hand.held or group_id in hand.handed_in:
                continue
            room = hand.groups < self._rules.capacity_groups and now < self._deals_from_s
            if room and not was_trained(group_id) and self._holder(group_id) is None:
                hand.claimed.add(group_id)
            else:
                taken.append(group_id)
        lost = [group_id for group_id in hand.held if group_id not in said]
        return tuple(taken), [hand.held.pop(group_id) for group_id in lost]

    def disconnect(self, name: str, stream: object, *, now: float) -> None:
        """Note that a stream has ended; an older one's end means nothing."""
        hand = self._hands.get(name)
        if hand is not None and hand.stream is stream:
            hand.stream, hand.gone_since_s, hand.credits = None, now, 0

    def credit(self, name: str, groups: int) -> None:
        """Note that a contributor has room for more groups."""
        hand = self._hands[name]
        hand.credits = min(hand.credits + groups, self._rules.capacity_groups)

    def taker(self, *, now: float) -> str | None:
        """Return who is dealt the next batch: of those with room and a share left, who has the fewest."""
        if now < self._deals_from_s:
            return None
        rules = self._rules
        share = max(rules.hand_groups, rules.capacity_groups // max(1, len(self._hands)))
        ready = [
            (hand.groups, name)
            for name, hand in self._hands.items()
            if hand.stream is not None
            and hand.credits >= rules.batch_groups
            and hand.groups + rules.batch_groups <= share
        ]
        return min(ready)[1] if ready else None

    def deal(self, name: str, batch: Iterable[RolloutGroup]) -> None:
        """Note that groups go to a contributor."""
        hand = self._hands[name]
        for group in batch:
            hand.held[group.group_id] = group
            hand.credits -= 1

    def found(self, group: RolloutGroup) -> bool:
        """Take a group that has come for who claims it; return whether somebody does."""
        name = self._holder(group.group_id)
        if name is None:
            return False
        hand = self._hands[name]
        hand.claimed.discard(group.group_id)
        hand.held[group.group_id] = group
        return True

    def is_claimed(self, group_id: str) -> bool:
        """Whether a group that has not come since the start is somebody's."""
        return any(group_id in hand.claimed for hand in self._hands.values())

    def awaits(self, name: str, group_ids: Iterable[str]) -> bool:
        """Whether some of a contributor's groups have yet to be delivered here."""
        return name in self._hands and not self._hands[name].claimed.isdisjoint(group_ids)

    def objection(self, name: str, group_ids: Sequence[str]) -> str:
        """Return why a contribution of these groups cannot be taken; empty: it can."""
        hand = self._hands.get(name, _Hand())
        if len(set(group_ids)) != len(group_ids):
            return "it names a group twice"
        foreign = [group_id for group_id in group_ids if group_id not in hand.held]
        return f"it names {len(foreign)} groups that {name} does not hold" if foreign else ""

    def hand_in(self, name: str, group_ids: Sequence[str]) -> dict[str, RolloutGroup]:
        """Note that a contribution to which there is no objection has come; return its groups."""
        hand = self._hands[name]
        groups = {group_id: hand.held.pop(group_id) for group_id in group_ids}
        hand.handed_in |= groups
        return groups

    def held_by(self, name: str) -> set[str]:
        """Return the groups that a contributor was dealt and that are in no contribution."""
        return set(self._hands[name].held) if name in self._hands else set()

    def handed_in(self, name: str) -> dict[str, RolloutGroup]:
        """Return the groups of a contributor's contribution."""
        return dict(self._hands[name].handed_in)

    def consumed(self, name: str, group_ids: Iterable[str]) -> None:
        """Forget groups of a contribution whose merge is durable."""
        for group_id in group_ids:
            del self._hands[name].handed_in[group_id]

    def give_back(self, name: str, group_ids: Iterable[str]) -> list[RolloutGroup]:
        """Return a refused contribution's groups, as far as its contributor holds them, to be dealt again."""
        hand, back = self._hands.get(name, _Hand()), []
        for group_id in dict.fromkeys(group_ids):
            group = hand.held.pop(group_id, None) or hand.handed_in.pop(group_id, None)
            if group is not None:
                back.append(group)
            hand.claimed.discard(group_id)
        return back

    def expire(self, *, now: float) -> list[RolloutGroup]:
        """Return the groups of contributors that have been gone for too long; what they handed in stays."""
        back: list[RolloutGroup] = []
        if now >= self._claims_until_s:
            for hand in self._hands.values():
                hand.claimed.clear()
        for name, hand in list(self._hands.items()):
            if hand.stream is None and now >= hand.gone_since_s + self._rules.member_timeout_s:
                back += hand.held.values()
                hand.held.clear()
                hand.claimed.clear()
                if not hand.handed_in:
                    del self._hands[name]
        return back

    def waited_for(self, *, has_room: bool) -> frozenset[str]:
        """Return the contributors whose next contribution can come.

        Args:
            has_room: whether more groups can be delivered here. Without, a hand that is not full stays so.
        """
        return frozenset(
            name
            for name, hand in self._hands.items()
            if hand.claimed or (hand.held and (has_room or len(hand.held) >= self._rules.hand_groups))
        )

    def next_event_s(self, *, now: float) -> float | None:
        """Return when ``taker`` or ``expire`` may have another answer by time alone; None: never."""
        times = [
            hand.gone_since_s + self._rules.member_timeout_s
            for hand in self._hands.values()
            if hand.stream is None and (hand.held or hand.claimed or not hand.handed_in)
        ]
        times += [self._deals_from_s] if now < self._deals_from_s else []
        times += [self._claims_until_s] if any(hand.claimed for hand in self._hands.values()) else []
        return min(times, default=None)

    def _holder(self, group_id: str) -> str | None:
        for name, hand in self._hands.items():
            if group_id in hand.held or group_id in hand.handed_in or group_id in hand.claimed:
                return name
        return None
