"""The next move of a contributor, whatever is dealt, taken, answered and cut off in whatever order."""

import json
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from learner.contributor.contributor_state import (
    GROUPS,
    LEARNER,
    MERGED,
    Adopt,
    ContributorState,
    HandIn,
    Leave,
    Train,
    WaitFor,
)
from node.values.contribution import Contribution, ContributionAnswer, MergeTerms
from node.values.groups.rollout import EncodedGroup

BATCH = 2


def terms(**merge: object) -> MergeTerms:
    return MergeTerms(json.dumps({"learning_rate": 1e-3}).encode(), json.dumps(merge).encode(), BATCH)


def group(group_id: str) -> EncodedGroup:
    return EncodedGroup(b"", b"", group_id, "sampler", 0.0)


def contribution(number: int, version: int) -> Contribution:
    return Contribution(number, version, b"{}", b"change", b"d" * 16)


def dealt(state: ContributorState, *ids: str) -> None:
    state.take_owed()
    for group_id in ids:
        state.delivered(group(group_id))


def trained(state: ContributorState) -> tuple[str, ...]:
    """Train on the batch that is due, and return its ids."""
    move = state.next_move()
    assert isinstance(move, Train)
    ids = tuple(one.group_id for one in move.batch)
    state.trained(ids)
    return ids


def handed_in(state: ContributorState) -> Contribution:
    move = state.next_move()
    assert isinstance(move, HandIn)
    made = contribution(move.number, state.version)
    state.handed_in(made)
    return made


def with_terms(**merge: object) -> ContributorState:
    state = ContributorState()
    state.told(terms(**merge))
    return state


def test_without_terms_nothing_is_asked_for_and_nothing_done() -> None:
    state = ContributorState()
    assert state.next_move() == WaitFor(LEARNER)
    assert state.take_owed().credit_groups == 0


def test_a_round_in_turn_trains_hands_in_waits_and_adopts() -> None:
    state = with_terms(local_steps=2, overlap="wait")
    dealt(state, *"abcdef")
    assert trained(state) == ("a", "b")
    assert trained(state) == ("c", "d")
    assert handed_in(state).number == 1
    assert state.next_move() == WaitFor(MERGED), "the next batch is here, and is not trained on meanwhile"
    assert state.answered(ContributionAnswer(1, 1))
    assert state.next_move() == WaitFor(MERGED), "the words of version 1 are not here"
    state.available(1)
    assert state.next_move() == Adopt(1)
    state.adopted(1)
    assert trained(state) == ("e", "f")


def test_with_overlap_it_trains_on_but_hands_in_nothing_before_the_version_is_adopted() -> None:
    state = with_terms(local_steps=1, overlap="eager")
    dealt(state, *"abcd")
    trained(state)
    handed_in(state)
    assert trained(state) == ("c", "d")
    assert state.next_move() == WaitFor(MERGED)
    state.answered(ContributionAnswer(1, 1))
    assert state.next_move() == WaitFor(MERGED)
    state.available(1)
    assert state.next_move() == Adopt(1)
    state.adopted(1)
    assert state.next_move() == HandIn(2)


def test_a_refused_contribution_is_forgotten_from_the_version_that_is_here() -> None:
    state = with_terms(local_steps=1)
    dealt(state, "a", "b")
    trained(state)
    handed_in(state)
    state.answered(ContributionAnswer(1, None, "it named a group of another"))
    assert state.next_move() == Adopt(0, is_refused=True)
    state.adopted(0)
    assert state.held_group_ids == ()
    assert state.next_move() == WaitFor(GROUPS)


def test_a_contribution_without_a_change_needs_no_new_version() -> None:
    state = with_terms(local_steps=1)
    dealt(state, "a", "b")
    trained(state)
    handed_in(state)
    state.answered(ContributionAnswer(1, 0))
    assert state.next_move() == WaitFor(GROUPS)


def test_a_late_joiner_takes_no_step_before_the_runs_version_is_here() -> None:
    state = with_terms()
    state.starts_from(7)
    dealt(state, "a", "b")
    assert state.next_move() == WaitFor(MERGED)
    state.available(7)
    assert state.next_move() == Adopt(7)
    state.adopted(7)
    trained(state)


def test_a_round_that_would_be_refused_as_too_late_moves_to_the_newest_version() -> None:
    state = with_terms(local_steps=2, late_rounds=1)
    dealt(state, *"abcd")
    trained(state)
    state.available(1)
    assert isinstance(state.next_move(), Train), "one round late is merged"
    state.available(2)
    assert state.next_move() == Adopt(2)


