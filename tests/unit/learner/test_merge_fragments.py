"""Which tensors are merged in which round."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.merging.formulas.fragments import Fragments
from learner.merging.formulas.outer_step import outer_step

NAMES = st.text("abcdef", min_size=1, max_size=3)
MODELS = st.dictionaries(NAMES, st.integers(0, 1000), min_size=1, max_size=30)


@given(MODELS, st.integers(1, 30))
def test_every_tensor_is_of_one_fragment_and_none_is_far_above_the_mean(
    sizes: dict[str, int], count: int
) -> None:
    if count > len(sizes):
        with pytest.raises(ValueError, match="fragments"):
            Fragments.of(sizes, count=count)
        return
    names = Fragments.of(sizes, count=count).names
    assert len(names) == count
    assert sorted(name for each in names for name in each) == sorted(sizes)
    filled = [sum(sizes[name] for name in each) for each in names]
    assert max(filled) <= sum(sizes.values()) / count + max(sizes.values())
    order = list(sizes)
    assert all(list(each) == sorted(each, key=order.index) for each in names)


def test_fragments_take_turns_and_follow_from_the_model_alone() -> None:
    sizes = {"embedding": 10, "a": 4, "b": 4, "c": 4, "head": 10}
    fragments = Fragments.of(sizes, count=3)
    assert fragments.names == (("embedding",), ("head",), ("a", "b", "c"))
    assert fragments == Fragments.of(dict(sizes), count=3)
    assert [fragments.due(each) for each in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def streamed(*, tau: int, alpha: float, steps: int) -> dict[str, list[float]]:
    """Return two layers after each step, as torchft's fixtures have them.

    A gradient of 2, inner SGD 1, outer SGD 2 without momentum, H 6 in 2 fragments: one is due every third
    step, and its exchange begins tau steps earlier. ``wait`` is alpha 0; alpha > 0, which mixes, is torchft's
    alone.
    """
    fragments = Fragments.of({"0": 1, "1": 1}, count=2)
    local = {name: torch.ones(1, dtype=torch.float64) for name in ("0", "1")}
    version = {name: value.clone() for name, value in local.items()}
    handed_in: dict[str, Tensor] = {}
    seen: dict[str, list[float]] = {"0": [1.0], "1": [1.0]}
    for step in range(1, steps):
        for value in local.values():
            value -= 2
        due = fragments.names[fragments.due((step + tau - 1) // 3)]
        if (step + tau) % 3 == 0:
            handed_in = {name: local[name] - version[name] for name in due}
        if step % 3 == 0:
            for name, change in handed_in.items():
                outer_step(version[name], None, change, rate=2.0, beta=0.0)
                local[name] = version[name] + alpha * (local[name] - version[name])
        for name in local:
            seen[name].append(local[name].item())
    return seen


@pytest.mark.parametrize(
    ("tau", "alpha", "known"),
    [
        (0, 0.0, {0: 1, 1: -1, 2: -3, 3: -11, 4: -13, 5: -15, 6: -17, 7: -19, 8: -21, 9: -35}),
        (0, 0.5, {0: 1, 1: -1, 2: -3, 3: -8, 8: -18, 9: -24.5}),
        (1, 0.0, {0: 1, 1: -1, 2: -3, 3: -7, 8: -17, 9: -27}),
        (1, 0.5, {0: 1, 1: -1, 2: -3, 3: -6, 9: -21.5}),
    ],
)
def test_the_first_layer_goes_as_torchfts_fixtures_say(
    tau: int, alpha: float, known: dict[int, float]
) -> None:
    seen = streamed(tau=tau, alpha=alpha, steps=10)["0"]
    assert {step: seen[step] for step in known} == known


def test_the_second_layer_is_due_in_the_rounds_between() -> None:
    seen = streamed(tau=0, alpha=0.0, steps=13)["1"]
    assert (seen[5], seen[6], seen[11], seen[12]) == (-9, -23, -33, -47)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_two_pipeline_stages_at_two_sites_train_as_the_whole_model_does(beta: float) -> None:
    """DiLoCoX's dual optimizer: each stage has its own inner and outer one, changes are merged a round late.

    Stages exchange activations and their gradients inside this process, without gloo; what is merged are
    shards.
    """
    whole, staged = (trained(stages, beta=beta) for stages in (1, 2))
    assert np.abs(whole - staged).max() < 1e-9
    assert np.abs(whole).max() > 1e-2


def trained(stages: int, *, beta: float) -> np.ndarray:
    """Return the masters of a two-layer model after 6 rounds of 4 Adam steps at two sites, float64."""
    generator = torch.Generator().manual_seed(3)
    version = [torch.randn(6, 6, generator=generator, dtype=torch.float64) / 3 for _ in range(2)]
    momentum = [torch.zeros_like(each) for each in version]
    sites = [[torch.nn.Parameter(each.clone()) for each in version] for _ in range(2)]
    optimizers = [
        [torch.optim.Adam(part, lr=0.02) for part in ([site] if stages == 1 else [site[:1], site[1:]])]
        for site in sites
    ]
    in_flight: list[list[Tensor]] = []
    for _ in range(6):
        anchor = [each.clone() for each in version]
        for site, own in zip(sites, optimizers, strict=True):
            for _ in range(4):
                backward(site, torch.randn(8, 6, generator=generator, dtype=torch.float64), stages)
                for optimizer in own:
                    optimizer.step()
        changes = [[p.detach() - a for p, a in zip(site, anchor, strict=True)] for site in sites]
        for stage, landed in enumerate(zip(*in_flight, strict=True)):
            outer_step(version[stage], momentum[stage], sum(landed) / 2, rate=0.7, beta=beta)
        in_flight = changes
        for site in sites:
            for parameter, value in zip(site, version, strict=True):
                parameter.data.copy_(value)
    return torch.stack(version).numpy()


def backward(site: list[torch.nn.Parameter], x: Tensor, stages: int) -> None:
    """Leave the gradient of a regression in both layers; a stage sees its neighbour's activations alone."""
    for parameter in site:
        parameter.grad = None
    hidden = torch.tanh(x @ site[0])
    sent = hidden.detach().requires_grad_() if stages == 2 else hidden
    torch.autograd.backward(((sent @ site[1] - x.roll(1, dims=1)) ** 2).mean())
    if stages == 2:
        torch.autograd.backward(hidden, sent.grad)
