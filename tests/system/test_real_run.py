"""``make real`` on a tiny random model and rows of its own: real processes, no download, a few versions."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from deploy.real.outcome import render
from deploy.real.real_plan import Plan
from deploy.real.real_run import real_run
from deploy.runs.run_directory import RunDirectory
from support.tiny_model import make_tiny_model

HELD_OUT = 27
"""As in the recipe."""

TASK = """
[coordinator]
task = "jsonl"
max_new_tokens = 6
batch_groups = 24  # steps that take long enough for an evaluation to come between
buffer_groups = 96
heartbeat_interval_s = 0.1

[coordinator.evaluation]
every_versions = 3
prompts = 27

[coordinator.data]
file = "{file}"
evaluation_rows = 27

[coordinator.task_options]
prompt = "question"
answer = "digit"
grader = "contains"
"""


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.timeout(240)
async def test_the_real_run_trains_evaluates_exports_and_compares(tmp_path: Path) -> None:
    rows = [{"question": f"{a}+{b}=", "digit": b} for a in range(10) for b in range(10)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task_file = tmp_path / "task.toml"
    task_file.write_text(TASK.format(file=data))
    directory = RunDirectory(tmp_path / "run")
    directory.make_folders()
    plan = Plan(
        model=make_tiny_model(tmp_path / "model"),
        task_file=task_file,
        engines=("torch", "torch"),
        seed=0,
        seconds=120.0,
        gain=-1.0,  # whatever a few versions bring
        versions=6,
    )
    shown = io.StringIO()
    outcome = await real_run(plan, directory, Console(file=shown, width=200))
    assert [check for check in outcome.checks if not check.is_kept] == []
    assert outcome.export is not None
    assert outcome.export.greedy_texts.keys() == {"transformers", "torch-engine"}
    assert all(len(texts) == HELD_OUT for texts in outcome.export.greedy_texts.values())
    assert len(outcome.evaluations) >= 2  # the base model and a later one
    assert "all processes serve" in shown.getvalue()
    Console(file=shown).print(render(outcome))
