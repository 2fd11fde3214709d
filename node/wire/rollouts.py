"""Leases, groups, verdicts and step records <-> heterorl.v1.

A group travels as columns: raw little-endian arrays, one per kind of number, so that neither
side visits tokens one by one.
"""

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from heterorl.v1 import common_pb2, membership_pb2, rollout_pb2
from node import limits
from node.errors import Reason, RefusedError
from node.failure import FAULTS, FailedLease, Failure, detail_of
from node.rollout import (
    Completion,
    DeliveredGroup,
    GroupVerdict,
    LogprobMode,
    PromptLease,
    RolloutGroup,
    SamplingParameters,
    Verdict,
)
from node.run import StepRecord

_VERDICTS: Final[Mapping[Verdict, common_pb2.Verdict.ValueType]] = {
    Verdict.SPOOLED: common_pb2.VERDICT_SPOOLED,
    Verdict.ACCEPTED: common_pb2.VERDICT_ACCEPTED,
    Verdict.STALE: common_pb2.VERDICT_STALE,
    Verdict.DUPLICATE: common_pb2.VERDICT_DUPLICATE,
    Verdict.FOREIGN: common_pb2.VERDICT_FOREIGN,
    Verdict.MALFORMED: common_pb2.VERDICT_MALFORMED,
    Verdict.SUSPECT: common_pb2.VERDICT_SUSPECT,
    Verdict.TRAINED: common_pb2.VERDICT_TRAINED,
}
_VERDICTS_BACK: Final = {wire: verdict for verdict, wire in _VERDICTS.items()}

_LOGPROB_MODES: Final[Mapping[LogprobMode, rollout_pb2.LogprobMode.ValueType]] = {
    LogprobMode.SAMPLED: rollout_pb2.LOGPROB_MODE_SAMPLED,
    LogprobMode.FULL: rollout_pb2.LOGPROB_MODE_FULL,
}
_LOGPROB_MODES_BACK: Final = {wire: mode for mode, wire in _LOGPROB_MODES.items()}

_FAULTS: Final[Mapping[Failure, rollout_pb2.LeaseFault.ValueType]] = {
    Failure.PROMPT_TOO_LONG: rollout_pb2.LEASE_FAULT_PROMPT_TOO_LONG,
    Failure.PROMPT_FAILED: rollout_pb2.LEASE_FAULT_PROMPT_FAILED,
    Failure.PROMPT_TIMED_OUT: rollout_pb2.LEASE_FAULT_PROMPT_TIMED_OUT,
    Failure.GRADING_FAILED: rollout_pb2.LEASE_FAULT_GRADING_FAILED,
    Failure.GRADING_TIMED_OUT: rollout_pb2.LEASE_FAULT_GRADING_TIMED_OUT,
    Failure.ENGINE_REFUSED: rollout_pb2.LEASE_FAULT_ENGINE_REFUSED,
}
_FAULTS_BACK: Final = {wire: fault for fault, wire in _FAULTS.items()}
assert _FAULTS.keys() == FAULTS

_I32: Final = np.dtype("<i4")
_F32: Final = np.dtype("<f4")
_U8: Final = np.dtype("u1")
_Entry = TypeVar("_Entry", bound=np.generic)


def verdict_to_wire(verdict: Verdict) -> common_pb2.Verdict.ValueType:
    return _VERDICTS[verdict]


def verdict_from_wire(verdict: common_pb2.Verdict.ValueType) -> Verdict:
    if verdict not in _VERDICTS_BACK:
        raise RefusedError(Reason.MALFORMED, f"verdict {verdict} is not one this version knows")
    return _VERDICTS_BACK[verdict]


def group_verdict_to_wire(verdict: GroupVerdict) -> membership_pb2.GroupVerdict:
    return membership_pb2.GroupVerdict(
        group_id=verdict.group_id, verdict=verdict_to_wire(verdict.verdict), detail=verdict.detail
    )


def group_verdict_from_wire(
    message: membership_pb2.GroupVerdict | rollout_pb2.GroupJudgement,
) -> GroupVerdict:
    return GroupVerdict(message.group_id, verdict_from_wire(message.verdict), message.detail)


def failed_lease_to_wire(lease: FailedLease) -> rollout_pb2.FailedLease:
    return rollout_pb2.FailedLease(
        lease_id=lease.lease_id, fault=_FAULTS[lease.fault], detail=detail_of(lease.detail)
    )


