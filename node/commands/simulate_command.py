"""``heterorl-node simulate``: how a run of so many samplers and relays would go, before there is one."""

import argparse
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Final

from node.exit_code import ExitCode
from node.simulation.fleet import Fleet
from node.simulation.profile import Profile
from node.simulation.report import Report

EXAMPLE: Final = """\
  heterorl-node simulate --samplers 10000 --relays 100 --profile profile.toml
Nothing is started and nothing is sent. docs/simulate.md has the keys of a profile, and what is left out.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node simulate``."""
    add = parser.add_argument
    add("--samplers", type=_count, required=True, metavar="N", help="how many, up to 100000")
    add("--relays", type=partial(_count, least=0), default=0, metavar="N", help="how many; default: none")
    add("--profile", type=Path, metavar="FILE", help="a TOML file of what differs from the defaults")
    add("--seed", type=int, default=0, metavar="N", help="of all that is drawn; default: %(default)s")
    add("--json", action="store_true", help="one JSON object instead of lines")


def run(arguments: argparse.Namespace) -> int:
    """Simulate a run and print what it came to. Raises StartupError: the profile cannot be used."""
    profile = Profile() if arguments.profile is None else Profile.load(arguments.profile)
    fleet = Fleet(profile, samplers=arguments.samplers, relays=arguments.relays, seed=arguments.seed)
    fleet.run()
    report = Report.of(fleet)
    print(json.dumps(dataclasses.asdict(report)) if arguments.json else "\n".join(report.lines()))
    return ExitCode.DRAINED


def _count(text: str, *, least: int = 1) -> int:
    if not text.isdecimal() or not least <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to 100000")
    return int(text)
