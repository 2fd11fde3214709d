"""Groups <-> heterorl.v1: a header, and columns of raw little-endian arrays.

Neither side visits tokens one by one.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from heterorl.v1 import rollout_pb2
from node import limits
from node.errors import Reason, RefusedError
from node.failure import detail_of
from node.rollout import (
    Completion,
    EncodedGroup,
    Finish,
    GroupGrades,
    GroupHeader,
    GroupTerms,
    RewardFinding,
    RolloutGroup,
    Scalar,
    check_header,
    check_metrics,
)
from node.wire.mapping import Wire, from_wire, to_wire

_HEADER_BYTES: Final = 8 << 10
"""Largest header of a group: names, digests, stop strings; at most 7 KiB of them."""

_METRIC_NAME_BYTES: Final = 2 << 10
"""Names of metrics, and what protobuf puts before each column."""

_I32: Final = np.dtype("<i4")
_F32: Final = np.dtype("<f4")
_U8: Final = np.dtype("u1")
_FINISHES: Final = (Finish.LENGTH, Finish.END, Finish.STOP)
"""By their number in the column ``finished``."""


def largest_group_bytes(*, group_size: int, max_new_tokens: int, prompt_tokens: int) -> int:
    """Return the size of the largest encoded group with so many completions of so many tokens each.

    A token takes 16 bytes (id or real action, logprob, version, kept mass) and a bit (whether it was drawn),
    a completion 9 bytes (length, reward, finish) and 4 for each metric.
    """
    tokens = min(group_size * max_new_tokens, limits.GROUP_TOKENS)
    columns = 4 * prompt_tokens + 16 * tokens + (tokens + 7) // 8
    return _HEADER_BYTES + _METRIC_NAME_BYTES + columns + group_size * (9 + 4 * limits.GROUP_METRICS)


def group_to_wire(group: RolloutGroup) -> EncodedGroup:
    """Return the group encoded, as it is stored and handed on."""
    completions = group.completions
    header = to_wire(rollout_pb2.GroupHeader, group.header)
    prompt = group.prompt_token_ids.astype(_I32).tobytes()
    header.prompt_digest = hashlib.blake2b(prompt, digest_size=16).digest()  # learners of 0.3 compare it
    columns = rollout_pb2.GroupColumns(
        prompt_token_ids=prompt,
        completion_lengths=np.array([len(c.token_ids) for c in completions], _I32).tobytes(),
        token_ids=_joined((c.token_ids for c in completions if c.actions is None), _I32),
        behaviour_logprobs=_joined((c.of_drawn(c.behaviour_logprob) for c in completions), _F32),
        policy_versions=_joined((c.of_drawn(c.policy_version) for c in completions), _I32),
        rewards=np.array([c.reward for c in completions], _F32).tobytes() if group.is_graded else b"",
        finished=bytes(_FINISHES.index(c.finish) for c in completions),
        kept_masses=_joined((c.of_drawn(c.kept_mass) for c in completions if c.kept_mass is not None), _F32),
        metrics=_metrics_to_wire(group.metrics),
        drawn=_bits(completions) if group.drawn_tokens < group.tokens else b"",
        actions=_joined((c.actions for c in completions if c.actions is not None), _F32),
    )
    return EncodedGroup(header.SerializeToString(), columns.SerializeToString(), group.group_id)


def graded(encoded: EncodedGroup, grades: GroupGrades, *, grader_digest: bytes, at_s: float) -> EncodedGroup:
    """Return an ungraded group with a verifier's grades; its tokens are not looked at.

    Encoded messages one after the other are one message, and no field is in both.

    Raises RefusedError: MALFORMED, NON_FINITE or OVER_LIMIT; these are no grades of this group.
    """
    header = header_from_wire(encoded.header)
    if len(grades.rewards) != header.completions:
        raise RefusedError(
            Reason.MALFORMED, f"{len(grades.rewards)} rewards for {header.completions} completions"
        )
    # Without a reward from any completion NaN stays, which check_header refuses.
    given = grades.rewards[~np.isnan(grades.rewards)]
    header = replace(
        header,
        least_reward=float(given.min()) if given.size else math.nan,
        largest_reward=float(given.max()) if given.size else math.nan,
        grader_digest=grader_digest,
        graded_at_s=max(header.sampling_finished_at_s, at_s),
    )
    check_header(header)
    check_metrics(grades.metrics)
    columns = rollout_pb2.GroupColumns(
        rewards=grades.rewards.astype(_F32).tobytes(), metrics=_metrics_to_wire(grades.metrics)
    )
    return replace(
        encoded,
        header=to_wire(rollout_pb2.GroupHeader, header).SerializeToString(),
        columns=encoded.columns + columns.SerializeToString(),
    )


def finding_to_wire(finding: RewardFinding) -> rollout_pb2.RewardFinding:
    grades = None
    if finding.grades is not None:
        grades = rollout_pb2.GroupGrades(
            rewards=finding.grades.rewards.astype(_F32).tobytes(),
            metrics=_metrics_to_wire(finding.grades.metrics),
        )
    return to_wire(rollout_pb2.RewardFinding, finding, detail=detail_of(finding.detail), grades=grades)


def finding_from_wire(message: rollout_pb2.RewardFinding) -> RewardFinding:
    """Return a verifier's finding. Raises RefusedError: MALFORMED."""
    grades = None
    if message.HasField("grades"):
        rewards = _column(message.grades.rewards, _F32, "rewards")
        grades = GroupGrades(rewards, _metrics(message.grades.metrics, len(rewards)))
    if (message.outcome == rollout_pb2.REWARD_CHECK_GRADED) != (grades is not None):
        raise RefusedError(
            Reason.MALFORMED, f"finding {message.outcome} {'with' if grades else 'without'} rewards"
        )
    return from_wire(RewardFinding, message, detail=detail_of(message.detail), grades=grades)


