"""A sampler and a relay whose lines take longer than the head takes to move on: they follow."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from deploy.demo.link_emulator import LinkEmulator, LinkProfile
from node.rpc.channel import Purpose, dial
from node.system.clock import SystemClock
from node.weights.transfer.sources import Source
from support.identity import MadeRun
from support.policy_hub import PolicyHub, Pushing, Registry, make_sources, policy_hub
from support.policy_sync import syncing
from support.relay import running_relay

DELAY_S = 0.3
"""Each way: six versions and more than one keyframe are published in a round trip."""

PERIOD_S = 0.09
KEYFRAME_EVERY = 5
FETCHES = 12
VERSIONS = int(FETCHES * 2 * DELAY_S / PERIOD_S)


async def publish(hub: PolicyHub) -> None:
    for number in range(1, VERSIONS + 1):
        began_s = time.monotonic()
        await asyncio.to_thread(hub.learner.put, hub.store, (number, number - 1))
        if number % KEYFRAME_EVERY == 0:
            await asyncio.to_thread(hub.learner.put, hub.store, (number, None))
        await asyncio.sleep(max(0.0, began_s + PERIOD_S - time.monotonic()))


@asynccontextmanager
async def far_line(hub: PolicyHub) -> AsyncIterator[str]:
    """Run a line of its own to the hub, and return the address at its far end."""
    host, port = hub.serving.address.rsplit(":", 1)
    emulator = LinkEmulator(
        profile=LinkProfile(delay_s=DELAY_S),
        clock=SystemClock(),
        random_source=random.Random(0),
    )
    async with await emulator.listen("127.0.0.1", 0, target=(host, int(port))) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        await emulator.cut()


async def far_source(hub: PolicyHub, address: str, made: MadeRun) -> Source:
    control, bulk = [
        await hub.own(dial(address, made.sampler, purpose=purpose, now=made.made_at_s))
        for purpose in (Purpose.CONTROL, Purpose.BULK)
    ]
    return Source(address, control, (bulk,))


async def test_a_head_that_moves_faster_than_their_lines_is_followed_by_a_sampler_and_by_a_relay(
    made: MadeRun, tmp_path: Path
) -> None:
    state_dir = tmp_path / "sampler"
    state_dir.mkdir()
    served: set[int] = set()
    async with policy_hub(made, tmp_path / "hub") as hub:
        hub.servicer.pushes = Pushing.PUSHES
        hub.learner.words(VERSIONS)
        async with (
            far_line(hub) as line,
            syncing(hub, state_dir, sources=(await far_source(hub, line, made),)) as serving,
            far_line(hub) as line_of_relay,
            running_relay(made, tmp_path / "relay", coordinator=line_of_relay) as relay,
        ):
            sources = make_sources(Registry(), relay.source())

            async def listen() -> None:
                async for announcement in sources.announcements():
                    served.add(announcement.head.number)

            listening = asyncio.create_task(listen())
            await publish(hub)
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            taken = serving.numbers[1:]
            waited_s = serving.registry.value("heterorl_node_wait_seconds_total", **{"for": "policy fetch"})
    # In flight when it left, under way while one round trip passed, and no keyframe just behind it.
    most_behind = 3 * 2 * DELAY_S / PERIOD_S + KEYFRAME_EVERY
    for followed in (taken, sorted(served)):
        assert len(followed) >= FETCHES // 3, f"of {VERSIONS} versions published it followed to {followed}"
        assert VERSIONS - followed[-1] <= most_behind, f"of {VERSIONS} it is at {followed[-1]}"
    assert waited_s > DELAY_S
