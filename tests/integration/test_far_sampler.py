"""A sampler whose line takes longer than the head takes to move on: it follows."""

import asyncio
import random
import time
from pathlib import Path

from deploy.demo.link_emulator import LinkEmulator, LinkProfile
from node.clock import SystemClock
from node.rpc.channel import Purpose, dial
from node.weights.transfer.sources import Source
from support.identity import MadeRun, make_run
from support.policy_hub import PolicyHub, Pushing, policy_hub
from support.policy_sync import syncing

DELAY_S = 0.5
"""Each way: six versions and more than one keyframe are published in a round trip."""

PERIOD_S = 0.15
KEYFRAME_EVERY = 5
RETAINED_KEYFRAMES = 2
FETCHES = 12


async def publish(hub: PolicyHub, versions: int) -> None:
    for number in range(1, versions + 1):
        began_s = time.monotonic()
        await asyncio.to_thread(hub.learner.put, hub.store, (number, number - 1))
        if number % KEYFRAME_EVERY == 0:
            await asyncio.to_thread(hub.learner.put, hub.store, (number, None))
        await asyncio.sleep(max(0.0, began_s + PERIOD_S - time.monotonic()))


async def far_source(hub: PolicyHub, link_address: str, made: MadeRun) -> Source:
    control, bulk = [
        await hub.own(dial(link_address, made.sampler, purpose=purpose, now=made.made_at_s))
        for purpose in (Purpose.CONTROL, Purpose.BULK)
    ]
    return Source(link_address, control, (bulk,))


async def test_a_head_that_moves_faster_than_the_line_is_followed(tmp_path: Path) -> None:
    made = make_run(tmp_path, now=time.time())
    state_dir = tmp_path / "sampler"
    state_dir.mkdir()
    versions = int(FETCHES * 2 * DELAY_S / PERIOD_S)
    async with policy_hub(made, tmp_path / "hub") as hub:
        hub.servicer.pushes = Pushing.PUSHES
        hub.learner.words(versions)
        host, port = hub.serving.address.rsplit(":", 1)
        emulator = LinkEmulator(
            target=(host, int(port)),
            profile=LinkProfile(delay_s=DELAY_S),
            clock=SystemClock(),
            random_source=random.Random(0),
        )
        async with await emulator.listen("127.0.0.1", 0) as server:
            link = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            source = await far_source(hub, link, made)
            async with syncing(hub, state_dir, sources=(source,)) as serving:
                await publish(hub, versions)
                taken = serving.numbers[1:]
                waited_s = serving.registry.value(
                    "heterorl_node_wait_seconds_total", **{"for": "policy fetch"}
                )
            server.close()
            await emulator.cut()
    assert len(taken) >= FETCHES // 3, f"of {versions} versions published it took {taken}"
    # In flight when it left, under way while one round trip passed, and no keyframe just behind it.
    in_a_round_trip = 2 * DELAY_S / PERIOD_S
    assert versions - taken[-1] <= 3 * in_a_round_trip + KEYFRAME_EVERY, f"of {versions} it holds {taken[-1]}"
    assert waited_s > DELAY_S
