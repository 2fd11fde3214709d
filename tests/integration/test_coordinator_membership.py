"""Who is in a run: how peers join, are heard from, fall silent, leave, and come back under their name."""

import grpc
import grpc.aio
import pytest
from prometheus_client import generate_latest

from heterorl.v1 import common_pb2, membership_pb2
from node.coordinator import run_members
from node.coordinator.work.sampler_standing import NEWCOMER_LEASES
from node.protocol import OURS, Spoken
from support.hub import LEASE_TTL_S, HandPeer, RunningHub, first_answer, members, reason
from support.waiting import eventually


async def is_let_in(peer: HandPeer, instance: str) -> bool:
    try:
        return bool(await peer.join(instance=instance))
    except grpc.aio.AioRpcError:
        return False


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layout_digest": b"x" * 16}, "layout_mismatch"),
        ({"layout_digest": b""}, "layout_mismatch"),
        ({"tokenizer_digest": b"x" * 16}, "tokenizer_mismatch"),
        ({"run_id": "other"}, "foreign_run"),
        ({"protocol": 99, "oldest_protocol": 98}, "protocol_mismatch"),
        ({"protocol": 1, "oldest_protocol": 2}, "malformed"),
        ({"role": common_pb2.ROLE_LEARNER}, "wrong_role"),
        ({"role": 99}, "malformed"),
    ],
)
async def test_a_peer_that_is_not_of_this_run_is_told_why(
    hub: RunningHub, changes: dict[str, object], expected: str
) -> None:
    async with hub.peer() as learner, hub.peer(hub.made.sampler) as sampler:
        await learner.join()
        assert await reason(sampler.join(**changes)) == expected
        assert await reason(sampler.lease()) == "not_joined"


async def test_software_is_shown_by_peer_and_what_is_older_is_unusual(hub: RunningHub) -> None:
    async with hub.peer() as learner, hub.peer(hub.made.sampler) as sampler:
        answer = await learner.join(protocol=2, oldest_protocol=1, software_version="0.3.0\x1b[2J")
        assert Spoken(answer.protocol, answer.oldest_protocol, answer.software_version) == OURS
        await sampler.join(software_version="0.2.0", protocol=0, oldest_protocol=0)
        hub.clock.advance(1.1)

        async def is_seen() -> bool:
            return bool((await learner.status()).unusual)

        await eventually(is_seen)
        status = await learner.status()
        shown = {one.node_id: (one.software_version, one.protocol) for one in status.peers}
        assert shown == {"learner": ("0.3.0[2J", 2), "sampler-1": ("0.2.0", 1)}
        assert [(one.what, list(one.node_ids)) for one in status.unusual] == [
            ("sampler of an older protocol: upgrade it", ["sampler-1"])
        ]


async def test_a_sampler_may_come_before_the_learner_and_waits_for_it(hub: RunningHub) -> None:
    async with hub.peer() as learner, hub.peer(hub.made.sampler) as sampler:
        await sampler.join()
        answer = await sampler.lease()
        assert (len(answer.leases), answer.waits_for) == (0, "learner")
        assert 0.2 <= answer.retry_after_s <= 2
        await learner.join()
        assert len((await sampler.lease(100)).leases) == NEWCOMER_LEASES


async def test_a_dead_samplers_lease_goes_to_another_and_it_is_told_when_it_comes_back(
    hub: RunningHub,
) -> None:
    async with members(hub, hub.made.sampler, hub.made.other_sampler) as (learner, dead, other):
        (lease,) = (await dead.lease()).leases
        hub.clock.advance(LEASE_TTL_S - 1)
        assert list((await dead.heartbeat(lease.lease_id)).lost_lease_ids) == []
        hub.clock.advance(LEASE_TTL_S + 1)

        async def is_available() -> bool:
            return (await learner.status()).slots["available"] == 1

        await eventually(is_available)
        assert (await other.lease()).leases[0].lease_id == "0.2"
        assert list((await dead.heartbeat(lease.lease_id)).lost_lease_ids) == ["0.1"]
        assert (await dead.submit(lease)).verdict == common_pb2.VERDICT_SPOOLED  # first come, however late
        assert hub.metric("heterorl_coordinator_lease_expiries_total") == 1


