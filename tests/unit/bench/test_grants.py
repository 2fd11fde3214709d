"""The bench of grants runs, with few slots and in no time."""

import sys
from pathlib import Path

import pytest

from bench import grants


def test_each_size_has_a_line_for_decisions_and_one_for_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grants", "--open", "8", "16", "--seconds", "0.02"])
    grants.main()
    printed = capsys.readouterr()
    assert [line.split('"')[3] for line in printed.out.splitlines()] == ["decision", "ledger"] * 2
    assert printed.err.count("of the first's time") == 2
    assert not list(tmp_path.iterdir())
