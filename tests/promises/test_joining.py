"""Who is let into a run, and who is told why not."""

import grpc.aio
import pytest

from heterorl.v1 import common_pb2, membership_pb2
from node.errors import Reason
from support.by_rpc import refusal_of, row_of, until_slots
from support.hub import LAYOUT, HandPeer, RunningHub, first_answer, members
from support.waiting import eventually

OTHER = b"x" * 16
BASE, OTHER_BASE = b"b" * 16, b"c" * 16


def heartbeat(**fields: object) -> membership_pb2.HeartbeatRequest:
    return membership_pb2.HeartbeatRequest(**({"sequence": 1} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "expected", "names"),
    [
        ({"layout_digest": OTHER}, Reason.LAYOUT_MISMATCH, (OTHER.hex(), LAYOUT.hex())),
        ({"layout_digest": b""}, Reason.LAYOUT_MISMATCH, (LAYOUT.hex(),)),
        ({"tokenizer_digest": OTHER}, Reason.TOKENIZER_MISMATCH, (OTHER.hex(),)),
        ({"base_root": OTHER_BASE}, Reason.BASE_MISMATCH, (BASE.hex(), OTHER_BASE.hex())),
        ({"base_root": b"short"}, Reason.MALFORMED, ("5 bytes",)),
        ({"run_id": "other"}, Reason.FOREIGN_RUN, ("'other'", "'example'")),
        ({"protocol": 99, "oldest_protocol": 98}, Reason.PROTOCOL_MISMATCH, ("98", "99")),
        ({"protocol": 1, "oldest_protocol": 2}, Reason.MALFORMED, ()),
        ({"role": common_pb2.ROLE_LEARNER}, Reason.WRONG_ROLE, ("sampler-1", "learner")),
        ({"role": 99}, Reason.MALFORMED, ("99",)),
        ({"learner_epoch": 9}, Reason.WRONG_ROLE, ("learner_epoch", "sampler")),
    ],
)
async def test_a_sampler_that_is_not_of_this_run_is_told_in_what_and_is_not_of_it(
    hub: RunningHub, changes: dict[str, object], expected: Reason, names: tuple[str, ...]
) -> None:
    async with hub.peer() as learner, hub.peer(hub.made.sampler) as sampler:
        await learner.join(base_root=BASE)
        refused = await refusal_of(sampler.join(**changes))
        assert (refused.reason, refused.names(*names)) == (expected, True), refused.detail
        assert (await refusal_of(sampler.lease())).reason is Reason.NOT_JOINED
        assert (await refusal_of(sampler.heartbeat())).reason is Reason.NOT_JOINED
        assert [peer.node_id for peer in (await learner.status()).peers] == ["learner"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokenizer_digest": OTHER}, Reason.TOKENIZER_MISMATCH),
        ({"layout_digest": LAYOUT}, Reason.WRONG_ROLE),
    ],
)
async def test_a_verifier_that_reads_texts_otherwise_accuses_nobody(
    hub: RunningHub, changes: dict[str, object], expected: Reason
) -> None:
    async with hub.peer() as learner, hub.peer(hub.made.verifier) as verifier:
        await learner.join()
        assert (await refusal_of(verifier.join(**changes))).reason is expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"learner_epoch": 0}, Reason.MALFORMED),
        ({"vocabulary_size": 0}, Reason.MALFORMED),
        ({"learner_epoch": 2, "layout_digest": OTHER}, Reason.LAYOUT_MISMATCH),
        ({"learner_epoch": 2, "tokenizer_digest": OTHER}, Reason.TOKENIZER_MISMATCH),
        ({"learner_epoch": 2, "base_root": OTHER_BASE}, Reason.BASE_MISMATCH),
    ],
)
async def test_a_learner_of_another_model_does_not_become_the_runs(
    hub: RunningHub, changes: dict[str, object], expected: Reason
) -> None:
    async with hub.peer() as learner, hub.peer() as again:
        await learner.join(base_root=BASE)
        assert (await refusal_of(again.join(**changes))).reason is expected
        assert (await learner.status()).learner_epoch == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layout_digest": OTHER}, Reason.LAYOUT_MISMATCH),
        ({"tokenizer_digest": OTHER}, Reason.TOKENIZER_MISMATCH),
        ({"base_root": OTHER_BASE}, Reason.BASE_MISMATCH),
    ],
)
async def test_a_sampler_that_came_before_the_learner_is_checked_at_its_first_lease(
    hub: RunningHub, changes: dict[str, object], expected: Reason
) -> None:
    async with hub.peer() as learner, hub.peer(hub.made.sampler) as sampler:
        await sampler.join(**changes)
        none = await sampler.lease()
        assert (len(none.leases), none.waits_for) == (0, "learner")
        await learner.join(base_root=BASE)
        assert (await refusal_of(sampler.lease())).reason is expected


