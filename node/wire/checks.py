"""Checks of messages before they become values: sizes and ranges, whatever the sender meant."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from google.protobuf.message import Message

from heterorl.v1 import common_pb2, membership_pb2, policy_pb2, rollout_pb2
from node.errors import Reason, RefusedError
from node.identity.peer import is_name
from node.values import limits
from node.values.policy import NO_BASE, ROOT_BYTES


def _policy_version(message: common_pb2.PolicyVersion) -> None:
    if not 0 <= message.number <= limits.VERSIONS:
        raise RefusedError(
            Reason.MALFORMED, f"policy version {message.number}, allowed are 0 to {limits.VERSIONS}"
        )
    if len(message.root) not in (0, ROOT_BYTES):
        raise RefusedError(Reason.MALFORMED, f"a root of {len(message.root)} bytes; it has {ROOT_BYTES}")


def _artifact_key(message: policy_pb2.ArtifactKey) -> None:
    if message.version < 0 or not NO_BASE <= message.base_version < message.version:
        raise RefusedError(
            Reason.MALFORMED,
            f"no artifact makes version {message.version} from version {message.base_version}",
            fix="the base is -1 (none) or an older version",
        )


def _artifact(message: policy_pb2.Artifact) -> None:
    if message.size_bytes < 0:
        raise RefusedError(Reason.MALFORMED, "an artifact of negative size")


def _announcement(message: policy_pb2.WatchVersionsResponse) -> None:
    artifacts = max(len(message.artifacts), len(message.in_bucket))
    if artifacts > limits.ARTIFACTS_PER_ANNOUNCEMENT:
        raise RefusedError(Reason.OVER_LIMIT, f"an announcement of {artifacts} artifacts")


def _revocations(message: membership_pb2.Revocations) -> None:
    node_ids = list(message.node_ids)
    if len(node_ids) > limits.REVOCATIONS:
        raise RefusedError(
            Reason.OVER_LIMIT, f"{len(node_ids)} revocations, at most {limits.REVOCATIONS} are allowed"
        )
    if not all(map(is_name, node_ids)) or node_ids != sorted(set(node_ids)):
        raise RefusedError(Reason.MALFORMED, "the revocations are not node ids in sorted order, each once")


def _step_report(message: membership_pb2.StepReport) -> None:
    if not 0 <= message.version <= limits.VERSIONS:
        raise RefusedError(Reason.MALFORMED, f"a report of step {message.version}")
    if not 0 <= message.groups_wait_s < math.inf:
        raise RefusedError(Reason.NON_FINITE, f"a wait for groups of {message.groups_wait_s} s")
    if len(message.grader_metrics) > limits.GROUP_METRICS:
        raise RefusedError(
            Reason.OVER_LIMIT,
            f"a report of {len(message.grader_metrics)} grader metrics, allowed are {limits.GROUP_METRICS}",
        )


def _figures(message: membership_pb2.MachineFigures | membership_pb2.SamplerFigures) -> None:
    for one, value in message.ListFields():
        if not math.isfinite(value):
            raise RefusedError(Reason.NON_FINITE, f"{one.name} = {value}", fix="leave out what is not known")


def _settings(message: membership_pb2.JoinResponse) -> None:
    if message.group_size < 1 or message.batch_groups < 1 or not message.heartbeat_interval_s > 0:
        raise RefusedError(
            Reason.MALFORMED,
            f"run settings with group_size={message.group_size} batch_groups={message.batch_groups} "
            f"heartbeat_interval_s={message.heartbeat_interval_s}",
        )
    if len(message.task_options_json) > limits.TASK_OPTIONS_BYTES:
        raise RefusedError(
            Reason.OVER_LIMIT,
            f"task options of {len(message.task_options_json)} bytes, at most {limits.TASK_OPTIONS_BYTES} "
            "are allowed",
        )


def _sampling(message: common_pb2.SamplingParameters) -> None:
    if not (
        message.temperature > 0
        and math.isfinite(message.temperature)
        and 0 < message.top_p <= 1
        and message.top_k >= 0
        and 0 < message.max_new_tokens <= limits.GROUP_TOKENS
        and 0 <= message.min_p <= 1
        and len(message.stop) <= limits.STOP_STRINGS
        and all(1 <= len(text) <= limits.STOP_STRING_CHARACTERS for text in message.stop)
    ):
        raise RefusedError(
            Reason.MALFORMED,
            f"sampling parameters temperature={message.temperature} top_p={message.top_p} "
            f"top_k={message.top_k} max_new_tokens={message.max_new_tokens} min_p={message.min_p} "
            f"stop={list(message.stop[: limits.STOP_STRINGS])} are out of range",
        )


def _lease(message: rollout_pb2.PromptLease) -> None:
    if not message.lease_id or not 1 <= message.group_size <= limits.GROUP_COMPLETIONS:
        raise RefusedError(
            Reason.MALFORMED, f"lease {message.lease_id!r} for a group of {message.group_size} completions"
        )
    if len(message.row) > limits.ROW_BYTES:
        raise RefusedError(
            Reason.OVER_LIMIT, f"a row of {len(message.row)} bytes, at most {limits.ROW_BYTES} are allowed"
        )


def _step_record(message: rollout_pb2.StepRecord) -> None:
    if message.version < 1 or len(message.group_ids) != len(message.staleness_versions):
        raise RefusedError(
            Reason.MALFORMED,
            f"step record of version {message.version} has {len(message.group_ids)} groups "
            f"and {len(message.staleness_versions)} stalenesses",
        )
    is_rollback = message.HasField("restored_version")
    if is_rollback and (message.group_ids or not 0 <= message.restored_version < message.version):
        raise RefusedError(
            Reason.MALFORMED,
            f"a rollback that made version {message.version} from {message.restored_version} with "
            f"{len(message.group_ids)} groups",
            fix="it restores an older version and consumes no group",
        )


CHECKS: Final[Mapping[type[Message], Callable[[Any], None]]] = {
    common_pb2.PolicyVersion: _policy_version,
    common_pb2.SamplingParameters: _sampling,
    membership_pb2.JoinResponse: _settings,
    membership_pb2.Revocations: _revocations,
    membership_pb2.StepReport: _step_report,
    membership_pb2.MachineFigures: _figures,
    membership_pb2.SamplerFigures: _figures,
    policy_pb2.Artifact: _artifact,
    policy_pb2.ArtifactKey: _artifact_key,
    policy_pb2.WatchVersionsResponse: _announcement,
    rollout_pb2.PromptLease: _lease,
    rollout_pb2.StepRecord: _step_record,
}
