"""The comparison of steps compares the same thing, and its report says what was measured."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.learner.__main__ import QUICK_SHAPES, compare
from bench.learner.report import report, write_report
from bench.learner.steps import (
    Shape,
    completion_tokens,
    distinct_positions,
    gradient_of,
    make_groups,
    padded_ids,
    step_makers,
)
from node.values.groups.well_formed import check_group

SHAPE, UNEVEN = QUICK_SHAPES


@pytest.mark.parametrize("shape", QUICK_SHAPES, ids=lambda shape: shape.name)
def test_the_batch_is_one_that_a_learner_takes(shape: Shape) -> None:
    for group in make_groups(shape):
        check_group(group, vocabulary_size=shape.vocabulary)


def test_lengths_are_those_of_the_shape() -> None:
    assert padded_ids(make_groups(SHAPE)).shape == (SHAPE.rows, SHAPE.prompt_tokens + SHAPE.completion_tokens)
    random = np.random.default_rng(0)
    prompts, completions = zip(*(UNEVEN.draw_lengths(random) for _ in range(200)), strict=True)
    assert (min(prompts), max(prompts)) == (4, UNEVEN.prompt_tokens)
    drawn = np.concatenate(completions)
    assert (drawn.min(), drawn.max()) == (1, UNEVEN.completion_tokens)
    assert np.median(drawn) <= 2  # most are short


def test_positions_that_differ_are_counted_once() -> None:
    (one, *_) = make_groups(SHAPE)
    first, *_ = one.completions
    longer = replace(first, token_ids=np.append(first.token_ids, [5, 5]))
    same = replace(one, completions=(first, first, longer))
    # The last token of a row is only ever a target, and what follows it in a longer row is not.
    assert distinct_positions([same]) == SHAPE.prompt_tokens + SHAPE.completion_tokens + 1
    assert distinct_positions([same, same]) == 2 * distinct_positions([same])
    assert completion_tokens([same]) == 3 * SHAPE.completion_tokens + 2


def test_bare_descends_the_mean_logprob_and_ours_the_objective() -> None:
    groups = make_groups(SHAPE)
    bare, grpo = (step_makers(SHAPE)[name](SHAPE, groups) for name in ("bare", "ours, grpo"))
    first = bare(), grpo()
    assert all(norm > 0 for norm in first)
    # The learning rate is so small that the second step sees what the first saw.
    assert (bare(), grpo()) == pytest.approx(first, rel=1e-2)


def test_grpo_and_trls_have_the_same_gradient() -> None:
    groups = make_groups(SHAPE)
    ours, trl, bare = (
        gradient_of(step_makers(SHAPE)[name](SHAPE, groups)) for name in ("ours, grpo", "trl", "bare")
    )
    torch.testing.assert_close(trl, ours, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(bare, ours, rtol=1e-2, atol=1e-3)


def test_steps_of_different_losses_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.learner.trl_steps.TRL_STEPS", {"trl": step_makers(SHAPE)["bare"]})
    with pytest.raises(ValueError, match="not one loss"):
        list(compare(SHAPE))


def test_the_report_has_every_line(tmp_path: Path) -> None:
    shapes = [line for shape in QUICK_SHAPES for line in compare(shape)]
    lines = [{"peak_bytes": 1 << 20, **line, "threads": 1} for line in shapes]
    write_report(lines, tmp_path)
    text = (tmp_path / "learner.md").read_text()
    assert text == report(lines)
    for line in lines:
        assert f"| {line['step']} |" in text
    kept = [json.loads(line) for line in (tmp_path / "learner.jsonl").read_text().splitlines()]
    assert kept == json.loads(json.dumps(lines))
