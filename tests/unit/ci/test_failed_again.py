"""CI runs tests that failed once more, alone, and tells the flaky from the broken."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / ".ci" / "failed_again.py"
TESTS = """
import os, pathlib
def test_that_holds(): pass
def test_that_is_broken(): assert 1 == 2
def test_that_races():
    first = pathlib.Path(__file__).with_name("came")
    came = first.exists()
    first.touch()
    assert came, "the first time"
"""


def run_again(folder: Path, *, only: str) -> "subprocess.CompletedProcess[str]":
    (folder / "tests").mkdir()
    (folder / "tests" / "test_some.py").write_text(TESTS)
    pytest_ = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        only,
        "tests/test_some.py",
    ]
    subprocess.run([*pytest_, f"--junitxml={folder}/first.xml"], cwd=folder, capture_output=True, check=False)
    command = [sys.executable, str(SCRIPT), str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_one_that_passes_alone_is_printed_with_both_outputs_and_does_not_block(tmp_path: Path) -> None:
    again = run_again(tmp_path, only="holds or races")
    assert again.returncode == 0
    assert "flaky: tests/test_some.py::test_that_races" in again.stdout
    assert "the first time" in again.stdout
    assert "1 passed" in again.stdout
    assert "test_that_holds" not in again.stdout


def test_one_that_fails_twice_blocks_whatever_the_others_do(tmp_path: Path) -> None:
    again = run_again(tmp_path, only="races or broken")
    assert again.returncode == 1
    assert "failed twice: tests/test_some.py::test_that_is_broken" in again.stdout
    assert "failed twice: tests/test_some.py::test_that_races" not in again.stdout


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(None, id="none was written"),
        pytest.param("<testsuites/>", id="no test failed"),
        pytest.param('<x><testcase name="a"><error>boom</error></testcase></x>', id="not a test"),
        pytest.param(
            "<x>"
            + "".join(f'<testcase classname="tests.t" name="a{n}"><failure/></testcase>' for n in range(11))
            + "</x>",
            id="too many",
        ),
    ],
)
def test_what_is_not_one_tests_fault_blocks(tmp_path: Path, report: str | None) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "t.py").write_text("")
    if report is not None:
        (tmp_path / "first.xml").write_text(report)
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "failed" in again.stdout
