"""A run whose merges diverge goes on at lower rates, and keeps them."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from pydantic import TypeAdapter

from learner.journal.progress import Progress
from learner.merging.formulas.outer_step import outer_step
from learner.merging.formulas.stability import LEAST_RATE
from learner.merging.merge_settings import MergeSettings
from learner.merging.outer_rates import OuterRates
from learner.step_log import RollbackLine


def settings(**values: object) -> MergeSettings:
    return MergeSettings.model_validate(
        {"method": "diloco", "outer_rate": 1.0, "outer_momentum": 0.0, **values}
    )


def run(
    configured: MergeSettings, contraction: float, *, rounds: int, reacts: bool = True
) -> tuple[float, OuterRates]:
    """Return the largest distance from the optimum in the last ten of some rounds, and the rates after them.

    A round's local steps go ``contraction`` of the way from the newest version, or from the one before.
    """
    rates, theta = OuterRates(), torch.ones(1, dtype=torch.float64)
    momentum, before, away = torch.zeros_like(theta), theta.clone(), [0.0]
    for _ in range(rounds):
        read = before if configured.overlap == "delayed" else theta
        change, before = -contraction * read, theta.clone()
        used = rates.of(configured) if reacts else configured
        if not used.outer_momentum:
            momentum.zero_()
        outer_step(theta, momentum, change, rate=used.outer_rate, beta=used.outer_momentum)
        rates = rates.after(abs(change.item()), configured)
        away.append(abs(theta.item()))
    return max(away[-10:]), rates


@pytest.mark.parametrize(
    ("configured", "contraction"),
    [
        (settings(overlap="delayed"), 1.6),
        (settings(overlap="delayed", outer_rate=0.5, outer_momentum=0.5), 2.5),
        (settings(), 2.5),
        (settings(outer_rate=0.7, outer_momentum=0.9), 2.5),
    ],
)
def test_rates_are_lowered_until_a_run_that_diverges_converges(
    configured: MergeSettings, contraction: float
) -> None:
    assert run(configured, contraction, rounds=200, reacts=False)[0] > 1e6
    away, rates = run(configured, contraction, rounds=400)
    assert away < 1e-2
    assert rates.are_lowered(configured)
    now = rates.of(configured)
    assert (now.outer_momentum, now.outer_rate * contraction < 1.26) == (0.0, True)
    assert now == configured.model_copy(update={"outer_rate": now.outer_rate, "outer_momentum": 0.0})


def test_a_run_that_converges_keeps_the_configured_rates() -> None:
    for configured in (settings(), settings(overlap="delayed"), settings(outer_rate=0.7, outer_momentum=0.5)):
        away, rates = run(configured, 0.5, rounds=300)
        assert away < 1e-6
        assert rates.of(configured) is configured


def doubled(rates: OuterRates, configured: MergeSettings, *, merges: int = 16) -> OuterRates:
    for number in range(merges):
        rates = rates.after(2.0**number, configured)
    return rates


def test_rates_are_halved_once_in_sixteen_merges_and_not_below_the_least() -> None:
    configured, rates = settings(), OuterRates()
    seen = []
    for _ in range(6):
        assert doubled(rates, configured, merges=15).of(configured) == rates.of(configured)
        rates = doubled(rates, configured)
        seen.append(rates.of(configured).outer_rate)
    assert seen == [0.5, 0.25, 0.125, LEAST_RATE, LEAST_RATE, LEAST_RATE]


@pytest.mark.parametrize("other", [{"outer_rate": 0.9}, {"outer_momentum": 0.5}])
def test_lowered_rates_end_once_others_are_configured(other: dict[str, float]) -> None:
    rates = doubled(OuterRates(), settings())
    assert rates.are_lowered(settings(local_steps=9, quorum=0.5))
    assert rates.of(settings(**other)) == settings(**other)
    assert not rates.after(1.0, settings(**other)).are_lowered(settings())


def test_lowered_rates_survive_the_progress_and_a_rollback() -> None:
    rates = replace(doubled(OuterRates(), settings()), norms=(1.0, 2.5))
    progress = Progress(3, outer_rates=rates)
    again = TypeAdapter(Progress).validate_python(json.loads(json.dumps(asdict(progress))))
    assert again == progress
    line = RollbackLine(version=4, at_s=0.0, step_s=0.0, restored_version=1)
    after = again.rolled_back(line, "order", unacknowledged=()).outer_rates
    assert (after.of(settings()).outer_rate, after.norms) == (0.5, ())
