"""Commands that are given something missing, mistyped, unknown or twice: what happened, and what to do."""

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from node.commands.cli import main
from node.coordinator.ledger.ledger_export import rows
from node.coordinator.ledger.ledger_file import FILE_NAME as LEDGER_FILE
from node.enrolment.init_run import init_run
from support.enrolled import let_in

MISSING = "cannot be read: No such file or directory"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with a run that has never been started, and with a file that is nothing of the sort."""
    init_run(tmp_path / "run", run_id="r", hosts=["localhost"], now=time.time())
    (tmp_path / "notes.txt").write_text("Made run r\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str]:
    try:
        code = main(line.split())
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr()
    return code, said.out + said.err


AT_RUN = "--state-dir run"


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        # a file that is missing is missing, and one of another kind is named with what it should be
        ("join nosuchfile", 3, f"nosuchfile {MISSING}\n  TOKEN is the whole line"),
        ("join run", 3, "run cannot be read: Is a directory"),
        ("join notes.txt", 3, "The token in notes.txt cannot be used: not a token of this version"),
        ("join eyJhbGci.x.y", 3, "The token on the command line cannot be used"),
        (
            "token nowhere --role sampler --address h:7701",
            3,
            f"nowhere/coordinator/authority/ca.key {MISSING}",
        ),
        ("token run --role sampler --address h:7701 --run-file typo", 3, f"typo {MISSING}"),
        ("ledger check typo", 3, "there is no ledger at typo\n"),
        ("ledger check run", 3, "there is no ledger at run, which is a folder"),
        ("ledger check notes.txt", 1, "1 problem\n"),
        ("ledger show notes.txt 1", 2, "invalid choice: 'show'"),
        ("ledger export typo --to out", 3, "there is no ledger at typo\n"),
        (f"ledger restore typo {AT_RUN}", 3, "there is no ledger at typo\n"),
        (f"ledger backup {AT_RUN} --to x", 3, "there is no ledger at run/coordinator/ledger.sqlite"),
        ("report --out page.html --ledger typo", 3, "there is no ledger at typo\n"),
        ("report --out page.html --ledger run", 3, "there is no ledger at run, which is a folder"),
        ("report --learner typo --ledger notes.txt --out r.html", 3, "there is no steps.jsonl in typo"),
        ("report run --ledger typo --out r.html", 3, "there is no ledger at typo\n"),
        ("report run --out r.html", 3, "looked for run/learner/steps.jsonl, run/coordinator/ledger.sqlite"),
        ("report --out r.html", 2, "RUN_DIR: is required where neither --learner nor --ledger is given"),
        ("simulate --samplers 2", 2, "simulate was removed in 0.4"),
        ("plan empty --gpus 1 --memory 1", 3, f"empty/config.json {MISSING}"),
        ("status --state-dir nowhere --coordinator h:1", 3, f"nowhere/run.json {MISSING}"),
        ("status --state-dir run --coordinator h:1 --run-file typo", 3, f"typo {MISSING}"),
        (
            "status --state-dir run --coordinator h:1 --run-file notes.txt",
            3,
            "notes.txt is not a run description",
        ),
        # a directory that is none, is empty, is another role's or the role's own
        ("samples --state-dir nowhere", 3, "no learner's state in nowhere, which does not exist"),
        ("samples --follow --state-dir nowhere", 3, "no learner's state in nowhere, which does not exist"),
        (
            "export out --state-dir nowhere --model-dir m",
            3,
            "no learner's state in nowhere, which does not exist",
        ),
        ("rollback 5 --state-dir run/coordinator", 3, "--state-dir is the directory above, run."),
        ("set --list --state-dir empty", 3, "There is no coordinator's state in empty\n"),
        ("drain s --state-dir run/coordinator", 3, "--state-dir is the directory above, run."),
        # a learner that has not begun
        (f"samples {AT_RUN}", 3, "there are no samples at run/learner/samples.jsonl"),
        # arguments that say nothing, or contradict each other
        (f"set learner.learning_rate {AT_RUN}", 2, "learner.learning_rate: needs a value"),
        (f"set learner.learning_rate= {AT_RUN}", 2, "needs a value"),
        ("token run --json", 2, "--json: is for --list"),
        ("token run --role sampler --address h:7701 --node-id learner", 2, "is a learner of this run"),
        (f"drain --list s {AT_RUN}", 2, "--list shows all"),
        (f"revoke --list s {AT_RUN}", 2, "--list shows all"),
        ("try -n 0", 2, "'0' is not a number of at least 1"),
    ],
)
def test_a_mistake_is_told_as_what_it_is(
    place: Path, capsys: pytest.CaptureFixture[str], line: str, code: int, said: str
) -> None:
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}
    answered = answer(capsys, line)
    assert answered[0] == code, answered[1]
    assert said in answered[1]
    assert "Errno" not in answered[1]
    assert "could not start" not in answered[1]
    after = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}
    assert {path: at for path, at in after.items() if path.name != "enrolments.sqlite"} == before


def test_a_command_line_without_its_token_and_one_from_an_empty_pipe_have_none(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["join", ""]) == 3
    assert "The token on the command line cannot be used: there is none" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["join", "-"]) == 3
    assert "The token on standard input cannot be used: there is none" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        f"pause {AT_RUN} --because twice",
        f"resume {AT_RUN}",
        f"revoke s-1 {AT_RUN}",
        f"drain s-1 {AT_RUN}",
        f"move --to h:7700 --to h:7700 {AT_RUN}",
        f"rollback 0 {AT_RUN}",
        f"set learner.learning_rate=1e-4 {AT_RUN}",
    ],
)
def test_what_is_ordered_twice_is_as_ordered_once(
    place: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    let_in(place / "run", "s-1")
    states: list[list[dict[str, Any]]] = []
    for _ in range(2):
        assert answer(capsys, line)[0] == 0
        orders = rows(place / "run" / "coordinator" / LEDGER_FILE, "order")
        states.append([order for order in orders if order["verb"] != "move"])
    assert states[0] == states[1]


def test_a_token_of_a_machine_that_is_let_in_already_is_not_asked_for(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"status {AT_RUN} --coordinator localhost:1 --token-file typo"
    code, said = answer(capsys, line)
    assert code == 1
    assert "operator has its certificate in run/operator/identity: leave --token-file out" in said
    assert "enrolled as" not in said


def test_of_an_identity_or_authority_the_missing_file_is_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("operator/identity/ca.pem", "coordinator/authority/ca.pem"):
        (place / "run" / name).unlink()
    for line in (f"status {AT_RUN} --coordinator localhost:1", "token run --role sampler --address h:7701"):
        code, said = answer(capsys, line)
        assert (code, MISSING in said, "damaged" in said) == (3, True, False), said


def test_json_of_a_rollback_says_whether_it_was_ordered_before(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for line in (
        f"rollback 3 {AT_RUN} --json",
        f"rollback 3 {AT_RUN} --json",
        f"rollback 3 {AT_RUN} --json --again",
    ):
        assert main(line.split()) == 0
        told.append(json.loads(capsys.readouterr().out)[0])
    assert [order["value"] for order in told] == ["3"] * 3
    assert told[0]["order_id"] == told[1]["order_id"] != told[2]["order_id"]
