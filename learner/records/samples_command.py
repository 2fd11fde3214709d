"""``heterorl-node samples``: what the model writes, as the learner wrote it down while it trained."""

import argparse
import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from rich.console import Console
from rich.text import Text

from learner.state_argument import add_learner_state, learner_state
from node.errors import StartupError
from node.exit_code import ExitCode
from node.page.samples_file import FILE_NAME, GroupSample, SamplesFile
from node.text.visible_text import quoted

REFRESH_S: Final = 1.0

FOLLOWED_GROUPS: Final = 256
"""Newest groups compared with those of the refresh before: more than a learner writes in a second."""

EXAMPLE: Final = """\
  heterorl-node samples --state-dir runs/hand/learner --follow
  heterorl-node samples --state-dir runs/hand/learner --worst --count 10

A learner writes down the first groups that arrive (as version 0), then some of every
learner.samples_every_versions-th batch, and keeps the newest 32 to 64 MiB. It may be running.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_learner_state(parser)
    parser.add_argument("--version", type=int, help="only what the step that made this version consumed")
    parser.add_argument(
        "--count", type=_positive, default=5, help="newest groups, or best or worst completions; default: 5"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line; ASCII only")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--follow", action="store_true", help="go on with new ones until Ctrl-C")
    which.add_argument("--best", action="store_true", help="the completions of highest reward")
    which.add_argument("--worst", action="store_true", help="the completions of lowest reward")


def run(arguments: argparse.Namespace) -> int:
    """Print samples.

    Raises:
        StartupError: the learner has written none.
    """
    path = learner_state(arguments) / FILE_NAME
    file = SamplesFile(path)
    if not path.exists() and not arguments.follow:
        raise StartupError(
            f"there are no samples at {path}",
            fix="--state-dir is the learner's node.state_dir; the first samples come with the first groups, "
            "with learner.samples_every_versions = 0 none. Before there is a run, use `heterorl-node try`.",
        )
    try:
        seen = file.newest(FOLLOWED_GROUPS)
        _print(_chosen(file, arguments), as_json=arguments.json)
        while arguments.follow:
            time.sleep(REFRESH_S)
            newest = file.newest(FOLLOWED_GROUPS)
            appended = [group for group in newest if group not in seen]
            _print(filter(_filter(arguments.version), appended), as_json=arguments.json)
            seen = newest
    except KeyboardInterrupt:
        pass
    return ExitCode.DRAINED


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _chosen(file: SamplesFile, arguments: argparse.Namespace) -> list[GroupSample]:
    of_version = filter(_filter(arguments.version), file.all())
    if not (arguments.best or arguments.worst):
        if arguments.version is None:
            return file.newest(arguments.count)
        return list(deque(of_version, maxlen=arguments.count))
    single = (replace(group, completions=(one,)) for group in of_version for one in group.completions)
    pick = heapq.nlargest if arguments.best else heapq.nsmallest
    return pick(arguments.count, single, key=lambda group: group.completions[0].reward)


def _filter(version: int | None) -> Callable[[GroupSample], bool]:
    return lambda group: version is None or group.version == version


def _print(groups: Iterable[GroupSample], *, as_json: bool) -> None:
    # Lines are not wrapped: a terminal does that, and a pipe wants them whole.
    console = Console(soft_wrap=True, highlight=False)
    for group in groups:
        if as_json:
            print(group.to_json(), flush=True)
            continue
        # Text, not markup: a completion may hold [square brackets].
        console.print(Text(group.heading, "bold"))
        console.print(Text(quoted(group.prompt), "dim"))
        for completion in group.completions:
            style = "green" if completion.advantage > 0 else "red" if completion.advantage < 0 else "yellow"
            console.print(Text(completion.heading, style))
            console.print(Text(quoted(completion.text)))
        console.print()
