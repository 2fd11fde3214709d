"""Which outer rates converge where changes are merged late."""

import math
import random
from itertools import pairwise

import pytest
import torch

from learner.merging.formulas.outer_step import outer_step
from learner.merging.formulas.overlap import rebased
from learner.merging.formulas.stability import (
    LEAST_RATE,
    NORMS_KEPT,
    Overlap,
    grows,
    largest_stable_contraction,
    largest_stable_rate,
    lowered_rate,
)

OVERLAPS: tuple[Overlap, ...] = ("wait", "eager", "delayed")


@pytest.mark.parametrize(
    ("beta", "wait", "delayed", "shares"),
    [
        (0.9, 1.357, 0.253, (0.769, 0.415, 0.320)),
        (0.5, 1.499, 0.561, (1.186, 0.765, 0.648)),
        (0.0, 2.0, 1.0, (2.0, 1.333, 1.143)),
    ],
)
def test_the_largest_stable_rates_are_those_of_the_table(
    beta: float, wait: float, delayed: float, shares: tuple[float, ...]
) -> None:
    assert largest_stable_rate(beta, overlap="wait") == pytest.approx(wait, abs=1.1e-3)
    assert largest_stable_rate(beta, overlap="delayed") == pytest.approx(delayed, abs=1.1e-3)
    for contributors, rate in zip((2, 4, 8), shares, strict=True):
        found = largest_stable_rate(beta, overlap="eager", own_share=1 / contributors)
        assert found == pytest.approx(rate, abs=1.1e-3)


@pytest.mark.parametrize(
    ("beta", "wait", "delayed", "shares"),
    [(0.9, 1, 0.361, (1, 0.594, 0.457)), (0.5, 1, 0.802, (1, 1, 0.926))],
)
def test_the_largest_stable_contractions_at_rate_7_are_those_of_the_table(
    beta: float, wait: float, delayed: float, shares: tuple[float, ...]
) -> None:
    assert largest_stable_contraction(0.7, beta, overlap="wait") == wait
    assert largest_stable_contraction(0.7, beta, overlap="delayed") == pytest.approx(delayed, abs=1.1e-3)
    for contributors, contraction in zip((2, 4, 8), shares, strict=True):
        found = largest_stable_contraction(0.7, beta, overlap="eager", own_share=1 / contributors)
        assert found == pytest.approx(contraction, abs=1.1e-3)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("contraction", [0.3, 1.0])
def test_rounds_converge_below_the_largest_stable_rate_and_diverge_above(
    beta: float, overlap: Overlap, contraction: float
) -> None:
    stable = largest_stable_rate(beta, overlap=overlap, contraction=contraction)
    assert distances(0.9 * stable, beta, overlap, contraction)[-1] < 1e-2
    if stable < 4:
        assert distances(1.1 * stable, beta, overlap, contraction)[-1] > 1e2


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_defaults_converge_whatever_the_contraction(overlap: Overlap) -> None:
    rates = [(1.0, 0.0)] if overlap == "delayed" else [(1.0, 0.0), (0.7, 0.5)]
    for rate, beta in rates:
        assert distances(rate, beta, overlap, 0.95)[-1] < 1e-2


def distances(rate: float, beta: float, overlap: Overlap, contraction: float) -> list[float]:
    """Return the version's distance from the optimum after each of 1000 rounds of the very formulas."""
    version, momentum = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    local, anchor = version.clone(), version.clone()
    sent = change = None
    found = []
    for _ in range(1000):
        local = local - contraction * local
        if overlap == "wait":
            outer_step(version, momentum, local - anchor, rate=rate, beta=beta)
            local = rebased(local, local, anchor, version, overlap=overlap)
            anchor = version.clone()
        else:
            if sent is not None and change is not None:
                outer_step(version, momentum, change, rate=rate, beta=beta)
                local = rebased(local, sent, anchor, version, overlap=overlap)
                anchor = version.clone()
            sent, change = local, local - anchor
            local = anchor.clone() if overlap == "delayed" else local
        found.append(abs(version.item()))
        if not found[-1] < 1e6:
            break
    return found


def alarms(norms: list[float]) -> list[int]:
    """Return the rounds in which the alarm is on."""
    return [i for i in range(len(norms)) if grows(norms[max(0, i + 1 - NORMS_KEPT) : i + 1])]


@pytest.mark.parametrize("growth", [1.05, 1.2, 2.0])
def test_exponential_growth_alarms_by_the_time_it_has_doubled_a_few_times(growth: float) -> None:
    norms = [growth**i * (1 + 0.2 * math.sin(i)) for i in range(200)]
    first = alarms(norms)[0]
    assert first <= max(16, 4 * 2 * math.log(2) / math.log(growth)) + 4
    assert alarms(norms) == list(range(first, 200))


@pytest.mark.parametrize(
    "norms",
    [
        [1 / (1 + i) for i in range(300)],
        [1.0] * 300,
        [0.0] * 300,
        [min(i, 100) / 100 for i in range(300)],  # a linear warm-up
        [min(i + 1, 100) ** 2 for i in range(300)],  # a quadratic one
        [0.0] * 20 + [1.0] * 300,
    ],
)
def test_convergence_and_warm_ups_do_not_alarm(norms: list[float]) -> None:
    assert alarms(norms) == []


def test_noise_does_not_alarm() -> None:
    noise = random.Random(5)
    assert alarms([math.exp(noise.gauss(0, 0.5)) for _ in range(5000)]) == []


def test_a_delay_that_diverges_alarms_and_the_default_for_it_does_not() -> None:
    def norms(rate: float, beta: float) -> list[float]:
        noise = random.Random(6)
        away = distances(rate, beta, "delayed", 0.9)
        return [abs(b - a) + 0.01 * noise.random() for a, b in pairwise(away)]

    assert alarms(norms(0.7, 0.9))
    assert not alarms(norms(1.0, 0.0))


@pytest.mark.parametrize(
    ("rate", "beta", "overlap", "lowered"),
    [
        (0.7, 0.5, "wait", 0.7),
        (0.7, 0.9, "wait", 1.0),
        (1.0, 0.0, "eager", 0.5),
        (1.0, 0.0, "delayed", 0.5),
        (0.5, 0.0, "delayed", 0.25),
        (LEAST_RATE, 0.0, "delayed", LEAST_RATE),
    ],
)
def test_a_lowered_rate_is_half_of_what_was_taken_over_in_the_end(
    rate: float, beta: float, overlap: Overlap, lowered: float
) -> None:
    assert lowered_rate(rate, beta, overlap=overlap) == pytest.approx(lowered)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_a_lowered_rate_is_stable(overlap: Overlap, beta: float) -> None:
    rate = lowered_rate(2.0, beta, overlap=overlap)
    assert distances(rate, 0.0, overlap, 1.0)[-1] < 1e-2
    assert rate <= largest_stable_rate(0.0, overlap=overlap) / 2
