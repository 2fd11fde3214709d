"""A group's columns <-> bytes: a GroupColumns message, whose fields are raw little-endian arrays.

Neither side visits tokens one by one. Arrays are copied once when they are written, and those that are read
are views of the bytes. Protobuf would copy every field on its way in and out.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import ArrayLike, NDArray

from heterorl.v1 import rollout_pb2
from node.errors import Reason, RefusedError
from node.values import limits
from node.values.groups.reward_finding import GroupGrades
from node.values.groups.rollout import Completion, Finish, RolloutGroup, Scalar
from node.wire.mapping import Wire

_METRIC_NAME_BYTES: Final = 2 << 10
"""Names of metrics, and what protobuf puts before each column."""

_I32: Final = np.dtype("<i4")
_F32: Final = np.dtype("<f4")
_U8: Final = np.dtype("u1")
_FINISHES: Final = (Finish.LENGTH, Finish.END, Finish.STOP)
"""By their number in the column ``finished``."""

_NUMBERS: Final = {one.name: one.number for one in rollout_pb2.GroupColumns.DESCRIPTOR.fields}
_NAMES: Final = {number: name for name, number in _NUMBERS.items()}
_LENGTH_DELIMITED: Final = 2
"""Protobuf's wire type of bytes and of messages, which all of the fields are."""
_VARINT_BYTES: Final = 5
"""Most bytes of a field's number or size, both below 2^35."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Columns as read, which agree in length and hold anything."""

    prompt_token_ids: NDArray[np.int32]
    completions: tuple[Completion, ...]
    metrics: Mapping[str, NDArray[np.float32]]


def largest_columns_bytes(*, group_size: int, max_new_tokens: int, prompt_tokens: int) -> int:
    """Return the size of the largest columns of so many completions of so many tokens each.

    A token takes 16 bytes (id or real action, logprob, version, kept mass) and a bit (whether it was drawn),
    a completion 9 bytes (length, reward, finish) and 4 for each metric.
    """
    tokens = min(group_size * max_new_tokens, limits.GROUP_TOKENS)
    of_tokens = 4 * prompt_tokens + 16 * tokens + (tokens + 7) // 8
    return _METRIC_NAME_BYTES + of_tokens + group_size * (9 + 4 * limits.GROUP_METRICS)


def columns_of(group: RolloutGroup) -> bytes:
    """Return the columns of a group."""
    completions = group.completions
    is_all_drawn = group.drawn_tokens == group.tokens
    fields = {
        "prompt_token_ids": [_raw(group.prompt_token_ids, _I32)],
        "completion_lengths": [_raw([len(c.token_ids) for c in completions], _I32)],
        "token_ids": [_raw(c.token_ids, _I32) for c in completions if c.actions is None],
        "behaviour_logprobs": [_raw(c.of_drawn(c.behaviour_logprob), _F32) for c in completions],
        "policy_versions": [_raw(c.of_drawn(c.policy_version), _I32) for c in completions],
        "rewards": [_raw([c.reward for c in completions], _F32)] if group.is_graded else [],
        "finished": [_raw([_FINISHES.index(c.finish) for c in completions], _U8)],
        "kept_masses": [_raw(c.of_drawn(c.kept_mass), _F32) for c in completions if c.kept_mass is not None],
        "drawn": [] if is_all_drawn else [_bits(completions)],
        "actions": [_raw(c.actions, _F32) for c in completions if c.actions is not None],
    }
    return _message(fields, group.metrics)


def columns_of_grades(grades: GroupGrades) -> bytes:
    """Return what a verifier's grades add to the columns of an ungraded group."""
    return _message({"rewards": [_raw(grades.rewards, _F32)]}, grades.metrics)


