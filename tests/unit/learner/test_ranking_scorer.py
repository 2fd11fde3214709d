"""The learner's side of rankings: their logprobs all at once, their gradient, and what a pass holds."""

from itertools import permutations, product

import numpy as np
import pytest
import torch

from learner.model.micro_batches import collate
from learner.model.model import load_policy
from learner.objective.batch import ObjectiveBatch
from learner.objective.registry import load_objective
from node.kinds.ranking import scorer as ranking_scorer
from node.kinds.ranking.scorer import RankingScorer, ranking_logprobs
from node.kinds.ranking.values import prompt_of, ranking_logprob
from node.values.groups.rollout import RolloutGroup
from support.groups import SAMPLING, make_completion, make_group
from support.ranking import make_ranker

ORDERS = torch.tensor(list(permutations(range(3))))
SCORES = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
ABSENT = torch.tensor([-1e20], dtype=torch.float64)
"""Comes after the scores: what is not a candidate."""

GRADIENT = [-0.064512, 0.095502, -0.030989]
"""The gradient of the expected gain of ``gains_of``, at these scores; 2310.04407's policy."""


def gains_of(orders: torch.Tensor) -> torch.Tensor:
    """Return the gain of each ranking where candidate 1 alone is relevant."""
    return 1 / torch.log2(2 + (orders == 1).double().argmax(dim=1))


def logprobs_of(scores: torch.Tensor, orders: torch.Tensor) -> torch.Tensor:
    return ranking_logprobs(torch.cat([scores, ABSENT]).expand(len(orders), -1), orders)


def test_a_rankings_gradient_is_the_papers_at_every_candidate() -> None:
    """1 - e^s_d times the sum of 1 / Z_k over the positions at which d could still be chosen."""
    for order in ORDERS:
        scores = SCORES.clone().requires_grad_()
        (found,) = torch.autograd.grad(logprobs_of(scores, order[None]).sum(), scores)
        left = SCORES[order].exp().flip(0).cumsum(0).flip(0)
        places = torch.argsort(order)
        expected = [1 - SCORES[d].exp() * (1 / left[: int(places[d]) + 1]).sum() for d in range(3)]
        torch.testing.assert_close(found, torch.stack(expected))


def test_rankings_of_different_lengths_side_by_side_have_the_logprobs_and_gradients_they_have_alone() -> None:
    draw = np.random.default_rng(0)
    candidates, ranked = [5, 3, 4], [5, 3, 2]
    scores = [torch.from_numpy(draw.normal(size=n)).requires_grad_() for n in candidates]
    orders = [draw.permutation(n)[:k] for n, k in zip(candidates, ranked, strict=True)]
    padded = torch.stack([torch.cat([one, ABSENT.expand(6 - len(one))]) for one in scores])
    order = torch.full((3, 5), 5)
    is_ranked = torch.zeros(3, 5, dtype=torch.bool)
    for row, ranking in enumerate(orders):
        order[row, : len(ranking)] = torch.from_numpy(ranking)
        is_ranked[row, : len(ranking)] = True
    together = ranking_logprobs(padded, order)[is_ranked]
    alone = [ranking_logprob(one.detach().numpy(), each) for one, each in zip(scores, orders, strict=True)]
    np.testing.assert_allclose(together.detach().numpy(), np.concatenate(alone), atol=1e-12)
    weight = torch.from_numpy(draw.normal(size=len(together)))
    gradients = torch.autograd.grad((together * weight).sum(), scores)
    first = 0
    for one, each, gradient in zip(scores, orders, gradients, strict=True):
        by_itself = logprobs_of(one, torch.from_numpy(each)[None])[0]
        (expected,) = torch.autograd.grad(by_itself @ weight[first : first + len(each)], one)
        torch.testing.assert_close(gradient, expected)
        first += len(each)


@pytest.mark.parametrize("size", [2, 3])
def test_the_leave_one_out_gradient_is_unbiased_over_every_group_there_can_be(size: int) -> None:
    scores = SCORES.clone().requires_grad_()
    groups = torch.tensor(list(product(range(len(ORDERS)), repeat=size)))
    probability = logprobs_of(SCORES, ORDERS).sum(dim=1).exp()[groups].prod(dim=1)
    assert float(probability.sum()) == pytest.approx(1.0)
    orders = ORDERS[groups.flatten()]
    logprob = logprobs_of(scores, orders)
    batch = ObjectiveBatch(
        learner_logprob=logprob,
        behaviour_logprob=logprob.detach(),
        mask=torch.ones_like(orders, dtype=torch.bool),
        group_index=torch.arange(len(groups)).repeat_interleave(size),
        reward=gains_of(orders),
        staleness_versions=torch.zeros(len(orders), dtype=torch.int64),
        max_tokens=3,
        # The mean over all groups becomes the expectation.
        discount=(len(groups) * probability).repeat_interleave(size),
    )
    # The loss is a mean over positions, of which a ranking has three.
    (gradient,) = torch.autograd.grad(-3 * load_objective("rloo")(batch).loss, scores)
    assert gradient.tolist() == pytest.approx(GRADIENT, abs=1e-6)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> RankingScorer:
    scorer = load_policy(make_ranker(tmp_path_factory.mktemp("ranker")), device="cpu").scorer
    assert isinstance(scorer, RankingScorer)
    return scorer


def group_of(scorer: RankingScorer, *, query: int, candidates: list[int], size: int = 4) -> RolloutGroup:
    """Return a group whose query and candidates have so many tokens."""
    prompt = prompt_of([5] * query, [[6] * n for n in candidates], separator=scorer.separator)
    ranking = make_completion(token_ids=np.arange(len(candidates), dtype=np.int32), tokens=len(candidates))
    return make_group(prompt_token_ids=prompt, completions=(ranking,) * size, sampling=SAMPLING)


def test_a_micro_batch_counts_the_pairs_that_are_read_and_a_groups_once(scorer: RankingScorer) -> None:
    groups = [group_of(scorer, query=4, candidates=[1, 3]), group_of(scorer, query=1, candidates=[1, 1, 1])]
    # Two pairs of 4 + 1 + 3 tokens, three of 1 + 1 + 1, for four rankings each.
    assert scorer.row_tokens(groups) == [4] * 4 + [3] * 4


def test_all_prompts_of_a_micro_batch_are_scored_in_one_pass_as_far_as_memory_goes(
    scorer: RankingScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [
        group_of(scorer, query=20, candidates=[1, 2]),
        group_of(scorer, query=1, candidates=[1] * 5),
        group_of(scorer, query=2, candidates=[1, 2, 1]),
    ]
    part = collate(groups, range(12), width=5, dtype=torch.float32, device=torch.device("cpu"))
    shapes: list[tuple[int, ...]] = []
    hook = scorer.model.register_forward_pre_hook(
        lambda _, __, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    try:
        at_once = scorer(part.input_ids, part.positions, part.target_ids, part.temperature)
        assert shapes == [(10, 23)]
        monkeypatch.setattr(ranking_scorer, "PAIRED_TOKENS", 8 * 5)
        shapes.clear()
        bounded = scorer(part.input_ids, part.positions, part.target_ids, part.temperature)
        # The five short pairs and the three longer ones are 8 of 5 tokens together; the long ones go alone.
        assert shapes == [(8, 5), (2, 23)]
    finally:
        hook.remove()
    torch.testing.assert_close(bounded, at_once)
