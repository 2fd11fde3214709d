"""The gradient of any objective through the model, however its work is cut up."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.model.model import Policy
from learner.objective.menu import MENU
from learner.step.step_loss import teaches_where_drawn
from learner.step.train_step import train_step
from learner.step_settings import StepSettings
from node.values.groups.rollout import Completion, RolloutGroup
from support.groups import make_completion, make_group
from support.made_up_groups import (
    VERSION,
    completion_logprob,
    float64_policy,
    gradient_of,
    groups_with_replies,
    made_up_groups,
    nearby,
    shared_policy,
)
from support.step_settings import changed, make_step_settings


@cache
def near_groups(model_dir: Path, seed: int) -> list[RolloutGroup]:
    return nearby(made_up_groups(seed), shared_policy(model_dir))


def settings_of(name: str, **changes: object) -> StepSettings:
    return make_step_settings(
        **{
            "objective": name,
            "kl_coefficient": 0.1,
            "gradient_clip_norm": 1e9,
            "staleness_half_life_versions": 2.0,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("name", "budget", "packing"),
    [*((name, 17, "prefixes") for name in MENU), ("eqp", 1, "prefixes"), ("drift_aware", 17, "none")],
)
def test_micro_batches_change_no_gradient_of_any_objective(
    model_dir: Path, name: str, budget: int, packing: str
) -> None:
    groups = near_groups(model_dir, 1)
    settings = settings_of(name)
    expected, whole = gradient_of(shared_policy(model_dir), groups, settings)
    assert float(expected.norm()) > 1e-6
    small = changed(settings, micro_batch_tokens=budget, packing=packing)
    actual, cut = gradient_of(shared_policy(model_dir), groups, small)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert math.isclose(cut.loss, whole.loss, rel_tol=1e-9)
    for field in ("kl_nats", "ess_ratio", "clip_fraction", "surprisal_nats", "tokens"):
        numbers = (getattr(one.numbers, field) for one in (cut, whole))
        assert math.isclose(*numbers, rel_tol=1e-9), field
    assert cut.kl_nats_of_groups == pytest.approx(whole.kl_nats_of_groups)


@pytest.mark.parametrize("name", ["drift_aware", "eqp", "topr"])
def test_no_objective_sees_what_the_columns_hold_of_replies(model_dir: Path, name: str) -> None:
    groups = groups_with_replies(1)

    def overwritten(completion: Completion) -> Completion:
        logprob = np.where(completion.drawn, completion.behaviour_logprob, np.float32(-7.0))
        version = np.where(completion.drawn, completion.policy_version, np.int32(VERSION))
        return replace(completion, behaviour_logprob=logprob, policy_version=version)

    others = [replace(group, completions=tuple(map(overwritten, group.completions))) for group in groups]
    expected, outcome = gradient_of(shared_policy(model_dir), groups, settings_of(name))
    actual, other = gradient_of(shared_policy(model_dir), others, settings_of(name))
    assert torch.equal(actual, expected)
    assert other == outcome
    assert outcome.numbers.tokens == sum(group.drawn_tokens for group in groups)


def test_micro_batches_change_nothing_under_a_discount_by_sample_size(model_dir: Path) -> None:
    groups = near_groups(model_dir, 1)
    settings = settings_of("gepo", staleness_discount="sample_size")
    expected, _ = gradient_of(shared_policy(model_dir), groups, settings)
    actual, _ = gradient_of(shared_policy(model_dir), groups, changed(settings, micro_batch_tokens=17))
    undiscounted, _ = gradient_of(
        shared_policy(model_dir), groups, changed(settings, staleness_discount="none")
    )
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(actual, undiscounted)


@pytest.mark.parametrize(("name", "forwards"), [("gepo", 1), ("eqp", 2)])
def test_only_objectives_that_need_the_whole_batch_run_the_model_twice(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, forwards: int
) -> None:
    policy = float64_policy(model_dir)
    seen = []
    forward = policy.scorer.forward

    def counted(input_ids: torch.Tensor, positions: torch.Tensor, *asked: Any) -> torch.Tensor:
        seen.append(len(positions))
        return forward(input_ids, positions, *asked)

    monkeypatch.setattr(policy.scorer, "forward", counted)
    groups = made_up_groups(1)
    gradient_of(policy, groups, settings_of(name, micro_batch_tokens=17))
    assert sum(seen) == forwards * sum(group.drawn_tokens for group in groups)


def test_the_divergence_of_each_group_is_the_mean_over_its_tokens(model_dir: Path) -> None:
    groups = near_groups(model_dir, 2)
    _, outcome = gradient_of(shared_policy(model_dir), groups, settings_of("gepo"))
    alone = [gradient_of(shared_policy(model_dir), [group], settings_of("gepo"))[1] for group in groups]
    assert outcome.kl_nats_of_groups == pytest.approx([one.numbers.kl_nats for one in alone])
    tokens = [one.numbers.tokens for one in alone]
    mean = sum(kl * n for kl, n in zip(outcome.kl_nats_of_groups, tokens, strict=True)) / sum(tokens)
    assert outcome.numbers.kl_nats == pytest.approx(mean)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("drift_aware", {}),
        ("eqp", {}),
        ("dapo", {}),
        ("dppo_tv", {}),
        ("gepo", {"kl_coefficient": 0.0}),
        ("gepo", {"fast_steps": 2}),
    ],
)
def test_groups_of_equal_rewards_teach_nothing(model_dir: Path, name: str, changes: dict[str, Any]) -> None:
    """The policies are apart, so that the pull towards the sampler has a gradient; kl_coefficient is 0.1."""
    policy, settings = shared_policy(model_dir), settings_of(name, **changes)
    equal = nearby(made_up_groups(3, reward=0.1), policy)
    gradient, outcome = gradient_of(policy, equal, settings)
    assert (gradient == 0).all()
    assert (outcome.numbers.teaching_groups, outcome.is_finite, outcome.is_applied) == (0, True, False)
    assert (outcome.numbers.gradient_norm > 0) == (settings.kl_coefficient > 0)
    mixed = [equal[0], *near_groups(model_dir, 3)[1:]]
    _, outcome = gradient_of(shared_policy(model_dir), mixed, changed(settings, micro_batch_tokens=17))
    assert 1 <= outcome.numbers.teaching_groups < len(mixed)
    assert outcome.is_applied


def flat(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().clone().flatten() for p in policy.parameters.values()])


def test_slow_fast_is_fast_steps_a_reposition_and_a_slow_step(model_dir: Path) -> None:
    groups = near_groups(model_dir, 3)
    plain = settings_of("gepo", kl_coefficient=0.0)
    stepwise = float64_policy(model_dir)
    optimizer = torch.optim.SGD(stepwise.parameters.values(), lr=0.05)
    start = flat(stepwise)
    for _ in range(2):
        train_step(stepwise, optimizer, groups, version=VERSION, settings=plain)
    led_to = start + 0.8 * (flat(stepwise) - start)
    torch.nn.utils.vector_to_parameters(led_to, list(stepwise.parameters.values()))
    train_step(stepwise, optimizer, groups, version=VERSION, settings=plain)

    at_once = float64_policy(model_dir)
    optimizer = torch.optim.SGD(at_once.parameters.values(), lr=0.05)
    outcome = train_step(
        at_once,
        optimizer,
        groups,
        version=VERSION,
        settings=changed(plain, fast_steps=2, reposition_share=0.8),
    )
    assert outcome.is_applied
    torch.testing.assert_close(flat(at_once), flat(stepwise), rtol=1e-12, atol=1e-14)


def test_fast_steps_are_clipped_to_the_policy_they_started_from(model_dir: Path) -> None:
    """Decoupled PPO: with no memory of the start, u would be 1 in every step and nothing ever clipped."""
    groups = near_groups(model_dir, 3)
    finals: list[torch.Tensor] = []
    for clip in (1e-4, 1.0):
        policy = float64_policy(model_dir)
        settings = settings_of(
            "decoupled_ppo",
            objective_options={"clip_low": clip, "clip_high": clip},
            fast_steps=3,
        )
        optimizer = torch.optim.SGD(policy.parameters.values(), lr=0.05)
        train_step(policy, optimizer, groups, version=VERSION, settings=settings)
        finals.append(flat(policy))
    assert not torch.equal(finals[0], finals[1])


@pytest.mark.parametrize("rate", [1e200, 1e308])
def test_a_fast_step_that_goes_wrong_takes_everything_back(model_dir: Path, rate: float) -> None:
    policy = float64_policy(model_dir)
    optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-3)
    settings = settings_of("gepo")
    train_step(policy, optimizer, near_groups(model_dir, 3), version=VERSION, settings=settings)
    before = flat(policy)
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    for group in optimizer.param_groups:
        group["lr"] = rate
    outcome = train_step(
        policy,
        optimizer,
        near_groups(model_dir, 3),
        version=VERSION,
        settings=changed(settings, fast_steps=2),
    )
    assert not outcome.is_applied
    assert torch.equal(flat(policy), before)
    for state, moment in zip(optimizer.state.values(), moments, strict=True):
        assert torch.equal(state["exp_avg"], moment)


@pytest.mark.parametrize("name", ["gepo", "tis"])
def test_few_effective_completions_make_a_small_step(model_dir: Path, name: str) -> None:
    """The factor is of whole completions' ratios, neither truncated nor per token, whatever the objective."""
    groups, policy, weights = near_groups(model_dir, 4), shared_policy(model_dir), []
    for group in groups:
        for one in group.completions:
            prompt, temperature = group.prompt_token_ids, group.sampling.temperature
            logprob = completion_logprob(policy, prompt, one.token_ids, temperature=temperature)
            weights.append(math.exp(logprob.sum().item() - float(one.behaviour_logprob.sum(dtype=float))))
    ess_ratio = sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))
    plain, _ = gradient_of(shared_policy(model_dir), groups, settings_of(name))
    scaled, _ = gradient_of(
        shared_policy(model_dir), groups, settings_of(name, scales_rate_by_sample_size=True)
    )
    assert ess_ratio < 0.9
    torch.testing.assert_close(scaled, math.sqrt(ess_ratio) * plain, rtol=1e-6, atol=1e-12)


