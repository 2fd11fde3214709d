"""Roles, settings, heartbeats and the state of a run <-> heterorl.v1."""

from collections.abc import Iterable, Mapping
from typing import Final

from heterorl.v1 import common_pb2, membership_pb2
from node import limits
from node.errors import Reason, RefusedError
from node.failure import BadPrompt, Failure
from node.identity.peer import is_name
from node.identity.revocation import Revocations
from node.run import PeerStatus, Role, RunSettings, RunStatus, StepReport
from node.telemetry.metrics import MetricFamily, MetricSample
from node.wire.policies import policy_version_from_wire, policy_version_to_wire
from node.wire.rollouts import sampling_from_wire, sampling_to_wire

_ROLES: Final[Mapping[Role, common_pb2.Role.ValueType]] = {
    Role.COORDINATOR: common_pb2.ROLE_COORDINATOR,
    Role.LEARNER: common_pb2.ROLE_LEARNER,
    Role.SAMPLER: common_pb2.ROLE_SAMPLER,
    Role.RELAY: common_pb2.ROLE_RELAY,
    Role.OPERATOR: common_pb2.ROLE_OPERATOR,
}
_ROLES_BACK: Final = {wire: role for role, wire in _ROLES.items()}


def role_to_wire(role: Role) -> common_pb2.Role.ValueType:
    return _ROLES[role]


def role_from_wire(role: common_pb2.Role.ValueType) -> Role:
    if role not in _ROLES_BACK:
        raise RefusedError(Reason.MALFORMED, f"role {role} is not one this version knows")
    return _ROLES_BACK[role]


def revocations_to_wire(revocations: Revocations) -> membership_pb2.Revocations:
    return membership_pb2.Revocations(node_ids=revocations.node_ids)


def revocations_from_wire(message: membership_pb2.Revocations) -> Revocations:
    if len(message.node_ids) > limits.REVOCATIONS:
        raise RefusedError(Reason.OVER_LIMIT, f"{len(message.node_ids)} revocations")
    node_ids = tuple(message.node_ids)
    if not all(map(is_name, node_ids)) or list(node_ids) != sorted(set(node_ids)):
        raise RefusedError(Reason.MALFORMED, "revocations that are no sorted node ids")
    return Revocations(node_ids)


def step_report_to_wire(report: StepReport) -> membership_pb2.StepReport:
    return membership_pb2.StepReport(
        version=report.version,
        reward_mean=report.reward_mean,
        staleness_mean_versions=report.staleness_mean_versions,
        staleness_max_versions=report.staleness_max_versions,
        kl_nats=report.kl_nats,
        ess_ratio=report.ess_ratio,
        clip_fraction=report.clip_fraction,
        gradient_norm=report.gradient_norm,
        step_s=report.step_s,
        surprisal_nats=report.surprisal_nats,
    )


def step_report_from_wire(message: membership_pb2.StepReport) -> StepReport:
    return StepReport(
        version=message.version,
        reward_mean=message.reward_mean,
        staleness_mean_versions=message.staleness_mean_versions,
        staleness_max_versions=message.staleness_max_versions,
        kl_nats=message.kl_nats,
        ess_ratio=message.ess_ratio,
        clip_fraction=message.clip_fraction,
        gradient_norm=message.gradient_norm,
        step_s=message.step_s,
        surprisal_nats=message.surprisal_nats,
    )


def settings_to_wire(settings: RunSettings) -> membership_pb2.JoinResponse:
    return membership_pb2.JoinResponse(
        task=settings.task,
        group_size=settings.group_size,
        batch_groups=settings.batch_groups,
        max_staleness_versions=settings.max_staleness_versions,
        heartbeat_interval_s=settings.heartbeat_interval_s,
        head=None if settings.head is None else policy_version_to_wire(settings.head),
        sampling=sampling_to_wire(settings.sampling),
    )


def settings_from_wire(message: membership_pb2.JoinResponse) -> RunSettings:
    if message.group_size < 1 or message.batch_groups < 1 or not message.heartbeat_interval_s > 0:
        raise RefusedError(
            Reason.MALFORMED,
            f"run settings with group_size={message.group_size} batch_groups={message.batch_groups} "
            f"heartbeat_interval_s={message.heartbeat_interval_s}",
        )
    return RunSettings(
        task=message.task,
        group_size=message.group_size,
        batch_groups=message.batch_groups,
        max_staleness_versions=message.max_staleness_versions,
        heartbeat_interval_s=message.heartbeat_interval_s,
        head=policy_version_from_wire(message.head) if message.HasField("head") else None,
        sampling=sampling_from_wire(message.sampling),
    )


