"""``python -m bench.cheat_lab.lying_node``: a sampler that cheats in training, and is honest otherwise.

The environment variable HETERORL_CHEAT has the cheat as JSON; HETERORL_LIES the file to which it writes the
id of each group that it lied about, and the time; HETERORL_LEAGUE a directory that all liars of the run
share.
"""

import asyncio
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.cheat_lab.lies import DRAWS, LATE, NAMES, PROMPTS, WEIGHTS, Cheat
from bench.cheat_lab.other_draws import Draw, copied, random_tokens, replayed
from bench.cheat_lab.other_weights import Change, draw_by, eight_bit, noisy, stale
from node.commands.cli import main

CHEAT: Final = "HETERORL_CHEAT"
LIES: Final = "HETERORL_LIES"
LEAGUE: Final = "HETERORL_LEAGUE"

LATE_S: Final = 6.0
"""The demo's learner makes some ten versions meanwhile."""

_CHANGES: Final[Mapping[str, Callable[[], Change]]] = {
    "another model": lambda: noisy(seed=1),
    "stale version": stale,
    "base model": lambda: stale(math.inf),
    "8-bit weights": eight_bit,
}


def environment(cheat: Cheat, *, lies: Path, league: Path) -> dict[str, str]:
    """Return the variables with which this node cheats; makes the league's directory."""
    league.mkdir(exist_ok=True)
    return {CHEAT: json.dumps(asdict(cheat)), LIES: str(lies), LEAGUE: str(league)}


def lie(cheat: Cheat, told: Path, league: Path) -> None:
    """Make every GroupPipeline of this process cheat."""
    pipeline = importlib.import_module("sampler.rollouts.group_pipeline").GroupPipeline
    replaced = _replace_draws(pipeline, cheat, league) if cheat.lie in DRAWS else set[str]()
    if cheat.lie in _CHANGES:
        draw_by(_CHANGES[cheat.lie]())
    if cheat.lie in PROMPTS:
        replaced = _exchange_digits(cheat)
    if cheat.lie == LATE:
        _hand_in_late(pipeline)
        return
    names = OtherNames(cheat.versions) if cheat.lie in NAMES else None
    honest, groups = pipeline._group, 0

    def group_of(self: Any, job: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal groups
        group = honest(self, job, *arguments, **keywords)
        if job.lease.purpose != "training":
            return group
        number, groups = groups, groups + 1
        if names is not None:
            claimed = names.of(group) if cheat.is_due(number) else group
        else:
            rewards = cheat.rewards(number, [one.reward for one in group.completions])
            pairs = zip(group.completions, rewards, strict=True)
            claimed = replace(group, completions=tuple(replace(one, reward=r) for one, r in pairs))
            is_other = group.group_id in replaced or cheat.lie in WEIGHTS
            if not is_other and rewards == [one.reward for one in group.completions]:
                return group
        if claimed is not group:
            with told.open("a") as file:
                file.write(f"{group.group_id} {time.time()}\n")
        return claimed

    pipeline._group = group_of


class OtherNames:
    """Names the newest version held here that is some versions older than the one that drew a token."""

    def __init__(self, versions: int) -> None:
        self._versions = versions
        self._held = {0}

    def of(self, group: Any) -> Any:
        """Return the group with other names; itself where there is no older one."""
        completions = tuple(
            replace(one, policy_version=np.array([*map(self._older, one.policy_version.tolist())], np.int32))
            for one in group.completions
        )
        pairs = zip(completions, group.completions, strict=True)
        is_same = all((named.policy_version == one.policy_version).all() for named, one in pairs)
        return group if is_same else replace(group, completions=completions)

    def _older(self, version: int) -> int:
        self._held.add(version)
        return max((one for one in self._held if one <= version - self._versions), default=min(self._held))


def _hand_in_late(pipeline: Any) -> None:
    """Make every GroupPipeline of this process wait before a group goes on."""
    honest = pipeline.finished

    def finished(self: Any, request: Any) -> None:
        asyncio.get_running_loop().call_later(LATE_S, honest, self, request)

    pipeline.finished = finished


def _replace_draws(pipeline: Any, cheat: Cheat, league: Path) -> set[str]:
    """Make every GroupPipeline hand in other tokens; return where the ids of these groups will be."""
    honest, draw, groups, replaced = pipeline.finished, None, 0, set[str]()

    def finished(self: Any, request: Any) -> None:
        nonlocal draw, groups
        draw = draw or _draw(cheat.lie, self._engine, league)
        job = self._turns._jobs.get(request.request_id)
        if job is not None and job.lease.purpose == "training":
            completions = request.completions
            if cheat.is_due(groups):
                completions = draw(request.prompt_token_ids, request.completions)
            groups += 1
            if completions is not request.completions:
                replaced.add(request.request_id)
                request = replace(request, completions=completions)
        honest(self, request)

    pipeline.finished = finished
    return replaced


def _exchange_digits(cheat: Cheat) -> set[str]:
    """Make every task ask for b+a in place of a+b; return where the ids of these groups will be."""
    task = importlib.import_module("sampler.rollouts.run_task").RunTask
    honest, groups, replaced = task.prompt, 0, set[str]()

    async def prompt(self: Any, lease: Any, tokenizer: Any) -> Any:
        nonlocal groups
        made = await honest(self, lease, tokenizer)
        first, plus, second, equals = made.token_ids
        if lease.purpose != "training" or first == second:
            return made
        groups += 1
        if not cheat.is_due(groups - 1):
            return made
        replaced.add(lease.lease_id)
        return replace(made, token_ids=np.array([second, plus, first, equals], np.int32))

    task.prompt = prompt
    return replaced


def _draw(name: str, engine: Any, league: Path) -> Draw:
    if name == "replay":
        return replayed()
    if name == "copies":
        return copied(league, name=f"sampler-{os.getpid()}")
    tokenizer = engine.tokenizer
    return random_tokens(len(tokenizer._tokenizer), tokenizer.end_ids, seed=os.getpid())


def run() -> Any:
    """Run a node with the cheat that the environment asks for."""
    # As in node.commands.cli, before grpc is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    cheat = Cheat(**json.loads(os.environ.pop(CHEAT)))
    lie(cheat, Path(os.environ.pop(LIES)), Path(os.environ.pop(LEAGUE)))
    return main()


if __name__ == "__main__":
    sys.exit(run())
