"""A relay as a process of its own: it enrols, serves, is killed without warning, and goes on."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from deploy.runs.run_directory import free_ports
from node.enrolment.tokens import issue_token
from node.values.policy import ArtifactKey
from node.values.roles import Role
from node.weights.format.layout import Layout, TensorSpec
from node.weights.transfer.sources import Source, Sources, dial_source
from support.fetching import fetch_version
from support.hub import running_hub
from support.identity import MadeRun, make_run
from support.policy_hub import Registry, make_fetcher, make_sources, policy_hub
from support.warm_processes import AsyncProcess, start_warm
from support.weights import LAYOUT, Learner

WIDE = Layout.of([TensorSpec("a", (200 * 4096,))], frame_words=4096)
"""200 frames: enough to be killed among them."""

KILLS = 3


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path, now=time.time())


class RelayProcess:
    """``heterorl-node --role relay`` in a state directory of its own; may be started again and again."""

    def __init__(self, made: MadeRun, directory: Path, *, coordinator: str, token: str) -> None:
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self._made = made
        self._log = directory / "log"
        directory.mkdir(mode=0o700)
        token_file = directory / "token"
        token_file.write_text(token)
        self._arguments = [
            *("--role", "relay", "--coordinator", coordinator),
            *("--state-dir", str(directory), "--run-file", str(made.directory / "run.json")),
            *("--token-file", str(token_file), "--set", f"relay.listen={self.address}"),
        ]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[AsyncProcess]:
        with self._log.open("ab") as log:
            process = await start_warm(["node", *self._arguments], log, log, env=os.environ)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def source(self) -> Source:
        """Return the relay as a sampler's source, over channels of its own."""
        return dial_source(
            self.address, self._made.sampler, connections=1, now=time.time(), server=Role.RELAY
        )


def enrolment_token(made: MadeRun, address: str) -> str:
    return issue_token(made.authority, role=Role.RELAY, node_id="relay-9", address=address, now=time.time())


async def announces(sources: Sources, version: int) -> None:
    async with asyncio.timeout(30):
        async for announcement in sources.announcements():
            if announcement.head.number == version:
                return


async def fetch_whole(made: MadeRun, learner: Learner, sources: Sources, version: int) -> None:
    """Fetch a keyframe through ``sources`` and hold it to the learner's words."""
    registry = Registry()
    fetcher = make_fetcher(made, sources, registry, attempts=10_000)
    async with asyncio.timeout(60):
        held = await fetch_version(
            fetcher,
            await fetcher.manifest(ArtifactKey(version)),
            layout=learner.layout,
            held=None,
        )
    np.testing.assert_array_equal(held.words, learner.words(version))


async def test_a_relay_enrols_with_its_token_serves_and_drains(made: MadeRun, tmp_path: Path) -> None:
    learner = Learner(layout=LAYOUT, run_id=made.run_id, key=made.signing_key)
    async with running_hub(made) as hub, hub.peer() as peer:
        await peer.join()
        await peer.publish(*learner.signed(1, None))
        enrolment = hub.hub.enrolment_address
        assert enrolment is not None
        relay = RelayProcess(
            made, tmp_path / "relay", coordinator=hub.address, token=enrolment_token(made, enrolment)
        )
        async with relay.running() as process:
            sources = make_sources(Registry(), relay.source())
            await announces(sources, 1)
            await fetch_whole(made, learner, sources, 1)
            async with asyncio.timeout(30):
                while "relay-9" not in {row.node_id for row in (await peer.status()).peers}:
                    pass  # each look is a round trip
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), timeout=30) == 0


@pytest.mark.timeout(180)
async def test_a_relay_killed_at_any_moment_never_serves_wrong_weights_and_goes_on(
    made: MadeRun, tmp_path: Path
) -> None:
    moments = random.Random(7)
    async with running_hub(made) as enrolling:
        enrolment = enrolling.hub.enrolment_address
        assert enrolment is not None
        token = enrolment_token(made, enrolment)
        async with policy_hub(made, tmp_path / "hub", layout=WIDE) as hub:
            relay = RelayProcess(made, tmp_path / "relay", coordinator=hub.serving.address, token=token)
            for version in range(1, KILLS + 1):
                await asyncio.to_thread(hub.learner.put, hub.store, (version, None))
                async with relay.running() as process:
                    sources = make_sources(Registry(), relay.source())
                    await announces(sources, version)
                    fetching = asyncio.create_task(fetch_whole(made, hub.learner, sources, version))
                    await asyncio.sleep(moments.uniform(0.0, 0.3))
                    process.kill()
                    await process.wait()
                async with relay.running():
                    await fetching