def metric_families_to_wire(families: Iterable[MetricFamily]) -> list[membership_pb2.MetricFamily]:
    return [
        membership_pb2.MetricFamily(
            name=family.name,
            type=family.type,
            help=family.help,
            samples=[
                membership_pb2.MetricSample(name=s.name, labels=s.labels, value=s.value)
                for s in family.samples
            ],
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
        MetricFamily(
            name=family.name,
            type=family.type,
            help=family.help,
            samples=tuple(MetricSample(s.name, dict(s.labels), s.value) for s in family.samples),
        )
        for family in families
    )


def peer_status_to_wire(peer: PeerStatus) -> membership_pb2.PeerStatus:
    return membership_pb2.PeerStatus(
        node_id=peer.node_id,
        role=role_to_wire(peer.role),
        state=peer.state,
        held=None if peer.held is None else policy_version_to_wire(peer.held),
        version_lag_versions=peer.version_lag_versions,
        lag_s=peer.lag_s,
        last_seen_s=peer.last_seen_s,
        clock_offset_s=peer.clock_offset_s,
        waits_for=peer.waits_for,
        verdicts=peer.verdicts,
        staleness_mean_versions=peer.staleness_mean_versions,
        joins=peer.joins,
        refused_twins=peer.refused_twins,
        refused_twin_s=peer.refused_twin_s,
    )


def peer_status_from_wire(message: membership_pb2.PeerStatus) -> PeerStatus:
    return PeerStatus(
        node_id=message.node_id,
        role=role_from_wire(message.role),
        state=message.state,
        held=policy_version_from_wire(message.held) if message.HasField("held") else None,
        version_lag_versions=message.version_lag_versions,
        lag_s=message.lag_s,
        last_seen_s=message.last_seen_s,
        clock_offset_s=message.clock_offset_s,
        waits_for=message.waits_for,
        verdicts=dict(message.verdicts),
        staleness_mean_versions=message.staleness_mean_versions,
        joins=message.joins,
        refused_twins=message.refused_twins,
        refused_twin_s=message.refused_twin_s,
    )


def run_status_to_wire(status: RunStatus) -> membership_pb2.GetStatusResponse:
    return membership_pb2.GetStatusResponse(
        run_id=status.run_id,
        head=None if status.head is None else policy_version_to_wire(status.head),
        learner_epoch=status.learner_epoch,
        peers=[peer_status_to_wire(peer) for peer in status.peers],
        slots=status.slots,
        verdicts=status.verdicts,
        step=None if status.step is None else step_report_to_wire(status.step),
        capacity_groups=status.capacity_groups,
        capacity_bound=status.capacity_bound,
        now_s=status.now_s,
        ledger_gap=status.ledger_gap,
        prompts=status.prompts,
        bad_prompts=map(_bad_prompt_to_wire, status.bad_prompts),
        bad_prompts_total=status.bad_prompts_total,
    )


def run_status_from_wire(message: membership_pb2.GetStatusResponse) -> RunStatus:
    return RunStatus(
        run_id=message.run_id,
        head=policy_version_from_wire(message.head) if message.HasField("head") else None,
        learner_epoch=message.learner_epoch,
        peers=tuple(peer_status_from_wire(peer) for peer in message.peers),
        slots=dict(message.slots),
        verdicts=dict(message.verdicts),
        step=step_report_from_wire(message.step) if message.HasField("step") else None,
        capacity_groups=message.capacity_groups,
        capacity_bound=message.capacity_bound,
        now_s=message.now_s,
        ledger_gap=message.ledger_gap,
        prompts=message.prompts,
        bad_prompts=tuple(map(_bad_prompt_from_wire, message.bad_prompts)),
        bad_prompts_total=message.bad_prompts_total,
    )


def _bad_prompt_to_wire(bad: BadPrompt) -> membership_pb2.BadPrompt:
    return membership_pb2.BadPrompt(
        prompt_index=bad.prompt_index,
        reason=bad.reason.value,
        detail=bad.detail,
        times=bad.times,
        slot=bad.slot,
        at_s=bad.at_s,
        retry_at_s=bad.retry_at_s,
    )


def _bad_prompt_from_wire(message: membership_pb2.BadPrompt) -> BadPrompt:
    if message.reason not in set(Failure):
        raise RefusedError(Reason.MALFORMED, f"failure {message.reason[:50]!r} is not one this version knows")
    return BadPrompt(
        prompt_index=message.prompt_index,
        reason=Failure(message.reason),
        detail=message.detail,
        times=message.times,
        slot=message.slot,
        at_s=message.at_s,
        retry_at_s=message.retry_at_s,
    )