async def test_a_heartbeat_is_stamped_on_arrival_and_departure_and_repeats_its_number(
    hub: RunningHub,
) -> None:
    async with hub.peer(hub.made.sampler) as sampler:
        await sampler.join()
        answer = await sampler.heartbeat(sequence=7)
        assert answer.sequence == 7
        assert answer.received_at_s == answer.sent_at_s == hub.clock.now()


async def test_a_peer_that_ends_its_stream_has_left_and_one_that_is_cut_off_has_not(hub: RunningHub) -> None:
    async with hub.peer(hub.made.sampler) as sampler, hub.peer(hub.made.other_sampler) as other:
        await sampler.join()
        await other.join()
        await other.heartbeat()
        stream = sampler.membership.Heartbeat()
        await stream.write(membership_pb2.HeartbeatRequest(sequence=1))
        await stream.read()
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        states = {peer.node_id: peer.state for peer in (await sampler.status()).peers}
        assert states == {"sampler-1": "left", "sampler-2": "live"}


async def test_a_peer_that_stops_beating_is_shown_as_silent(hub: RunningHub) -> None:
    async with hub.peer(hub.made.sampler) as sampler:
        await sampler.join()
        hub.clock.advance(21)

        async def is_silent() -> bool:
            return [peer.state for peer in (await sampler.status()).peers] == ["silent"]

        await eventually(is_silent)
        await sampler.heartbeat()
        assert [peer.state for peer in (await sampler.status()).peers] == ["live"]


async def test_the_numbers_of_a_heartbeat_are_in_the_status_and_on_the_coordinators_page(
    hub: RunningHub,
) -> None:
    machine = membership_pb2.MachineFigures(disk_free_ratio=0.25)
    figures = membership_pb2.SamplerFigures(starving_s=90.0)
    async with hub.peer(hub.made.sampler) as sampler:
        await sampler.join()
        await sampler.heartbeat(machine=machine, sampler=figures)
        (row,) = (await sampler.status()).peers
        assert (row.machine, row.sampler) == (machine, figures)

        hub.clock.advance(2)

        async def is_shown() -> bool:
            labels = 'peer_starving_seconds{node="sampler-1",role="sampler"} 90.0'
            return labels in generate_latest(hub.registry).decode()

        await eventually(is_shown)
        wrong = membership_pb2.SamplerFigures(starving_s=float("nan"))
        assert await reason(sampler.heartbeat(sampler=wrong)) == "non_finite"
    async with hub.peer() as learner:
        await learner.join()
        assert await reason(learner.heartbeat(sampler=figures)) == "wrong_role"


async def test_a_second_process_of_a_name_is_refused_while_the_first_is_here(hub: RunningHub) -> None:
    identity = hub.made.sampler
    async with hub.peer() as learner, hub.peer(identity) as first, hub.peer(identity) as second:
        await learner.join()
        await first.join(instance="a")
        heartbeats = first.membership.Heartbeat()

        async def heartbeat(sequence: int) -> bool:
            await heartbeats.write(membership_pb2.HeartbeatRequest(sequence=sequence, instance="a"))
            return isinstance(await heartbeats.read(), membership_pb2.HeartbeatResponse)

        async def row() -> membership_pb2.PeerStatus:
            (row,) = [peer for peer in (await learner.status()).peers if peer.node_id == "sampler-1"]
            return row

        assert await heartbeat(1)
        for _ in range(2):
            assert await reason(second.join(instance="b")) == "name_in_use"
        # Nor does a stream without a join take the place of the one that goes on.
        stranger = second.membership.Heartbeat()
        await stranger.write(membership_pb2.HeartbeatRequest(sequence=1, instance="b"))
        assert await reason(stranger.read()) == "name_in_use"
        assert await heartbeat(2)
        hub.clock.advance(5)
        told = await row()
        assert (told.state, told.joins, told.refused_twins, told.refused_twin_s) == ("live", 1, 3, 5.0)
        assert hub.metric("heterorl_coordinator_refused_twins_total") == 3
        # The first comes back after a cut that the coordinator has not noticed: the older stream ends later.
        await first.join(instance="a")
        newer = first.membership.Heartbeat()
        await newer.write(membership_pb2.HeartbeatRequest(sequence=1, instance="a"))
        await newer.read()
        heartbeats.cancel()
        assert await reason(second.join(instance="b")) == "name_in_use"
        newer.cancel()
        await eventually(lambda: is_let_in(second, "b"))
        assert (await row()).state == "joined"


