"""A message that repeats is logged some times, then counted, and the count is told."""

from node.telemetry.repeat_limit import Decision, RepeatLimit, Suppressed


def test_the_first_of_an_interval_pass_and_the_others_are_counted_and_told_when_it_is_over() -> None:
    limit = RepeatLimit[str](passed=2, interval_s=60)
    assert [limit.decide("refused", now=at / 1400).passes for at in range(1400)] == [True] * 2 + [
        False
    ] * 1398
    assert limit.decide("refused", now=59.9) == Decision(passes=False)
    assert limit.decide("refused", now=60.0) == Decision(True, (Suppressed("refused", 1399),))
    assert limit.decide("refused", now=60.1) == Decision(passes=True)


def test_another_message_tells_what_an_ended_interval_kept_back() -> None:
    limit = RepeatLimit[str](passed=1, interval_s=60)
    for _ in range(5):
        limit.decide("refused", now=0)
    assert limit.decide("joined", now=59) == Decision(passes=True)
    assert limit.decide("joined", now=61) == Decision(False, (Suppressed("refused", 4),))


def test_one_message_does_not_silence_another() -> None:
    limit = RepeatLimit[str](passed=1, interval_s=60)
    assert [limit.decide(key, now=0).passes for key in "aabba"] == [True, False, True, False, False]


def test_memory_is_bounded_and_what_is_forgotten_is_told() -> None:
    limit = RepeatLimit[int](passed=1, interval_s=60, keys=2)
    limit.decide(0, now=0)
    limit.decide(0, now=0)
    limit.decide(1, now=0)
    assert limit.decide(2, now=0) == Decision(True, (Suppressed(0, 1),))
    assert limit.flush() == ()


def test_a_clock_set_back_ends_an_interval_instead_of_making_it_endless() -> None:
    limit = RepeatLimit[str](passed=1, interval_s=60)
    limit.decide("refused", now=1000)
    limit.decide("refused", now=1000)
    assert limit.decide("refused", now=10) == Decision(True, (Suppressed("refused", 1),))


def test_the_rest_is_told_at_the_end_once() -> None:
    limit = RepeatLimit[str](passed=1, interval_s=60)
    for _ in range(3):
        limit.decide("refused", now=0)
    assert limit.flush() == (Suppressed("refused", 2),)
    assert limit.flush() == ()
