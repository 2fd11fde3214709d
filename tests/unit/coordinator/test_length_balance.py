"""Whether long groups come to nothing more often than short ones shows before the policy has learned it."""

import random

import pytest
from scipy.stats import ks_2samp  # type: ignore[import-untyped]

from node.coordinator.work import verdicts
from node.coordinator.work.length_balance import LEAST_GROUPS, WINDOW_GROUPS, LengthBalance
from node.verdict import GroupVerdict, Verdict
from support.coordinator import Desk


def balance_of(sizes: list[int], used: list[bool]) -> LengthBalance:
    balance = LengthBalance()
    for size, is_used in zip(sizes, used, strict=True):
        balance.note(size, is_used=is_used)
    return balance


def some_sizes(n: int) -> list[int]:
    draw = random.Random(3)
    return [round(1000 * draw.lognormvariate(0, 1)) for _ in range(n)]


def test_a_few_groups_say_nothing() -> None:
    assert balance_of(some_sizes(LEAST_GROUPS - 1), [True] * (LEAST_GROUPS - 1)).distance() is None


def test_groups_that_are_all_used_are_no_distance_apart_and_none_used_is_all() -> None:
    sizes = some_sizes(LEAST_GROUPS)
    assert balance_of(sizes, [True] * LEAST_GROUPS).distance() == 0
    assert balance_of(sizes, [False] * LEAST_GROUPS).distance() == 1


@pytest.mark.parametrize("unused_share", [0.02, 0.3])
def test_a_loss_that_knows_no_length_is_within_a_twentieth(unused_share: float) -> None:
    draw = random.Random(4)
    sizes = some_sizes(WINDOW_GROUPS)
    distance = balance_of(sizes, [draw.random() >= unused_share for _ in sizes]).distance()
    assert distance is not None
    assert distance <= 0.05


def test_a_loss_of_the_longest_quarter_is_the_distance_scipy_finds() -> None:
    sizes = some_sizes(WINDOW_GROUPS)
    longest = sorted(sizes)[3 * WINDOW_GROUPS // 4]
    distance = balance_of(sizes, [size < longest for size in sizes]).distance()
    used = [size for size in sizes if size < longest]
    assert distance == pytest.approx(ks_2samp(used, sizes).statistic)
    assert distance == pytest.approx(0.25, abs=0.01)


def test_only_the_newest_groups_count() -> None:
    sizes = [10_000] * LEAST_GROUPS + some_sizes(WINDOW_GROUPS)
    assert balance_of(sizes, [False] * LEAST_GROUPS + [True] * WINDOW_GROUPS).distance() == 0


def test_a_run_counts_what_leaves_its_spool() -> None:
    desk = Desk()
    desk.accounts.length_balance = balance_of([100] * (LEAST_GROUPS - 2), [True] * (LEAST_GROUPS - 2))
    trained, stale = desk.lease(wanted=2)
    for name in (trained, stale):
        desk.submit(name)
    desk.train(1, trained)
    assert desk.accounts.length_balance.distance() is None
    judged = GroupVerdict(stale, Verdict.STALE)
    desk.settle(verdicts.judgement(desk.accounts, judged, now=desk.now))
    assert desk.accounts.length_balance.distance() == pytest.approx(1 / LEAST_GROUPS, rel=0.1)