def test_a_stop_hands_in_what_is_trained_and_waits_for_its_answer_alone() -> None:
    state = with_terms(local_steps=4)
    dealt(state, *"abcd")
    trained(state)
    assert state.next_move(is_stopping=True) == HandIn(1)
    state.handed_in(contribution(1, 0))
    assert state.next_move(is_stopping=True) == WaitFor(MERGED)
    state.answered(ContributionAnswer(1, 1))
    assert state.next_move(is_stopping=True) == Leave()
    assert state.travelling_group_ids == ()


def test_what_was_taken_back_is_not_trained_on_and_leaves_room() -> None:
    state = with_terms()
    dealt(state, "a", "b")
    state.taken(["a"])
    assert state.next_move() == WaitFor(GROUPS)
    assert state.take_owed().credit_groups == 1


def test_answers_to_earlier_contributions_change_nothing() -> None:
    state = with_terms(local_steps=1)
    dealt(state, "a", "b")
    trained(state)
    handed_in(state)
    assert not state.answered(ContributionAnswer(9, 4))
    assert state.next_move() == WaitFor(MERGED)


@dataclass
class Learner:
    """The other half, as the protocol has it."""

    version: int = 0
    credits: int = 0
    dealt: int = 0
    at_contributor: set[str] = field(default_factory=set)
    merged: list[str] = field(default_factory=list)


class Rounds(RuleBasedStateMachine):
    """A contributor at a learner whose connection may be cut between any two messages."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ContributorState()
        self.learner = Learner()
        self.contribution: tuple[int, tuple[str, ...]] | None = None
        self.received: int | None = None
        """The contribution that the learner has."""

    @precondition(lambda self: self.state.terms is None)
    @rule(overlap=st.sampled_from(["wait", "eager", "delayed"]), steps=st.integers(1, 3))
    def told(self, overlap: str, steps: int) -> None:
        self.state.told(terms(overlap=overlap, local_steps=steps))

    @rule()
    def send(self) -> None:
        owed = self.state.take_owed()
        self.learner.credits += owed.credit_groups
        if owed.contribution is not None:
            self.received = owed.contribution.number

    @precondition(lambda self: self.learner.credits > 0)
    @rule()
    def deal(self) -> None:
        self.learner.dealt += 1
        self.learner.credits -= 1
        name = f"{self.learner.dealt}.0"
        assert self.state.has_room_for(name)
        self.learner.at_contributor.add(name)
        self.state.delivered(group(name))

    @precondition(lambda self: self.learner.credits > 0 and self.state.held_group_ids)
    @rule(data=st.data())
    def deal_again(self, data: st.DataObject) -> None:
        self.learner.credits -= 1
        self.state.delivered(group(data.draw(st.sampled_from(sorted(self.state.held_group_ids)))))

    @invariant()
    def nothing_waits_for_a_credit_that_neither_has(self) -> None:
        """Once everything owed is sent, a contributor without groups may be sent a batch."""
        if (terms := self.state.terms) is not None:
            owed = self.state.take_owed()
            self.learner.credits += owed.credit_groups
            self.received = self.received if owed.contribution is None else owed.contribution.number
            if not self.state.held_groups:
                assert self.learner.credits >= terms.batch_groups

    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        held = sorted(set(self.state.held_group_ids) - set(self.state.travelling_group_ids))
        if held:
            self.state.taken([data.draw(st.sampled_from(held))])

    @rule()
    def cut(self) -> None:
        self.state.connected()
        self.learner.credits, self.received = 0, None

    @precondition(lambda self: self.received is not None)
    @rule(is_merged=st.booleans())
    def answer(self, is_merged: bool) -> None:
        number, ids = self.contribution or (0, ())
        assert number == self.received
        self.learner.version += is_merged
        if is_merged:
            self.learner.merged += ids
        assert self.state.answered(ContributionAnswer(number, self.learner.version if is_merged else None))
        self.received = self.contribution = None

    @rule()
    def publish(self) -> None:
        self.state.available(self.learner.version)

    @rule()
    def move(self) -> None:
        match self.state.next_move():
            case Train(batch):
                assert len(batch) == BATCH
                self.state.trained([one.group_id for one in batch])
            case HandIn(number):
                assert self.contribution is None, "at most one contribution is under way"
                made = contribution(number, self.state.version)
                self.state.handed_in(made)
                self.contribution = number, self.state.travelling_group_ids
            case Adopt(version):
                assert self.contribution is None
                assert version >= self.state.version, "versions never go back"
                self.state.adopted(version)

    @invariant()
    def what_is_held_is_bounded(self) -> None:
        assert self.state.held_groups <= 2 * BATCH
        assert len(self.state.held_group_ids) <= (2 + 2 * 3) * BATCH

    @invariant()
    def no_group_is_here_or_merged_twice(self) -> None:
        held = self.state.held_group_ids
        assert len({*held, *self.learner.merged}) == len(held) + len(self.learner.merged)


TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