async def test_a_process_that_takes_the_place_of_another_of_its_name_ends_the_leases_of_that_one(
    hub: RunningHub,
) -> None:
    identity = hub.made.sampler
    async with hub.peer() as learner, hub.peer(identity) as first, hub.peer(identity) as second:
        await learner.join()
        await first.join(instance="a")
        taken = (await first.lease(3)).leases
        await first.join(instance="a")  # after a lost connection: it still has them
        assert hub.metric("heterorl_coordinator_lease_expiries_total") == 0
        await first.heartbeat(instance="a")
        await eventually(lambda: is_let_in(second, "b"))
        assert hub.metric("heterorl_coordinator_lease_expiries_total") == len(taken)


async def test_in_a_large_fleet_those_who_ask_for_the_state_at_once_share_an_answer(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_members, "LARGE_FLEET_PEERS", 2)
    async with members(hub) as (learner, sampler):
        before = await learner.status()
        assert len(before.peers) == 2
        await sampler.lease()
        assert await sampler.status() == before
        hub.clock.advance(run_members.SHARED_STATUS_S)
        assert (await sampler.status()).slots["leased"] == 1


async def test_only_the_learner_reports_steps_and_its_newest_report_is_shown(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler):
        report = membership_pb2.StepReport(version=1 << 39)
        assert (
            await reason(first_answer(sampler.membership.Heartbeat, _heartbeat(step=report))) == "wrong_role"
        )
        await learner.heartbeat(step=membership_pb2.StepReport(version=9))
        await learner.heartbeat(step=membership_pb2.StepReport(version=7))  # from an older checkpoint
        assert (await learner.status()).step.version == 7
        refusals = {"service": "MembershipService", "reason": "wrong_role"}
        assert hub.metric("heterorl_node_refusals_total", **refusals) == 1


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
    async with hub.peer(hub.made.sampler) as sampler:
        await sampler.join()
        assert await reason(first_answer(sampler.membership.Heartbeat, _heartbeat(**fields))) == "malformed"


async def test_a_revoked_node_is_shown_as_revoked(hub: RunningHub) -> None:
    async with members(hub) as (learner, _sampler):
        (hub.made.directory / "coordinator" / "revoked").write_text("sampler-1\n")
        rows = {row.node_id: row.state for row in (await learner.status()).peers}
        assert rows == {"learner": "joined", "sampler-1": "revoked"}


async def test_an_operator_asks_for_a_page_of_peers_and_hears_what_the_run_waits_for(hub: RunningHub) -> None:
    async with (
        members(hub, hub.made.sampler, hub.made.other_sampler) as peers,
        hub.peer(hub.made.operator) as asks,
    ):
        for peer in peers:
            await peer.heartbeat()
        hub.clock.advance(1.1)  # all peers are looked at each second

        async def is_seen() -> bool:
            return sum(count.peers for count in (await asks.status()).peer_counts) == 3

        await eventually(is_seen)
        query = membership_pb2.PeerQuery(roles=["sampler"], sort_by="name", is_reversed=True, limit=1)
        page = await asks.membership.GetStatus(membership_pb2.GetStatusRequest(query=query))
        assert ([peer.node_id for peer in page.peers], page.matching_peers) == (["sampler-2"], 2)
        assert page.headline.waits_for == "groups: 0 of 2 are ready"
        assert not page.unusual
        query = membership_pb2.PeerQuery(sort_by="age")
        wrong = asks.membership.GetStatus(membership_pb2.GetStatusRequest(query=query))
        assert await reason(wrong) == "malformed"


def _heartbeat(**fields: object) -> membership_pb2.HeartbeatRequest:
    return membership_pb2.HeartbeatRequest(**({"sequence": 1} | fields))  # type: ignore[arg-type]
