"""Learners in the foreground of a test: a whole one, and one by hand."""

import asyncio
import json
from pathlib import Path
from typing import Any

from learner import learner_role
from learner.config import LearnerConfig
from node.exit_code import ExitCode
from node.process.daemon import StartStage, run_daemon
from node.process.service import Service
from node.values.groups.rollout import RolloutGroup
from node.values.roles import Role
from node.wire.rollouts import encoded_from_wire, group_from_wire
from support.hub import HandDrain
from support.identity import MadeRun
from support.roles import role_context
from support.waiting import WITHIN_S


async def learn(
    made: MadeRun, hub: str, model_dir: Path, *, versions: int, learning_rate: float = 1e-3
) -> ExitCode:
    """Run the learner's daemon for so many versions, as somebody who knows the coordinator at ``hub``."""
    section = LearnerConfig(
        model_dir=model_dir, learning_rate=learning_rate, threads=1, max_versions=versions
    )
    context = role_context(made, Role.LEARNER, section, hub=hub)

    async def build() -> list[Service]:
        return await learner_role.build(context)

    async with asyncio.timeout(60):
        return await run_daemon([StartStage("learner", build)], drain_timeout_s=10, announce=lambda _: None)


def steps_of(made: MadeRun) -> list[dict[str, Any]]:
    """Return the lines that the learner wrote of its steps."""
    lines = (made.directory / "learner" / "steps.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def has_learnt(made: MadeRun, *, versions: int) -> bool:
    """Say whether rewards rose by a fifth over so many steps."""
    rewards = [step["reward_mean"] for step in steps_of(made)]
    return len(rewards) == versions and sum(rewards[-3:]) > sum(rewards[:3]) + 3 * 0.2


async def trained(drain: HandDrain, *, groups: int) -> list[RolloutGroup]:
    """Train on each group by itself until there are so many; return them."""
    received: list[RolloutGroup] = []
    async with asyncio.timeout(WITHIN_S):
        while len(received) < groups:
            response = await drain.hear()
            if response.WhichOneof("message") == "group":
                received.append(group_from_wire(encoded_from_wire(response.group)))
                await drain.step(len(received), received[-1].group_id)
    return received
