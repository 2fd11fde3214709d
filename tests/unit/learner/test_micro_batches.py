"""A step's groups as the objective and the model see them, worked by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.model.micro_batches import collate, objective_batch
from learner.model.step_rows import PaddedRows
from node.values.groups.rollout import Completion, RolloutGroup
from support.groups import SAMPLING, make_completion, make_group, with_replies

CPU = torch.device("cpu")


def group_of(
    number: int, *, prompt: int = 1, tokens: int = 1, drawn: list[bool] | None = None
) -> RolloutGroup:
    """Return a group of one completion, whose token ids count up from 10 times its number."""
    ids = np.arange(10 * number, 10 * number + prompt + tokens, dtype=np.int32)
    completion = make_completion(tokens, token_ids=ids[prompt:])
    completion = completion if drawn is None else with_replies(completion, drawn)
    sampling = replace(SAMPLING, temperature=number / 2)
    return make_group(prompt_token_ids=ids[:prompt], sampling=sampling, completions=(completion,))


def groups() -> list[RolloutGroup]:
    """Return two groups, of two completions and of one; the first has a reply of two tokens."""

    def completion(tokens: int, version: int, reward: float) -> Completion:
        logprob = -np.arange(1, tokens + 1, dtype=np.float32)
        return make_completion(tokens, version=version, reward=reward, behaviour_logprob=logprob)

    replied = with_replies(completion(5, 4, 1.0), [True, False, False, True, True])
    return [
        make_group("0.1", completions=(replied, completion(2, 6, 0.0))),
        make_group(
            "1.1", completions=(completion(1, 5, 0.5),), sampling=replace(SAMPLING, max_new_tokens=99)
        ),
    ]


@pytest.mark.parametrize(
    ("budget", "cut"),
    [
        (12, [[1, 0], [2, 3]]),
        (11, [[1], [0, 2], [3]]),
        (20, [[1, 0, 2], [3]]),
        (24, [[1, 0, 2, 3]]),
        (1, [[1], [0], [2], [3]]),
    ],
)
def test_runs_fill_their_budget_longest_first_and_a_long_row_is_alone(
    budget: int, cut: list[list[int]]
) -> None:
    rows = PaddedRows((5, 6, 4, 4))
    assert rows.share_out(shares=1, budget_tokens=budget) == [cut]
    assert PaddedRows(()).share_out(shares=1, budget_tokens=budget) == [[]]


def test_a_pack_has_what_rows_share_once_and_predicts_each_target_where_its_row_is() -> None:
    completions = tuple(
        make_completion(3, token_ids=np.array(ids, np.int32)) for ids in ([5, 6, 7], [5, 8, 9])
    )
    group = make_group(prompt_token_ids=np.array([1, 2], np.int32), completions=completions)
    batch = collate([group], [1, 0], width=3, dtype=torch.float64, device=CPU, packed=True)
    assert batch.input_ids.tolist() == [[1, 2, 5, 6, 8]]
    assert batch.positions.tolist() == [1, 2, 4, 1, 2, 3]
    assert batch.target_ids.tolist() == [5, 8, 9, 5, 6, 7]
    assert batch.places.tolist() == [3, 4, 5, 0, 1, 2]
    assert batch.pack is not None


@pytest.mark.parametrize("packed", [True, False])
def test_without_rows_a_token_is_read_and_nothing_asked_of_it(packed: bool) -> None:
    batch = collate(groups(), [], width=3, dtype=torch.float64, device=CPU, packed=packed)
    assert batch.input_ids.shape == (1, 1)
    assert all(len(one) == 0 for one in (batch.places, *batch.asked[:3]))


def test_rows_are_padded_on_the_right_and_replies_are_input_and_no_targets() -> None:
    groups = [group_of(0, tokens=2), group_of(1, prompt=2, tokens=4, drawn=[True, False, False, True])]
    batch = collate(groups, [1, 0], width=3, dtype=torch.float64, device=CPU)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14], [0, 1, 0, 0, 0]]
    assert batch.positions.tolist() == [1, 4, 5, 6]
    assert batch.target_ids.tolist() == [12, 15, 1, 2]
    assert batch.places.tolist() == [3, 4, 0, 1]
    assert batch.temperature.tolist() == [0.5, 0.5, 0.0, 0.0]
    assert batch.temperature.dtype is torch.float64


def test_the_objectives_batch_has_a_row_of_drawn_tokens_for_every_completion() -> None:
    asked: list[int] = []

    def discount(age: int) -> float:
        asked.append(age)
        return 1.0 / age

    batch = objective_batch(groups(), version=7, discount=discount, dtype=torch.float32, device=CPU)
    assert batch.mask.tolist() == [[True] * 3, [True, True, False], [True, False, False]]
    assert batch.behaviour_logprob.tolist() == [[-1, -4, -5], [-1, -2, 0], [-1, 0, 0]]
    assert batch.learner_logprob.requires_grad
    assert torch.equal(batch.learner_logprob, batch.behaviour_logprob)
    assert not batch.behaviour_logprob.requires_grad
    assert batch.group_index.tolist() == [0, 0, 1]
    assert batch.reward.tolist() == [1.0, 0.0, 0.5]
    assert batch.staleness_versions.tolist() == [3, 3, 2]
    assert batch.discount is not None
    assert batch.discount.tolist() == [1 / 3, 1 / 3, 1 / 2]
    assert asked == [3, 2]
    assert batch.max_tokens == 99
