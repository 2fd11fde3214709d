"""A group that a sampler hands in: its verdict, its lease and its prompt."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from heterorl.v1 import common_pb2, rollout_pb2
from node.errors import Reason
from node.values.groups.rollout import EncodedGroup
from node.wire.rollouts import group_to_wire
from support.by_rpc import (
    DUPLICATE,
    FOREIGN,
    MALFORMED,
    SPOOLED,
    acknowledged,
    slots,
    told,
    verdicts,
)
from support.groups import SAMPLING, make_completion
from support.hub import TIMEOUT_S, RunningHub, answer_to, joined, members, submission
from support.identity import MadeRun
from support.waiting import eventually
from support.weights import Learner

STREAMS = 2
"""As many as a sampler may have at once."""
UNSPECIFIED = common_pb2.VERDICT_UNSPECIFIED
OTHER = b"other digest...."


async def test_a_group_submitted_again_is_a_duplicate_and_counted_once(hub: RunningHub) -> None:
    """Whether it waits, is delivered or was trained on."""
    async with members(hub) as (learner, sampler):
        (lease,) = (await sampler.lease()).leases
        assert (await sampler.submit(lease)).verdict == SPOOLED
        assert (await sampler.submit(lease)).verdict == DUPLICATE
        drain = await learner.drain(credits=9)
        assert await drain.group() == lease.lease_id
        assert (await sampler.submit(lease)).verdict == DUPLICATE
        await drain.step(1, lease.lease_id)
        await acknowledged(drain, 1)
        assert (await sampler.submit(lease)).verdict == DUPLICATE
        assert await drain.hears_nothing()
        assert await verdicts(learner) == {"spooled": 1, "trained": 1}


async def test_a_group_submitted_by_two_streams_at_once_is_spooled_once(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler):
        (lease,) = (await sampler.lease()).leases
        answers = await asyncio.gather(*(sampler.submit(lease) for _ in range(STREAMS)))
        assert {answer.verdict for answer in answers} == {SPOOLED, DUPLICATE}
        assert await slots(learner) == {"spooled": 1}


async def test_answers_come_in_the_order_of_the_groups_of_a_stream(hub: RunningHub) -> None:
    """A group that is refused does not end the stream."""
    async with members(hub) as (_, sampler):
        leases = (await sampler.lease(4)).leases
        good = [submission(answer_to(one, run_id=hub.made.run_id)) for one in leases]
        unreadable = submission(EncodedGroup(b"\xff", b""), group_id=leases[2].lease_id)
        stream = sampler.rollout.SubmitRollouts(timeout=TIMEOUT_S)
        for request in (good[0], good[0], unreadable, good[1], good[3]):
            await stream.write(request)
        await stream.done_writing()
        told = [answer.verdict async for response in stream for answer in response.answers]
        assert told == [SPOOLED, DUPLICATE, MALFORMED, SPOOLED, SPOOLED]


@pytest.mark.parametrize("name", ["another's", "0.2", "99.1", "junk"])
async def test_who_does_not_hold_a_lease_neither_answers_nor_spends_it(hub: RunningHub, name: str) -> None:
    async with members(hub, hub.made.sampler, hub.made.other_sampler) as (learner, holder, thief):
        (lease,) = (await holder.lease()).leases
        claimed = lease.lease_id if name == "another's" else name
        answer = await thief.submit(replace_id(lease, claimed))
        assert answer.verdict == (MALFORMED if name == "junk" else FOREIGN)
        assert claimed in answer.detail
        assert (await holder.submit(lease)).verdict == SPOOLED
        assert await verdicts(learner) == {"spooled": 1}


def replace_id(lease: rollout_pb2.PromptLease, lease_id: str) -> rollout_pb2.PromptLease:
    changed = rollout_pb2.PromptLease()
    changed.CopyFrom(lease)
    changed.lease_id = lease_id
    return changed


def completions(**changes: Any) -> dict[str, Any]:
    return {"completions": tuple(make_completion(**changes) for _ in range(2))}


@pytest.mark.parametrize(
    ("changes", "verdict", "named"),
    [
        ({"run_id": "other"}, FOREIGN, ("'other'", "'example'")),
        ({"task": "other"}, FOREIGN, ("'other'", "'addition'")),
        ({"prompt_index": 99_999}, FOREIGN, ("99999",)),
        ({"layout_digest": OTHER}, FOREIGN, (OTHER.hex(),)),
        ({"tokenizer_digest": OTHER}, FOREIGN, (OTHER.hex(),)),
        ({"task_digest": OTHER}, FOREIGN, (OTHER.hex(),)),
        ({"sampling": replace(SAMPLING, temperature=0.5)}, FOREIGN, ("0.5",)),
        ({"sampling": replace(SAMPLING, max_new_tokens=9)}, FOREIGN, ("9",)),
        (completions(version=1), FOREIGN, ("version 1",)),
        (completions(tokens=9), MALFORMED, ("9 tokens", "8")),
        ({"completions": (make_completion(),) * 3}, MALFORMED, ("3 completions", "2")),
        ({"prompt_token_ids": np.zeros(1_200_000, np.int32)}, UNSPECIFIED, ()),
    ],
)
async def test_a_group_that_does_not_answer_its_lease_has_a_verdict_with_the_values(
    hub: RunningHub, changes: dict[str, Any], verdict: int, named: tuple[str, ...]
) -> None:
    async with members(hub) as (_, sampler):
        (lease,) = (await sampler.lease()).leases
        run_id = changes.pop("run_id", hub.made.run_id)
        group = answer_to(lease, run_id=run_id, **changes)
        answer = await sampler.hand_in(submission(group))
        assert answer.verdict == verdict, answer
        assert all(word in answer.detail for word in named), answer.detail
        if verdict == UNSPECIFIED:
            assert answer.reason == Reason.OVER_LIMIT


@pytest.mark.parametrize(
    "changes", [{"layout_digest": OTHER}, completions(tokens=9)], ids=["foreign", "malformed"]
)
async def test_the_prompt_of_a_group_that_was_refused_is_leased_again(
    hub: RunningHub, changes: dict[str, Any]
) -> None:
    async with members(hub) as (learner, sampler):
        (lease,) = (await sampler.lease()).leases
        await sampler.submit(lease, **changes)
        assert await told(sampler) == []  # the answer told it
        (again,) = (await sampler.lease()).leases
        assert (again.lease_id, again.prompt_index) == ("0.2", lease.prompt_index)
        assert (await sampler.submit(again)).verdict == SPOOLED
        assert (await verdicts(learner))["spooled"] == 1


async def test_bytes_that_no_field_holds_are_neither_stored_nor_read_beyond_the_largest_group(
    hub: RunningHub,
) -> None:
    ledger = hub.made.directory / "coordinator" / "ledger.sqlite"
    async with members(hub) as (_learner, sampler):
        leases = (await sampler.lease(3)).leases

        def padded(lease: rollout_pb2.PromptLease, mebibytes: int) -> rollout_pb2.SubmitRolloutsRequest:
            group = group_to_wire(answer_to(lease, run_id=hub.made.run_id))
            unknown = b"x" * (mebibytes << 20)
            field_999 = b"\xba\x3e" + encoded_length(len(unknown)) + unknown
            padded = replace(group, header=group.header + field_999)
            return submission(padded, group_id=lease.lease_id)

        def written_bytes() -> int:
            return sum(file.stat().st_size for file in ledger.parent.glob("ledger.sqlite*"))

        before = written_bytes()
        for lease in leases:
            answer = await sampler.hand_in(padded(lease, 1))
            assert (answer.verdict, "allowed are 8192" in answer.detail) == (MALFORMED, True)
        answer = await sampler.hand_in(padded(leases[0], 5))
        assert (answer.verdict, answer.reason) == (UNSPECIFIED, Reason.OVER_LIMIT)
        with pytest.raises(grpc.aio.AioRpcError) as refused:  # by gRPC, before it is received
            await sampler.hand_in(padded(leases[0], 60))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert written_bytes() - before < 1 << 20


def encoded_length(size: int) -> bytes:
    """Return a length as protobuf writes it: seven bits a byte, the lowest first."""
    low, rest = size & 0x7F, size >> 7
    return bytes([low | 0x80]) + encoded_length(rest) if rest else bytes([low])


async def test_a_header_without_what_it_needs_has_a_verdict_and_its_prompt_goes_on(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler):
        (lease,) = (await sampler.lease()).leases
        header = rollout_pb2.GroupHeader(run_id=hub.made.run_id, group_id=lease.lease_id)
        group = EncodedGroup(header.SerializeToString(), b"")
        answer = await sampler.hand_in(submission(group, group_id=lease.lease_id))
        assert answer.verdict == MALFORMED
        assert await slots(learner) == {"available": 1}


async def test_where_the_spool_is_full_a_group_may_be_sent_again_later(made: MadeRun) -> None:
    """Groups of twice the size that was expected: the bytes' bound is met with leases out."""
    settings: dict[str, Any] = {
        "buffer_bytes": 1 << 20,
        "batch_groups": 1,
        "group_size": 64,
        "max_new_tokens": 4096,
        "max_staleness_versions": 50,
        "newcomers_part": 1.0,
    }
    async with joined(made, **settings) as (_, learner, sampler):
        leases = (await sampler.lease(3)).leases
        large = {"completions": (make_completion(tokens=1024),) * 64}
        assert (await sampler.submit(leases[0], **large)).verdict == SPOOLED
        refused = await sampler.submit(leases[1], **large)
        assert (refused.verdict, refused.reason) == (UNSPECIFIED, Reason.BUSY)
        assert list((await sampler.heartbeat(leases[1].lease_id)).lost_lease_ids) == []
        drain = await learner.drain(credits=9)
        await drain.step(1, await drain.group())
        await acknowledged(drain, 1)
        assert (await sampler.submit(leases[1], **large)).verdict == SPOOLED


