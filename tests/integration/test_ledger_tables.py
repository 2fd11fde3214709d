"""A run's ledger read by people: a slot's life, tables for analysis, and the learner's log beside it."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow.parquet import read_table

from node.commands.cli import main
from node.coordinator.ledger.ledger_check import reading
from node.coordinator.work.step_history import Hello
from node.failure import Failure
from node.step_log_parts import part_of
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


def verify(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(
        ["ledger", "verify", str(run / "ledger.sqlite"), "--steps", str(run / "steps.jsonl"), "--json"]
    )
    return code, json.loads(capsys.readouterr().out)["story"]


def test_ledger_and_log_of_a_run_tell_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, story = verify(run, capsys)
    assert (code, story["steps"], story["untold_steps"], story["contradictions"]) == (0, STEPS, 0, [])


def test_a_log_may_be_ahead_of_the_ledger_and_end_in_half_a_line(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run / "steps.jsonl"
    write(log, [*read(log), {"version": STEPS + 1, "groups": []}])
    log.write_bytes(log.read_bytes() + b'{"version": 6, "gro')
    code, story = verify(run, capsys)
    assert (code, story["untold_steps"], story["contradictions"]) == (0, 1, [])


def another_sampler(lines: list[dict[str, Any]]) -> None:
    lines[1]["groups"][0]["sampler_id"] = "s9"


def another_age(lines: list[dict[str, Any]]) -> None:
    lines[1]["groups"][1]["staleness_versions"] += 1


def other_order(lines: list[dict[str, Any]]) -> None:
    lines[2]["groups"].reverse()


def one_group_less(lines: list[dict[str, Any]]) -> None:
    del lines[2]["groups"][0]


def a_step_less(lines: list[dict[str, Any]]) -> None:
    del lines[1]


def the_newest_step_lost(lines: list[dict[str, Any]]) -> None:
    del lines[-1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (another_sampler, "the log says s9's"),
        (another_age, "group 3.1 of step 2"),
        (other_order, "step 3 has 2 groups in the log and 2 in the ledger"),
        (one_group_less, "step 3 has 1 groups in the log and 2 in the ledger"),
        (a_step_less, "the log's line 2 is of version 3"),
        (the_newest_step_lost, "the ledger has steps up to 4, the log ends with 3"),
    ],
)
def test_a_log_that_tells_another_story_is_told_where(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[list[dict[str, Any]]], None],
    said: str,
) -> None:
    lines = read(run / "steps.jsonl")
    change(lines)
    write(run / "steps.jsonl", lines)
    code, story = verify(run, capsys)
    assert code == 1
    assert said in story["contradictions"][0]


def test_a_log_in_parts_is_read_from_its_first_part_and_older_parts_may_be_gone(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = read(run / "steps.jsonl")
    log = run / "steps.jsonl"
    write(part_of(log, version=1), lines[:1])
    write(part_of(log, version=2), lines[1:2])
    write(log, lines[2:])
    code, story = verify(run, capsys)
    assert (code, story["steps"], story["first_version"]) == (0, len(lines), 1)
    part_of(log, version=1).unlink()
    code, story = verify(run, capsys)
    assert (code, story["steps"], story["first_version"]) == (0, len(lines) - 1, 2)
    part_of(log, version=2).rename(run / "elsewhere.jsonl")
    write(part_of(log, version=1), lines[:1])
    code, story = verify(run, capsys)
    assert (code, story["contradictions"]) == (1, ["the log's line 2 is of version 3"])


@pytest.mark.parametrize(
    "content",
    [
        "[]\n",
        "{}\n",
        "half\n",
        '{"version": 1, "groups": [1]}\n',
        '{"version": 1, "groups": [{"group_id": "0.1", "sampler_id": "s1"}]}\n',
    ],
)
def test_what_is_not_a_log_of_steps_is_refused_by_line(
    run: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (run / "steps.jsonl").write_text(content)
    assert main(["ledger", "verify", str(run / "ledger.sqlite"), "--steps", str(run / "steps.jsonl")]) == 3
    assert "line 1 of" in capsys.readouterr().err


def test_show_tells_what_became_of_a_slot(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "show", str(run / "ledger.sqlite"), "3.1"]) == 0
    out = capsys.readouterr().out
    assert "trained" in out
    assert "in the step to version 2" in out
    assert main(["ledger", "show", str(run / "ledger.sqlite"), "8", "--json"]) == 0
    life = json.loads(capsys.readouterr().out)
    assert life["attempts"][0]["failure"] == "prompt_too_long"
    assert life["version"] is None


@pytest.mark.parametrize("named", ["999", "-1", "x.1", "9" * 30])
def test_show_refuses_a_slot_that_was_never_leased(
    run: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    assert main(["ledger", "show", str(run / "ledger.sqlite"), "--", named]) == 3
    assert f"has no slot '{named}'" in capsys.readouterr().err


def test_an_export_has_every_row_of_one_moment(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = run / "tables"
    assert main(["ledger", "export", str(run / "ledger.sqlite"), "--to", str(to), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert sorted(path.stem for path in to.iterdir()) == sorted(rows)
    tables = {name: read_table(to / f"{name}.parquet").to_pylist() for name in rows}
    assert {name: len(table) for name, table in tables.items()} == rows
    assert len(tables["trained"]) == 2 * STEPS
    trained = {(row["slot"], row["attempt"], row["version"]) for row in tables["trained"]}
    logged = {
        (*map(int, group["group_id"].split(".")), line["version"])
        for line in read(run / "steps.jsonl")
        for group in line["groups"]
    }
    assert trained == logged
    states = Counter(row["state"] for row in tables["slots"])
    assert states == {"trained": 2 * STEPS, "available": 1, "spooled": 1, "leased": 1}
    assert all(type(row["is_submitted"]) is bool for row in tables["attempts"])
    assert tables["waiting"][0]["sampler_id"] == "s2"


def test_no_ledger_no_directory_and_no_ledger_file_are_said(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", "export", str(run / "none.sqlite"), "--to", str(run / "tables")]) == 3
    assert "there is no ledger at" in capsys.readouterr().err
    (run / "file").write_text("not a directory")
    assert main(["ledger", "export", str(run / "ledger.sqlite"), "--to", str(run / "file" / "tables")]) == 3
    assert "cannot be written to" in capsys.readouterr().err
    (run / "torn.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 100)
    assert main(["ledger", "show", str(run / "torn.sqlite"), "1"]) == 3
    assert "cannot be read" in capsys.readouterr().err