def submission_to_wire(group: EncodedGroup) -> rollout_pb2.SubmitRolloutsRequest:
    request = rollout_pb2.SubmitRolloutsRequest()
    _fill(request.group, group)
    return request


def delivery_to_wire(group: EncodedGroup) -> rollout_pb2.DrainRolloutsResponse:
    response = rollout_pb2.DrainRolloutsResponse()
    _fill(response.group, group)
    return response


def _fill(message: rollout_pb2.EncodedGroup, group: EncodedGroup) -> None:
    """Fill a part of another message, which would copy a whole one."""
    message.group_id, message.sampler_id = group.group_id, group.sampler_id
    message.header, message.columns = group.header, group.columns
    message.spooled_at_s = group.spooled_at_s


def encoded_from_wire(message: rollout_pb2.EncodedGroup) -> EncodedGroup:
    """Return an encoded group as it came. Each look at a field of a message copies it."""
    return EncodedGroup(
        message.header,
        message.columns,
        message.group_id,
        message.sampler_id,
        message.spooled_at_s,
    )


def header_from_wire(data: bytes) -> GroupHeader:
    """Return an encoded header.

    Raises RefusedError: OVER_LIMIT; MALFORMED where it is not a header, or has bytes that no field of it
    holds.
    """
    if len(data) > _HEADER_BYTES:
        raise RefusedError(
            Reason.OVER_LIMIT, f"a group's header of {len(data)} bytes, allowed are {_HEADER_BYTES}"
        )
    return from_wire(GroupHeader, _parsed(rollout_pb2.GroupHeader(), data))


