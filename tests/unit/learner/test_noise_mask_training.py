"""A step on masks: the gradients of policy and classifier are those of the loss that is written down."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from learner.config import LearnerConfig
from learner.intake.group_verdict import GroupRules, judge
from learner.model.micro_batches import collate, objective_batch
from learner.model.model import Policy, ScoringModel, load_policy
from learner.model.sliced_loading import EmptyModel
from learner.objective.formulas.advantage import leave_one_out_advantage
from learner.step.step_loss import StepLoss, add_gradient
from learner.step.train_step import train_step
from learner.step_settings import StepSettings
from node.kinds.noise_mask.classifier import error, fine_tune
from node.kinds.noise_mask.network import NoiseMaskClassifier, NoiseMaskModel, log_density, read_prompts
from node.values.groups.rollout import RolloutGroup
from node.values.groups.verdict import Verdict
from support.groups import make_group
from support.noise_mask import engine_of, make_masks, masked_group
from support.refusals import cannot_start
from support.tiny_model import make_tiny_model

AS_RELEASED = "node.kinds.noise_mask.as_released:as_released"
IMAGES, MASKS = 3, 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_masks(tmp_path_factory.mktemp("masks"))


@pytest.fixture(scope="module")
def groups(model_dir: Path) -> list[RolloutGroup]:
    engine = engine_of(model_dir)
    return [masked_group(engine, seed=seed, wanted=MASKS) for seed in range(IMAGES)]


def settings_of(model_dir: Path, objective: str) -> StepSettings:
    return StepSettings.of(
        LearnerConfig(model_dir=model_dir, objective=objective, kl_coefficient=0.0, learning_rate=1e-3)
    )


def gradients_of_step(
    model_dir: Path, groups: list[RolloutGroup], objective: str, *, parts: int
) -> list[Tensor]:
    """Return the gradients that a step adds, the rows cut into so many micro-batches."""
    policy, settings = load_policy(model_dir, device="cpu"), settings_of(model_dir, objective)
    batch = objective_batch(groups, version=0, discount=lambda _: 1.0, dtype=torch.float32, device=CPU)
    width, rows = batch.mask.shape[1], list(range(IMAGES * MASKS))
    cut = [
        collate(groups, rows[part::parts], width=width, dtype=torch.float32, device=CPU)
        for part in range(parts)
    ]
    outcome = add_gradient(policy, cut, batch, StepLoss.of(settings))
    policy.differentiate_beside(cut, weight=outcome.objective.beside_weight)
    return gradients(policy)


def gradients(policy: Policy) -> list[Tensor]:
    found = [parameter.grad for parameter in policy.parameters.values()]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


def model_terms(policy: Policy, groups: list[RolloutGroup]) -> tuple[Tensor, Tensor]:
    """Return log-densities, [rows, cells], and the classifier's cost of each row, by the networks alone."""
    model = policy.model
    assert isinstance(model, NoiseMaskModel)
    masks = torch.stack([torch.from_numpy(c.actions) for group in groups for c in group.completions])
    prompts = torch.stack(
        [torch.from_numpy(group.prompt_token_ids) for group in groups for _ in group.completions]
    )
    images, labels = read_prompts(prompts, model.config)
    cost = functional.cross_entropy(model(images, masks), labels, reduction="none")
    return log_density(masks, model.policy(images)), cost


def released_loss(density: Tensor, cost: Tensor) -> Tensor:
    """As in the authors' train_one_epoch.py, whose criterion is a mean over the batch."""
    return torch.mean(torch.log(torch.sum(density.exp(), 1)) * cost.mean())


def textbook_loss(density: Tensor, cost: Tensor) -> Tensor:
    """Cross-entropy, and (reward - mean of the others) times the log-density, as a mean over cells."""
    reward = -cost.detach().view(IMAGES, MASKS)
    advantage = torch.cat([leave_one_out_advantage(of_image) for of_image in reward])
    return cost.mean() - (advantage[:, None] * density).mean()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("objective", "written"), [(AS_RELEASED, released_loss), ("rloo", textbook_loss)])
def test_one_step_moves_both_networks_along_the_loss_as_it_is_written(
    model_dir: Path, groups: list[RolloutGroup], objective: str, written: object, parts: int
) -> None:
    policy = load_policy(model_dir, device="cpu")
    assert callable(written)
    written(*model_terms(policy, groups)).backward()
    found = gradients_of_step(model_dir, groups, objective, parts=parts)
    for ours, expected in zip(found, gradients(policy), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=2e-6)


