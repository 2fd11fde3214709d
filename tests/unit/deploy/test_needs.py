"""Missing tools are installed where the user may, and named before any work where not."""

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from deploy import needs
from deploy.needs import Need
from support import needed_tools


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A machine that has one thing and lacks another."""
    here = {"bwrap": False, "gcc": True}
    for name in here:
        monkeypatch.setitem(needs.NEEDS, name, Need(partial(here.__getitem__, name), "bubblewrap", "ask"))
        monkeypatch.setitem(needs.COMMANDS, name, (name,))
    monkeypatch.setitem(needs.COMMANDS, "test", tuple(here))
    monkeypatch.setenv("CI", "")
    needs.is_here.cache_clear()
    return here


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that are run; all succeed but those that ask for a password."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> "subprocess.CompletedProcess[bytes]":
        ran.append(command)
        asks = os.environ.get("SUDO_ASKS") and command[0] == "sudo"
        return subprocess.CompletedProcess(command, 1 if asks else 0)

    monkeypatch.setattr("deploy.needs.shutil.which", lambda name: name)
    monkeypatch.setattr("deploy.needs.subprocess.run", run)
    return ran


def become(monkeypatch: pytest.MonkeyPatch, user: int) -> None:
    monkeypatch.setattr("deploy.needs.os.geteuid", lambda: user)


def test_root_installs_the_package_of_what_is_missing_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]
) -> None:
    become(monkeypatch, 0)
    needs.main("test")
    assert [command[:2] for command in commands] == [["apt-get", "update"], ["apt-get", "install"]]
    assert commands[1][-1] == "bubblewrap"
    commands.clear()
    assert needs.main("gcc") == 0
    assert commands == []


def test_a_user_installs_only_with_a_sudo_that_asks_for_no_password(
    monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]
) -> None:
    become(monkeypatch, 1000)
    needs.main("test")
    assert commands[0] == ["sudo", "-n", "true"]
    assert [command[:3] for command in commands[1:]] == [["sudo", "-n", "apt-get"]] * 2
    commands.clear()
    monkeypatch.setenv("SUDO_ASKS", "1")
    needs.main("test")
    assert commands == [["sudo", "-n", "true"]]


@pytest.mark.parametrize(
    ("command", "ci", "exit_code"), [("test", "", 0), ("test", "true", 1), ("bwrap", "", 1), ("gcc", "", 0)]
)
def test_only_the_tests_go_on_without_and_never_in_ci(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, ci: str, exit_code: int
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(needs, "install", lambda names: None)
    assert needs.main(command) == exit_code
    said = "bwrap is missing: apt-get install bubblewrap, or ask\n"
    assert capsys.readouterr().err == (said if exit_code else "")


def test_files_whose_tests_are_left_out_are_named_with_what_they_need(tmp_path: Path) -> None:
    mark = "@pytest.mark." + "needs"  # in two, so that this file is not read as one that needs them
    (tmp_path / "test_sandbox.py").write_text(f'{mark}("gcc", "bwrap")')
    (tmp_path / "test_compiler.py").write_text(f'{mark}("gcc")')
    (line,) = needed_tools.lines_for_people(tmp_path)
    assert line.startswith("bwrap is missing: apt-get install bubblewrap, or ask. ")
    assert line.endswith(": test_sandbox.py")