def failed_lease_from_wire(message: rollout_pb2.FailedLease) -> FailedLease:
    if message.fault not in _FAULTS_BACK:
        raise RefusedError(Reason.MALFORMED, f"fault {message.fault} is not one this version knows")
    return FailedLease(message.lease_id, _FAULTS_BACK[message.fault], detail_of(message.detail))


def sampling_to_wire(sampling: SamplingParameters) -> common_pb2.SamplingParameters:
    return common_pb2.SamplingParameters(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
    )


def sampling_from_wire(message: common_pb2.SamplingParameters) -> SamplingParameters:
    if not (
        message.temperature > 0
        and np.isfinite(message.temperature)
        and 0 < message.top_p <= 1
        and message.top_k >= 0
        and 0 < message.max_new_tokens <= limits.GROUP_TOKENS
    ):
        raise RefusedError(
            Reason.MALFORMED,
            f"sampling parameters temperature={message.temperature} top_p={message.top_p} "
            f"top_k={message.top_k} max_new_tokens={message.max_new_tokens} are out of range",
        )
    return SamplingParameters(message.temperature, message.top_p, message.top_k, message.max_new_tokens)


def lease_to_wire(lease: PromptLease) -> rollout_pb2.PromptLease:
    return rollout_pb2.PromptLease(
        lease_id=lease.lease_id,
        task=lease.task,
        prompt_index=lease.prompt_index,
        group_size=lease.group_size,
        sampling=sampling_to_wire(lease.sampling),
        ttl_s=lease.ttl_s,
    )


def lease_from_wire(message: rollout_pb2.PromptLease) -> PromptLease:
    if not message.lease_id or not 1 <= message.group_size <= limits.GROUP_COMPLETIONS:
        raise RefusedError(
            Reason.MALFORMED, f"lease {message.lease_id!r} for a group of {message.group_size} completions"
        )
    return PromptLease(
        lease_id=message.lease_id,
        task=message.task,
        prompt_index=message.prompt_index,
        group_size=message.group_size,
        sampling=sampling_from_wire(message.sampling),
        ttl_s=message.ttl_s,
    )


def group_to_wire(group: RolloutGroup) -> rollout_pb2.RolloutGroup:
    completions = group.completions
    return rollout_pb2.RolloutGroup(
        run_id=group.run_id,
        group_id=group.group_id,
        layout_digest=group.layout_digest,
        tokenizer_digest=group.tokenizer_digest,
        task=group.task,
        prompt_index=group.prompt_index,
        prompt_token_ids=group.prompt_token_ids.astype(_I32).tobytes(),
        completion_lengths=np.array([len(c.token_ids) for c in completions], _I32).tobytes(),
        token_ids=_joined((c.token_ids for c in completions), _I32),
        behaviour_logprobs=_joined((c.behaviour_logprob for c in completions), _F32),
        policy_versions=_joined((c.policy_version for c in completions), _I32),
        rewards=np.array([c.reward for c in completions], _F32).tobytes(),
        finished=np.array([c.is_finished for c in completions], _U8).tobytes(),
        sampling=sampling_to_wire(group.sampling),
        sampling_started_at_s=group.sampling_started_at_s,
        sampling_finished_at_s=group.sampling_finished_at_s,
        graded_at_s=group.graded_at_s,
        logprob_mode=_LOGPROB_MODES[group.logprob_mode],
        kept_masses=_joined((c.kept_mass for c in completions if c.kept_mass is not None), _F32),
    )