def test_the_engines_reward_is_minus_the_classifiers_cost(
    model_dir: Path, groups: list[RolloutGroup]
) -> None:
    density, cost = model_terms(load_policy(model_dir, device="cpu"), groups)
    drawn = [completion for group in groups for completion in group.completions]
    torch.testing.assert_close(cost, torch.tensor([-one.reward for one in drawn]), rtol=1e-5, atol=1e-6)
    said = torch.stack([torch.from_numpy(one.behaviour_logprob) for one in drawn])
    torch.testing.assert_close(density, said, rtol=1e-5, atol=1e-5)


def test_a_step_that_is_taken_moves_the_base_and_one_that_is_not_finite_moves_nothing(
    model_dir: Path, groups: list[RolloutGroup]
) -> None:
    policy = load_policy(model_dir, device="cpu")
    optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-3)
    settings = settings_of(model_dir, "rloo")
    before = {name: tensor.detach().clone() for name, tensor in policy.tensors.items()}
    assert "policy.base" in before
    assert train_step(policy, optimizer, groups, version=0, settings=settings).is_applied
    moved = {name for name, tensor in policy.tensors.items() if not torch.equal(tensor, before[name])}
    assert moved == before.keys()
    with torch.no_grad():
        policy.tensors["classifier.6.bias"].fill_(torch.nan)
    base = policy.tensors["policy.base"].clone()
    assert not train_step(policy, optimizer, groups, version=1, settings=settings).is_applied
    assert torch.equal(policy.tensors["policy.base"], base)


def test_a_language_models_scorer_refuses_real_actions_and_that_of_masks_refuses_tokens(
    model_dir: Path, groups: list[RolloutGroup], tmp_path: Path
) -> None:
    masks = load_policy(model_dir, device="cpu").scorer
    tokens = load_policy(make_tiny_model(tmp_path, hidden=16, layers=1), device="cpu").scorer
    assert masks.objection(groups[0]) is None
    assert (
        tokens.objection(groups[0]) == "it has real actions, and the actions of this run's policy are tokens"
    )
    assert tokens.objection(make_group()) is None
    assert masks.objection(make_group()) is not None


def test_masks_that_cannot_be_are_judged_malformed_by_name(
    model_dir: Path, groups: list[RolloutGroup]
) -> None:
    policy = load_policy(model_dir, device="cpu")
    rules = GroupRules(
        run_id=groups[0].run_id,
        layout_digest=groups[0].layout_digest,
        tokenizer_digest=groups[0].tokenizer_digest,
        vocabulary_size=policy.vocabulary_size,
        context_tokens=policy.scorer.context_tokens,
        group_size=MASKS,
        max_staleness_versions=8,
        objection=policy.scorer.objection,
    )
    assert judge(groups[0], rules, version=0, trained_group_ids=()).verdict is Verdict.ACCEPTED
    first, *others = groups[0].completions
    assert first.actions is not None
    short = {name: getattr(first, name)[:-1] for name in ("token_ids", "behaviour_logprob", "policy_version")}
    wrong = {
        "completion 0 has an action that is not finite": replace(
            first, actions=np.full_like(first.actions, np.nan)
        ),
        "completion 0 has actions of 2.0 to 2.0": replace(first, actions=np.full_like(first.actions, 2)),
        "completion 0 is a mask of 8 cells, not of 9": replace(first, **short, actions=first.actions[:-1]),
        "completion 0 has tokens for actions": replace(
            first, actions=None, behaviour_logprob=np.full_like(first.behaviour_logprob, -1)
        ),
    }
    for said, completion in wrong.items():
        told = judge(
            replace(groups[0], completions=(completion, *others)), rules, version=0, trained_group_ids=()
        )
        assert told.verdict is Verdict.MALFORMED
        assert said in told.detail


def test_an_export_of_masks_is_not_made_as_a_language_model_is(model_dir: Path) -> None:
    assert EmptyModel.of(model_dir) is None


def test_several_ranks_are_refused_for_masks(model_dir: Path) -> None:
    class Shared:
        is_shared = True

    model: PreTrainedModel = NoiseMaskModel.from_pretrained(model_dir)
    with cannot_start("noise_mask", "tp"):
        ScoringModel(model, ranks=Shared())  # type: ignore[arg-type]


def test_the_policy_is_dropped_and_the_classifier_learns_clean_images(
    model_dir: Path, groups: list[RolloutGroup]
) -> None:
    classifier = NoiseMaskClassifier.from_pretrained(model_dir, dtype=torch.float32)
    both = NoiseMaskModel.from_pretrained(model_dir, dtype=torch.float32)
    assert not any(name.startswith("policy") for name in classifier.state_dict())
    prompts = torch.stack([torch.from_numpy(group.prompt_token_ids) for group in groups])
    images, labels = read_prompts(prompts, classifier.config)
    torch.testing.assert_close(classifier(images), both(images))
    fine_tune(classifier, images, labels, epochs=60, rate=1e-2, seed=0)
    assert error(classifier, images, labels) == 0.0
