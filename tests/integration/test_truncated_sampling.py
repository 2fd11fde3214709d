"""Truncated sampling from engine to gradient step: what the learner makes of tokens drawn from some."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.intake.divergence_panel import Observed
from learner.intake.group_verdict import GroupRules, judge
from learner.intake.sampler_mismatch import LEAST_FRESH_GROUPS
from learner.model.model import Policy, load_policy
from learner.step.train_step import StepOutcome, train_step
from node.values.groups.rollout import Completion, RolloutGroup
from node.values.groups.sampling_parameters import SamplingParameters
from node.values.groups.verdict import Verdict
from node.wire.rollouts import group_from_wire, group_to_wire
from sampler.engines.engine import GenerationRequest
from sampler.engines.torch.torch_engine import TorchEngine
from support.fleets import Watched
from support.groups import make_group
from support.step_settings import make_step_settings
from support.tiny_model import make_tiny_model

QUARANTINE_NATS = 0.01

CUTS = [
    SamplingParameters(temperature=1.0, top_p=1.0, top_k=3, max_new_tokens=12),
    SamplingParameters(temperature=0.8, top_p=0.8, top_k=0, max_new_tokens=12),
    SamplingParameters(temperature=1.2, top_p=0.8, top_k=10, max_new_tokens=12),
    SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=12, min_p=0.2),
    SamplingParameters(temperature=1.2, top_p=0.9, top_k=20, max_new_tokens=12, min_p=0.1),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def policy(model_dir: Path) -> Policy:
    return load_policy(model_dir, device="cpu")


def sampled_group(model_dir: Path, policy: Policy, sampling: SamplingParameters) -> RolloutGroup:
    """Sample from the very weights the learner has, and send the group through the wire."""
    engine = TorchEngine(model_dir, device="cpu", compute_dtype=torch.float32, threads=1, seed=11)
    prompt = engine.tokenizer.encode("12+3=")
    engine.add(GenerationRequest("g", prompt, wanted=16, sampling=sampling))
    finished = []
    while engine.running:
        finished += engine.step()
    group = make_group(
        prompt_token_ids=prompt,
        layout_digest=policy.layout.digest,
        sampling=sampling,
        completions=tuple(
            Completion(
                token_ids=sampled.token_ids,
                behaviour_logprob=sampled.behaviour_logprob,
                policy_version=sampled.policy_version,
                reward=float(number % 2),
                finish=sampled.finish,
                kept_mass=sampled.kept_mass,
            )
            for number, sampled in enumerate(finished[0].completions)
        ),
    )
    return group_from_wire(group_to_wire(group))


def taken_as_whole(group: RolloutGroup) -> RolloutGroup:
    """Return a truncated group as if its logprobs were of the whole softmax."""
    completions = (replace(c, kept_mass=np.ones_like(c.behaviour_logprob)) for c in group.completions)
    return replace(group, completions=tuple(completions))


def step(policy: Policy, group: RolloutGroup) -> StepOutcome:
    still = torch.optim.SGD(policy.parameters.values(), lr=0.0)
    return train_step(policy, still, [group], version=0, settings=make_step_settings())


@pytest.mark.parametrize("sampling", CUTS)
def test_a_truncated_group_agrees_with_the_learner_and_is_admitted_by_its_kept_masses_only(
    model_dir: Path, policy: Policy, sampling: SamplingParameters
) -> None:
    group = sampled_group(model_dir, policy, sampling)
    corrected = step(policy, group)
    assert corrected.numbers.kl_nats < 1e-6
    # The same numbers, taken for logprobs of the whole softmax.
    uncorrected = step(policy, taken_as_whole(group))
    assert uncorrected.numbers.kl_nats > QUARANTINE_NATS
    rules = GroupRules(
        run_id=group.run_id,
        layout_digest=policy.layout.digest,
        tokenizer_digest=group.tokenizer_digest,
        vocabulary_size=policy.vocabulary_size,
        context_tokens=policy.scorer.context_tokens,
        group_size=16,
        max_staleness_versions=0,
    )
    assert judge(group, rules, version=0, trained_group_ids=()).verdict is Verdict.ACCEPTED
    without = replace(group, completions=tuple(replace(c, kept_mass=None) for c in group.completions))
    assert judge(without, rules, version=0, trained_group_ids=()).verdict is Verdict.FOREIGN


def test_the_mismatch_book_sees_corrected_logprobs(model_dir: Path, policy: Policy) -> None:
    group = sampled_group(model_dir, policy, CUTS[0])
    mismatches = Watched(QUARANTINE_NATS)
    for name, one in {"honest": group, "mute": taken_as_whole(group)}.items():
        (kl_nats,) = step(policy, one).kl_nats_of_groups
        for _ in range(LEAST_FRESH_GROUPS):
            mismatches.see([Observed(name, kl_nats, ((0, 1.0),))])
    assert mismatches.quarantined.get("honest") is None
    assert mismatches.quarantined.get("mute") is not None
