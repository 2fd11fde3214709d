import argparse
import json
import time
from pathlib import Path

import pytest
from cryptography import x509

from node.commands import init_command
from node.commands.joining import token_command
from node.enrolment.enrolment_ledger import note_incomplete
from node.enrolment.init_run import init_run
from node.enrolment.tokens import Token
from node.errors import ConfigError
from node.identity.identity_store import check_own, load_identity
from node.identity.run_description import RunDescription
from node.identity.signatures import SigningKey
from node.system.clock import moment
from node.values.roles import Role
from support.identity import NOW_S
from support.present import present
from support.refusals import cannot_start, misconfigured


def run_init(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    init_command.add_arguments(parser)
    return init_command.run(parser.parse_args(arguments))


def run_token(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    token_command.add_arguments(parser)
    return token_command.run(parser.parse_args(arguments))


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the directory of a run that was just made."""
    run_init(str(tmp_path / "run"), "--run-id", "first")
    capsys.readouterr()
    return str(tmp_path / "run")


def test_init_makes_everything_a_run_starts_from(tmp_path: Path) -> None:
    run = init_run(tmp_path / "run", run_id="first", hosts=["hub.example.org"], now=NOW_S)
    root = tmp_path / "run"
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    identity_files = ("key.pem", "certificate.pem", "ca.pem")
    assert files == {
        "run.json",
        "coordinator/authority/ca.key",
        "coordinator/authority/ca.pem",
        "learner/signing.key",
        *(
            f"{role}/identity/{name}"
            for role in ("coordinator", "learner", "operator")
            for name in identity_files
        ),
    }
    assert RunDescription.load(root / "run.json") == run
    assert SigningKey.load(root / "learner" / "signing.key").public_key == run.learner_public_key
    for role in (Role.COORDINATOR, Role.LEARNER, Role.OPERATOR):
        identity = present(load_identity(root / role / "identity"))
        check_own(identity, run, role, NOW_S)
    hub = present(load_identity(root / "coordinator" / "identity"))
    names = x509.load_pem_x509_certificate(hub.certificate_pem).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.DNSName) == ["hub.first.heterorl", "hub.example.org"]


def test_no_secret_of_a_new_run_is_readable_by_others(tmp_path: Path) -> None:
    root = tmp_path / "run"
    init_run(root, run_id="first", hosts=[], now=NOW_S)
    secrets = [path for path in root.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]
    assert len(secrets) == 5
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    assert {path.parent.stat().st_mode & 0o777 for path in secrets} == {0o700}
    assert root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("left", ["run.json", "coordinator", "learner"])
def test_init_does_not_touch_a_run_that_is_there(tmp_path: Path, left: str) -> None:
    root = tmp_path / "run"
    run_init(str(root), "--run-id", "first")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with cannot_start("run.json"):
        run_init(str(root), "--run-id", "second")
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    # Also when only a part of it is left: its keys may be all there is.
    other = tmp_path / "part"
    other.mkdir()
    (root / left).rename(other / left)
    with cannot_start(left):
        run_init(str(other))


def test_init_says_what_to_copy_where_and_which_command_comes_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_init(str(tmp_path / "run"), "--run-id", "first", "--host", "hub.example.org") == 0
    said = capsys.readouterr().out
    for needed in ("Made run first", "run.json", "learner/signing.key", "--role coordinator --role learner"):
        assert needed in said
    assert f"heterorl-node token {tmp_path}/run --role sampler --address hub.example.org:7701" in said


def test_init_makes_up_a_run_id(tmp_path: Path) -> None:
    run_init(str(tmp_path / "a"))
    run_init(str(tmp_path / "b"))
    names = [RunDescription.load(tmp_path / name / "run.json").run_id for name in ("a", "b")]
    assert names[0] != names[1]


@pytest.mark.parametrize("run_id", ["Big Run", "a" * 64])
def test_init_names_a_wrong_run_id_and_makes_nothing(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_init(str(tmp_path / "run"), "--run-id", run_id)
    assert not (tmp_path / "run").exists()


def test_token_prints_the_token_alone_on_standard_output(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--role", "sampler", "--node-id", "s1", "--ttl", "30m", "--address", "hub:7401")
    assert run_token(run, *arguments) == 0
    printed = capsys.readouterr()
    token = Token.parse(printed.out)
    assert printed.out.count("\n") == 1
    assert (token.run_id, token.role, token.node_id, token.address) == (
        "first",
        Role.SAMPLER,
        "s1",
        "hub:7401",
    )
    assert "node.token_file" in printed.err  # the members port is not known beside 7401
    assert f"until {moment(token.expires_at_s)} (--ttl)" in printed.err
    assert abs(token.expires_at_s - time.time() - 1800) < 60


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1h", 3600), ("7d", 604_800)])
def test_a_lifetime_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert token_command.lifetime(text) == seconds


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--ttl", value) for value in ("8d", "0s", "soon", "1", "h", "1.5h", "-1h")),
        ("--node-id", "S 1"),
        *(("--address", value) for value in ("hub", "h:99999", "https://h:1", "::1:7701")),
    ],
)
def test_token_names_a_wrong_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    arguments = {"--role": "sampler", "--address": "hub:7401"} | {flag: value}
    with pytest.raises(SystemExit, match="2"):
        run_token(str(tmp_path), *(f"{name}={value}" for name, value in arguments.items()))
    assert f"argument {flag}: {value!r} is not" in capsys.readouterr().err


def test_token_without_a_run_says_which_file_is_missing(tmp_path: Path) -> None:
    with cannot_start("ca.key"):
        run_token(str(tmp_path), "--role", "sampler", "--address", "hub:7401")


def test_a_token_leads_to_the_whole_run_and_is_listed_and_cancelled(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_token(run, "--role", "sampler", "--address", "hub:7701", "--uses", "20")
    printed = capsys.readouterr()
    token = Token.parse(printed.out)
    assert token.can_join
    assert token.run == RunDescription.load(tmp_path / "run" / "run.json")
    assert token.coordinator == "hub:7700"
    assert "heterorl-node join TOKEN" in printed.err
    assert "valid for 20 samplers" in printed.err
    run_token(run, "--list")
    assert f"{token.number}  sampler  any   0/20" in capsys.readouterr().out
    run_token(run, "--cancel", token.number)
    capsys.readouterr()
    run_token(run, "--list", "--json")
    [listed] = capsys.readouterr().out.splitlines()
    assert json.loads(listed)["is_cancelled"]
    assert token.nonce not in listed
    with misconfigured("000000000000", key="--cancel"):
        run_token(run, "--cancel", "0" * 12)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--address", "hub:7701"), "is required to make a token"),
        (("--role", "sampler"), "is required to make a token"),
        (("--role", "sampler", "--address", "h:1", "--uses", "2", "--node-id", "s1"), "names one node"),
    ],
)
def test_token_says_what_a_new_token_lacks(run: str, arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_token(run, *arguments)


def test_a_description_of_another_run_is_a_wrong_argument(tmp_path: Path) -> None:
    for name in ("first", "second"):
        run_init(str(tmp_path / name), "--run-id", name)
    words = (
        "--role",
        "sampler",
        "--address",
        "hub:7701",
        "--run-file",
        str(tmp_path / "second" / "run.json"),
    )
    with misconfigured("'second'", "'first'", key="--run-file"):
        run_token(str(tmp_path / "first"), *words)


def test_a_list_of_tokens_that_is_damaged_is_named(run: str, tmp_path: Path) -> None:
    path = tmp_path / "run" / "coordinator" / "enrolments.sqlite"
    path.write_bytes(b"not a database" * 100)
    with cannot_start(str(path)):
        run_token(run, "--list")


def test_where_a_run_has_a_database_the_command_says_what_is_not_here(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_token(run, "--role", "sampler", "--address", "hub:7701")
    number = Token.parse(capsys.readouterr().out).number
    note_incomplete(tmp_path / "run" / "coordinator" / "enrolments.sqlite")
    run_token(run, "--list", "--json")
    listed = capsys.readouterr()
    assert json.loads(listed.out)["number"] == number
    assert "the tokens that were made on this machine" in listed.err
    run_token(run, "--cancel", number)
    assert "while the coordinator of this machine leads" in capsys.readouterr().err
