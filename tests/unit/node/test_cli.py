import io
import json
import os
import pkgutil
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.commands import completion_command
from node.commands.cli import COMMANDS, main
from node.config.settings import SECTIONS
from node.enrolment.init_run import init_run
from node.errors import Reason, RefusedError
from node.exit_code import ExitCode
from support.model_files import write_model_files

HEAVY = ("torch", "vllm", "grpc", "transformers", "numpy", "pydantic", "cryptography", "prometheus_client")

_CALLS = """
import contextlib, io, json, sys
from node.commands.cli import main
answers = []
for words in json.loads(sys.argv[1]):
    output, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        try:
            code = main(words)
        except SystemExit as exit:
            code = exit.code
    modules = [name for name in sys.modules if "." not in name]
    answers.append([code, modules, output.getvalue(), error.getvalue()])
print(json.dumps(answers))
"""

_RUN_TINY_ROLE = """
import sys
from node.commands.cli import main
from dataclasses import replace
from node.values.roles import ROLES, Role
ROLES[Role.LEARNER] = replace(ROLES[Role.LEARNER], build="support.tiny_role:build")
sys.exit(main())
"""

LEARNER = ["--set=learner.model_dir=/m", "--set=learner.learning_rate=1e-3", "--coordinator=localhost:1"]


def environment() -> dict[str, str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {"PYTHONPATH": path, "PATH": os.environ["PATH"]}


def calls(*lines: list[str]) -> list[tuple[int, set[str], str, str]]:
    """Run command lines in a fresh interpreter; return exit codes, modules so far, outputs and errors."""
    command = [sys.executable, "-c", _CALLS, json.dumps(lines)]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment(), timeout=60, check=True)
    return [(code, set(modules), output, error) for code, modules, output, error in json.loads(done.stdout)]


def test_help_and_mistakes_are_answered_before_anything_heavy_loads(run_dir: Path) -> None:
    wrong = ("learner.kl_coefficient=-7", "node.drain_timeout_s=5s", "learner.objective=gepp")
    learner = ["--role", "learner", *LEARNER]
    version, help_, mistaken, without_model = calls(
        ["--version"],
        ["--help"],
        [*learner, *(f"--set={one}" for one in wrong)],
        [*learner, "--state-dir", str(run_dir)],
    )
    for code, modules, output, _ in (version, help_):
        assert (code, modules & set(HEAVY)) == (0, set())
        assert "heterorl-node " in output
    assert [command for command in COMMANDS if f"\n  {command}" not in help_[2]] == []
    code, modules, _, error = mistaken
    assert (code, modules & {"torch", "transformers", "vllm", "grpc"}) == (2, set())
    assert "learner.kl_coefficient = '-7' (from flag --set): must be greater than or equal to 0" in error
    assert "the default is 0.005" in error
    assert "node.drain_timeout_s = '5s'" in error
    assert "learner.objective = 'gepp'" in error
    assert "gepo_plus, grpo, gspo" in error
    assert "node.state_dir (from nowhere): is required" in error
    code, modules, _, error = without_model
    assert (code, modules & {"torch", "transformers", "grpc"}) == (3, set())
    assert "/m cannot be read: No such file or directory" in error
    assert "learner.model_dir is a directory on this machine with config.json, model.safetensors" in error


