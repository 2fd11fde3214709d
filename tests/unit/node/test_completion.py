"""Completion scripts: each shell's own completion finds commands, options and choices."""

import subprocess
from pathlib import Path

import pytest

from node.commands.cli import COMMANDS, main
from node.commands.completion_command import SHELLS

_ASK_BASH = """
source "$1"
COMP_WORDS=(heterorl-node "${@:2}")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
_shtab_heterorl_node heterorl-node "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("completion")
    made = {}
    for shell in SHELLS:
        with pytest.MonkeyPatch.context() as patched:
            said: list[str] = []
            patched.setattr("builtins.print", said.append)
            assert main(["completion", shell]) == 0
        made[shell] = directory / shell
        made[shell].write_text("\n".join(said))
    return made


def completed(script: Path, *words: str) -> set[str]:
    """Return what bash would offer for the last of some words."""
    asked = subprocess.run(
        ["bash", "-c", _ASK_BASH, "bash", str(script), *words],
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    return {word.strip() for word in asked.stdout.splitlines() if word}


def test_bash_completes_commands_options_and_choices(scripts: dict[str, Path]) -> None:
    assert completed(scripts["bash"], "dr") == {"drain"}
    assert completed(scripts["bash"], "") >= set(COMMANDS)
    assert "--state-dir" in completed(scripts["bash"], "pause", "--")
    assert completed(scripts["bash"], "ledger", "ch") == {"check"}
    assert completed(scripts["bash"], "--role", "sam") == {"sampler"}
    assert completed(scripts["bash"], "completion", "f") == {"fish"}


def test_bash_completes_files_where_an_option_takes_one(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    assert completed(scripts["bash"], "--config", f"{tmp_path}/ru") == {f"{tmp_path}/run.toml"}


@pytest.mark.parametrize(
    "shell",
    [
        "bash",
        pytest.param("zsh", marks=pytest.mark.needs("zsh")),
        pytest.param("fish", marks=pytest.mark.needs("fish")),
    ],
)
def test_each_script_names_every_command_and_its_shell_reads_it(shell: str, scripts: dict[str, Path]) -> None:
    script = scripts[shell].read_text()
    assert [name for name in COMMANDS if name not in script] == []
    subprocess.run([shell, "-n", str(scripts[shell])], check=True, timeout=30)
