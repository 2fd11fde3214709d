"""Keys that a release took away, and what to write in their place; pure."""

from typing import Final

REMOVED: Final = {
    "coordinator.shown_samplers": (
        "0.4",
        "Leave it out, and let Prometheus read the pages of those samplers.",
    ),
    "relay.spool_bytes": ("0.4", "Leave it out: a relay keeps no groups, samplers do."),
    "relay.spool_groups": ("0.4", "Leave it out: a relay keeps no groups, samplers do."),
    "sampler.rollout_via": ("0.4", "Name the relay in sampler.relays."),
}
"""Key -> the release that removed it, what to do now."""