async def test_a_new_ledger_does_not_take_a_group_of_a_lease_that_it_never_granted(made: MadeRun) -> None:
    async with joined(made) as (_, _, sampler):
        (lease,) = (await sampler.lease()).leases
        group = submission(answer_to(lease, run_id=made.run_id))
    (made.directory / "coordinator" / "ledger.sqlite").unlink()
    async with joined(made) as (_, _, sampler):  # a new ledger, which never granted that lease
        assert (await sampler.hand_in(group)).verdict == FOREIGN
        assert await slots(sampler) == {}


async def test_an_uploaded_version_is_announced_and_its_groups_are_no_longer_foreign(hub: RunningHub) -> None:
    made = hub.made
    weights = Learner(run_id=made.run_id, key=made.signing_key)
    async with members(hub) as (learner, sampler):
        first, second = (await sampler.lease(2)).leases
        completions = (make_completion(version=1),) * 2
        refused = await sampler.submit(first, completions=completions)
        assert (refused.verdict, "version 1" in refused.detail) == (FOREIGN, True)
        await learner.publish(*weights.signed(1, None))
        assert (await sampler.submit(second, completions=completions)).verdict == SPOOLED
        root = weights.versions[1].version.root
        told = await sampler.heartbeat()
        assert (told.head.number, told.head.root, told.must_repair) == (1, root, False)

        async def is_logged() -> bool:
            wrong = common_pb2.PolicyVersion(number=1, root=b"x" * 16)
            return (await sampler.heartbeat(held=wrong)).must_repair

        await eventually(is_logged)
        hub.clock.advance(5)
        await sampler.heartbeat(held=common_pb2.PolicyVersion(number=0))
        (row,) = [peer for peer in (await sampler.status()).peers if peer.node_id == "sampler-1"]
        assert (row.version_lag_versions, row.lag_s) == (1, 5.0)
