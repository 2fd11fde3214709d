"""Every command on an install without extras, as a coordinator has: it works, or says what to install."""

import json
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from node.commands.cli import COMMANDS
from node.enrolment.init_run import init_run
from support.model_files import write_model_files

ABSENT: Final = (
    "torch", "transformers", "tokenizers", "vllm", "httpx", "obstore", "datasets", "pyarrow", "psycopg",
    "math_verify", "reasoning_gym", "verifiers", "tensorboard", "wandb", "matplotlib",
)  # fmt: skip
"""Packages that extras bring, as imported."""

_CALL: Final = """
import contextlib, io, json, sys
absent, calls = map(json.loads, sys.argv[1:])
sys.modules.update(dict.fromkeys(absent))
from node.commands.cli import main
answers = []
for words in calls:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(words)
        except SystemExit as exit:
            code = exit.code
        except BaseException as error:
            code = repr(error)
    answers.append([code, said.getvalue()])
print(json.dumps(answers))
"""


def answers(*calls: list[str]) -> list[tuple[int | str, str]]:
    """Return exit code, or what was raised, and output of each call in a process without the extras."""
    command = [sys.executable, "-c", _CALL, json.dumps(ABSENT), json.dumps(calls)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [(code, said) for code, said in json.loads(done.stdout.splitlines()[-1])]


@cache
def helps() -> dict[str, tuple[int | str, str]]:
    return dict(zip(COMMANDS, answers(*([name, "--help"] for name in COMMANDS)), strict=True))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_help_with_an_example(name: str) -> None:
    code, said = helps()[name]
    assert code == 0
    assert f"usage: heterorl-node {name}" in said
    assert f"heterorl-node {name}" in said.partition("\nexample:\n")[2]


def test_orders_to_a_learner_need_no_torch_and_what_needs_it_says_how_to_get_it(tmp_path: Path) -> None:
    init_run(tmp_path / "run", run_id="r", hosts=["localhost"], now=time.time())
    (tmp_path / "run/learner/checkpoints/000000000007").mkdir(parents=True)
    model = write_model_files(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    (tmp_path / "run.toml").write_text(
        f'[coordinator]\ntask = "jsonl"\ndata = {{file = "{tmp_path}/rows.jsonl"}}\n'
        'task_options = {prompt = "question", answer = "answer", grader = "exact"}\n'
    )
    state, base = ["--state-dir", str(tmp_path / "run")], ["--model-dir", str(model)]
    roles = [
        ["--role", role, *state, "--coordinator", "localhost:1", f"--set={role}.model_dir={model}"]
        for role in ("learner", "sampler", "verifier")
    ]
    roles[0].append("--set=learner.learning_rate=1e-3")
    ordered, changed, exported, tried, *started = answers(
        ["rollback", "7", *state],
        ["set", "learner.learning_rate=1e-4", *state],
        ["export", str(tmp_path / "out"), *state, *base],
        ["try", "--config", str(tmp_path / "run.toml"), *base],
        *roles,
    )
    assert (ordered[0], changed[0]) == (0, 0)
    for (code, said), extra in zip(
        (exported, tried, *started), ("learner", "sampler", "learner", "sampler", "sampler"), strict=True
    ):
        assert code == 2, said
        assert "needs the package torch, which is not installed" in said
        assert f"pip install 'heterorl-node[{extra}]'" in said


def test_a_package_that_nobody_looked_for_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from node.commands import cli

    def start(*_: object) -> int:
        raise ModuleNotFoundError("No module named 'psycopg.rows'", name="psycopg.rows")

    monkeypatch.setattr("node.commands.order_command.OrderCommand.run", start)
    assert cli.main(["pause", "--state-dir", "/nowhere"]) == 2
    said = capsys.readouterr().err
    assert "needs the package psycopg.rows, which is not installed" in said
    assert "pip install 'heterorl-node[postgresql]'" in said
