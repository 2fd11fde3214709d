"""``heterorl-node completion``: what a shell completes, as a script for it.

The script is made of the commands' own parsers, so a shell runs nothing when it completes.
"""

import argparse
from pathlib import Path
from typing import Final

import shtab

from node.exit_code import ExitCode

EXAMPLE: Final = """\
  heterorl-node completion bash > ~/.local/share/bash-completion/completions/heterorl-node
  heterorl-node completion zsh > ~/.zfunc/_heterorl-node        # with ~/.zfunc in fpath, before compinit
  heterorl-node completion fish > ~/.config/fish/completions/heterorl-node.fish
"""

SHELLS: Final = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node completion``."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to complete")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    print(shtab.complete(_whole_parser(), shell=arguments.shell))
    return ExitCode.DRAINED


def _whole_parser() -> argparse.ArgumentParser:
    """Return one parser of the daemon's flags and all commands; those that need an extra have no options."""
    from node.commands.cli import COMMANDS, command_of, daemon_parser

    parser = daemon_parser()
    _complete_paths(parser)
    commands = parser.add_subparsers()
    for name, (_, description) in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=description)
        try:
            module = command_of(name)
        except ImportError:  # it needs an extra that is not installed
            continue
        module.add_arguments(command)
        _complete_paths(command)
    return parser


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                _complete_paths(verb)
        elif action.type is Path or action.metavar in ("DIR", "FILE"):
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
