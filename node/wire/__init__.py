"""The only translator between our values and ``heterorl.v1``.

Nothing that comes off the wire is believed here: lengths are compared before arrays are
made, enums are mapped explicitly, and whatever does not fit is a ``RefusedError``. Rules
about meaning (finite, in range, wanted) live with the values, not here. Fields unknown to
this version are ignored, as protobuf promises; enum values unknown to it are refused.
"""

from node.wire.members import (
    metric_families_from_wire,
    metric_families_to_wire,
    peer_status_from_wire,
    peer_status_to_wire,
    revocations_from_wire,
    revocations_to_wire,
    role_from_wire,
    role_to_wire,
    run_status_from_wire,
    run_status_to_wire,
    settings_from_wire,
    settings_to_wire,
    step_report_from_wire,
    step_report_to_wire,
)
from node.wire.policies import (
    announcement_from_wire,
    announcement_to_wire,
    artifact_key_from_wire,
    artifact_key_to_wire,
    policy_version_from_wire,
    policy_version_to_wire,
)
from node.wire.rollouts import (
    delivered_group_from_wire,
    delivered_group_to_wire,
    failed_lease_from_wire,
    failed_lease_to_wire,
    group_from_wire,
    group_to_wire,
    lease_from_wire,
    lease_to_wire,
    sampling_from_wire,
    sampling_to_wire,
    step_record_from_wire,
    step_record_to_wire,
    verdict_from_wire,
    verdict_to_wire,
)

__all__ = [
    "announcement_from_wire",
    "announcement_to_wire",
    "artifact_key_from_wire",
    "artifact_key_to_wire",
    "delivered_group_from_wire",
    "delivered_group_to_wire",
    "failed_lease_from_wire",
    "failed_lease_to_wire",
    "group_from_wire",
    "group_to_wire",
    "lease_from_wire",
    "lease_to_wire",
    "metric_families_from_wire",
    "metric_families_to_wire",
    "peer_status_from_wire",
    "peer_status_to_wire",
    "policy_version_from_wire",
    "policy_version_to_wire",
    "revocations_from_wire",
    "revocations_to_wire",
    "role_from_wire",
    "role_to_wire",
    "run_status_from_wire",
    "run_status_to_wire",
    "sampling_from_wire",
    "sampling_to_wire",
    "settings_from_wire",
    "settings_to_wire",
    "step_record_from_wire",
    "step_record_to_wire",
    "step_report_from_wire",
    "step_report_to_wire",
    "verdict_from_wire",
    "verdict_to_wire",
]