def group_from_wire(message: rollout_pb2.RolloutGroup) -> RolloutGroup:
    """Give the group as it was sent; its arrays view the message's bytes.

    Raises:
        RefusedError: MALFORMED where columns disagree in length, OVER_LIMIT where the group
            is larger than any we take; both before anything is split.
    """
    lengths = _column(message.completion_lengths, _I32, "completion_lengths")
    if not 1 <= len(lengths) <= limits.GROUP_COMPLETIONS:
        raise RefusedError(
            Reason.MALFORMED,
            f"a group of {len(lengths)} completions, allowed are 1 to {limits.GROUP_COMPLETIONS}",
        )
    if (lengths < 1).any():
        raise RefusedError(Reason.MALFORMED, f"a completion of {int(lengths.min())} tokens")
    tokens = int(lengths.sum(dtype=np.int64))
    if tokens > limits.GROUP_TOKENS:
        raise RefusedError(
            Reason.OVER_LIMIT, f"a group of {tokens} tokens, allowed are {limits.GROUP_TOKENS}"
        )
    n = len(lengths)
    token_ids = _column(message.token_ids, _I32, "token_ids", tokens)
    behaviour_logprobs = _column(message.behaviour_logprobs, _F32, "behaviour_logprobs", tokens)
    policy_versions = _column(message.policy_versions, _I32, "policy_versions", tokens)
    rewards = _column(message.rewards, _F32, "rewards", n)
    finished = _column(message.finished, _U8, "finished", n)
    has_kept_masses = bool(message.kept_masses)
    kept_masses = _column(message.kept_masses, _F32, "kept_masses", tokens if has_kept_masses else 0)
    ends = np.cumsum(lengths, dtype=np.int64)
    return RolloutGroup(
        run_id=message.run_id,
        group_id=message.group_id,
        layout_digest=message.layout_digest,
        tokenizer_digest=message.tokenizer_digest,
        task=message.task,
        prompt_index=message.prompt_index,
        prompt_token_ids=_column(message.prompt_token_ids, _I32, "prompt_token_ids"),
        completions=tuple(
            Completion(
                token_ids=token_ids[end - length : end],
                behaviour_logprob=behaviour_logprobs[end - length : end],
                policy_version=policy_versions[end - length : end],
                reward=float(reward),
                is_finished=bool(is_finished),
                kept_mass=kept_masses[end - length : end] if has_kept_masses else None,
            )
            for length, end, reward, is_finished in zip(lengths, ends, rewards, finished, strict=True)
        ),
        sampling=sampling_from_wire(message.sampling),
        logprob_mode=_logprob_mode(message.logprob_mode),
        sampling_started_at_s=message.sampling_started_at_s,
        sampling_finished_at_s=message.sampling_finished_at_s,
        graded_at_s=message.graded_at_s,
    )


def delivered_group_to_wire(delivered: DeliveredGroup) -> rollout_pb2.DeliveredGroup:
    return rollout_pb2.DeliveredGroup(
        group=group_to_wire(delivered.group),
        sampler_id=delivered.sampler_id,
        spooled_at_s=delivered.spooled_at_s,
    )


def delivered_group_from_wire(message: rollout_pb2.DeliveredGroup) -> DeliveredGroup:
    return DeliveredGroup(group_from_wire(message.group), message.sampler_id, message.spooled_at_s)


def _logprob_mode(mode: rollout_pb2.LogprobMode.ValueType) -> LogprobMode:
    if mode not in _LOGPROB_MODES_BACK:
        raise RefusedError(Reason.MALFORMED, f"logprob mode {mode} is not one this version knows")
    return _LOGPROB_MODES_BACK[mode]


def _joined(arrays: Iterable[NDArray[np.generic]], dtype: np.dtype[np.generic]) -> bytes:
    return b"".join(array.astype(dtype).tobytes() for array in arrays)


def _column(data: bytes, dtype: np.dtype[_Entry], name: str, length: int | None = None) -> NDArray[_Entry]:
    if len(data) % dtype.itemsize:
        raise RefusedError(
            Reason.MALFORMED, f"column {name} has {len(data)} bytes, not a multiple of {dtype.itemsize}"
        )
    if length is not None and len(data) != length * dtype.itemsize:
        raise RefusedError(
            Reason.MALFORMED,
            f"column {name} has {len(data) // dtype.itemsize} entries, the lengths ask for {length}",
        )
    return np.frombuffer(data, dtype)


def step_record_to_wire(record: StepRecord) -> rollout_pb2.StepRecord:
    return rollout_pb2.StepRecord(
        version=record.version,
        group_ids=record.group_ids,
        staleness_versions=record.staleness_versions,
    )


def step_record_from_wire(message: rollout_pb2.StepRecord) -> StepRecord:
    if message.version < 1 or len(message.group_ids) != len(message.staleness_versions):
        raise RefusedError(
            Reason.MALFORMED,
            f"step record of version {message.version} has {len(message.group_ids)} groups "
            f"and {len(message.staleness_versions)} stalenesses",
        )
    return StepRecord(message.version, tuple(message.group_ids), tuple(message.staleness_versions))
