"""The table in the module's docstring is what the machine does; stops, floors and listeners beside it."""

import itertools

import pytest

from node.values.groups.rollout import LeaseGrant, LeasePurpose, PromptLease
from node.values.policy import PolicyVersion
from sampler import served_policy
from sampler.served_policy import LONGEST_STOP_S, Command, Event, ServedPolicy, State
from support.groups import SAMPLING


def drawn_table() -> dict[State, dict[str, str]]:
    """Read the table in the docstring: state -> column -> cell."""
    lines = (served_policy.__doc__ or "").splitlines()
    first = next(n for n, line in enumerate(lines) if line.split()[:2] == ["state", "command"])
    columns = lines[first].split()
    rows = [line.split() for line in lines[first + 2 : first + 2 + len(State)]]
    return {State(row[0]): dict(zip(columns[1:], row[1:], strict=True)) for row in rows}


TABLE = drawn_table()


def version(number: int) -> PolicyVersion:
    return PolicyVersion(number, bytes([number]) * 16)


def in_state(state: State, number: int = 5) -> ServedPolicy:
    """Reach a state by events alone."""
    policy = ServedPolicy(is_generating=lambda _: False)
    policy.answered(0, LeaseGrant((), 0.0, ""), had_to_ask=False, now=0.0)
    policy.load(version(number))
    events = {
        State.EMPTY: (),
        State.LIVE: (Event.HOLD,),
        State.FETCHING: (Event.HOLD, Event.FETCH),
        State.VERIFIED: (Event.HOLD, Event.FETCH, Event.VERIFIED),
        State.SUSPECT: (Event.HOLD, Event.DAMAGE),
        State.LOST: (Event.HOLD, Event.LOSE),
        State.RESTORING: (Event.HOLD, Event.LOSE, Event.RESTORE),
    }
    for event in events[state]:
        tell(policy, event)
    return policy


def tell(policy: ServedPolicy, event: Event) -> None:
    if event is Event.HOLD:
        policy.hold(policy.held, now=0.0)
    else:
        policy.note(event)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_event_in_every_state_does_what_the_table_says(state: State, event: Event) -> None:
    policy = in_state(state)
    assert policy.state is state
    tell(policy, event)
    cell = TABLE[state][event]
    assert policy.state is (state if cell == "." else State(cell))


@pytest.mark.parametrize("state", State)
def test_every_state_has_the_command_of_the_table(state: State) -> None:
    assert in_state(state).command(now=0.0) is Command(TABLE[state]["command"])


@pytest.mark.parametrize("state", State)
def test_a_version_is_served_only_while_the_live_words_are_its_own(state: State) -> None:
    is_whole = state in (State.LIVE, State.FETCHING, State.VERIFIED)
    assert in_state(state).served == (version(5) if is_whole else None)


def test_after_damage_nothing_older_than_what_was_served_is_sampled_from() -> None:
    policy = in_state(State.RESTORING)
    policy.hold(version(3), now=0.0)
    assert (policy.held, policy.served, policy.command(now=0.0)) == (version(3), None, Command.LOOK)
    for event in (Event.FETCH, Event.VERIFIED):
        policy.note(event)
    policy.hold(version(5), now=0.0)
    assert policy.served == version(5)


def test_a_version_is_given_up_with_its_second_bad_probe_and_a_newer_one_is_served() -> None:
    policy = in_state(State.LIVE)
    assert not policy.fails_probe()
    for event in (Event.LOSE, Event.RESTORE):
        policy.note(event)
    policy.hold(version(5), now=0.0)
    assert policy.served == version(5)
    assert policy.fails_probe()
    assert policy.served is None
    policy.hold(version(6), now=0.0)
    assert policy.served == version(6)
    assert not policy.fails_probe()


def test_listeners_hear_of_every_event_and_what_was_served_before_it() -> None:
    policy, heard = in_state(State.LIVE), list[tuple[PolicyVersion | None, PolicyVersion | None]]()
    policy.listen(lambda before: heard.append((before, policy.served)))
    policy.note(Event.DAMAGE)
    policy.note(Event.RESTORE)
    policy.hold(version(5), now=0.0)
    assert heard == [(version(5), None), (None, None), (None, version(5))]


def lease(number: int | None) -> PromptLease:
    purpose = LeasePurpose.TRAINING if number is None else LeasePurpose.EVALUATION
    return PromptLease("e", "addition", 0, 1, SAMPLING, 60.0, purpose, policy_version=number)


class Sampler:
    """A sampler that holds one version after another."""

    def __init__(self, number: int) -> None:
        self.generating: set[int] = set()
        self.now = 100.0
        self.policy = ServedPolicy(is_generating=self.generating.__contains__)
        self.policy.load(version(number))
        self.policy.hold(version(number), now=self.now)

    def arrive(self, number: int) -> None:
        for event in (Event.FETCH, Event.VERIFIED):
            self.policy.note(event)
        self.policy.hold(version(number), now=self.now)

    def ask(
        self,
        *leases: PromptLease,
        at: int | None = None,
        from_version: int | None = None,
        is_left: bool = False,
    ) -> None:
        had_to_ask = self.policy.has_to_ask
        self.generating |= {one.policy_version for one in leases if one.policy_version is not None}
        grant = LeaseGrant(leases, 0.0, "", from_version, is_left)
        asked_at = self.policy.held.number if at is None else at
        self.policy.answered(asked_at, grant, had_to_ask=had_to_ask, now=self.now)

    @property
    def stays(self) -> bool:
        stays = self.policy.stays(now=self.now)
        assert (self.policy.command(now=self.now) is Command.STAY) is stays
        return stays


