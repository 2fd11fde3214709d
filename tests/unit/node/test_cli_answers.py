"""What an operator reads on the terminal: the command as it is typed, the answer, the exit code."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.cli import main
from node.identity.init_run import init_run


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
    assert "For example: --coordinator localhost:7700" in said


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("h", "the port is missing"),
        ("h:99999", "a port is a number from 0 to 65535"),
        ("h:0", "port 0 stands for any free port"),
        ("::1:7701", "an IPv6 address stands in brackets"),
        ("https://h:1", "neither a name nor an address"),
    ],
)
def test_a_token_is_made_only_for_an_address_that_can_be_dialled(
    capsys: pytest.CaptureFixture[str], run_dir: Path, address: str, rule: str
) -> None:
    code, said = answer(capsys, "token", run_dir, "--role", "sampler", "--address", address)
    assert code == 2
    assert rule in said
    assert ":7701" in said


@pytest.mark.parametrize(
    ("host", "fix"),
    [
        ("h:7700", "Write --host h. The port belongs to coordinator.listen."),
        ("[::1]", "Write --host ::1."),
        ("a b", "For example: --host hub.example.org"),
    ],
)
def test_init_takes_hosts_without_ports(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, host: str, fix: str
) -> None:
    code, said = answer(capsys, "init", tmp_path / "run", "--host", host)
    assert code == 2
    assert fix in said
    assert not (tmp_path / "run").exists()


def test_init_names_the_enrolment_port_of_an_ipv6_host_in_brackets(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["init", str(tmp_path / "run"), "--host", "::1"]) == 0
    assert "--address [::1]:PORT" in capsys.readouterr().out


def test_a_daemon_dials_no_port_zero(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ("config", "--role", "sampler", "--state-dir", tmp_path, "--set", "sampler.model_dir=/m")
    code, said = answer(capsys, *argv, "--coordinator", "h:0", "--set", "sampler.weight_sources=['h:0']")
    assert code == 2
    assert "node.coordinator = 'h:0' (from flag --coordinator): 'h:0' cannot be dialled" in said
    assert "sampler.weight_sources.0 = " in said


def test_the_link_emulator_reads_addresses_as_everyone_does(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = answer(capsys, "emulate-link", "--target", "localhost")
    assert code == 2
    assert "the port is missing" in said


# Files


def as_nobody(*argv: object) -> tuple[int, str]:
    """Run a command line as a user who owns nothing; where that is who we are, as ourselves."""
    command = [sys.executable, "-m", "node", *map(str, argv)]
    if os.geteuid() == 0:
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]
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
    assert f"could not start: {tmp_path}/file/run cannot be made: Not a directory" in said
    assert "Choose a directory" in said


def test_init_where_nothing_may_be_written_names_the_folder_and_its_owner(open_path: Path) -> None:
    closed = open_path / "closed"
    closed.mkdir(mode=0o555)
    code, said = as_nobody("init", closed / "run")
    assert code == 3
    assert f"{closed}/run cannot be made: Permission denied: the folder {closed} belongs to " in said
    assert "with mode 555" in said
    assert "Traceback" not in said


def test_a_run_file_one_may_not_read_is_not_said_to_be_missing(open_path: Path) -> None:
    init_run(open_path / "run", run_id="r", hosts=[], now=time.time())
    run_file = open_path / "run" / "run.json"
    argv = ("status", "--state-dir", open_path, "--run-file", run_file, "--coordinator", "localhost:1")
    if os.geteuid() != 0:
        run_file.chmod(0)
        (open_path / "run").chmod(0)
    code, said = as_nobody(*argv)
    assert code == 3
    assert f"Permission denied: the folder {open_path}/run belongs to " in said
    assert "and this process runs as " in said
    assert "Copy run.json" not in said


def test_an_identity_one_may_not_read_is_named_and_not_traced(open_path: Path) -> None:
    init_run(open_path / "run", run_id="r", hosts=[], now=time.time())
    (open_path / "run").chmod(0o755)
    if os.geteuid() != 0:
        (open_path / "run" / "operator" / "identity").chmod(0)
    code, said = as_nobody("status", "--state-dir", open_path / "run", "--coordinator", "localhost:1")
    assert code == 3
    assert f"Permission denied: the folder {open_path}/run/operator/identity belongs to " in said
