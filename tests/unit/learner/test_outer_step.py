"""The outer step beside torch's own optimizer, plain Python and published numbers."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.merging.formulas.outer_step import Worked, combined, mean_change, outer_step, weights_of
from learner.merging.merge_settings import Combine

floats32 = st.floats(width=32, min_value=-1e6, max_value=1e6)


def worked(*, tokens: int, steps: int, groups: int = 4) -> Worked:
    """Return the work of steps on batches of so many groups."""
    return Worked(steps * groups, tokens, groups=steps * groups)


def moved(
    theta: list[float], change: list[float], *, rate: float, beta: float, memory: list[float]
) -> list[float]:
    """Step by step in plain Python: the twin."""
    for i, by in enumerate(change):
        memory[i] = beta * memory[i] - by
        theta[i] -= rate * (-by + beta * memory[i])
    return theta


def test_diloco_takes_the_steps_that_were_worked_by_hand() -> None:
    theta, momentum = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    seen = []
    for drifts in ((0.2, 0.4), (0.1, 0.1)):
        change = mean_change([(0.5, torch.tensor(-each, dtype=torch.float64)) for each in drifts])
        outer_step(theta, momentum, change, rate=0.7, beta=0.9)
        seen.append((theta.item(), momentum.item()))
    assert np.allclose(seen, [(0.601, 0.3), (0.2979, 0.37)], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rate", "beta"), [(1.0, 0.0), (0.7, 0.5), (0.7, 0.9), (2.0, 0.0)])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 2, 5)])
def test_steps_are_those_of_torchs_nesterov_and_of_plain_python(
    rate: float, beta: float, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(shape, generator=generator, dtype=torch.float64)
    parameter = torch.nn.Parameter(theta.clone())
    sgd = torch.optim.SGD([parameter], lr=rate, momentum=beta, nesterov=beta > 0)
    momentum = torch.zeros_like(theta)
    twin, memory = theta.flatten().tolist(), [0.0] * theta.numel()
    for _ in range(5):
        change = torch.randn(shape, generator=generator, dtype=torch.float64)
        outer_step(theta, momentum if beta else None, change, rate=rate, beta=beta)
        parameter.grad = -change
        sgd.step()
        twin = moved(twin, change.flatten().tolist(), rate=rate, beta=beta, memory=memory)
    assert torch.allclose(theta, parameter.detach(), rtol=0, atol=1e-12)
    assert np.allclose(theta.flatten().numpy(), twin, rtol=0, atol=1e-12)


@given(st.lists(st.tuples(floats32, floats32), min_size=1, max_size=20))
def test_one_change_at_rate_1_without_momentum_gives_the_contributors_masters_bit_for_bit(
    pairs: list[tuple[float, float]],
) -> None:
    theta, masters = torch.tensor(pairs).T.contiguous().unbind()
    change = masters.double() - theta.double()
    change = torch.where(
        theta.view(torch.int32) == masters.view(torch.int32), -0.0, change
    )  # -0.0 + -0.0 is -0.0
    sum32 = (theta.double() + change).float()
    is_exact = sum32.view(torch.int32) == masters.view(
        torch.int32
    )  # the codec sends a residual for the others
    outer_step(theta, None, mean_change([(1.0, change)]), rate=1.0, beta=0.0)
    assert torch.equal(theta.view(torch.int32)[is_exact], masters.view(torch.int32)[is_exact])


def test_the_same_bits_come_of_a_whole_tensor_and_of_its_slices() -> None:
    generator = torch.Generator().manual_seed(2)
    theta, momentum = (torch.randn(101, generator=generator) for _ in range(2))
    changes = [(w, torch.randn(101, generator=generator, dtype=torch.float64)) for w in (0.2, 0.3, 0.5)]
    sliced, sliced_momentum = theta.clone(), momentum.clone()
    outer_step(theta, momentum, mean_change(changes), rate=0.7, beta=0.5)
    for part in (slice(0, 3), slice(3, 64), slice(64, 101)):
        mean = mean_change([(weight, change[part]) for weight, change in changes])
        outer_step(sliced[part], sliced_momentum[part], mean, rate=0.7, beta=0.5)
    assert torch.equal(theta, sliced)
    assert torch.equal(momentum, sliced_momentum)


def test_changes_are_added_in_the_order_given() -> None:
    large, small = torch.tensor(1e16, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    assert mean_change([(1.0, large), (1.0, -large), (1.0, small)]).item() == 1.0
    assert mean_change([(1.0, small), (1.0, large), (1.0, -large)]).item() == 0.0


@pytest.mark.parametrize(
    ("refused", "word"),
    [
        (lambda: mean_change([]), "changes"),
        (lambda: weights_of([Worked(0, 0, groups=4)], "groups"), "contributions"),
        (lambda: weights_of([], "tokens"), "contributions"),
        (
            lambda: outer_step(torch.zeros(1), None, torch.zeros(1).double(), rate=1.0, beta=0.5),
            "momentum",
        ),
    ],
)
def test_nothing_to_merge_and_momentum_that_is_not_there_are_errors(
    refused: Callable[[], object], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        refused()


def test_decoupled_weighs_by_tokens_squared_over_steps() -> None:
    weights = weights_of([worked(tokens=100, steps=10), worked(tokens=50, steps=10)], "tokens")
    assert weights == pytest.approx((0.8, 0.2))
    assert sum(w * drift for w, drift in zip(weights, (0.2, 0.4), strict=True)) == pytest.approx(0.24)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 999)), min_size=1, max_size=8))
def test_weights_are_shares_in_the_order_given(contributions: list[tuple[int, int]]) -> None:
    works = [worked(tokens=t * s, steps=s) for s, t in contributions]
    tokens = np.array([(t * s) ** 2 / s for s, t in contributions], dtype=np.float64)
    assert np.allclose(weights_of(works, "tokens"), tokens / tokens.sum())
    groups = np.array([s for s, _ in contributions], dtype=np.float64)
    assert np.allclose(weights_of(works, "groups"), groups / groups.sum())
    assert math.isclose(sum(weights_of(works, "tokens")), 1)


@pytest.mark.parametrize("weighting", ["groups", "tokens"])
def test_one_contribution_has_weight_1_exactly(weighting: str) -> None:
    assert weights_of([worked(tokens=77, steps=7, groups=3)], weighting) == (1.0,)  # type: ignore[arg-type]


def ranked(rows: list[list[float]], combine: Combine) -> list[float]:
    """Entry by entry in plain Python: the twin."""
    cut = (len(rows) - 1) // 2 if combine == "median" else max(1, len(rows) // 4)
    columns = [sorted(column)[cut : len(rows) - cut] for column in zip(*rows, strict=True)]
    return [math.fsum(column) / len(column) for column in columns]


@given(
    rows=st.integers(1, 6).flatmap(
        lambda width: st.lists(st.lists(floats32, min_size=width, max_size=width), min_size=3, max_size=13)
    ),
    combine=st.sampled_from(["median", "trimmed_mean"]),
)
def test_median_and_trimmed_mean_are_those_of_plain_python(rows: list[list[float]], combine: Combine) -> None:
    changes = [(1 / len(rows), torch.tensor(row, dtype=torch.float64)) for row in rows]
    twin = np.array(ranked(rows, combine))
    assert np.allclose(combined(changes, combine).numpy(), twin, rtol=1e-12, atol=1e-9)
    assert torch.equal(combined(changes, combine), combined(changes[::-1], combine))


@pytest.mark.parametrize("combine", ["mean", "median", "trimmed_mean"])
def test_of_two_changes_there_is_but_the_mean_by_weight(combine: Combine) -> None:
    changes = [(0.75, torch.ones(2, 3).double()), (0.25, -torch.ones(2, 3).double())]
    assert torch.equal(combined(changes, combine), torch.full((2, 3), 0.5).double())


@pytest.mark.parametrize(
    ("combine", "contributors", "liars"),
    [
        ("median", 5, 2),
        ("trimmed_mean", 5, 1),
        ("median", 3, 1),
        ("trimmed_mean", 3, 1),
        ("trimmed_mean", 8, 2),
    ],
)
def test_liars_of_usual_norm_move_a_version_no_further_than_honest_changes_differ(
    combine: Combine, contributors: int, liars: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    way = torch.randn(40, 50, generator=generator, dtype=torch.float64)
    noise = torch.randn(contributors - liars, 40, 50, generator=generator, dtype=torch.float64)
    honest = list(way + 0.3 * noise)
    lies = [-honest[0] * (honest[-1].norm() / honest[0].norm())] * liars
    changes = [(1 / contributors, change) for change in (*lies, *honest)]
    least, most = torch.stack(honest).amin(dim=0), torch.stack(honest).amax(dim=0)
    merged = combined(changes, combine)
    assert bool(((least <= merged) & (merged <= most)).all())
    mean = mean_change(changes)
    assert bool(((mean < least) | (mean > most)).any())
