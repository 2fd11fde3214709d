import pytest

from node.clients.drain_book import DrainBook
from node.rollout import GroupVerdict, Verdict
from node.run import StepRecord


def make_book(capacity: int = 3, *unacknowledged: StepRecord) -> DrainBook:
    version = max((step.version for step in unacknowledged), default=0)
    book = DrainBook(version=version, capacity_groups=capacity, unacknowledged=unacknowledged)
    book.connected()
    return book


def test_credits_never_exceed_the_room_there_is() -> None:
    book = make_book(3)
    assert book.take_owed().credit_groups == 3
    assert book.take_owed().credit_groups == 0
    assert book.delivered("1.1")
    book.judged(GroupVerdict("1.1", Verdict.ACCEPTED))
    assert book.take_owed().credit_groups == 0
    book.stepped(StepRecord(1, ("1.1",), (0,)))
    assert book.take_owed().credit_groups == 1


def test_a_refused_group_makes_room_at_once() -> None:
    book = make_book(1)
    book.take_owed()
    book.delivered("1.1")
    book.judged(GroupVerdict("1.1", Verdict.STALE, "7 versions"))
    owed = book.take_owed()
    assert owed.judgements == (GroupVerdict("1.1", Verdict.STALE, "7 versions"),)
    assert owed.credit_groups == 1


def test_what_may_have_been_lost_is_said_again_on_the_next_stream() -> None:
    book = make_book(3)
    book.take_owed()
    book.delivered("1.1")
    book.delivered("2.1")
    book.judged(GroupVerdict("1.1", Verdict.ACCEPTED))
    book.take_owed()
    book.connected()
    owed = book.take_owed()
    assert owed.judgements == (GroupVerdict("1.1", Verdict.ACCEPTED),)
    assert owed.credit_groups == 1
    assert book.held_group_ids == ("1.1", "2.1")


def test_a_step_is_unacknowledged_until_the_hub_has_it_on_disk() -> None:
    book = make_book(3)
    for version in (1, 2):
        book.delivered(f"{version}.1")
        book.stepped(StepRecord(version, (f"{version}.1",), (0,)))
    book.acknowledged(1)
    assert [step.version for step in book.unacknowledged] == [2]


def test_the_version_of_a_hello_is_that_of_the_newest_record_known_acknowledged_or_not() -> None:
    book = make_book(3, StepRecord(4, ("9.1",), (2,)))
    assert book.version == 4
    book.delivered("10.1")
    book.stepped(StepRecord(5, ("10.1",), (0,)))
    book.acknowledged(5)
    assert (book.version, book.unacknowledged) == (5, ())


def test_a_group_of_an_unacknowledged_step_is_not_taken_again() -> None:
    book = make_book(3, StepRecord(4, ("9.1",), (2,)))
    assert not book.delivered("9.1")
    assert not book.held_group_ids


def test_a_group_that_is_held_is_not_taken_twice() -> None:
    book = make_book(3)
    assert book.delivered("1.1")
    assert not book.delivered("1.1")


def test_steps_of_a_broken_stream_travel_in_the_next_hello_only() -> None:
    book = make_book(3)
    book.delivered("1.1")
    book.stepped(StepRecord(1, ("1.1",), (0,)))
    book.connected()
    assert book.take_owed().steps == ()
    assert book.unacknowledged == (StepRecord(1, ("1.1",), (0,)),)


def test_a_group_that_was_trained_on_before_its_acceptance_was_said_is_said_to_be_trained_only() -> None:
    book = make_book(3)
    book.delivered("1.1")
    book.judged(GroupVerdict("1.1", Verdict.ACCEPTED))
    book.stepped(StepRecord(1, ("1.1",), (0,)))
    owed = book.take_owed()
    assert (owed.judgements, [step.version for step in owed.steps]) == ((), [1])


def test_a_refusal_is_said_once_and_what_was_said_is_not_owed() -> None:
    book = make_book(3)
    book.delivered("1.1")
    book.delivered("2.1")
    book.judged(GroupVerdict("1.1", Verdict.STALE))
    book.stepped(StepRecord(1, ("2.1",), (0,)))
    assert (len((owed := book.take_owed()).judgements), len(owed.steps)) == (1, 1)
    assert ((owed := book.take_owed()).judgements, owed.steps) == ((), ())
    book.connected()
    assert book.take_owed().judgements == ()


def test_a_refusal_that_was_not_said_before_a_cut_is_not_said_after_it() -> None:
    """The group is not in the hello either: the hub delivers it again, and it is judged again."""
    book = make_book(3)
    book.delivered("1.1")
    book.judged(GroupVerdict("1.1", Verdict.STALE))
    book.connected()
    assert book.take_owed().judgements == ()
    assert book.held_group_ids == ()
    assert book.delivered("1.1")


def test_what_was_delivered_twice_uses_up_its_credit_all_the_same() -> None:
    book = make_book(2)
    assert book.take_owed().credit_groups == 2
    book.delivered("1.1")
    book.delivered("1.1")
    assert book.take_owed().credit_groups == 1


def test_judging_a_group_that_is_not_held_is_a_fault_of_ours() -> None:
    with pytest.raises(KeyError, match="not held"):
        make_book().judged(GroupVerdict("1.1", Verdict.ACCEPTED))


def test_a_learner_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity_groups"):
        DrainBook(version=0, capacity_groups=0, unacknowledged=())
