"""``heterorl-node export``: a version as a model directory."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from learner.publishing.available_versions import check_available
from learner.state_argument import add_learner_state, learner_state
from node.errors import COMMAND_LINE
from node.exit_code import ExitCode
from node.system.extras import TORCH, NeededPackage

EXAMPLE: Final = """\
  heterorl-node export runs/hand/exported --state-dir runs/hand/learner --model-dir runs/hand/model

The newest version, unless --version names another that the learner still has: those published lately, its
last two checkpoints, the best, every learner.keep_every_versions-th, and some older ones, spaced out
(learner.keep_spaced_versions). --best is the version that did best in evaluations; without any, the newest
one when the mean training reward over learner.stop_window_versions was highest. The learner may be running.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="made by the export; must not exist yet")
    add_learner_state(parser)
    parser.add_argument(
        "--model-dir", type=Path, required=True, help="the run's base model: learner.model_dir"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--version", type=int, help="which version; default: the newest")
    which.add_argument("--best", action="store_true", help="the best version that the learner knows of")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def run(arguments: argparse.Namespace) -> int:
    """Export a version.

    Raises:
        ConfigError: torch is not installed.
        StartupError: the version is not there, a file is damaged, or the directory cannot be written.
    """
    state = learner_state(arguments)
    if arguments.version is not None:
        check_available(state, arguments.version)
    for package in TORCH:
        NeededPackage("command", "export", package, "learner", source=COMMAND_LINE).check()
    from learner.export import best_version, export_version  # torch, which --help does not need

    version = best_version(state) if arguments.best else arguments.version
    export = export_version(arguments.directory, state=state, model_dir=arguments.model_dir, version=version)
    if arguments.json:
        print(json.dumps(asdict(export)))
    else:
        print(f"version {export.version}, root {export.root}, is in {export.directory}")
    return ExitCode.DRAINED
