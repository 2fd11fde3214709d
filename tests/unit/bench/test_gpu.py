"""The command that is meant for a GPU: every run is written down, whatever became of the others."""

import importlib.util
import json
from pathlib import Path

import pytest

from bench.gpu import __main__ as gpu
from bench.gpu.__main__ import ON_GPU, TINY, Measurement, measure


def test_the_trial_has_the_runs_of_the_real_thing() -> None:
    assert TINY.keys() == ON_GPU.keys()
    for measurement in ON_GPU.values():
        assert importlib.util.find_spec(measurement.command.split()[0]) is not None


def test_lines_come_with_the_name_of_their_run_and_the_rest_goes_to_its_log(tmp_path: Path) -> None:
    printed = tmp_path / "printed.jsonl"
    printed.write_text('{"seconds": 1}\n"a word of the engine"\n{"seconds": 2}\n')
    log = tmp_path / "log"
    command = Measurement(60, f"json.tool --json-lines --compact {printed}")
    assert list(measure("one", command, log=log)) == [
        {"run": "one", "seconds": 1},
        {"run": "one", "seconds": 2},
    ]
    assert "a word of the engine" in log.read_text()


def test_a_failure_is_written_down_and_the_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tmp_path / "good.json"
    good.write_text('{"seconds": 3}')
    runs = {
        "learner": Measurement(60, f"json.tool {tmp_path / 'missing.json'}"),
        "whole-run": Measurement(0.2, "http.server 0"),
        "sampler": Measurement(60, f"json.tool --compact {good}"),
    }
    monkeypatch.setattr(gpu, "ON_GPU", runs)
    results = tmp_path / "gpu.jsonl"
    results.write_text('{"run": "of another day"}\n')
    assert gpu.main(["--results", str(results), "--logs", str(tmp_path / "logs")]) == 1
    before, failed, late, kept = [json.loads(line) for line in results.read_text().splitlines()]
    assert before == {"run": "of another day"}
    assert failed["run"] == "learner"
    assert failed["failed"].startswith("exit code")
    assert "missing.json" in failed["log"]
    assert (late["run"], late["failed"]) == ("whole-run", "not done after 0.2 s")
    assert kept == {"run": "sampler", "gpu": gpu.card(), "seconds": 3}
