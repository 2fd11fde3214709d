from node.clients.rollouts.outstanding_rollouts import OutstandingRollouts, Owed
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.run import StepRecord
from support.refusals import naming


def make_outstanding(capacity: int = 3, *unacknowledged: StepRecord) -> OutstandingRollouts:
    version = max((step.version for step in unacknowledged), default=0)
    outstanding = OutstandingRollouts(
        version=version, capacity_groups=capacity, unacknowledged=unacknowledged
    )
    outstanding.connected()
    return outstanding


def test_credits_never_exceed_the_room_there_is() -> None:
    outstanding = make_outstanding(3)
    assert outstanding.take_owed().credit_groups == 3
    assert outstanding.take_owed().credit_groups == 0
    assert outstanding.delivered("1.1")
    outstanding.judged(GroupVerdict("1.1", Verdict.ACCEPTED))
    assert outstanding.take_owed().credit_groups == 0
    outstanding.stepped(StepRecord(1, ("1.1",), (0,)))
    assert outstanding.take_owed().credit_groups == 1


def test_before_the_first_stream_nothing_is_owed_but_all_of_the_room() -> None:
    outstanding = OutstandingRollouts(version=0, capacity_groups=3, unacknowledged=())
    assert outstanding.take_owed() == Owed((), (), 3)


def test_groups_that_came_without_credit_take_room_and_no_more() -> None:
    outstanding = make_outstanding(2)
    outstanding.delivered("1.1")
    assert outstanding.take_owed().credit_groups == 1
    outstanding.delivered("2.1")
    outstanding.delivered("3.1")
    assert outstanding.take_owed().credit_groups == 0
    outstanding.judged(GroupVerdict("1.1", Verdict.STALE))
    assert outstanding.take_owed().credit_groups == 0


def test_a_refused_group_makes_room_at_once() -> None:
    outstanding = make_outstanding(1)
    outstanding.take_owed()
    outstanding.delivered("1.1")
    outstanding.judged(GroupVerdict("1.1", Verdict.STALE, "7 versions"))
    owed = outstanding.take_owed()
    assert owed.verdicts == (GroupVerdict("1.1", Verdict.STALE, "7 versions"),)
    assert owed.credit_groups == 1


def test_what_may_have_been_lost_is_said_again_on_the_next_stream() -> None:
    outstanding = make_outstanding(3)
    outstanding.take_owed()
    outstanding.delivered("1.1")
    outstanding.delivered("2.1")
    outstanding.judged(GroupVerdict("1.1", Verdict.ACCEPTED))
    outstanding.take_owed()
    outstanding.connected()
    owed = outstanding.take_owed()
    assert owed.verdicts == (GroupVerdict("1.1", Verdict.ACCEPTED),)
    assert owed.credit_groups == 1
    assert outstanding.held_group_ids == ("1.1", "2.1")


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


def test_steps_of_a_broken_stream_travel_in_the_next_hello_only() -> None:
    outstanding = make_outstanding(3)
    outstanding.delivered("1.1")
    outstanding.stepped(StepRecord(1, ("1.1",), (0,)))
    outstanding.connected()
    assert outstanding.take_owed().steps == ()
    assert outstanding.unacknowledged == (StepRecord(1, ("1.1",), (0,)),)


def test_a_group_that_was_trained_on_before_its_acceptance_was_said_is_said_to_be_trained_only() -> None:
    outstanding = make_outstanding(3)
    outstanding.delivered("1.1")
    outstanding.judged(GroupVerdict("1.1", Verdict.ACCEPTED))
    outstanding.stepped(StepRecord(1, ("1.1",), (0,)))
    owed = outstanding.take_owed()
    assert (owed.verdicts, [step.version for step in owed.steps]) == ((), [1])


def test_a_refusal_is_said_once_and_what_was_said_is_not_owed() -> None:
    outstanding = make_outstanding(3)
    outstanding.delivered("1.1")
    outstanding.delivered("2.1")
    outstanding.judged(GroupVerdict("1.1", Verdict.STALE))
    outstanding.stepped(StepRecord(1, ("2.1",), (0,)))
    assert (len((owed := outstanding.take_owed()).verdicts), len(owed.steps)) == (1, 1)
    assert ((owed := outstanding.take_owed()).verdicts, owed.steps) == ((), ())
    outstanding.connected()
    assert outstanding.take_owed().verdicts == ()


def test_a_refusal_that_was_not_said_before_a_cut_is_not_said_after_it() -> None:
    """The group is not in the hello either: the hub delivers it again, and it is judged again."""
    outstanding = make_outstanding(3)
    outstanding.delivered("1.1")
    outstanding.judged(GroupVerdict("1.1", Verdict.STALE))
    outstanding.connected()
    assert outstanding.take_owed().verdicts == ()
    assert outstanding.held_group_ids == ()
    assert outstanding.delivered("1.1")


def test_what_is_delivered_twice_is_taken_once_and_uses_up_its_credit_all_the_same() -> None:
    outstanding = make_outstanding(2)
    assert outstanding.take_owed().credit_groups == 2
    assert outstanding.delivered("1.1")
    assert not outstanding.delivered("1.1")
    assert outstanding.take_owed().credit_groups == 1


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


def test_a_delivery_is_within_the_credits_or_of_a_group_that_is_held() -> None:
    account = OutstandingRollouts(version=0, capacity_groups=2, unacknowledged=())
    assert account.delivered("1.1")
    assert account.has_room_for("2.1")
    assert account.delivered("2.1")
    assert [account.has_room_for(name) for name in ("1.1", "2.1", "3.1")] == [True, True, False]
    account.judged(GroupVerdict("1.1", Verdict.STALE))
    assert account.has_room_for("3.1")
