"""How long peers wait between two heartbeats, by how many they are; pure.

A fleet of up to ``HEARTBEATS_PER_S`` times the configured interval keeps that interval. In a larger one each
peer waits longer, so that the coordinator spends the same on heartbeats however many peers there are.
Samplers that were leased nothing wait as long before they ask again. Each pause is drawn anew, so that peers
that came back at one moment do not stay in step.
"""

from typing import Final

HEARTBEATS_PER_S: Final = 1000.0
"""Limit for the whole fleet: three quarters of a core (``python -m bench.peers``)."""

JITTER: Final = 0.2
"""Each pause is up to so much of it shorter or longer."""

LEASE_PART: Final = 4.0
"""A lease lasts at least so many pauses, since heartbeats renew it."""

SILENT_PAUSES: Final = 3.0
"""A peer is not silent before it has missed so many."""


def pause_s(*, interval_s: float, peers: int, lease_ttl_s: float) -> float:
    """Return the mean pause of a fleet of so many ``peers``."""
    return max(interval_s, min(peers / HEARTBEATS_PER_S, lease_ttl_s / LEASE_PART))


def drawn_pause_s(mean_s: float, random: float) -> float:
    """Return one pause; ``random`` is in [0, 1)."""
    return mean_s * (1.0 + JITTER * (2.0 * random - 1.0))


def silence_s(*, configured_s: float, pause_s: float) -> float:
    """Return the time without a heartbeat after which a peer is silent."""
    return max(configured_s, SILENT_PAUSES * pause_s)
