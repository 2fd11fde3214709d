"""Groups, and what is said about them, <-> heterorl.v1. Columns are in ``columns``."""

import hashlib
import math
from dataclasses import fields, replace
from typing import Final

import numpy as np

from heterorl.v1 import rollout_pb2
from node.errors import Reason, RefusedError
from node.values.groups.failure import detail_of
from node.values.groups.reward_finding import GroupGrades, RewardFinding
from node.values.groups.rollout import EncodedGroup, GroupHeader, GroupTerms, RolloutGroup
from node.values.groups.well_formed import check_header, check_metrics
from node.wire.columns import (
    columns_of,
    columns_of_grades,
    grades_to_wire,
    largest_columns_bytes,
    parsed,
    read_columns,
    read_grades,
)
from node.wire.mapping import from_wire, to_wire

_HEADER_BYTES: Final = 8 << 10
"""Largest header of a group: names, digests, stop strings; at most 7 KiB of them."""


def largest_group_bytes(*, group_size: int, max_new_tokens: int, prompt_tokens: int) -> int:
    """Return the size of the largest encoded group with so many completions of so many tokens each."""
    return _HEADER_BYTES + largest_columns_bytes(
        group_size=group_size, max_new_tokens=max_new_tokens, prompt_tokens=prompt_tokens
    )


def group_to_wire(group: RolloutGroup) -> EncodedGroup:
    """Return the group encoded, as it is stored and handed on: once, where it is made."""
    header = to_wire(rollout_pb2.GroupHeader, group.header)
    prompt = group.prompt_token_ids.astype("<i4").tobytes()
    header.prompt_digest = hashlib.blake2b(prompt, digest_size=16).digest()  # learners of 0.3 compare it
    return EncodedGroup(header.SerializeToString(), columns_of(group), group.group_id)


def source_of(group: RolloutGroup) -> EncodedGroup:
    """Return the bytes that a group came in; of one that was made here, new ones."""
    return group.source or group_to_wire(group)


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
    return replace(
        encoded,
        header=to_wire(rollout_pb2.GroupHeader, header).SerializeToString(),
        columns=encoded.columns + columns_of_grades(grades),
    )


def finding_to_wire(finding: RewardFinding) -> rollout_pb2.RewardFinding:
    grades = None if finding.grades is None else grades_to_wire(finding.grades)
    return to_wire(rollout_pb2.RewardFinding, finding, detail=detail_of(finding.detail), grades=grades)


def finding_from_wire(message: rollout_pb2.RewardFinding) -> RewardFinding:
    """Return a verifier's finding. Raises RefusedError: MALFORMED."""
    grades = read_grades(message.grades) if message.HasField("grades") else None
    if (message.outcome == rollout_pb2.REWARD_CHECK_GRADED) != (grades is not None):
        raise RefusedError(
            Reason.MALFORMED, f"finding {message.outcome} {'with' if grades else 'without'} rewards"
        )
    return from_wire(RewardFinding, message, detail=detail_of(message.detail), grades=grades)


def submission_to_wire(group: EncodedGroup, *further: EncodedGroup) -> rollout_pb2.SubmitRolloutsRequest:
    request = rollout_pb2.SubmitRolloutsRequest()
    fill_group(request.group, group)
    for one in further:
        fill_group(request.further.add(), one)
    return request


def submitted_from_wire(request: rollout_pb2.SubmitRolloutsRequest) -> list[EncodedGroup]:
    """Return the groups of a request, in their order."""
    return [encoded_from_wire(request.group), *map(encoded_from_wire, request.further)]


def delivery_to_wire(group: EncodedGroup) -> rollout_pb2.DrainRolloutsResponse:
    response = rollout_pb2.DrainRolloutsResponse()
    fill_group(response.group, group)
    return response


def fill_group(message: rollout_pb2.EncodedGroup, group: EncodedGroup) -> None:
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
    return from_wire(GroupHeader, parsed(rollout_pb2.GroupHeader(), data))


def group_from_wire(encoded: EncodedGroup) -> RolloutGroup:
    """Return an encoded group; its arrays are views of the bytes, which are its ``source``.

    Raises:
        RefusedError: MALFORMED where it is not a group, has bytes that no field of it holds, columns that
            disagree in length, or a header that says something else; OVER_LIMIT where it is larger than any
            we take. Lengths are checked before anything is split.
    """
    header = header_from_wire(encoded.header)
    if encoded.group_id not in ("", header.group_id):
        what = f"group {header.group_id[:100]!r} came as {encoded.group_id[:100]!r}"
        raise RefusedError(Reason.MALFORMED, what)
    columns = read_columns(encoded.columns)
    group = RolloutGroup(
        **{one.name: getattr(header, one.name) for one in fields(GroupTerms)},
        prompt_token_ids=columns.prompt_token_ids,
        completions=columns.completions,
        metrics=columns.metrics,
        sampler_id=encoded.sampler_id,
        spooled_at_s=encoded.spooled_at_s,
        source=encoded,
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
