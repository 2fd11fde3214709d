"""Setup of a mirror of policy versions, which a relay and a contributor share."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Final

from node.process.coordinator_link import CoordinatorLink
from node.values.roles import Role
from node.weights.store.artifact_store import ArtifactStore
from node.weights.transfer.fetcher import Fetcher
from node.weights.transfer.mirror import Mirror
from node.weights.transfer.sources import Sources, dial_source

BULK_CONNECTIONS: Final = 4
"""For weights, to each source. A relay passes a frame on when all of it has arrived. The more frames share a
link, the later the first one arrives: at 100 Mbit/s each hop costs 0.8 s with four and 1.6 s with eight."""


def make_mirror(link: CoordinatorLink, store: ArtifactStore, *, relays: Sequence[str]) -> Mirror:
    """Return the service that keeps ``store`` like what ``relays`` serve, or the coordinator without any.

    Raises StartupError: as ``dial``.
    """
    context = link.context
    dial_upstream = partial(
        dial_source, caller=link.caller, connections=BULK_CONNECTIONS, now=context.clock.now()
    )
    coordinator = dial_upstream(link.hub, control=link.control)
    upstream = [dial_upstream(address, server=Role.RELAY) for address in relays]
    # A peer whose way to the coordinator is another relay has weights from that one alone.
    is_reached_by_relays = set(link.hub.addresses) <= set(relays)
    sources = Sources(
        upstream or [coordinator],
        last_resort=coordinator if upstream and not is_reached_by_relays else None,
        clock=context.clock,
        random=random.random,
        metrics=context.transfer_metrics,
    )
    fetcher = Fetcher(
        sources,
        public_key=context.run.learner_public_key,
        run_id=context.run.run_id,
        metrics=context.transfer_metrics,
        random=random.random,
    )
    return Mirror(
        store,
        fetcher,
        watch=sources.announcements,
        count_refusal=context.node_metrics.count_refusal,
        random=random.random,
    )
