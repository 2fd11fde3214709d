"""The step that is meant for a GPU, tried on a CPU: it is measured and compared."""

import json

import pytest

from bench.learner import device


def test_steps_are_compared_with_the_least_one(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--size tiny --device cpu --groups 2 --group-size 2 --prompt-tokens 3 --rounds 2"
    device.main([*arguments.split(), "--completion-tokens", "5", "--micro-batch-tokens", "16"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["step"] for line in lines] == ["bare", "bare, again", "ours, grpo", "ours, drift_aware"]
    assert lines[0]["over_bare"] == 1
    assert all(line["tokens"] == 20 and line["seconds"] > 0 for line in lines)
