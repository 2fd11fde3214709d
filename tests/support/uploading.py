"""A learner's uploader in the background of a test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from node.rpc.channel import Purpose, dial
from node.weights.store.artifact_store import ArtifactStore
from node.weights.transfer.artifact_uploader import ArtifactUploader
from support.identity import MadeRun
from support.policy_hub import Registry


@asynccontextmanager
async def uploading(
    made: MadeRun, store: ArtifactStore, address: str, *, channels: int = 1
) -> AsyncIterator[Registry]:
    """Run an uploader from ``store``; what ends it ends the body."""
    registry = Registry()
    control = dial(address, made.learner, purpose=Purpose.CONTROL, now=made.made_at_s)
    bulk = [dial(address, made.learner, purpose=Purpose.BULK, now=made.made_at_s) for _ in range(channels)]
    uploader = ArtifactUploader(
        store, control=control, bulk=bulk, metrics=registry.metrics, random=lambda: 0.01
    )
    stopping = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(uploader.run(ready=lambda: None, stopping=stopping))
            yield registry
            stopping.set()
    finally:
        for channel in (control, *bulk):
            await channel.close()