def test_help_takes_half_a_second_of_a_core() -> None:
    def took_s() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "node", "--help"]
        subprocess.run(command, stdout=subprocess.DEVNULL, env=environment(), timeout=60, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    assert any(took_s() < 0.5 for _ in range(3))


def test_without_a_role_the_daemon_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "--role" in capsys.readouterr().err


def test_the_configuration_command_shows_every_value_and_its_source(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[node]\nstate_dir = '/s'\n")
    assert main(["config", "--config", str(file), "--set", "telemetry.log_level=debug", "--json"]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    told = {name: (one["value"], one["source"], one["default"]) for name, one in values.items()}
    assert told["node.state_dir"] == ("/s", f"{file} [node]", None)
    assert told["telemetry.log_level"] == ("debug", "flag --set", "info")
    assert told["node.tls"] == (True, "default", True)
    assert values["node.drain_timeout_s"]["meaning"].startswith("How long a stopping daemon may finish")


ROLES = ("coordinator", "relay", "learner", "contributor", "sampler", "verifier")


@pytest.mark.parametrize("role", ROLES)
def test_every_key_of_a_role_is_shown_with_its_meaning_before_any_required_one_is_given(
    role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--role", role, "--json"]) == ExitCode.CONFIGURATION
    said = capsys.readouterr()
    rows: dict[str, dict[str, Any]] = json.loads(said.out)
    keys = {
        f"{section}.{key}"
        for section in ("node", role)
        for key in pkgutil.resolve_name(SECTIONS[section]).model_fields
    }
    assert keys <= rows.keys()
    assert [name for name, row in rows.items() if not row["meaning"]] == []
    missing = {name for name, row in rows.items() if row["is_required"]}
    assert missing >= {"node.state_dir"}
    assert all(rows[name]["source"] == "nowhere" for name in missing)
    assert all(f"{name} (from nowhere): is required" in said.err for name in missing)
    assert main(["config", "--role", role]) == ExitCode.CONFIGURATION
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(" ")[0] for line in lines if not line.startswith(" ")} == rows.keys()
    assert {f"{name} is required" for name in missing} <= set(lines)


def test_a_wrong_value_is_shown_beside_the_others_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--state-dir", "/s", "--set", "node.drain_timeout_s=soon", "--set", "node.stat_dir=/t"]
    assert main(["config", *flags]) == ExitCode.CONFIGURATION
    said = capsys.readouterr()
    assert 'node.drain_timeout_s = "soon"  (flag --set; default: 30.0)' in said.out
    assert 'node.state_dir = "/s"  (flag --state-dir)' in said.out
    assert "node.drain_timeout_s = 'soon' (from flag --set): must be a plain number of seconds" in said.err
    assert "node.stat_dir" in said.err


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [sys.executable, "-c", "import sys; from node.commands.cli import main; sys.exit(main())"]
    with subprocess.Popen(
        [*command, "config", *(f"--role={role}" for role in ROLES), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, said = process.communicate(timeout=30)
    assert (process.returncode, b"Traceback" in said) in ((0, False), (2, False))


def resolved(capsys: pytest.CaptureFixture[str], flags: list[str]) -> dict[str, tuple[str, str]]:
    """Return each value, as text, and its source, as the configuration command has them."""
    assert main(["config", *flags, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    text = {name: "-" if one["value"] is None else json.dumps(one["value"]) for name, one in rows.items()}
    return {name: (text[name], one["source"]) for name, one in rows.items()}


def rows_of(table: str) -> dict[str, tuple[str, str]]:
    """Return the same from the table of a dry run."""
    cells = (re.split(r"  +", line) for line in table.partition("\n\n")[0].splitlines())
    return {name: (value, source) for name, value, source in cells}


def test_a_dry_run_says_the_same_as_the_configuration_command_and_makes_nothing(
    capsys: pytest.CaptureFixture[str], run_dir: Path, tmp_path: Path
) -> None:
    flags = ["--role", "learner", "--state-dir", str(run_dir), *learner(tmp_path)]
    values = resolved(capsys, flags)
    assert values["node.state_dir"] == (json.dumps(str(run_dir)), "flag --state-dir")
    before = sorted(run_dir.rglob("*"))
    assert main([*flags, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert (rows_of(said.out), said.err) == (values, "")
    *findings, last = said.out.partition("\n\n")[2].splitlines()
    assert {line.split()[0] for line in findings} == {"ok"}
    assert last == "nothing is wrong"
    assert sorted(run_dir.rglob("*")) == before


def test_a_dry_run_names_everything_that_is_not_there_and_makes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--role", "learner", "--state-dir", "/nowhere", *LEARNER]
    values = resolved(capsys, flags)
    assert main([*flags, "--dry-run"]) == 3
    said = capsys.readouterr()
    assert rows_of(said.out) == values
    failed = [line for line in said.out.splitlines() if line.startswith("fail ")]
    assert ["run file" in failed[0], "/nowhere/run.json" in failed[0]] == [True, True]
    assert any("model" in line and "/m " in line for line in failed)
    assert not Path("/nowhere").exists()


def test_an_engine_that_is_not_installed_is_answered_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    sampler = ["--role", "sampler", "--state-dir", "/nowhere", "--coordinator", "localhost:1"]
    flags = [*sampler, "--set", "sampler.model_dir=/m", "--set", "sampler.engine=vllm"]
    for more in ([], ["--dry-run"]):
        assert main([*flags, *more]) == 2
        captured = capsys.readouterr()
        said = captured.out if more else captured.err
        assert "sampler.engine = 'vllm'" in said
        assert "needs the package vllm" in said
        assert "pip install 'heterorl-node[vllm]', or change the setting." in said


def test_each_shorthand_sets_its_key_and_is_named_as_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    given = {
        "--state-dir": ("node.state_dir", "/s"),
        "--node-id": ("node.node_id", "n"),
        "--run-file": ("node.run_file", "/r"),
        "--token-file": ("node.token_file", "/t"),
        "--coordinator": ("node.coordinator", "h:1"),
        "--log-format": ("telemetry.log_format", "json"),
        "--log-level": ("telemetry.log_level", "error"),
    }
    flags = [word for flag, (_, value) in given.items() for word in (flag, value)]
    assert main(["config", *flags, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert {name: (values[name]["value"], values[name]["source"]) for name, _ in given.values()} == {
        name: (value, f"flag {flag}") for flag, (name, value) in given.items()
    }


def learner(directory: Path) -> list[str]:
    """Return ``LEARNER`` with a directory that looks like a model's, as far as one sees without torch."""
    return [flag.replace("=/m", f"={write_model_files(directory / 'model')}") for flag in LEARNER]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    init_run(tmp_path / "run", run_id="r", hosts=["localhost"], now=time.time())
    return tmp_path / "run"


def tiny_role(run_dir: Path, directory: Path) -> list[str]:
    roles = ["--role", "learner", "--state-dir", str(run_dir)]
    return [sys.executable, "-c", _RUN_TINY_ROLE, *roles, *learner(directory)]


@pytest.fixture
def daemon(run_dir: Path, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    command = tiny_role(run_dir, tmp_path)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            yield process
        finally:
            process.kill()


def events_until(process: "subprocess.Popen[str]", event: str) -> dict[str, dict[str, Any]]:
    assert process.stderr is not None
    events: dict[str, dict[str, Any]] = {}
    while event not in events:
        line = json.loads(process.stderr.readline())
        events[line["event"]] = line
    return events


def test_a_daemon_tells_its_story_holds_its_directory_and_drains_on_sigterm(
    daemon: "subprocess.Popen[str]", run_dir: Path, tmp_path: Path
) -> None:
    events = events_until(daemon, "ready")
    assert events["configuration"]["values"]["node.state_dir"] == f"{run_dir} (flag --state-dir)"
    built = events["built"]
    assert (built["role"], built["node"], built["run_id"]) == ("learner", "learner", "r")
    assert (built["state_dir"], built["has_identity"]) == (str(run_dir / "learner"), True)
    port = events["telemetry listens"]["port"]
    # The port of a second process is taken as well: the directory is what it is told of.
    command = [*tiny_role(run_dir, tmp_path), "--set", f"telemetry.http_listen=127.0.0.1:{port}"]
    second = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=30)
    assert second.returncode == ExitCode.COULD_NOT_START, second.stderr
    assert (
        f"{run_dir / 'learner'} is in use by process {daemon.pid} on {socket.gethostname()}" in second.stderr
    )
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as response:
        assert response.status == 200
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        assert b'heterorl_node_info{roles="learner"' in response.read()
    daemon.send_signal(signal.SIGTERM)
    stopped = events_until(daemon, "stopped")
    assert (stopped["drained"]["role"], stopped["drained"]["node"]) == ("learner", "learner")
    assert daemon.wait(10) == 0


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [
        ("ascii", "answer \\xe9 \\u7b54\n"),
        ("latin-1", "answer \u00e9 \\u7b54\n"),
        ("utf-8", "answer \u00e9 \u7b54\n"),
    ],
)
def test_text_that_the_locale_lacks_is_printed_as_its_escape(
    monkeypatch: pytest.MonkeyPatch, encoding: str, printed: str
) -> None:
    written = io.BytesIO()
    terminal = io.TextIOWrapper(written, encoding=encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(completion_command, "run", lambda _: print("answer \u00e9 \u7b54") or 0)
    assert main(["completion", "bash"]) == 0
    assert written.getvalue().decode(encoding) == printed


def test_what_a_hub_or_a_file_says_in_an_error_cannot_command_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> int:
        raise RefusedError(
            Reason.FOREIGN_RUN, "run \x1b[2J\x1b]0;title\x07", fix="see \u202e", is_remote=True
        )

    monkeypatch.setattr(completion_command, "run", refused)
    assert main(["completion", "bash"]) == ExitCode.FAILED
    said = capsys.readouterr().err
    assert "run \\x1b[2J\\x1b]0;title\\x07; see \\u202e" in said
    assert "\x1b" not in said
