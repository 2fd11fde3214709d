"""Groups against the words that drew them: the name that is true fits, and another shows what is."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.intake.named_versions import Scored
from learner.model.model import Policy, load_policy
from learner.operator_orders import VersionGoneError
from learner.publishing.version_scorer import VersionScorer
from node.values.groups.rollout import Completion, Finish, RolloutGroup
from support.groups import SAMPLING, make_group
from support.tiny_model import VOCABULARY_SIZE, make_tiny_model

NEWEST = 40
GONE = 3


class Walk:
    """Versions that drift from each other, step by step; all but one are published and here."""

    def __init__(self, policy: Policy) -> None:
        random = torch.Generator().manual_seed(1)
        masters = {name: one.detach().clone() for name, one in policy.tensors.items()}
        self.of: list[Mapping[str, Tensor]] = []
        for _ in range(NEWEST + 1):
            self.of.append(masters)
            masters = {
                name: one + 0.01 * torch.randn(one.shape, generator=random) for name, one in masters.items()
            }

    def read(self, version: int) -> dict[str, Tensor]:
        if version == GONE:
            raise VersionGoneError("it is gone")
        return dict(self.of[version])

    def published(self) -> list[int]:
        return [version for version in range(NEWEST + 1) if version != GONE]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load_policy(make_tiny_model(tmp_path_factory.mktemp("model")), device="cpu")


@pytest.fixture(scope="module")
def walk(policy: Policy) -> Walk:
    return Walk(policy)


def drawn_by(
    policy: Policy, masters: Mapping[str, Tensor], *, names: int, noise: float = 0.0
) -> RolloutGroup:
    """Return a group whose logprobs are those of ``masters``, worked out by a plain forward pass."""
    random = np.random.default_rng(names)
    before = {name: one.detach().clone() for name, one in policy.tensors.items()}
    prompt, completions = np.array([3, 4, 5], np.int32), []
    with torch.no_grad():
        try:
            for name, one in policy.tensors.items():
                one.copy_(masters[name])
            for _ in range(4):
                tokens = random.integers(2, VOCABULARY_SIZE, 8).astype(np.int32)
                ids = torch.from_numpy(np.concatenate([prompt, tokens])[None].astype(np.int64))
                logprobs = policy.model(input_ids=ids).logits[0].log_softmax(-1)
                of_tokens = (
                    logprobs[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()
                )
                logprob = (of_tokens + noise * random.standard_normal(8)).astype(np.float32)
                version = np.full(8, names, np.int32)
                completions.append(Completion(tokens, logprob, version, Finish.LENGTH, reward=0.0))
        finally:
            for name, one in policy.tensors.items():
                one.copy_(before[name])
    return make_group(prompt_token_ids=prompt, sampling=SAMPLING, completions=tuple(completions))


def score(policy: Policy, walk: Walk, group: RolloutGroup) -> Scored | None:
    scorer = VersionScorer(walk, policy, micro_batch_tokens=20, packing="prefixes", random=lambda: 0.5)
    return scorer.score([group], NEWEST)[0]


def test_a_true_name_fits_and_the_masters_stay_what_they_are(policy: Policy, walk: Walk) -> None:
    before = {name: one.detach().clone() for name, one in policy.tensors.items()}
    scored = score(policy, walk, drawn_by(policy, walk.of[20], names=20))
    assert scored is not None
    assert scored.nats < 1e-9
    assert (scored.version, scored.other_version, scored.is_misnamed) == (20, None, False)
    assert all(torch.equal(one, before[name]) for name, one in policy.tensors.items())


@pytest.mark.parametrize(
    ("drew", "names"), [(20, 18), (20, 12), (20, 0), (13, 21), (38, 40), (20, 19), (40, 30), (37, 20)]
)
def test_a_name_that_is_not_true_is_found_with_the_version_that_is(
    policy: Policy, walk: Walk, drew: int, names: int
) -> None:
    scored = score(policy, walk, drawn_by(policy, walk.of[drew], names=names))
    assert scored is not None
    assert scored.is_misnamed
    assert scored.version == names
    assert scored.other_version is not None
    assert abs(scored.other_version - drew) < abs(names - drew)


def test_noise_of_an_engine_is_divergence_and_no_wrong_name(policy: Policy, walk: Walk) -> None:
    for seed in (15, 22, 29):
        scored = score(policy, walk, drawn_by(policy, walk.of[seed], names=seed, noise=0.05))
        assert scored is not None
        assert 0.0003 < scored.nats < 0.005
        assert not scored.is_misnamed


def test_tokens_of_several_versions_are_scored_by_their_own(policy: Policy, walk: Walk) -> None:
    group, other = (drawn_by(policy, walk.of[20], names=20), drawn_by(policy, walk.of[30], names=30))
    first, *rest = group.completions
    version = first.policy_version.copy()
    version[4:] = 30  # drawn later, from the same text, by other words
    mixed = replace(group, completions=(replace(first, policy_version=version), *rest, other.completions[0]))
    assert mixed.newest_version == 30
    scored = VersionScorer(walk, policy, micro_batch_tokens=20, packing="prefixes", random=lambda: 0.0).score(
        [mixed], NEWEST
    )[0]
    assert scored is not None
    assert (scored.version, scored.nats < 1e-9) == (20, True)


def test_a_version_whose_words_are_gone_shows_nothing(policy: Policy, walk: Walk) -> None:
    assert score(policy, walk, drawn_by(policy, walk.of[GONE], names=GONE)) is None


def test_groups_that_name_one_version_are_scored_together_and_each_by_itself(
    policy: Policy, walk: Walk
) -> None:
    true, other = (drawn_by(policy, walk.of[drew], names=20) for drew in (20, 28))
    elsewhere = drawn_by(policy, walk.of[21], names=21)
    scorer = VersionScorer(walk, policy, micro_batch_tokens=20, packing="prefixes", random=lambda: 0.5)
    scored = scorer.score([true, elsewhere, other], NEWEST)
    assert {place: one is not None and one.is_misnamed for place, one in scored.items()} == {
        0: False,
        2: True,
    }
