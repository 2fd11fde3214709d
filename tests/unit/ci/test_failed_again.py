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


@pytest.fixture(autouse=True)
def without_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each pytest without the plugins of this one, in a third of the time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def again(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def run_first(folder: Path, *, only: str) -> None:
    (folder / "tests").mkdir()
    (folder / "tests" / "test_some.py").write_text(TESTS)
    options = ["-q", "-p", "no:cacheprovider", "-k", only, f"--junitxml={folder}/first.xml"]
    command = [sys.executable, "-m", "pytest", *options, "tests/test_some.py"]
    subprocess.run(command, cwd=folder, capture_output=True, check=False)


def test_one_that_passes_alone_is_printed_with_both_outputs_and_does_not_block(tmp_path: Path) -> None:
    run_first(tmp_path, only="holds or races")
    ended = again(tmp_path)
    assert ended.returncode == 0
    assert "flaky: tests/test_some.py::test_that_races" in ended.stdout
    assert "the first time" in ended.stdout
    assert "1 passed" in ended.stdout
    assert "test_that_holds" not in ended.stdout


def test_one_that_fails_twice_blocks_whatever_the_others_do(tmp_path: Path) -> None:
    run_first(tmp_path, only="races or broken")
    ended = again(tmp_path)
    assert ended.returncode == 1
    assert "failed twice: tests/test_some.py::test_that_is_broken" in ended.stdout
    assert "failed twice: tests/test_some.py::test_that_races" not in ended.stdout


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
    ended = again(tmp_path)
    assert ended.returncode == 1
    assert "failed" in ended.stdout