def group_from_wire(encoded: EncodedGroup) -> RolloutGroup:
    """Return an encoded group.

    Raises RefusedError: MALFORMED where it is not a group, has bytes that no field of it holds, columns that
    disagree in length, or a header that says something else; OVER_LIMIT where it is larger than any we take.
    Lengths are checked before anything is split.
    """
    header = header_from_wire(encoded.header)
    message = _parsed(rollout_pb2.GroupColumns(), encoded.columns)
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
    has_actions = bool(message.actions)
    token_ids = _column(message.token_ids, _I32, "token_ids", 0 if has_actions else tokens)
    actions = _column(message.actions, _F32, "actions", tokens if has_actions else 0)
    if has_actions:
        token_ids = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    is_drawn = _is_drawn(message.drawn, tokens) if message.drawn else None
    drawn = tokens if is_drawn is None else int(is_drawn.sum())
    behaviour_logprobs = _column(message.behaviour_logprobs, _F32, "behaviour_logprobs", drawn)
    policy_versions = _column(message.policy_versions, _I32, "policy_versions", drawn)
    rewards = np.full(n, np.nan, _F32)
    if message.rewards:
        rewards = _column(message.rewards, _F32, "rewards", n)
    finished = _column(message.finished, _U8, "finished", n)
    if (finished >= len(_FINISHES)).any():
        raise RefusedError(Reason.MALFORMED, f"finish {int(finished.max())} is not one this version knows")
    has_kept_masses = bool(message.kept_masses)
    kept_masses = _column(message.kept_masses, _F32, "kept_masses", drawn if has_kept_masses else 0)
    if is_drawn is not None:
        # A completion that begins with a reply is refused by ``check_group``, whatever version this gives it.
        policy_versions = policy_versions[np.maximum(np.cumsum(is_drawn) - 1, 0)]
        behaviour_logprobs = _spread(behaviour_logprobs, is_drawn, np.float32(0))
        kept_masses = _spread(kept_masses, is_drawn, np.float32(1)) if has_kept_masses else kept_masses
    ends = np.cumsum(lengths, dtype=np.int64)
    group = RolloutGroup(
        **{one.name: getattr(header, one.name) for one in fields(GroupTerms)},
        prompt_token_ids=_column(message.prompt_token_ids, _I32, "prompt_token_ids"),
        completions=tuple(
            Completion(
                token_ids=token_ids[end - length : end],
                behaviour_logprob=behaviour_logprobs[end - length : end],
                policy_version=policy_versions[end - length : end],
                reward=float(reward),
                finish=_FINISHES[finish],
                kept_mass=kept_masses[end - length : end] if has_kept_masses else None,
                is_drawn=None if is_drawn is None else is_drawn[end - length : end],
                actions=actions[end - length : end] if has_actions else None,
            )
            for length, end, reward, finish in zip(lengths, ends, rewards, finished, strict=True)
        ),
        metrics=_metrics(message.metrics, n),
        sampler_id=encoded.sampler_id,
        spooled_at_s=encoded.spooled_at_s,
    )
    _check_agreement(header, group.header)
    return group


def _check_agreement(stated: GroupHeader, found: GroupHeader) -> None:
    for one in fields(GroupHeader):
        said, is_now = getattr(stated, one.name), getattr(found, one.name)
        if said != is_now and not (said != said and is_now != is_now):  # both NaN: none is graded
            raise RefusedError(
                Reason.MALFORMED, f"the group's header says {one.name} = {said!r}, its columns {is_now!r}"
            )


def _parsed(message: Wire, data: bytes) -> Wire:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise RefusedError(Reason.MALFORMED, f"{len(data)} bytes that are not a group") from error
    # Protobuf keeps unknown fields and lets the last of repeated ones win: both would go on unseen.
    message.DiscardUnknownFields()
    if spare := len(data) - message.ByteSize():
        raise RefusedError(
            Reason.MALFORMED,
            f"{spare} of the group's {len(data)} bytes belong to no field that this version knows",
            fix="run the coordinator's version of heterorl-node",
        )
    return message


def _metrics_to_wire(metrics: Mapping[str, NDArray[np.float32]]) -> list[rollout_pb2.CompletionMetric]:
    return [
        rollout_pb2.CompletionMetric(name=name, values=values.astype(_F32).tobytes())
        for name, values in metrics.items()
    ]


def _metrics(messages: Collection[rollout_pb2.CompletionMetric], n: int) -> dict[str, NDArray[np.float32]]:
    metrics = {metric.name: _column(metric.values, _F32, "metrics", n) for metric in messages}
    if len(metrics) < len(messages):
        raise RefusedError(Reason.MALFORMED, "the group has a metric twice")
    return metrics


def _joined(arrays: Iterable[NDArray[np.generic]], dtype: np.dtype[np.generic]) -> bytes:
    return b"".join(array.astype(dtype).tobytes() for array in arrays)


def _bits(completions: Iterable[Completion]) -> bytes:
    return np.packbits(np.concatenate([c.drawn for c in completions]), bitorder="little").tobytes()


def _is_drawn(bits: bytes, tokens: int) -> NDArray[np.bool_]:
    packed = _column(bits, _U8, "drawn", (tokens + 7) // 8)
    is_drawn = np.unpackbits(packed, bitorder="little").astype(np.bool_)
    if is_drawn[tokens:].any() or not is_drawn[:tokens].any():
        raise RefusedError(Reason.MALFORMED, "column drawn has none of the tokens, or more than there are")
    return is_drawn[:tokens]


def _spread(column: NDArray[Scalar], is_drawn: NDArray[np.bool_], fill: Scalar) -> NDArray[Scalar]:
    whole = np.full(len(is_drawn), fill)
    whole[is_drawn] = column
    return whole


def _column(data: bytes, dtype: np.dtype[Scalar], name: str, length: int | None = None) -> NDArray[Scalar]:
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
