"""Who has which group, whatever contributors do: no group with two, none lost, none twice in a merge."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from learner.merging.deals import DealRules, Deals
from node.errors import Reason
from node.values.groups.rollout import RolloutGroup
from support.groups import make_group
from support.refusals import refused

BATCH, STEPS, CAPACITY, TIMEOUT_S = 2, 2, 12, 60.0
NAMES = st.sampled_from(["a", "b", "c"])
RULES = DealRules(
    BATCH,
    STEPS,
    CAPACITY,
    member_timeout_s=TIMEOUT_S,
    quorum=1.0,
    max_staleness_versions=1,
    restart_wait_s=0.0,
)


def nobodys(_: str) -> bool:
    return False


class Contributors(RuleBasedStateMachine):
    """The learner's account over its restarts, with contributors that come, go, lie and send twice."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.deals = Deals(RULES, now=0.0)
        self.made = 0
        self.pool: dict[str, RolloutGroup] = {}
        self.streams: dict[str, object] = {}
        self.holds: dict[str, list[str]] = {"a": [], "b": [], "c": []}
        """By what each was told."""
        self.handed_in: dict[str, tuple[str, ...]] = {}
        self.merged: list[str] = []

    def take_back(self, groups: list[RolloutGroup]) -> None:
        for group in groups:
            assert group.group_id not in self.pool
            self.pool[group.group_id] = group

    @rule(name=NAMES, forgets=st.booleans(), lies=st.booleans())
    def connect(self, name: str, *, forgets: bool, lies: bool) -> None:
        if forgets:
            self.holds[name] = []
        said = [*self.holds[name], *self.handed_in.get(name, ())]
        if lies:
            said += [
                *self.merged,
                *self.pool,
                "999.1",
                *(one for held in self.holds.values() for one in held),
            ]
        self.streams[name] = object()
        taken, back = self.deals.connect(
            name,
            self.streams[name],
            said,
            was_trained=lambda one: one in self.merged,
            now=self.now,
        )
        assert not set(taken) & set(self.handed_in.get(name, ()))
        self.holds[name] = [one for one in self.holds[name] if one not in taken]
        self.take_back(back)
        self.deals.credit(name, CAPACITY)
        for group_id in [one for one in self.pool if self.deals.is_claimed(one)]:
            assert self.deals.found(self.pool.pop(group_id))

    @rule()
    def restart_the_learner(self) -> None:
        """Contributions are sent again; the coordinator delivers all that was not merged."""
        self.deals = Deals(replace(RULES, restart_wait_s=10.0), now=self.now)
        self.streams.clear()
        for name, ids in self.handed_in.items():
            self.holds[name] = [*ids, *self.holds[name]]
        self.handed_in.clear()
        known = [f"{number}.1" for number in range(1, self.made + 1)]
        self.pool = {one: make_group(one) for one in known if one not in self.merged}

    @rule(name=NAMES)
    def disconnect(self, name: str) -> None:
        if (stream := self.streams.pop(name, None)) is not None:
            self.deals.disconnect(name, object(), now=self.now)  # an older stream's end means nothing
            self.deals.disconnect(name, stream, now=self.now)

    @rule(seconds=st.sampled_from([1.0, TIMEOUT_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take_back(self.deals.expire(now=self.now))

    @rule()
    def deal(self) -> None:
        while self.deals.held_groups + len(self.pool) < CAPACITY:
            self.made += 1
            self.pool[f"{self.made}.1"] = make_group(f"{self.made}.1")
        while len(self.pool) >= BATCH and (takers := self.deals.takers(now=self.now)):
            name = takers[0]
            assert name in self.streams
            batch = [self.pool.pop(one) for one in list(self.pool)[:BATCH]]
            self.deals.deal(name, batch)
            self.holds[name] += [one.group_id for one in batch]

    @rule(name=NAMES, groups=st.integers(1, BATCH * STEPS), lies=st.booleans())
    def hand_in(self, name: str, groups: int, *, lies: bool) -> None:
        if name not in self.streams or name in self.handed_in:
            return
        ids = tuple(self.holds[name][:groups])
        if lies:
            ids = (*ids, "999.1") if groups % 2 else (*ids, *ids, "999.1")
        why = self.deals.objection(name, ids)
        assert bool(why) >= lies
        self.holds[name] = [one for one in self.holds[name] if one not in ids]
        if why:
            self.take_back(self.deals.give_back(name, ids))
        elif ids:
            assert list(self.deals.hand_in(name, ids)) == list(ids)
            assert "hold" in self.deals.objection(name, ids)
            self.handed_in[name] = ids

    @rule(name=NAMES, is_refused=st.booleans())
    def end(self, name: str, *, is_refused: bool) -> None:
        ids = self.handed_in.pop(name, ())
        if is_refused:
            self.take_back(self.deals.give_back(name, ids))
        else:
            self.deals.consumed(name, ids)
            self.merged += ids

    @invariant()
    def none_is_lost_and_none_is_twice_anywhere(self) -> None:
        assert len(set(self.merged)) == len(self.merged)
        assert not set(self.merged) & set(self.pool)
        assert self.deals.held_groups + len(self.pool) + len(self.merged) == self.made
        assert self.deals.held_groups <= CAPACITY
        assert self.deals.waited_for(has_room=False) <= self.deals.waited_for(has_room=True)


Contributors.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestContributors = Contributors.TestCase


def connected(deals: Deals, *names: str) -> None:
    for name in names:
        deals.connect(name, name, [], was_trained=nobodys, now=0.0)
        deals.credit(name, 1000)


def dealt(deals: Deals, batches: int) -> list[str]:
    """Deal until nobody takes more, or so many batches; return who took each."""
    takers = []
    for n in range(batches):
        if not (asking := deals.takers(now=0.0)):
            break
        deals.deal(asking[0], [make_group(f"{n}{place}.1") for place in range(BATCH)])
        takers.append(asking[0])
    return takers


def test_batches_go_round_and_a_greedy_contributor_gets_its_share_only() -> None:
    deals = Deals(RULES, now=0.0)
    connected(deals, "greedy", "modest")
    assert deals.asking(now=0.0) == {"greedy", "modest"}
    assert dealt(deals, 100) == ["greedy", "modest"] * 3
    assert deals.takers(now=0.0) == []


def test_there_are_no_more_contributors_than_can_hold_the_groups_of_a_contribution() -> None:
    deals = Deals(RULES, now=0.0)
    connected(deals, "a", "b", "c")
    with refused(Reason.BUSY, "3 contributors", "12"):
        connected(deals, "d")


def test_a_version_is_made_of_a_contribution_from_everybody() -> None:
    deals = Deals(RULES, now=0.0)
    assert deals.version_groups == BATCH * STEPS
    connected(deals, "a", "b")
    assert deals.version_groups == 2 * BATCH * STEPS


def test_a_hand_that_cannot_become_full_is_not_waited_for() -> None:
    deals = Deals(RULES, now=0.0)
    connected(deals, "a", "b")
    assert dealt(deals, 3) == ["a", "b", "a"]
    assert deals.waited_for(has_room=True) == {"a", "b"}
    assert deals.waited_for(has_room=False) == {"a"}


@pytest.mark.parametrize("says", [True, False])
def test_after_a_restart_groups_are_found_with_those_that_say_they_hold_them(says: bool) -> None:
    deals = Deals(replace(RULES, restart_wait_s=10.0), now=0.0)
    said = ["1.1", "2.1"] if says else []
    deals.connect("a", "s", said, was_trained=nobodys, now=1.0)
    deals.credit("a", 8)
    taken, _ = deals.connect("b", "t", ["1.1", "9.1"], was_trained=nobodys, now=2.0)
    assert taken == (("1.1",) if says else ())
    assert deals.takers(now=9.0) == []
    assert deals.next_event_s(now=9.0) == 10.0
    assert deals.is_claimed("2.1") is says
    if says:
        assert deals.found(make_group("2.1")) == "a"
    assert deals.awaits("a", ["1.1", "2.1"]) is says
    assert deals.takers(now=10.0) == ["a"]
    late, _ = deals.connect("c", "u", ["5.1"], was_trained=nobodys, now=11.0)
    assert late == ("5.1",)
    deals.expire(now=10.0 + TIMEOUT_S)
    assert not deals.awaits("a", ["1.1"])


def test_nobody_claims_more_than_a_contributor_can_have() -> None:
    deals = Deals(replace(RULES, capacity_groups=100, restart_wait_s=10.0), now=0.0)
    most = 2 * (BATCH * STEPS + BATCH)
    taken, _ = deals.connect("a", "s", [f"{n}.1" for n in range(50)], was_trained=nobodys, now=1.0)
    assert len(taken) == 50 - most
    assert not deals.connect("b", "t", ["40.1"], was_trained=nobodys, now=1.0)[0]


def test_where_nothing_may_be_stale_each_has_a_contributions_groups_and_no_more() -> None:
    """Else who is first has a batch ahead, and another lacks it for good."""
    deals = Deals(replace(RULES, capacity_groups=100, max_staleness_versions=0), now=0.0)
    connected(deals, "a", "b")
    assert dealt(deals, 100) == ["a", "b"] * STEPS


def test_a_group_that_its_contributor_passes_over_is_not_there() -> None:
    """It was claimed by one that does not have it, and would wait for as long as that one is connected."""
    deals = Deals(replace(RULES, restart_wait_s=10.0), now=0.0)
    deals.connect("a", "s", ["1.1", "2.1", "3.1", "4.1"], was_trained=nobodys, now=1.0)
    for name in ("2.1", "3.1", "4.1"):
        deals.found(make_group(name))
    assert deals.passed_over("a", {"2.1", "3.1"}) == ["1.1"]
    assert not deals.passed_over("b", {"2.1"})
    deals.hand_in("a", ["2.1", "3.1"])
    deals.give_back("a", ["1.1"])
    assert not deals.passed_over("a", {"4.1"})
    assert not deals.passed_over("a", ())


@pytest.mark.parametrize(
    ("quorum", "staleness", "groups"), [(1.0, 0, 12), (1.0, 8, 12), (0.5, 8, 8), (0.1, 8, 4), (0.1, 0, 12)]
)
def test_leases_go_by_what_a_quorum_consumes_and_leave_a_contribution_for_everybody(
    quorum: float, staleness: int, groups: int
) -> None:
    deals = Deals(replace(RULES, quorum=quorum, max_staleness_versions=staleness), now=0.0)
    assert deals.version_groups == BATCH * STEPS
    connected(deals, "a", "b", "c")
    assert deals.version_groups == groups
    assert (staleness + 1) * groups >= 3 * BATCH * STEPS
