"""The step that is meant for a GPU, tried on a CPU: it is measured and compared."""

import json
from typing import Any

import pytest

from bench.learner import device


def lines_of(capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, Any]]:
    arguments = "--size tiny --device cpu --groups 2 --group-size 2 --prompt-tokens 3 --rounds 2"
    device.main([*arguments.split(), "--completion-tokens", "5", "--micro-batch-tokens", "16", *more])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def test_steps_are_compared_with_the_least_one(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys)
    assert [line["step"] for line in lines[:4]] == ["bare", "bare, again", "ours, grpo", "ours, drift_aware"]
    assert lines[0]["over_bare"] == 1
    assert all(line["tokens"] == 20 and line["seconds"] > 0 for line in lines)


def test_completions_of_many_lengths_are_read_without_the_least_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = "--least-tokens 2 1 --rematerialise layers --only"
    (line,) = lines_of(capsys, *more.split(), "ours, grpo")
    assert line["step"] == "ours, grpo"
    assert 4 <= line["tokens"] < 20
    assert line["positions_over_distinct"] >= 1
