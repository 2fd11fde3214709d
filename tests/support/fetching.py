"""Versions fetched whole, as a peer without an engine would."""

import asyncio

from bench.held_policy import HeldPolicy
from node.weights.format.layout import Layout
from node.weights.format.manifest import Manifest
from node.weights.transfer.fetcher import Fetcher
from support.whole_version import WholeVersion


async def fetch_version(
    fetcher: Fetcher,
    manifest: Manifest,
    *,
    layout: Layout,
    held: HeldPolicy | None,
) -> HeldPolicy:
    """Return the manifest's version, every frame and the root verified; CPU work is done in threads.

    Args:
        manifest: verified, from ``fetcher.manifest``.
        held: what it starts from; for a keyframe anything or nothing.
    Raises:
        RefusedError: WRONG_BASE, if ``held`` cannot be used: plan again from NO_BASE; others as
            ``Stage`` and ``Fetcher.fetch``. ``held`` is as it was.
        ConnectionLost: as ``Fetcher.fetch``.
    """
    assembly = await fetcher.fetch_into(lambda: WholeVersion(manifest, layout=layout, base=held), manifest)
    return await asyncio.to_thread(assembly.finish)
