"""Output of ``heterorl-node evaluations`` from a ledger."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from node.commands.cli import main
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.work.accounts import Transaction
from node.coordinator.work.evaluation.evaluations import EvaluationChange
from node.run import Evaluation

FINISHED = Evaluation(
    *(0, 936, 64, 1, 0.0, 32, 100.0, 160.0, 63, 1, 0.125, 0.01, 0.5, 30.25), answers=126, samplers=3
)
UNDER_WAY = Evaluation(20, 936, 64, 1, 0.0, 32, 200.0, 0.0, 5, answers=6, samplers=2)
MEASURED = replace(FINISHED, sampling='{"stop": ["#"]}', metrics='{"steps": 2.0, "words": 2.53125}')


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    with closing(Ledger.open(tmp_path / "coordinator" / "ledger.sqlite", run_id="run")):
        return tmp_path


@pytest.fixture
def write(state_dir: Path) -> Callable[..., None]:
    def record(*evaluations: Evaluation) -> None:
        with closing(Ledger.open(state_dir / "coordinator" / "ledger.sqlite", run_id="run")) as ledger:
            for evaluation in evaluations:
                ledger.record(Transaction(evaluation=EvaluationChange(evaluation)))

    return record


def test_the_record_is_a_table_with_a_row_for_each_version(
    state_dir: Path, write: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    write(FINISHED, UNDER_WAY)
    assert main(["evaluations", "--state-dir", str(state_dir)]) == 0
    _, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    finished = ["1970-01-01", "00:02:40Z", "60"]
    figures = ["0", "0.1250", "0.0100", "63", "of", "64", "1", "50.0%", "30.2", "126", "of", "3"]
    assert first == [*figures, *finished]
    assert second[-3:] == ["under", "way", "-"]


def test_json_is_one_object_a_line(
    state_dir: Path, write: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    write(MEASURED, UNDER_WAY)
    assert main(["evaluations", "--ledger", str(state_dir / "coordinator/ledger.sqlite"), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        asdict(MEASURED) | {"sampling": {"stop": ["#"]}, "metrics": {"steps": 2.0, "words": 2.53125}},
        asdict(UNDER_WAY) | {"sampling": {}, "metrics": {}},
    ]


def test_what_graders_measured_and_which_samplers_disagree_is_shown_where_there_is_any(
    state_dir: Path, write: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    disputed = replace(UNDER_WAY, finished_at_s=9.0, disputed_by="s1, s2")
    write(replace(MEASURED, left_out="s3"), disputed)
    assert main(["evaluations", "--state-dir", str(state_dir)]) == 0
    shown = capsys.readouterr().out
    for said in ("graders measured", "steps 2, words 2.531", "without s3", "disputed by s1, s2"):
        assert said in shown


def test_a_run_without_evaluations_says_how_to_have_some(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluations", "--state-dir", str(state_dir)]) == 0
    assert "coordinator.evaluation" in capsys.readouterr().out


def test_a_ledger_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluations", "--state-dir", str(tmp_path)]) == 3
    assert "there is no ledger at" in capsys.readouterr().err
