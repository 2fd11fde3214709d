"""Roles, settings, heartbeats and the state of a run <-> heterorl.v1."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Final

from heterorl.v1 import common_pb2, membership_pb2
from node import limits
from node.errors import Reason, RefusedError
from node.failure import BadPrompt, Failure
from node.identity.peer import is_name
from node.identity.revocation import Revocations
from node.run import (
    Evaluation,
    EvaluationStatus,
    PeerStatus,
    RecommendedStaleness,
    Role,
    RunSettings,
    RunStatus,
    StepReport,
    Teaching,
)
from node.telemetry.metrics import MetricFamily, MetricSample
from node.wire.mapping import EnumMapping, from_wire, to_wire
from node.wire.policies import optional_version_from_wire, optional_version_to_wire
from node.wire.rollouts import sampling_from_wire, sampling_to_wire

_ROLES: Final = EnumMapping(common_pb2.Role.Value, "ROLE", Role, of="role")


def role_to_wire(role: Role) -> Any:
    return _ROLES.to_wire(role)


def role_from_wire(role: int) -> Role:
    return _ROLES.from_wire(role)


def revocations_to_wire(revocations: Revocations) -> membership_pb2.Revocations:
    return membership_pb2.Revocations(node_ids=revocations.node_ids)


def revocations_from_wire(message: membership_pb2.Revocations) -> Revocations:
    if len(message.node_ids) > limits.REVOCATIONS:
        raise RefusedError(
            Reason.OVER_LIMIT,
            f"{len(message.node_ids)} revocations, at most {limits.REVOCATIONS} are allowed",
        )
    node_ids = tuple(message.node_ids)
    if not all(map(is_name, node_ids)) or list(node_ids) != sorted(set(node_ids)):
        raise RefusedError(Reason.MALFORMED, "the revocations are not node ids in sorted order, each once")
    return Revocations(node_ids)


def step_report_to_wire(report: StepReport) -> membership_pb2.StepReport:
    recommended = report.recommended_staleness
    return to_wire(
        membership_pb2.StepReport,
        report,
        recommended_staleness=recommended and to_wire(membership_pb2.RecommendedStaleness, recommended),
    )


def step_report_from_wire(message: membership_pb2.StepReport) -> StepReport:
    recommended = None
    if message.HasField("recommended_staleness"):
        wire = message.recommended_staleness
        versions = wire.versions if wire.HasField("versions") else None
        recommended = from_wire(RecommendedStaleness, wire, versions=versions)
    if not 0 <= message.version <= limits.VERSIONS:
        raise RefusedError(Reason.MALFORMED, f"a report of step {message.version}")
    metrics = dict(sorted(message.grader_metrics.items())[: limits.GROUP_METRICS])
    return from_wire(StepReport, message, recommended_staleness=recommended, grader_metrics=metrics)


def teaching_to_wire(teaching: Teaching | None) -> membership_pb2.Teaching | None:
    return None if teaching is None else to_wire(membership_pb2.Teaching, teaching)


def teaching_from_wire(
    message: membership_pb2.HeartbeatRequest | membership_pb2.GetStatusResponse,
) -> Teaching | None:
    return from_wire(Teaching, message.teaching) if message.HasField("teaching") else None


def settings_to_wire(settings: RunSettings) -> membership_pb2.JoinResponse:
    return to_wire(
        membership_pb2.JoinResponse,
        settings,
        head=optional_version_to_wire(settings.head),
        sampling=sampling_to_wire(settings.sampling),
    )


def settings_from_wire(message: membership_pb2.JoinResponse) -> RunSettings:
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
    return from_wire(
        RunSettings,
        message,
        head=optional_version_from_wire(message, "head"),
        sampling=sampling_from_wire(message.sampling),
    )


def metric_families_to_wire(families: Iterable[MetricFamily]) -> list[membership_pb2.MetricFamily]:
    return [
        to_wire(
            membership_pb2.MetricFamily,
            family,
            samples=[to_wire(membership_pb2.MetricSample, sample) for sample in family.samples],
        )
        for family in families
    ]


def metric_families_from_wire(messages: Iterable[membership_pb2.MetricFamily]) -> tuple[MetricFamily, ...]:
    families = tuple(messages)
    samples = sum(len(family.samples) for family in families)
    if len(families) > limits.METRIC_FAMILIES_PER_HEARTBEAT or samples > limits.METRIC_SAMPLES_PER_HEARTBEAT:
        raise RefusedError(
            Reason.OVER_LIMIT, f"a heartbeat with {len(families)} metric families and {samples} samples"
        )
    return tuple(
        from_wire(
            MetricFamily,
            family,
            samples=tuple(MetricSample(s.name, dict(s.labels), s.value) for s in family.samples),
        )
        for family in families
    )


def run_status_to_wire(status: RunStatus) -> membership_pb2.GetStatusResponse:
    return to_wire(
        membership_pb2.GetStatusResponse,
        status,
        head=optional_version_to_wire(status.head),
        peers=map(_peer_status_to_wire, status.peers),
        step=None if status.step is None else step_report_to_wire(status.step),
        teaching=teaching_to_wire(status.teaching),
        bad_prompts=[to_wire(membership_pb2.BadPrompt, bad) for bad in status.bad_prompts],
        evaluation=_evaluation_status_to_wire(status.evaluation),
    )


def run_status_from_wire(message: membership_pb2.GetStatusResponse) -> RunStatus:
    return from_wire(
        RunStatus,
        message,
        head=optional_version_from_wire(message, "head"),
        peers=tuple(map(_peer_status_from_wire, message.peers)),
        slots=dict(message.slots),
        bad_prompt_reasons=dict(message.bad_prompt_reasons),
        verdicts=dict(message.verdicts),
        step=step_report_from_wire(message.step) if message.HasField("step") else None,
        teaching=teaching_from_wire(message),
        bad_prompts=tuple(map(_bad_prompt_from_wire, message.bad_prompts)),
        evaluation=_evaluation_status_from_wire(message.evaluation),
        exportable_best=message.exportable_best if message.HasField("exportable_best") else None,
    )


def _evaluation_status_to_wire(status: EvaluationStatus) -> membership_pb2.EvaluationStatus:
    present = {field.name: getattr(status, field.name) for field in fields(status)}
    evaluations = {name: one for name, one in present.items() if isinstance(one, Evaluation)}
    return membership_pb2.EvaluationStatus(
        best_by=status.best_by,
        **{name: to_wire(membership_pb2.Evaluation, one) for name, one in evaluations.items()},
    )


def _evaluation_status_from_wire(message: membership_pb2.EvaluationStatus) -> EvaluationStatus:
    present = {field.name: value for field, value in message.ListFields() if field.name != "best_by"}
    evaluations = {name: from_wire(Evaluation, one) for name, one in present.items()}
    return EvaluationStatus(**evaluations, best_by=message.best_by)


def _peer_status_to_wire(peer: PeerStatus) -> membership_pb2.PeerStatus:
    return to_wire(
        membership_pb2.PeerStatus,
        peer,
        role=role_to_wire(peer.role),
        held=optional_version_to_wire(peer.held),
    )


def _peer_status_from_wire(message: membership_pb2.PeerStatus) -> PeerStatus:
    return from_wire(
        PeerStatus,
        message,
        role=role_from_wire(message.role),
        held=optional_version_from_wire(message, "held"),
        verdicts=dict(message.verdicts),
    )


def _bad_prompt_from_wire(message: membership_pb2.BadPrompt) -> BadPrompt:
    if message.reason not in set(Failure):
        raise RefusedError(Reason.MALFORMED, f"failure {message.reason[:50]!r} is not one this version knows")
    return from_wire(BadPrompt, message, reason=Failure(message.reason), said_by=tuple(message.said_by))
