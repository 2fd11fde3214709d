"""Harm that one sampler can do to a run, and the answer to it: a real coordinator, peers by hand."""

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path

from heterorl.v1 import membership_pb2
from node.commands import pardon_command
from support.enrolled import let_in
from support.hub import HandPeer, running_hub
from support.identity import MadeRun


async def until_status(
    learner: HandPeer, condition: Callable[[membership_pb2.GetStatusResponse], bool]
) -> None:
    for _ in range(200):
        if condition(await learner.status()):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(await learner.status())


def command(module: object, directory: Path, *nodes: str) -> None:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)  # type: ignore[attr-defined]
    assert module.run(parser.parse_args([*nodes, "--state-dir", str(directory)])) == 0  # type: ignore[attr-defined]


async def test_a_pardon_asked_while_the_coordinator_is_away_is_taken_once_it_is_back(made: MadeRun) -> None:
    (made.directory / "coordinator").mkdir(exist_ok=True)
    let_in(made.directory, made.sampler.node_id)
    command(pardon_command, made.directory, "all")
    command(pardon_command, made.directory, made.sampler.node_id)
    async with running_hub(made) as hub, hub.peer(made.sampler) as sampler:
        await sampler.join()
        assert not list((made.directory / "coordinator").glob("pardoned*"))
