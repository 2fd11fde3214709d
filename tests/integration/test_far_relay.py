"""A relay whose link takes longer than the head takes to move on: what it serves follows."""

import asyncio
import random
import time
from pathlib import Path

from deploy.demo.link_emulator import LinkEmulator, LinkProfile
from node.clock import SystemClock
from support.identity import make_run
from support.policy_hub import PolicyHub, Pushing, Registry, make_sources, policy_hub
from support.relay import running_relay

DELAY_S = 0.5
"""Each way: six versions and more than one keyframe are published in a round trip."""

PERIOD_S = 0.15
KEYFRAME_EVERY = 5
FETCHES = 12


async def publish(hub: PolicyHub, versions: int) -> None:
    for number in range(1, versions + 1):
        began_s = time.monotonic()
        await asyncio.to_thread(hub.learner.put, hub.store, (number, number - 1))
        if number % KEYFRAME_EVERY == 0:
            await asyncio.to_thread(hub.learner.put, hub.store, (number, None))
        await asyncio.sleep(max(0.0, began_s + PERIOD_S - time.monotonic()))


async def test_a_head_that_moves_faster_than_the_link_of_a_relay_is_followed(tmp_path: Path) -> None:
    made = make_run(tmp_path, now=time.time())
    versions = int(FETCHES * 2 * DELAY_S / PERIOD_S)
    served: list[int] = []

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
            async with running_relay(made, tmp_path / "relay", coordinator=link) as relay:
                sources = make_sources(Registry(), relay.source())

                async def listen() -> None:
                    async for announcement in sources.announcements():
                        served.append(announcement.head.number)

                listening = asyncio.create_task(listen())
                await publish(hub, versions)
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
            server.close()
            await emulator.cut()
    heads = sorted(set(served))
    assert len(heads) >= FETCHES // 3, f"of {versions} versions published it served {heads}"
    in_a_round_trip = 2 * DELAY_S / PERIOD_S
    assert versions - heads[-1] <= 3 * in_a_round_trip + KEYFRAME_EVERY, (
        f"of {versions} it serves {heads[-1]}"
    )