def stopped(*, before: int = 9, at: int = 10) -> Sampler:
    sampler = Sampler(before)
    sampler.ask(from_version=10)
    sampler.arrive(at)
    return sampler


def test_a_sampler_stays_where_it_starts_until_it_is_told_where_to_stop() -> None:
    """Seen where one was killed at a version under evaluation and had gone on before its first answer."""
    sampler = Sampler(10)
    assert sampler.stays
    assert sampler.policy.has_to_ask
    sampler.ask(from_version=10)
    assert not sampler.stays
    sampler = Sampler(10)
    sampler.ask(lease(10), from_version=10)
    assert sampler.stays


def test_while_an_evaluation_is_overdue_it_stops_at_each_new_version() -> None:
    """Seen where a sampler's request began the evaluation of a version that it had left by the answer."""
    sampler = stopped(at=12)
    sampler.ask(from_version=10)
    sampler.arrive(13)
    assert sampler.stays
    sampler.ask(from_version=20)
    assert not sampler.stays
    sampler.arrive(14)
    assert not sampler.stays


def test_it_stops_where_it_hears_that_prompts_of_the_version_it_holds_are_left() -> None:
    sampler = Sampler(9)
    sampler.ask()
    sampler.ask(is_left=True)
    assert sampler.stays
    sampler.now += LONGEST_STOP_S
    sampler.ask(is_left=True)
    assert not sampler.stays


def test_an_answer_about_a_version_it_has_left_does_not_end_the_stop_at_the_next() -> None:
    sampler = stopped(at=10)
    sampler.ask(lease(9), at=9, from_version=10)
    assert sampler.stays


def test_a_hub_that_grants_nothing_delays_a_sampler_once() -> None:
    sampler = Sampler(0)
    sampler.now += LONGEST_STOP_S
    sampler.arrive(1)
    assert not sampler.stays


def test_a_sampler_that_is_told_of_nothing_passes_every_version_by() -> None:
    sampler = Sampler(0)
    sampler.ask()
    sampler.arrive(1)
    assert not sampler.stays
    assert not sampler.policy.has_to_ask


@pytest.mark.parametrize(
    ("before", "number", "stops"), [(8, 9, False), (9, 10, True), (8, 12, True), (10, 10, False)]
)
def test_it_stops_at_the_first_version_from_the_one_it_was_told(
    before: int, number: int, stops: bool
) -> None:
    assert stopped(before=before, at=number).stays is stops


def test_it_does_not_stop_where_the_way_to_the_head_leads_back_through_such_a_version() -> None:
    """Seen as a run of 17 s without a step: nothing is served there, so that no answer would end the stop."""
    sampler = stopped()
    sampler.ask(from_version=20)
    for on_the_way in (14, 8, 10, 16):
        sampler.arrive(on_the_way)
        assert not sampler.stays
        assert not sampler.policy.has_to_ask


def test_no_stop_holds_a_sampler_at_a_version_that_it_may_not_sample_from() -> None:
    sampler = stopped()
    sampler.arrive(12)
    sampler.ask(lease(11), at=11, from_version=10)
    sampler.arrive(11)
    assert sampler.policy.served is None
    assert not sampler.stays


def test_it_goes_on_once_it_asked_and_got_nothing_for_evaluation() -> None:
    sampler = stopped()
    assert sampler.policy.has_to_ask
    heard: list[PolicyVersion | None] = []
    sampler.policy.listen(heard.append)
    sampler.ask(lease(None), from_version=10)
    assert not sampler.stays
    assert heard == [version(10)]


def test_it_stays_until_its_prompts_are_generated_and_it_asked_again_and_got_none() -> None:
    sampler = stopped()
    sampler.ask(lease(10), from_version=10)
    assert not sampler.policy.has_to_ask
    sampler.ask(from_version=10)  # it has its share
    sampler.now += 10 * LONGEST_STOP_S
    assert sampler.stays
    sampler.now -= 10 * LONGEST_STOP_S
    sampler.generating.clear()
    assert sampler.stays
    assert sampler.policy.has_to_ask
    sampler.ask(lease(10), from_version=10)
    sampler.generating.clear()
    sampler.ask(from_version=20)
    assert not sampler.stays


def test_it_stays_while_prompts_are_left_for_it_but_not_without_end() -> None:
    """Seen where the hub had not yet heard of its last answer, and so gave it no more."""
    sampler = stopped()
    sampler.ask(lease(10), from_version=10)
    sampler.generating.clear()
    sampler.ask(from_version=10, is_left=True)
    assert sampler.stays
    assert sampler.policy.has_to_ask
    sampler.now += LONGEST_STOP_S
    assert not sampler.stays


def test_a_verified_version_waits_for_the_end_of_the_stop_and_a_repair_does_not() -> None:
    sampler = stopped()
    for event in (Event.FETCH, Event.VERIFIED):
        sampler.policy.note(event)
    assert sampler.stays
    sampler.policy.note(Event.DAMAGE)
    assert sampler.policy.command(now=sampler.now) is Command.RESTORE
    sampler.policy.note(Event.RESTORE)
    sampler.policy.hold(version(10), now=sampler.now)
    assert sampler.stays


def test_prompts_of_the_version_it_holds_stop_it_wherever_it_is() -> None:
    sampler = Sampler(0)
    sampler.ask(lease(0), lease(None))
    assert sampler.stays