def read_columns(data: bytes) -> Columns:
    """Return columns as views of ``data``.

    Raises:
        RefusedError: MALFORMED where they are not columns, have bytes that no field of them holds, or
            disagree in length; OVER_LIMIT where they are larger than any we take. Lengths are checked before
            anything is split.
    """
    found = _fields(data)

    def of(name: str, dtype: np.dtype[Scalar], length: int | None = None) -> NDArray[Scalar]:
        return _column(found[name][0] if name in found else b"", dtype, name, length)

    lengths = of("completion_lengths", _I32)
    tokens = _checked_tokens(lengths)
    n = len(lengths)
    has_actions, has_kept_masses = "actions" in found, "kept_masses" in found
    token_ids = of("token_ids", _I32, 0 if has_actions else tokens)
    actions = of("actions", _F32, tokens if has_actions else 0)
    if has_actions:
        token_ids = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    is_drawn = _is_drawn(of("drawn", _U8, (tokens + 7) // 8), tokens) if "drawn" in found else None
    drawn = tokens if is_drawn is None else int(is_drawn.sum())
    behaviour_logprobs = of("behaviour_logprobs", _F32, drawn)
    policy_versions = of("policy_versions", _I32, drawn)
    rewards = of("rewards", _F32, n) if "rewards" in found else np.full(n, math.nan, _F32)
    finished = of("finished", _U8, n)
    if (finished >= len(_FINISHES)).any():
        raise RefusedError(Reason.MALFORMED, f"finish {int(finished.max())} is not one this version knows")
    kept_masses = of("kept_masses", _F32, drawn if has_kept_masses else 0)
    if is_drawn is not None:
        # A completion that begins with a reply is refused by ``check_group``, whatever version this gives it.
        policy_versions = policy_versions[np.maximum(np.cumsum(is_drawn) - 1, 0)]
        behaviour_logprobs = _spread(behaviour_logprobs, is_drawn, np.float32(0))
        kept_masses = _spread(kept_masses, is_drawn, np.float32(1)) if has_kept_masses else kept_masses
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    completions = tuple(
        Completion(
            token_ids=token_ids[end - length : end],
            behaviour_logprob=behaviour_logprobs[end - length : end],
            policy_version=policy_versions[end - length : end],
            reward=reward,
            finish=_FINISHES[finish],
            kept_mass=kept_masses[end - length : end] if has_kept_masses else None,
            is_drawn=None if is_drawn is None else is_drawn[end - length : end],
            actions=actions[end - length : end] if has_actions else None,
        )
        for length, end, reward, finish in zip(
            lengths.tolist(), ends, rewards.tolist(), finished.tolist(), strict=True
        )
    )
    messages = [parsed(rollout_pb2.CompletionMetric(), bytes(one)) for one in found.get("metrics", ())]
    return Columns(of("prompt_token_ids", _I32), completions, _metrics(messages, n))


def read_grades(message: rollout_pb2.GroupGrades) -> GroupGrades:
    """Return a verifier's numbers. Raises RefusedError: MALFORMED."""
    rewards = _column(message.rewards, _F32, "rewards")
    return GroupGrades(rewards, _metrics(message.metrics, len(rewards)))


def grades_to_wire(grades: GroupGrades) -> rollout_pb2.GroupGrades:
    return rollout_pb2.GroupGrades(
        rewards=grades.rewards.astype(_F32).tobytes(), metrics=_metrics_to_wire(grades.metrics)
    )


def parsed(message: Wire, data: bytes) -> Wire:
    """Return ``message`` as ``data`` has it.

    Raises RefusedError: MALFORMED where it is none, or has bytes that no field of it holds.
    """
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise _no_group(len(data)) from error
    # Protobuf keeps unknown fields and lets the last of repeated ones win: both would go on unseen.
    message.DiscardUnknownFields()
    if spare := len(data) - message.ByteSize():
        raise _spare(spare, len(data))
    return message


def _raw(values: ArrayLike, dtype: np.dtype[np.generic]) -> memoryview:
    """Return the bytes of an array, which are its own where it is of this type and contiguous."""
    return np.ascontiguousarray(values, dtype).data


def _message(fields: Mapping[str, Sequence[memoryview]], metrics: Mapping[str, NDArray[np.float32]]) -> bytes:
    """Return a GroupColumns message as protobuf writes it: by number, without the fields that are empty."""
    encoded_metrics = [memoryview(one.SerializeToString()) for one in _metrics_to_wire(metrics)]
    all_fields = [*fields.items(), *(("metrics", [one]) for one in encoded_metrics)]
    written: list[bytes | memoryview] = []
    for name, values in sorted(all_fields, key=lambda one: _NUMBERS[one[0]]):
        if size := sum(one.nbytes for one in values):
            written += [_varint(_NUMBERS[name] << 3 | _LENGTH_DELIMITED), _varint(size), *values]
    return b"".join(written)


def _fields(data: bytes) -> dict[str, list[memoryview]]:
    """Return where the fields of a GroupColumns message are, by name; each is there once, but for metrics.

    Raises RefusedError: MALFORMED, OVER_LIMIT; as ``read_columns``.
    """
    found: dict[str, list[memoryview]] = {}
    whole, start = memoryview(data), 0
    while start < len(data):
        key, at = _read_varint(data, start)
        size, at = _read_varint(data, at)
        start, end = at, at + size
        if key & 7 != _LENGTH_DELIMITED or end > len(data):
            raise _no_group(len(data))
        name = _NAMES.get(key >> 3)
        if name is None or not size or (name in found and name != "metrics"):
            raise _spare(size, len(data))
        same = found.setdefault(name, [])
        if len(same) == limits.GROUP_METRICS:
            what = f"more than {limits.GROUP_METRICS} metrics, which is as many as a group may have"
            raise RefusedError(Reason.OVER_LIMIT, what)
        same.append(whole[start:end])
        start = end
    return found


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low]) if not rest else bytes([low | 0x80]) + _varint(rest)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends. Raises RefusedError: MALFORMED; protobuf would not write it so."""
    number = 0
    for place, byte in enumerate(data[at : at + _VARINT_BYTES]):
        number |= (byte & 0x7F) << (7 * place)
        if byte < 0x80 and (byte or not place):
            return number, at + place + 1
    raise _no_group(len(data))


def _no_group(size_bytes: int) -> RefusedError:
    return RefusedError(Reason.MALFORMED, f"{size_bytes} bytes that are not a group")


def _spare(spare: int, size_bytes: int) -> RefusedError:
    return RefusedError(
        Reason.MALFORMED,
        f"{spare} of the group's {size_bytes} bytes belong to no field that this version knows",
        fix="run the coordinator's version of heterorl-node",
    )


def _checked_tokens(lengths: NDArray[np.int32]) -> int:
    """Return how many tokens completions have. Raises RefusedError: MALFORMED, OVER_LIMIT."""
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
    return tokens


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


def _bits(completions: Iterable[Completion]) -> memoryview:
    return np.packbits(np.concatenate([c.drawn for c in completions]), bitorder="little").data


def _is_drawn(packed: NDArray[np.uint8], tokens: int) -> NDArray[np.bool_]:
    is_drawn = np.unpackbits(packed, bitorder="little").astype(np.bool_)
    if is_drawn[tokens:].any() or not is_drawn[:tokens].any():
        raise RefusedError(Reason.MALFORMED, "column drawn has none of the tokens, or more than there are")
    return is_drawn[:tokens]


def _spread(column: NDArray[Scalar], is_drawn: NDArray[np.bool_], fill: Scalar) -> NDArray[Scalar]:
    whole = np.full(len(is_drawn), fill)
    whole[is_drawn] = column
    return whole


def _column(
    data: bytes | memoryview, dtype: np.dtype[Scalar], name: str, length: int | None = None
) -> NDArray[Scalar]:
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
