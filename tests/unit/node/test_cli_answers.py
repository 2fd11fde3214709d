"""The terminal as an operator sees it: the command as typed, the answer, the exit code."""

import getpass
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.commands.cli import main
from node.enrolment.enrolment_ledger import note_incomplete
from node.enrolment.init_run import init_run
from node.enrolment.tokens import Token
from node.values.roles import Role
from support.enrolled import let_in
from support.model_files import write_model_files


def answer(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    """Run a command line in this process; give its exit code and what it wrote on standard error."""
    try:
        code = main([str(word) for word in argv])
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, capsys.readouterr().err


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    init_run(tmp_path / "run", run_id="r", hosts=["localhost"], now=time.time())
    return tmp_path / "run"


# Addresses


def test_status_never_guesses_a_port(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    code, said = answer(capsys, "status", "--state-dir", run_dir, "--coordinator", "localhost")
    assert code == 2
    assert "'localhost' is not host:port: the port is missing" in said
    assert "For example: localhost:7700" in said


def test_init_takes_hosts_without_ports(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, said = answer(capsys, "init", tmp_path / "run", "--host", "h:7700")
    assert code == 2
    assert "argument --host: 'h:7700' is not a name or address alone" in said
    assert not (tmp_path / "run").exists()


def test_init_names_the_enrolment_port_of_an_ipv6_host_in_brackets(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["init", str(tmp_path / "run"), "--host", "::1"]) == 0
    assert "--address [::1]:7701" in capsys.readouterr().out


# Files


def unprivileged(*argv: object) -> tuple[int, str]:
    """Run a command line for which the modes of files hold, also where we are root."""
    command = [sys.executable, "-m", "node", *map(str, argv)]
    if os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": path, "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
    )
    return done.returncode, done.stderr


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that everybody reaches: pytest's own are closed to other users."""
    with tempfile.TemporaryDirectory(prefix="heterorl-cli-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def test_init_below_a_file_is_answered_and_not_traced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    code, said = answer(capsys, "init", tmp_path / "file" / "run")
    assert code == 3
    assert f"heterorl-node: {tmp_path}/file/run cannot be made: Not a directory" in said
    assert "Choose a directory" in said


def test_init_where_nothing_may_be_written_names_the_folder_and_its_owner(open_path: Path) -> None:
    closed = open_path / "closed"
    closed.mkdir(mode=0o555)
    code, said = unprivileged("init", closed / "run")
    assert code == 3
    assert f"{closed}/run cannot be made: Permission denied: the folder {closed} belongs to " in said
    assert "with mode 555" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("closed", ["run", "run/operator/identity"])
def test_files_one_may_not_read_are_named_with_their_owner_and_not_said_to_be_missing(
    open_path: Path, closed: str
) -> None:
    init_run(open_path / "run", run_id="r", hosts=[], now=time.time())
    (open_path / "run").chmod(0o755)
    (open_path / closed).chmod(0)
    code, said = unprivileged("status", "--state-dir", open_path / "run", "--coordinator", "localhost:1")
    assert code == 3
    assert f"Permission denied: the folder {open_path}/{closed} belongs to " in said
    assert "and this process runs as " in said
    assert "Copy run.json" not in said


# Commands


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("statsu", "Did you mean status? heterorl-node status --help"),
        ("revok", "Did you mean revoke?"),
        ("sampler", "A role is started by a flag: heterorl-node --role sampler"),
        ("frobnicate", "Commands are init, try, token"),
    ],
)
def test_a_misspelt_command_is_answered_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str], typed: str, fix: str
) -> None:
    code, said = answer(capsys, typed)
    assert code == 2
    assert f"command = '{typed}'" in said
    assert fix in said


# Tokens


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_a_token_written_to_a_file_is_its_owners_only_whatever_the_umask(
    capsys: pytest.CaptureFixture[str], run_dir: Path, tmp_path: Path, umask: int
) -> None:
    file = tmp_path / "sampler.token"
    before = os.umask(umask)
    try:
        argv = ("token", run_dir, "--role", "sampler", "--address", "h:7701", "--out", file)
        code, said = answer(capsys, *argv)
    finally:
        os.umask(before)
    assert code == 0
    assert file.stat().st_mode & 0o777 == 0o600
    token = Token.parse(file.read_text())
    assert token.role is Role.SAMPLER
    assert token.expires_at_s > time.time() + 47 * 3600  # made today, it lets a peer in tomorrow
    assert f"{file} has mode 600" in said


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_a_token_that_others_may_replace_is_refused(
    capsys: pytest.CaptureFixture[str], run_dir: Path, tmp_path: Path, mode: int
) -> None:
    file = tmp_path / "op.token"
    answer(capsys, "token", run_dir, "--role", "operator", "--address", "127.0.0.1:1", "--out", file)
    file.chmod(mode)
    (tmp_path / "run.json").write_bytes((run_dir / "run.json").read_bytes())
    argv = ("status", "--state-dir", tmp_path, "--coordinator", "127.0.0.1:1", "--token-file", file)
    code, said = answer(capsys, *argv)
    assert code == 3
    assert f"The token in {file} may be replaced by others: the file has mode {mode:o}" in said
    assert f"chmod 600 {file}" in said


# Revocation


