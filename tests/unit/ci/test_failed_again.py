"""CI runs tests that failed once more, alone, and tells the flaky from the broken."""

import runpy
import subprocess
import sys
from collections.abc import Callable
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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tests, which each pytest runs without the plugins of this one, in a third of the time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    return tmp_path


@pytest.fixture
def again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[], tuple[int, str]]:
    """Run the script; return its exit code and what it printed."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(folder)])

    def run() -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert isinstance(ended.value.code, int)
        return ended.value.code, capsys.readouterr().out

    return run


def reporting(*failed: str) -> str:
    """Return what a first run of the tests reports."""
    cases = [f'<testcase classname="tests.test_some" name="{name}"><failure/></testcase>' for name in failed]
    return f"<testsuites>{''.join(cases)}</testsuites>"


def test_one_that_passes_alone_is_printed_with_both_outputs_and_does_not_block(
    folder: Path, again: Callable[[], tuple[int, str]]
) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-k", "holds or races", f"--junitxml={folder}/first.xml"]
    command = [sys.executable, "-m", "pytest", *options, "tests/test_some.py"]
    subprocess.run(command, cwd=folder, capture_output=True, check=False)
    code, printed = again()
    assert code == 0
    assert "flaky: tests/test_some.py::test_that_races" in printed
    assert "the first time" in printed
    assert "1 passed" in printed
    assert "test_that_holds" not in printed


def test_one_that_fails_twice_blocks_whatever_the_others_do(
    folder: Path, again: Callable[[], tuple[int, str]]
) -> None:
    (folder / "tests" / "came").touch()
    (folder / "first.xml").write_text(reporting("test_that_races", "test_that_is_broken"))
    code, printed = again()
    assert code == 1
    assert "failed twice: tests/test_some.py::test_that_is_broken" in printed
    assert "failed twice: tests/test_some.py::test_that_races" not in printed


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(None, id="none was written"),
        pytest.param(reporting(), id="no test failed"),
        pytest.param('<x><testcase name="a"><error>boom</error></testcase></x>', id="not a test"),
        pytest.param(reporting(*(f"test_{number}" for number in range(11))), id="too many"),
    ],
)
def test_what_is_not_one_tests_fault_blocks(
    folder: Path, again: Callable[[], tuple[int, str]], report: str | None
) -> None:
    if report is not None:
        (folder / "first.xml").write_text(report)
    code, printed = again()
    assert code == 1
    assert "failed" in printed