def claimed_at(logprob: float) -> RolloutGroup:
    """Five tokens as unlikely as admission lets in, and six that are not."""
    unlikely, likely = (
        make_completion(n, reward=reward, token_ids=np.arange(n, dtype=np.int32), behaviour_logprob=claimed)
        for n, reward, claimed in (
            (5, 1.0, np.full(5, logprob, np.float32)),
            (6, 0.0, np.full(6, -2.0, np.float32)),
        )
    )
    return make_group(completions=(unlikely, likely))


@pytest.mark.parametrize(("logprob", "clamped"), [(-30.0, 5), (-8.0, 0)])
def test_the_step_counts_the_tokens_whose_ratios_were_held(
    model_dir: Path, logprob: float, clamped: int
) -> None:
    policy = Policy(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32))
    settings = settings_of("version_aware_kl", gradient_clip_norm=1.0)
    gradient, outcome = gradient_of(policy, [claimed_at(logprob)], settings)
    assert outcome.is_applied
    assert bool(gradient.isfinite().all())
    assert outcome.numbers.clamped_tokens == clamped


@pytest.mark.parametrize("name", MENU)
def test_what_a_batch_teaches_is_known_without_a_model_where_it_was_drawn(model_dir: Path, name: str) -> None:
    """As many groups teach as a step by the policy that drew them finds."""
    policy, settings = shared_policy(model_dir), settings_of(name, kl_coefficient=0.0)
    drawn = nearby(made_up_groups(1), policy, spread=0.0)
    equal = replace(drawn[0], completions=tuple(replace(one, reward=0.5) for one in drawn[0].completions))
    for batch in (drawn, [equal], [equal, *drawn[1:]]):
        _, outcome = gradient_of(policy, batch, settings)
        teaches = teaches_where_drawn(batch, version=VERSION, settings=settings)
        assert sum(teaches) == outcome.numbers.teaching_groups, len(batch)