def test_a_node_is_shut_out_listed_and_let_in_again_while_no_coordinator_runs(
    capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    for name in ("s1", "s2"):
        let_in(run_dir, name)
    where = ("--state-dir", str(run_dir))
    assert main(["revoke", "s1", "s2", *where, "--because", "sold\nto # somebody"]) == 0
    said = capsys.readouterr()
    assert f"heterorl-node revoke --undo s1 s2 --state-dir {run_dir}" in said.out
    assert "no coordinator runs here" in said.err
    assert main(["revoke", "--list", *where]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["s1", "s2"]
    assert lines[0].endswith(f"by {getpass.getuser()}: sold to # somebody")
    assert main(["revoke", "--undo", "s1", *where]) == 0
    capsys.readouterr()
    assert main(["revoke", "--list", "--json", *where]) == 0
    assert [order["about"] for order in json.loads(capsys.readouterr().out)] == ["s2"]


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (("sampler-2",), 2, "no node of this name has ever been let in\n  Did you mean sampler-1?"),
        (("Not A Name",), 2, "'Not A Name' is not an id: 1-63 of a-z, 0-9 and -"),
        (("coordinator",), 2, "the coordinator keeps this list"),
        (("nobody",), 2, "There are coordinator, learner, operator, sampler-1."),
        (("--undo", "sampler-1"), 2, "There is none"),
        ((), 2, "Name one or more, or use --list."),
    ],
)
def test_a_name_that_cannot_be_meant_is_not_revoked(
    capsys: pytest.CaptureFixture[str], run_dir: Path, argv: tuple[str, ...], code: int, said: str
) -> None:
    let_in(run_dir, "sampler-1")
    assert answer(capsys, "revoke", *argv, "--state-dir", run_dir)[0] == code
    assert said in answer(capsys, "revoke", *argv, "--state-dir", run_dir)[1]
    capsys.readouterr()
    assert main(["revoke", "--list", "--state-dir", str(run_dir)]) == 0
    assert capsys.readouterr().out == "no node is shut out\n"


@pytest.mark.parametrize("command", ["drain", "pardon"])
@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("nobody", "NODE = 'nobody': no node of this name has ever been let in\n  There are s-1, sampler-1."),
        ("sampler-2", "Did you mean sampler-1? There are s-1, sampler-1."),
        ("learner", "it is a learner, and this is for a sampler\n  There are s-1, sampler-1."),
        ("v-1", "it is a verifier, and this is for a sampler"),
    ],
)
def test_what_is_for_samplers_takes_only_those_there_are(
    capsys: pytest.CaptureFixture[str], run_dir: Path, command: str, node: str, said: str
) -> None:
    for name in ("sampler-1", "s-1"):
        let_in(run_dir, name)
    let_in(run_dir, "v-1", role=Role.VERIFIER)
    before = sorted((run_dir / "coordinator").iterdir())
    code, answered = answer(capsys, command, "s-1", node, "--state-dir", run_dir)
    assert code == 2
    assert said in answered
    assert sorted((run_dir / "coordinator").iterdir()) == before
    assert answer(capsys, command, "s-1", "--state-dir", run_dir)[0] == 0


def test_nobody_is_known_where_no_coordinator_has_run(
    capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    code, said = answer(capsys, "drain", "nobody", "--state-dir", run_dir)
    assert code == 2
    assert "no node of this name has ever been let in\n  There is none." in said


def test_names_in_a_message_are_bounded(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    for number in range(30):
        let_in(run_dir, f"s-{number:02}")
    _, said = answer(capsys, "pardon", "nobody", "--state-dir", run_dir)
    assert "There are s-00, s-01, " in said
    assert "s-19 and 10 more." in said


@pytest.mark.parametrize("command", ["revoke", "drain", "pardon"])
def test_a_node_is_taken_as_named_where_members_are_in_a_database(
    capsys: pytest.CaptureFixture[str], run_dir: Path, command: str
) -> None:
    note_incomplete(run_dir / "coordinator" / "enrolments.sqlite")
    code, said = answer(capsys, command, "sampler-2", "--state-dir", run_dir)
    assert code == 0
    assert "sampler-2 is taken as it is: the list of the run's members is not here" in said


def test_revoking_without_the_coordinators_state_says_where_to_do_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, said = answer(capsys, "revoke", "s1", "--state-dir", tmp_path)
    assert code == 3
    assert "Run this where the coordinator runs" in said
    code, said = answer(capsys, "pause", "--state-dir", tmp_path / "typo")
    assert f"There is no coordinator's state in {tmp_path}/typo, which does not exist" in said
    (tmp_path / "coordinator").mkdir()
    code, said = answer(capsys, "pause", "--state-dir", tmp_path / "coordinator")
    assert f"--state-dir is the directory above, {tmp_path}." in said


def test_what_init_says_is_done_as_it_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = write_model_files(tmp_path / "model")
    (tmp_path / "run.toml").write_text(
        '[coordinator]\ntask = "sums"\nprompts = 100\n\n'
        f'[learner]\nlearning_rate = 1e-3\nmodel_dir = "{model}"\n'
    )
    run = tmp_path / "a run"
    assert main(["init", str(run), "--host", "hub.example.org"]) == 0
    text = capsys.readouterr().out.replace("\\\n", " ")
    commands = [shlex.split(line)[1:] for line in re.findall(r"^ +(heterorl-node .*)$", text, re.MULTILINE)]
    config = str(tmp_path / "run.toml")
    both, alone, token, _ = ([config if word == "run.toml" else word for word in one] for one in commands)
    for words in (both, alone):
        assert main([*words, "--dry-run"]) == 0, capsys.readouterr().err
    assert main(token) == 0
    # The learner's machine has what step 1 says, and no more.
    learner = tmp_path / "elsewhere"
    learner.mkdir()
    (run / "learner").rename(learner / "learner")
    (learner / "run.json").write_bytes((run / "run.json").read_bytes())
    words = ["--role", "learner", "--config", config, "--state-dir", str(learner)]
    assert main([*words, "--coordinator", "hub.example.org:7700", "--dry-run"]) == 0, capsys.readouterr().err
