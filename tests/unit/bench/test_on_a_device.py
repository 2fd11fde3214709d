"""Measurements that are meant for a GPU, tried on a CPU: they measure, and their daemons could start."""

import argparse
import json
from pathlib import Path

import pytest

from bench import learner_device, whole_run
from bench.even_numbers import EvenNumbers
from bench.random_model import made_model
from deploy.runs.run_directory import COORDINATOR, LEARNER, Ports, RunDirectory
from learner.config import LearnerConfig
from node.coordinator.config import CoordinatorConfig
from sampler.config import SamplerConfig
from sampler.tasks.task import CompletionText


def test_steps_are_compared_with_the_least_one(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--size tiny --device cpu --groups 2 --group-size 2 --prompt-tokens 3 --rounds 2"
    learner_device.main([*arguments.split(), "--completion-tokens", "5", "--micro-batch-tokens", "16"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["step"] for line in lines] == ["bare", "bare, again", "ours, grpo", "ours, drift_aware"]
    assert lines[0]["over_bare"] == 1
    assert all(line["tokens"] == 20 and line["seconds"] > 0 for line in lines)


def test_the_daemons_of_a_whole_run_take_their_configurations(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    made_model(directory.model, "tiny")
    arguments = argparse.Namespace(
        device="cpu",
        compute_dtype="bfloat16",
        group_size=8,
        batch_groups=8,
        new_tokens=256,
        learning_rate=1e-6,
        micro_batch_tokens=8192,
    )
    ports = Ports.free((COORDINATOR, LEARNER, whole_run.SAMPLER))
    of = whole_run.configurations(arguments, directory, ports)
    assert CoordinatorConfig.model_validate(of[COORDINATOR]["coordinator"]).task == whole_run.TASK
    assert LearnerConfig.model_validate(of[LEARNER]["learner"]).device == "cpu"
    assert SamplerConfig.model_validate(of[whole_run.SAMPLER]["sampler"]).compute_dtype == "bfloat16"


@pytest.mark.parametrize(("text", "reward"), [("2 4 7 9", 0.5), ("", 0.0), ("x 2", 0.5)])
def test_the_reward_is_the_share_of_even_numbers(text: str, reward: float) -> None:
    assert EvenNumbers().grade(0, None, CompletionText(text, 4, "length")) == reward
