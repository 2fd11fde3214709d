"""A run's ledger as tables for analysis, and what the learner's log says beside it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from node.commands.cli import main
from node.coordinator.ledger.ledger_check import reading
from node.coordinator.work.decisions.step_history import Hello
from node.values.groups.failure import Failure
from support.ledgers import open_desk

STEPS = 4


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of four steps of two groups each; a slot that failed once, a group that waits and a lease."""
    with open_desk(tmp_path / "ledger.sqlite") as desk:
        desk.open_drain(Hello("learner", 1, 0))
        lines: list[dict[str, Any]] = []
        for version in range(1, STEPS + 1):
            names = desk.train_next(2)
            groups: list[dict[str, Any]] = [{"group_id": name, "sampler_id": "s1"} for name in names]
            lines.append({"version": version, "groups": groups})
        [failed] = desk.lease("s1", held=STEPS)
        desk.fail(failed, "s1", fault=Failure.PROMPT_TOO_LONG, detail="9000 tokens")
        [waiting] = desk.lease("s2", held=STEPS)
        desk.submit(waiting, "s2")
        desk.lease("s1", held=STEPS)
    with reading(tmp_path / "ledger.sqlite") as connection:
        ages = dict(connection.execute("SELECT version, staleness_versions FROM steps"))
    for line in lines:
        for group, age in zip(line["groups"], json.loads(ages[line["version"]]), strict=True):
            group["staleness_versions"] = age
    write(tmp_path / "steps.jsonl", lines)
    return tmp_path


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def exported(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, list[dict[str, Any]]]:
    to = run / "tables"
    assert main(["ledger", "export", str(run / "ledger.sqlite"), "--to", str(to), "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)
    tables = {path.stem: read(path) for path in to.iterdir()}
    assert {name: len(table) for name, table in tables.items()} == counted
    return tables


def test_an_export_has_every_row_of_one_moment(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = exported(run, capsys)
    states = Counter(row["state"] for row in tables["slots"])
    assert states == {"trained": 2 * STEPS, "available": 1, "spooled": 1, "leased": 1}
    [failed] = [row for row in tables["attempts"] if row["failure"]]
    assert failed == {
        "slot": 8, "attempt": 1, "sampler_id": "s1", "is_submitted": False, "failure": "prompt_too_long",
    }  # fmt: skip
    assert tables["waiting"][0]["sampler_id"] == "s2"
    assert [row["version"] for row in tables["steps"]] == [1, 2, 3, 4]


def test_the_groups_trained_on_are_written_as_the_learners_log_has_them(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that `diff` compares them, as `heterorl-node ledger --help` says."""
    exported(run, capsys)
    logged = [
        json.dumps({"version": line["version"], **group}, separators=(",", ":"))
        for line in read(run / "steps.jsonl")
        for group in line["groups"]
    ]
    assert (run / "tables" / "trained.jsonl").read_text().splitlines() == logged


def test_no_ledger_no_directory_and_no_ledger_file_are_said(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", "export", str(run / "none.sqlite"), "--to", str(run / "tables")]) == 3
    assert "there is no ledger at" in capsys.readouterr().err
    (run / "file").write_text("not a directory")
    assert main(["ledger", "export", str(run / "ledger.sqlite"), "--to", str(run / "file" / "tables")]) == 3
    assert "cannot be written to" in capsys.readouterr().err
    (run / "torn.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 100)
    assert main(["ledger", "export", str(run / "torn.sqlite"), "--to", str(run / "tables")]) == 3
    assert "cannot be read" in capsys.readouterr().err
