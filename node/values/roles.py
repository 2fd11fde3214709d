"""The roles of peers, and what the rest of the system must know of each.

    a role's room    its section of the configuration, and ``build``, which makes its services
    its row here     where these two are, and what it has that others ask for
    common.proto     its number, for Join

Code that treats roles alike for what they have asks the row. So a new role needs these three, and its room a
place in pyproject.toml. What is particular to one, such as an rpc that it alone may call, is said there.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


class Role(enum.StrEnum):
    """The role of a peer, which decides what it may do.

    In the order in which roles of one process start: hubs before the peers that dial them.
    """

    COORDINATOR = "coordinator"
    RELAY = "relay"
    LEARNER = "learner"
    CONTRIBUTOR = "contributor"
    SAMPLER = "sampler"
    VERIFIER = "verifier"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTraits:
    """A role that a process runs, as the rest of the system sees it."""

    build: str
    """``async (RoleContext) -> list[Service]``, as ``package.module:function``. Imported once all values are
    known to be right: --help and a wrong one never pay for torch or grpc."""
    config: str
    """The model of its section, which has the role's name, as ``package.module:Class``. Imports neither."""
    server_name: str = ""
    """First label of the name by which others dial it; see ``node.identity.peer``. Empty: it serves nobody,
    and needs no address."""
    is_hub: bool = False
    """Whether it serves policy versions, at its key ``listen``."""
    has_model: bool = False
    """Whether it loads the run's model and computes with it."""
    grades: bool = False
    """Whether it runs the task's grader, whose code must be the run's."""
    version_gauge: str = ""
    """Its metric with the policy version that it has; empty: it never has one."""


ROLES: Final[Mapping[Role, RoleTraits]] = {
    Role.COORDINATOR: RoleTraits(
        build="node.coordinator.coordinator_role:build",
        config="node.coordinator.config:CoordinatorConfig",
        server_name="hub",
        is_hub=True,
        version_gauge="heterorl_coordinator_head_version",
    ),
    Role.RELAY: RoleTraits(
        build="node.relay.relay_role:build",
        config="node.relay.config:RelayConfig",
        server_name="relay",
        is_hub=True,
        version_gauge="heterorl_relay_head_version",
    ),
    Role.LEARNER: RoleTraits(
        build="learner.learner_role:build",
        config="learner.config:LearnerConfig",
        server_name="learner",  # for contributors
        has_model=True,
        version_gauge="heterorl_learner_version",
    ),
    Role.CONTRIBUTOR: RoleTraits(
        build="learner.contributor_role:build",
        config="learner.contributor.config:ContributorConfig",
        has_model=True,
        version_gauge="heterorl_contributor_version",
    ),
    Role.SAMPLER: RoleTraits(
        build="sampler.sampler_role:build",
        config="sampler.config:SamplerConfig",
        has_model=True,
        grades=True,
        version_gauge="heterorl_sampler_held_version",
    ),
    Role.VERIFIER: RoleTraits(
        build="sampler.verifier_role:build",
        config="sampler.config:VerifierConfig",
        grades=True,
    ),
}
"""Role -> its row. An operator is a role of certificates alone."""

MEMBER_ROLES: Final = tuple(role for role in ROLES if role is not Role.COORDINATOR)
"""Roles that join a run and send heartbeats."""

VERSIONED_ROLES: Final = frozenset(role for role, traits in ROLES.items() if traits.version_gauge)
"""Roles that have a policy version; others cannot be behind."""