async def test_a_second_process_of_a_name_is_refused_while_the_first_is_heard_and_then_let_in(
    hub: RunningHub,
) -> None:
    identity = hub.made.sampler
    async with hub.peer() as learner, hub.peer(identity) as first, hub.peer(identity) as second:
        await learner.join()
        await first.join(instance="a")
        heartbeats = first.membership.Heartbeat()

        async def is_heard() -> bool:
            await heartbeats.write(heartbeat(instance="a"))
            return isinstance(await heartbeats.read(), membership_pb2.HeartbeatResponse)

        assert await is_heard()
        assert (await refusal_of(second.join(instance="b"))).reason is Reason.NAME_IN_USE
        twin = first_answer(second.membership.Heartbeat, heartbeat(instance="b"))
        assert (await refusal_of(twin)).reason is Reason.NAME_IN_USE
        assert await is_heard()
        assert (await row_of(learner, identity.node_id)).refused_twins == 2
        # The first comes back after a cut that the coordinator has not noticed: the older stream ends later.
        await first.join(instance="a")
        newer = first.membership.Heartbeat()
        await newer.write(heartbeat(instance="a"))
        await newer.read()
        heartbeats.cancel()
        assert (await refusal_of(second.join(instance="b"))).reason is Reason.NAME_IN_USE
        newer.cancel()

        async def is_let_in() -> bool:
            try:
                return bool(await second.join(instance="b"))
            except grpc.aio.AioRpcError:
                return False

        await eventually(is_let_in)


@pytest.mark.parametrize("learner_is_here", [True, False])
async def test_a_process_that_is_refused_its_name_takes_nothing_from_the_one_that_has_it(
    hub: RunningHub, learner_is_here: bool
) -> None:
    identity = hub.made.sampler
    async with hub.peer() as learner, hub.peer(identity) as first, hub.peer(identity) as second:
        if learner_is_here:
            await learner.join(base_root=BASE)
        first.held = common_pb2.PolicyVersion(root=BASE)
        await first.join(instance="a", base_root=BASE)
        model = {"base_root": BASE} if learner_is_here else {"base_root": OTHER_BASE, "layout_digest": OTHER}
        assert (await refusal_of(second.join(instance="b", **model))).reason is Reason.NAME_IN_USE
        if not learner_is_here:
            await learner.join(base_root=BASE)
        grant = await first.lease()
        assert (len(grant.leases), grant.waits_for) == (1, "")


async def test_the_leases_of_a_process_end_with_it_and_not_with_its_connection(hub: RunningHub) -> None:
    async with hub.peer() as learner, hub.peer(hub.made.sampler) as sampler:
        await learner.join()
        await sampler.join(instance="a")
        before = [lease.lease_id for lease in (await sampler.lease(3)).leases]
        await sampler.join(instance="a")
        assert list((await sampler.heartbeat(*before, instance="a")).lost_lease_ids) == []
        hub.clock.advance(30)  # the first process falls silent
        await sampler.join(instance="b")
        await until_slots(learner, available=3)
        assert [lease.lease_id for lease in (await sampler.lease()).leases] == ["0.2"]
        assert list((await sampler.heartbeat(*before, instance="b")).lost_lease_ids) == before[:1]


@pytest.mark.parametrize(
    "fields",
    [
        {"clock_offset_s": float("nan")},
        {"clock_offset_s": -1e300},
        {"held": common_pb2.PolicyVersion(number=1 << 62)},
        {"held": common_pb2.PolicyVersion(number=-1)},
    ],
)
async def test_a_heartbeat_with_numbers_that_cannot_be_is_malformed(
    hub: RunningHub, fields: dict[str, object]
) -> None:
    async with members(hub) as (_, sampler):
        call = first_answer(sampler.membership.Heartbeat, heartbeat(**fields))
        assert (await refusal_of(call)).reason is Reason.MALFORMED


async def test_only_the_learner_says_what_is_the_learners(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler):
        step = membership_pb2.StepReport(version=1 << 39)
        refused = await refusal_of(first_answer(sampler.membership.Heartbeat, heartbeat(step=step)))
        assert (refused.reason, refused.names("step", "learner")) == (Reason.WRONG_ROLE, True)
        await learner.heartbeat(step=membership_pb2.StepReport(version=9))
        await learner.heartbeat(step=membership_pb2.StepReport(version=7))  # from an older checkpoint
        assert (await learner.status()).step.version == 7


async def test_a_peer_that_ends_its_stream_has_left_and_one_that_falls_silent_is_shown_so(
    hub: RunningHub,
) -> None:
    async def states(peer: HandPeer) -> dict[str, str]:
        return {one.node_id: one.state for one in (await peer.status()).peers}

    async with members(hub, hub.made.sampler, hub.made.other_sampler) as (learner, sampler, other):
        await other.heartbeat()
        stream = sampler.membership.Heartbeat()
        await stream.write(heartbeat())
        await stream.read()
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert (await states(learner))["sampler-1"] == "left"
        assert (await states(learner))["sampler-2"] == "live"
        hub.clock.advance(21)

        async def is_silent() -> bool:
            return (await states(learner))["sampler-2"] == "silent"

        await eventually(is_silent)
        await other.heartbeat()
        assert (await states(learner))["sampler-2"] == "live"
