"""Versions fetched whole, as a peer without an engine would."""

import asyncio

from bench.whole_versions import WholeVersion
from node.telemetry.transfer_metrics import TransferMetrics
from node.weights.assembly.held import HeldPolicy
from node.weights.format.digests import Words
from node.weights.format.layout import Layout
from node.weights.format.manifest import Manifest
from node.weights.transfer.advance import fetch_into
from node.weights.transfer.fetcher import Fetcher


async def fetch_version(
    fetcher: Fetcher,
    manifest: Manifest,
    *,
    layout: Layout,
    held: HeldPolicy | None,
    spare: Words | None,
    metrics: TransferMetrics,
) -> HeldPolicy:
    """Return the manifest's version, every frame and the root verified; CPU work is done in threads.

    Args:
        manifest: verified, from ``fetcher.manifest``.
        held: what it starts from; for a keyframe anything or nothing.
        spare: overwritten, and then owned by the result; None: allocated.
    Raises:
        RefusedError: WRONG_BASE, if ``held`` cannot be used: plan again from NO_BASE; others as
            ``Stage`` and ``Fetcher.fetch``. ``held`` is as it was, ``spare`` is worthless.
        ConnectionLost: as ``Fetcher.fetch``.
    """
    assembly = WholeVersion(manifest, layout=layout, base=held, spare=spare)
    await fetch_into(assembly, fetcher, manifest, metrics=metrics)
    return await asyncio.to_thread(assembly.finish)
