"""The start-up scripts of clouds call ``heterorl-node join`` as it is."""

import argparse
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from node.commands.joining import join_command, token_command

CLOUD = Path(__file__).parents[3] / "deploy" / "cloud"
FILES = sorted(CLOUD.glob("*.yaml"))


def commands(value: Any) -> list[str]:
    """Return every line of shell in a file's values."""
    if isinstance(value, dict):
        return [line for one in value.values() for line in commands(one)]
    if isinstance(value, list):
        return [line for one in value for line in commands(one)]
    return str(value).splitlines()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_start_up_script_joins_with_flags_that_exist(file: Path) -> None:
    [line] = [line for line in commands(yaml.safe_load(file.read_text())) if "heterorl-node join" in line]
    parser = argparse.ArgumentParser()
    join_command.add_arguments(parser)
    assert parser.parse_args(shlex.split(line.partition("heterorl-node join ")[2])).token


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_start_up_script_says_how_its_token_is_made(file: Path) -> None:
    [line] = re.findall(r"^#   heterorl-node token (.*)$", file.read_text(), re.MULTILINE)
    parser = argparse.ArgumentParser()
    token_command.add_arguments(parser)
    made = parser.parse_args(shlex.split(line.replace("$HUB", "hub")))
    assert (made.role, made.uses) == ("sampler", 20)


def test_the_wheel_that_a_script_fetches_is_this_release() -> None:
    version = tomllib.loads((CLOUD.parents[1] / "pyproject.toml").read_text())["project"]["version"]
    named = re.findall(r"heterorl_node-([0-9.]+)-py3", "".join(file.read_text() for file in FILES))
    assert named == [version]
