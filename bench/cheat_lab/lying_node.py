"""``python -m bench.cheat_lab.lying_node``: a sampler that draws honestly and lies about training's rewards.

The environment variable HETERORL_CHEAT has the cheat as JSON, and HETERORL_LIES the file that the ids of the
groups lied about are written to.
"""

import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.cheat_lab.lies import Cheat
from node.commands.cli import main

CHEAT: Final = "HETERORL_CHEAT"
LIES: Final = "HETERORL_LIES"


def lie(cheat: Cheat, told: Path) -> None:
    """Make every GroupPipeline of this process change the rewards that it submits."""
    pipeline = importlib.import_module("sampler.rollouts.group_pipeline").GroupPipeline
    honest, groups = pipeline._group, 0

    def group_of(self: Any, job: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal groups
        group = honest(self, job, *arguments, **keywords)
        if job.lease.purpose != "training":
            return group
        rewards = [one.reward for one in group.completions]
        claimed = cheat.rewards(groups, rewards)
        groups += 1
        if claimed == rewards:
            return group
        with told.open("a") as file:
            file.write(f"{group.group_id}\n")
        completions = (
            replace(one, reward=reward) for one, reward in zip(group.completions, claimed, strict=True)
        )
        return replace(group, completions=tuple(completions))

    pipeline._group = group_of


def run() -> Any:
    """Run a node with the cheat that the environment asks for."""
    # As in node.commands.cli, before grpc is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    lie(Cheat(**json.loads(os.environ.pop(CHEAT))), Path(os.environ.pop(LIES)))
    return main()


if __name__ == "__main__":
    sys.exit(run())
