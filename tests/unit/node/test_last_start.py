"""Settings that changed since a role's last start are named with what they were and what they are."""

import json
from pathlib import Path

import pytest

from node.process.last_start import FILE_NAME, note_settings
from node.values.roles import Role


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    fields = [record.__dict__ for record in caplog.records if "differs" in record.message]
    caplog.clear()
    return [(one["key"], one["was"], one["is"]) for one in fields]


def test_every_setting_that_changed_since_the_last_start_is_said_with_was_and_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first: dict[str, object] = {
        "learning_rate": 1e-6,
        "objective": "gepo",
        "betas": (0.9, 0.999),
        "objective_options": {"clip_low": 0.2},
    }
    for _ in range(2):
        note_settings(tmp_path, role=Role.LEARNER, settings=first)
        assert said(caplog) == []
    second = {**first, "learning_rate": 1e-5, "objective": "tis", "objective_options": {"ceiling": 3.0}}
    note_settings(tmp_path, role=Role.LEARNER, settings=second)
    assert said(caplog) == [
        ("learner.learning_rate", "1e-06", "1e-05"),
        ("learner.objective", '"gepo"', '"tis"'),
        ("learner.objective_options.ceiling", "not set", "3.0"),
        ("learner.objective_options.clip_low", "0.2", "not set"),
    ]
    note_settings(tmp_path, role=Role.LEARNER, settings=second)
    assert said(caplog) == []


def test_no_secret_is_written_or_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for value in ("hunter2", "hunter3"):
        options = {"judge": {"api_key": value, "max_new_tokens": 8, "hub_token": value, "url": "http://j"}}
        options["store"] = {"address": f"https://me:{value}@store"}
        note_settings(tmp_path, role=Role.COORDINATOR, settings={"task_options": options})
    assert said(caplog) == []
    path = tmp_path / FILE_NAME
    assert json.loads(path.read_text()) == {
        "coordinator.task_options.judge.max_new_tokens": 8,
        "coordinator.task_options.judge.url": "http://j",
    }
    assert path.stat().st_mode & 0o077 == 0


def test_a_damaged_file_of_settings_is_said_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    note_settings(tmp_path, role=Role.LEARNER, settings={"learning_rate": 1.0})
    assert "remove it if it is damaged" in caplog.records[0].__dict__["detail"]
    note_settings(tmp_path, role=Role.SAMPLER, settings={"threads": 1})
