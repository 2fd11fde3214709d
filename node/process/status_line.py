"""The line of `systemctl status`: the versions that a process has, and what it waits for."""

import math
from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry

from node.run import Role

VERSIONS: Final = {
    Role.COORDINATOR: "heterorl_coordinator_head_version",
    Role.RELAY: "heterorl_relay_head_version",
    Role.LEARNER: "heterorl_learner_version",
    Role.SAMPLER: "heterorl_sampler_held_version",
}
"""Gauge of the version that a role has."""


def status_line(registry: CollectorRegistry, roles: Sequence[Role], *, waits_for: str) -> str:
    """Return each role with its version, and what the process waits for."""
    having = ", ".join(_role(registry, role) for role in roles)
    return f"{having}; waits for {waits_for}" if waits_for else having


def _role(registry: CollectorRegistry, role: Role) -> str:
    # The registry's other metrics are not asked: a coordinator has the fleet's.
    found = registry.restricted_registry([gauge] if (gauge := VERSIONS.get(role)) else []).collect()
    values = [sample.value for metric in found for sample in metric.samples]
    known = [value for value in values if math.isfinite(value) and value >= 0]
    return f"{role} at version {known[0]:.0f}" if known else str(role)
