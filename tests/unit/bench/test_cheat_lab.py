"""Cheats: what they change, and that the rest stays as it was drawn."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.cheat_lab import stalling_task
from bench.cheat_lab.lies import Cheat
from bench.cheat_lab.other_draws import Completions, copied, random_tokens, replayed
from bench.cheat_lab.other_weights import BEHIND_VERSIONS, eight_bit, noisy, stale
from node.coordinator.work.checks.verifier_places import GRADING_LIMIT_S
from node.values.groups.rollout import Completion, Finish
from sampler.tasks.task import CompletionText

PROMPT, OTHER = np.array([1, 2], np.int32), np.array([1, 3], np.int32)
END = 0


def drawn(*token_ids: int, version: int = 3) -> Completions:
    n = len(token_ids)
    return (
        Completion(
            np.array(token_ids, np.int32),
            np.full(n, -0.5, np.float32),
            np.full(n, version, np.int32),
            Finish.END if token_ids[-1] == END else Finish.LENGTH,
        ),
    )


def tokens(completions: Completions) -> list[list[int]]:
    return [one.token_ids.tolist() for one in completions]


def test_a_cheat_about_tokens_leaves_rewards_as_they_are() -> None:
    assert Cheat("replay").rewards(0, [0.0, 1.0]) == [0.0, 1.0]
    assert Cheat("inverted", every=2).rewards(2, [0.0, 1.0]) == [1.0, 0.0]
    assert Cheat("inverted", every=2).rewards(3, [0.0, 1.0]) == [0.0, 1.0]


def test_random_tokens_are_of_the_vocabulary_and_end_where_the_policy_ended() -> None:
    draw = random_tokens(14, {END}, seed=0)
    (one,) = draw(PROMPT, drawn(*[5] * 200, END))
    assert one.token_ids[-1] == END
    assert set(one.token_ids[:-1].tolist()) == set(range(1, 14))
    assert one.behaviour_logprob.tolist() == [-0.5] * 201


def test_what_is_replayed_is_the_first_of_its_prompt_under_the_newest_version() -> None:
    draw = replayed()
    first = drawn(5, 6, version=3)
    assert draw(PROMPT, first) is first
    assert tokens(draw(OTHER, drawn(9, version=4))) == [[9]]
    (again,) = draw(PROMPT, drawn(7, version=9))
    assert (again.token_ids.tolist(), again.policy_version.tolist()) == ([5, 6], [9, 9])


def test_copies_are_the_first_of_another_sampler_of_the_league(tmp_path: Path) -> None:
    one, other = copied(tmp_path, name="s1"), copied(tmp_path, name="s2")
    first = drawn(5, END)
    assert one(PROMPT, first) is first
    assert tokens(one(PROMPT, drawn(6))) == [[6]]
    (copy,) = other(PROMPT, drawn(7, version=8))
    assert (copy.token_ids.tolist(), copy.finish) == ([5, END], Finish.END)
    assert copy.policy_version.tolist() == [8, 8]
    assert tokens(one(PROMPT, drawn(9))) == [[7]]


def test_a_stale_sampler_draws_by_a_version_that_is_old_enough_or_the_oldest() -> None:
    change = stale()
    served = [
        float(change(version, {"w": torch.full((1,), float(version))})["w"])
        for version in (0, 2, 5, BEHIND_VERSIONS, BEHIND_VERSIONS + 2, BEHIND_VERSIONS + 4)
    ]
    assert served == [0, 0, 0, 0, 2, 2]
    forever = stale(math.inf)
    assert [float(forever(n, {"w": torch.full((1,), float(n))})["w"]) for n in (0, 50, 100)] == [0, 0, 0]


def test_eight_bits_round_matrices_by_less_than_a_step_of_their_row_and_nothing_else() -> None:
    matrix, bias = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), torch.randn(4)
    changed = eight_bit()(0, {"w": matrix, "b": bias})
    step = matrix.abs().amax(dim=1, keepdim=True) / 127
    assert 0 < float(((changed["w"] - matrix).abs() / step).max()) <= 0.5001
    assert changed["b"] is bias


def test_another_model_is_the_same_one_at_each_version() -> None:
    change, tensor = noisy(seed=1), torch.arange(6.0)
    first, again = (change(version, {"w": tensor})["w"] for version in (0, 7))
    assert torch.equal(first, again)
    assert not torch.equal(first, tensor)
    assert float((first - tensor).abs().mean()) == pytest.approx(0.2 * float(tensor.std()), rel=0.9)


def test_the_stalling_task_gives_the_demos_rewards_and_takes_long_over_what_honest_samplers_never_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("bench.cheat_lab.stalling_task.time.sleep", slept.append)
    task = stalling_task.StallingTask()
    texts = ("12", "13", "1++")
    assert [task.grade(57, None, CompletionText(text, 3, "end")) for text in texts] == [1.0, 0.0, 0.0]
    assert slept == [stalling_task.USUAL_S, stalling_task.USUAL_S, stalling_task.SLOW_S]
    assert 8 * stalling_task.SLOW_S < GRADING_LIMIT_S
