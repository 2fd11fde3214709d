"""The penalty towards the base model: its gradient, its bounds, and the copy that it is computed with."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Linear

from learner.model.model import Policy, load_policy, load_reference
from learner.objective.formulas.divergence import reference_penalty
from learner.step.train_step import StepOutcome, train_step
from node.values.groups.rollout import RolloutGroup
from support.made_up_groups import VERSION, completion_logprob, float64_policy, made_up_groups, nearby
from support.step_settings import changed, make_step_settings

SETTINGS = make_step_settings(reference_kl_coefficient=0.5, gradient_clip_norm=1e9)


def log(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def kl_gradient(logits: Tensor, reference: Tensor) -> Tensor:
    """Return the gradient of KL(p || reference) at the logits of p."""
    leaf = logits.clone().requires_grad_()
    learner = torch.log_softmax(leaf, 0)
    return torch.autograd.grad((learner.exp() * (learner - reference)).sum(), leaf)[0]


def expected_gradient(logits: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """Return the gradient at the logits, taken exactly over tokens drawn from the behaviour policy."""
    leaf = logits.clone().requires_grad_()
    learner = torch.log_softmax(leaf, 0)
    penalty = (behaviour.exp() * reference_penalty(learner, reference, behaviour)).sum()
    return torch.autograd.grad(penalty, leaf)[0]


@pytest.mark.parametrize("behaviour", [log(0.5, 0.3, 0.2), log(0.3, 0.2, 0.5), log(0.25, 0.55, 0.2)])
@pytest.mark.parametrize("reference", [log(0.1, 0.6, 0.3), log(0.03, 0.27, 0.7)])
def test_its_gradient_is_that_of_the_divergence_on_policy_and_off(
    reference: Tensor, behaviour: Tensor
) -> None:
    """No token is more than twice as likely as under the behaviour policy, nor 20 times as the reference."""
    logits = log(0.5, 0.3, 0.2)
    exact = kl_gradient(logits, reference)
    assert float(exact.norm()) > 0.1
    torch.testing.assert_close(expected_gradient(logits, reference, behaviour), exact, rtol=1e-7, atol=1e-9)


def test_beyond_twice_the_ratio_it_is_off_by_what_is_held() -> None:
    """The first token is 5 times as likely as it was: E_p[(1 - 2/r)+ d s] is missing."""
    logits, reference, behaviour = log(0.5, 0.3, 0.2), log(0.1, 0.6, 0.3), log(0.1, 0.5, 0.4)
    exact = kl_gradient(logits, reference)
    score = torch.eye(3, dtype=torch.float64)[0] - logits.exp()
    missing = 0.5 * (1 - 2 / 5) * math.log(5) * score
    torch.testing.assert_close(
        expected_gradient(logits, reference, behaviour), exact - missing, rtol=1e-7, atol=1e-9
    )


def test_no_token_pulls_harder_than_six_and_none_at_the_reference() -> None:
    learner = torch.tensor([-1.0, -1.0, -1.0, -9.0, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.5, -30.0, -1.0, -1e4, -3.0], dtype=torch.float64)
    behaviour = torch.tensor([-1.0, -1.0, -30.0, -9.0, -1.0, -0.5], dtype=torch.float64)
    penalty = reference_penalty(learner, reference, behaviour)
    (slope,) = torch.autograd.grad(penalty.sum(), learner)
    by_hand = [0, 0.5, 2 * 3, -3, math.exp(-1) * 3, math.exp(-0.5) * 2]
    assert slope.tolist() == pytest.approx(by_hand)
    assert bool((penalty >= 0).all())
    assert penalty[0].item() == 0.0


def moved(model_dir: Path, *, by: float) -> Policy:
    """Return the model with noise on its weights."""
    policy = float64_policy(model_dir)
    # The embedding of the padding token has no gradient by torch's design, and made-up prompts contain it.
    embedding = policy.model.get_input_embeddings()
    assert isinstance(embedding, torch.nn.Embedding)
    embedding.padding_idx = None
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in policy.parameters.values():
            tensor += by * torch.randn(tensor.shape, generator=generator).double()
    return policy


def step(policy: Policy, groups: list[RolloutGroup], **changes: object) -> StepOutcome:
    optimizer = torch.optim.SGD(policy.parameters.values(), lr=1.0)
    reference = changes.pop("reference")
    return train_step(
        policy,
        optimizer,
        groups,
        version=VERSION,
        settings=changed(SETTINGS, **changes),
        reference=reference,  # type: ignore[arg-type]
    )


def flat(policy: Policy) -> Tensor:
    return torch.cat([tensor.detach().clone().flatten() for tensor in policy.parameters.values()])


def shift(policy: Policy, by: Tensor) -> None:
    parts = torch.split(by, [tensor.numel() for tensor in policy.parameters.values()])
    with torch.no_grad():
        for tensor, part in zip(policy.parameters.values(), parts, strict=True):
            tensor += part.view_as(tensor)


def drawn_by_less(groups: list[RolloutGroup], policy: Policy) -> list[RolloutGroup]:
    """Return the groups, rewards equal, as of a policy that found every token e^2 times less likely."""

    def redrawn(group: RolloutGroup) -> RolloutGroup:
        completions = []
        for one in group.completions:
            temperature = group.sampling.temperature
            with torch.no_grad():
                logprob = completion_logprob(
                    policy, group.prompt_token_ids, one.token_ids, temperature=temperature
                )
            behaviour = (logprob.numpy() - 2).astype(np.float32)
            completions.append(replace(one, behaviour_logprob=behaviour, reward=0.5))
        return replace(group, completions=tuple(completions))

    return [redrawn(group) for group in groups]


def test_a_steps_gradient_is_that_of_its_loss_by_finite_differences(model_dir: Path) -> None:
    """Equal rewards leave the penalty alone in the loss, and weights of 2 throughout leave it smooth."""
    reference, policy = float64_policy(model_dir), moved(model_dir, by=0.02)
    groups = drawn_by_less(made_up_groups(1), policy)
    before = flat(policy)
    step(policy, groups, reference=reference)
    gradient = before - flat(policy)
    assert float(gradient.norm()) > 1e-3
    direction = torch.randn(len(before), generator=torch.Generator().manual_seed(2)).double()
    direction = direction / direction.norm() + gradient / gradient.norm()
    losses = []
    for sign in (1, -1):
        there = moved(model_dir, by=0.02)
        shift(there, sign * 1e-3 * direction)
        losses.append(step(there, groups, reference=reference).loss)
    # The model's norms compute in float32, which leaves noise of 1e-7 in the losses.
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(float(gradient @ direction), rel=5e-4)


def test_at_the_base_model_it_changes_nothing(model_dir: Path) -> None:
    groups = nearby(made_up_groups(1), float64_policy(model_dir))
    tied, free = float64_policy(model_dir), float64_policy(model_dir)
    outcome = step(tied, groups, reference=float64_policy(model_dir))
    assert step(free, groups, reference=None).numbers.reference_kl_nats is None
    assert outcome.numbers.reference_kl_nats == 0.0
    assert torch.equal(flat(tied), flat(free))


def test_micro_batches_change_nothing(model_dir: Path) -> None:
    reference = moved(model_dir, by=0.05)
    groups = nearby(made_up_groups(1), float64_policy(model_dir))
    after = []
    for budget in (1 << 20, 17):
        policy = float64_policy(model_dir)
        outcome = step(policy, groups, reference=reference, micro_batch_tokens=budget)
        after.append((flat(policy), outcome.numbers.reference_kl_nats))
    (whole, kl_nats), (cut, kl_nats_cut) = after
    torch.testing.assert_close(cut, whole, rtol=1e-9, atol=1e-12)
    assert kl_nats_cut == pytest.approx(kl_nats)
    assert kl_nats
    assert kl_nats > 0.01


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_frozen_copy_finds_every_token_exactly_as_likely_as_the_policy_it_is_of(
    model_dir: Path, dtype: torch.dtype | None
) -> None:
    policy = load_policy(model_dir, device="cpu", compute_dtype=dtype)
    reference = load_reference(model_dir, device="cpu", compute_dtype=dtype)
    ids = torch.arange(2, 42).view(4, 10)
    positions, targets, temperature = torch.arange(9), torch.arange(9), torch.full((9,), 0.7)
    both = [model.scorer(ids, positions, targets, temperature) for model in (policy, reference)]
    assert torch.equal(both[0].detach(), both[1])
    assert not both[1].requires_grad
    inner = [layer for layer in reference.model.modules() if isinstance(layer, Linear)][:-1]
    assert {layer.weight.dtype for layer in inner} == {dtype or torch.float32}
