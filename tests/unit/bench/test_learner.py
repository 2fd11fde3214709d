"""The comparison of steps compares the same thing, and its report says what was measured."""

import json
from pathlib import Path

import pytest
import torch

from bench.learner.__main__ import QUICK_SHAPES, compare
from bench.learner.report import report, write_report
from bench.learner.steps import gradient_of, make_groups, make_model, padded_ids, step_makers
from node.values.groups.well_formed import check_group

SHAPE = QUICK_SHAPES[0]


def test_the_batch_is_one_that_a_learner_takes() -> None:
    groups = make_groups(SHAPE)
    for group in groups:
        check_group(group, vocabulary_size=SHAPE.vocabulary)
    assert padded_ids(groups).shape == (SHAPE.rows, SHAPE.prompt_tokens + SHAPE.completion_tokens)


def test_every_step_starts_from_the_same_weights() -> None:
    torch.manual_seed(3)
    one = make_model(SHAPE).state_dict()
    torch.manual_seed(4)
    for name, tensor in make_model(SHAPE).state_dict().items():
        assert torch.equal(tensor, one[name])


def test_bare_descends_the_mean_logprob_and_ours_the_objective() -> None:
    groups = make_groups(SHAPE)
    bare, grpo = (step_makers()[name](SHAPE, groups) for name in ("bare", "ours, grpo"))
    first = bare(), grpo()
    assert all(norm > 0 for norm in first)
    # The learning rate is so small that the second step sees what the first saw.
    assert (bare(), grpo()) == pytest.approx(first, rel=1e-2)


def test_grpo_and_trls_have_the_same_gradient() -> None:
    groups = make_groups(SHAPE)
    ours, trl, bare = (
        gradient_of(step_makers()[name](SHAPE, groups)) for name in ("ours, grpo", "trl", "bare")
    )
    torch.testing.assert_close(trl, ours, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(bare, ours, rtol=1e-2, atol=1e-3)


def test_steps_of_different_losses_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.learner.trl_steps.TRL_STEPS", {"trl": step_makers()["bare"]})
    with pytest.raises(ValueError, match="not one loss"):
        list(compare(SHAPE))


def test_the_report_has_every_line(tmp_path: Path) -> None:
    lines = [{"peak_bytes": 1 << 20, **line, "threads": 1} for line in compare(SHAPE)]
    write_report(lines, tmp_path)
    text = (tmp_path / "learner.md").read_text()
    assert text == report(lines)
    for line in lines:
        assert f"| {line['step']} |" in text
    kept = [json.loads(line) for line in (tmp_path / "learner.jsonl").read_text().splitlines()]
    assert kept == json.loads(json.dumps(lines))
