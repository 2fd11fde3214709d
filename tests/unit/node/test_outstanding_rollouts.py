"""The account beside a model of it, over streams that break; and what a model would only say again."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from node.clients.rollouts.outstanding_rollouts import OutstandingRollouts, Owed
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.run import StepRecord
from support.refusals import naming

CAPACITY = 3
GROUPS = tuple(f"{number}.1" for number in range(1, 7))


class AccountMachine(RuleBasedStateMachine):
    """Rules are what happens to a learner; what it sends is what the coordinator has yet to hear."""

    def __init__(self) -> None:
        super().__init__()
        self.account = OutstandingRollouts(version=0, capacity_groups=CAPACITY, unacknowledged=())
        self.held: dict[str, bool] = {}
        """Groups neither refused nor trained on, and whether each was accepted."""
        self.credits = 0
        self.unsaid: dict[str, Verdict] = {}
        self.unsent: list[StepRecord] = []
        self.unacknowledged: list[StepRecord] = []

    @rule(group=st.sampled_from(GROUPS))
    def deliver(self, group: str) -> None:
        """With or without a credit, for the first time or again."""
        trained = {name for step in self.unacknowledged for name in step.group_ids}
        is_new = group not in self.held and group not in trained
        assert self.account.has_room_for(group) == (not is_new or len(self.held) < CAPACITY)
        assert self.account.delivered(group) == is_new
        self.credits = max(0, self.credits - 1)
        if is_new:
            self.held[group] = False

    @precondition(lambda self: self.held)
    @rule(data=st.data(), verdict=st.sampled_from([Verdict.ACCEPTED, Verdict.STALE]))
    def judge(self, data: st.DataObject, verdict: Verdict) -> None:
        group = data.draw(st.sampled_from(sorted(self.held)))
        self.account.judged(GroupVerdict(group, verdict))
        self.unsaid[group] = verdict
        self.held[group] = True
        if verdict is Verdict.STALE:
            del self.held[group]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        groups = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        record = StepRecord(self.account.version + 1, tuple(groups), (0,) * len(groups))
        self.account.stepped(record)
        for group in groups:
            del self.held[group]
            self.unsaid.pop(group, None)
        self.unsent.append(record)
        self.unacknowledged.append(record)

    @rule()
    def send(self) -> None:
        """The coordinator may have as many groups under way as there is room for, and no more."""
        owed = self.account.take_owed()
        assert {said.group_id: said.verdict for said in owed.verdicts} == self.unsaid
        assert list(owed.steps) == self.unsent
        assert owed.credit_groups == max(0, CAPACITY - len(self.held) - self.credits)
        self.credits += owed.credit_groups
        self.unsaid, self.unsent = {}, []

    @rule()
    def reconnect(self) -> None:
        """Say again what was accepted. Steps are in the hello; what was refused is delivered again."""
        self.account.connected()
        self.credits, self.unsent = 0, []
        self.unsaid = {group: Verdict.ACCEPTED for group, accepted in self.held.items() if accepted}

    @precondition(lambda self: self.unacknowledged)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        version = data.draw(st.integers(0, self.account.version))
        self.account.acknowledged(version)
        self.unacknowledged = [step for step in self.unacknowledged if step.version > version]

    @invariant()
    def both_know_what_is_held_and_what_is_not_acknowledged(self) -> None:
        assert self.account.held_group_ids == tuple(self.held)
        assert list(self.account.unacknowledged) == self.unacknowledged


AccountMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
test_what_learner_and_coordinator_owe_each_other_survives_broken_streams = AccountMachine.TestCase


def make_outstanding(capacity: int = 3, *unacknowledged: StepRecord) -> OutstandingRollouts:
    version = max((step.version for step in unacknowledged), default=0)
    outstanding = OutstandingRollouts(
        version=version, capacity_groups=capacity, unacknowledged=unacknowledged
    )
    outstanding.connected()
    return outstanding


def test_before_the_first_stream_nothing_is_owed_but_all_of_the_room() -> None:
    outstanding = OutstandingRollouts(version=0, capacity_groups=3, unacknowledged=())
    assert outstanding.take_owed() == Owed((), (), 3)


def test_the_version_of_a_hello_is_that_of_the_newest_record_known_acknowledged_or_not() -> None:
    outstanding = make_outstanding(3, StepRecord(4, ("9.1",), (2,)))
    assert outstanding.version == 4
    outstanding.delivered("10.1")
    outstanding.stepped(StepRecord(5, ("10.1",), (0,)))
    outstanding.acknowledged(4)
    assert [step.version for step in outstanding.unacknowledged] == [5]
    outstanding.acknowledged(5)
    assert (outstanding.version, outstanding.unacknowledged) == (5, ())


def test_a_group_of_an_unacknowledged_step_is_not_taken_again() -> None:
    outstanding = make_outstanding(3, StepRecord(4, ("9.1",), (2,)))
    assert not outstanding.delivered("9.1")
    assert not outstanding.held_group_ids


def test_judging_a_group_that_is_not_held_is_a_fault_of_ours() -> None:
    with naming(KeyError, "1.1"):
        make_outstanding().judged(GroupVerdict("1.1", Verdict.ACCEPTED))


def test_a_learner_without_room_is_refused() -> None:
    with naming(ValueError, "capacity_groups"):
        OutstandingRollouts(version=0, capacity_groups=0, unacknowledged=())


def test_quarantines_are_owed_again_on_each_stream_and_a_release_outlives_the_coordinators_list() -> None:
    account = OutstandingRollouts(version=0, capacity_groups=1, unacknowledged=())
    account.quarantine("a", "off")
    account.quarantine("b", "off")
    assert account.take_owed().quarantines == (("a", "off"), ("b", "off"))
    account.quarantine("b", "")
    account.connected()
    account.quarantines_listed({"b": "off", "c": "before this process"}, releases_others=False)
    assert account.take_owed().quarantines == (("a", "off"), ("b", ""))
    assert account.quarantined == {"a": "off", "c": "before this process"}


def test_an_operators_pardon_releases_whoever_is_not_on_the_list_any_more() -> None:
    account = OutstandingRollouts(version=0, capacity_groups=1, unacknowledged=())
    account.quarantine("a", "off")
    account.quarantines_listed({}, releases_others=True)
    account.connected()
    assert account.quarantined == {}
    assert account.take_owed().quarantines == ()
