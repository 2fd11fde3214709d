"""Who is in a run: how peers join, are heard from, fall silent, leave, and come back under their name."""

import pytest
from prometheus_client import generate_latest

from heterorl.v1 import membership_pb2
from node.coordinator.requests import membership_servicer
from node.errors import Reason
from node.values.protocol import OURS, Spoken
from support.by_rpc import refusal_of
from support.hub import RunningHub, members
from support.waiting import eventually


async def test_a_heartbeat_is_answered_with_its_number_and_times_and_its_figures_are_on_the_coordinators_page(
    hub: RunningHub,
) -> None:
    machine = membership_pb2.MachineFigures(disk_free_ratio=0.25)
    figures = membership_pb2.SamplerFigures(starving_s=90.0)
    async with members(hub) as (learner, sampler):
        answer = await sampler.heartbeat(sequence=7, machine=machine, sampler=figures)
        assert answer.sequence == 7
        assert answer.received_at_s == answer.sent_at_s == hub.clock.now()
        (row,) = (one for one in (await sampler.status()).peers if one.node_id == "sampler-1")
        assert (row.machine, row.sampler) == (machine, figures)
        hub.clock.advance(2)

        async def is_shown() -> bool:
            labels = 'peer_starving_seconds{node="sampler-1",role="sampler"} 90.0'
            return labels in generate_latest(hub.registry).decode()

        await eventually(is_shown)
        wrong = membership_pb2.SamplerFigures(starving_s=float("nan"))
        assert (await refusal_of(sampler.heartbeat(sampler=wrong))).reason is Reason.NON_FINITE
        assert (await refusal_of(learner.heartbeat(sampler=figures))).reason is Reason.WRONG_ROLE


async def test_in_a_large_fleet_those_who_ask_for_the_state_at_once_share_an_answer(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_servicer, "LARGE_FLEET_PEERS", 2)
    async with members(hub) as (learner, sampler):
        before = await learner.status()
        assert len(before.peers) == 2
        await sampler.lease()
        assert await sampler.status() == before
        hub.clock.advance(membership_servicer.SHARED_STATUS_S)
        assert (await sampler.status()).slots["leased"] == 1


async def test_an_operator_asks_for_a_page_of_peers_and_hears_who_is_unusual_and_what_the_run_waits_for(
    hub: RunningHub,
) -> None:
    async with (
        members(hub, hub.made.sampler, hub.made.other_sampler) as (learner, sampler, other),
        hub.peer(hub.made.operator) as asks,
    ):
        spoken = await learner.join(protocol=3, oldest_protocol=2, software_version="0.4.0\x1b[2J")
        assert Spoken(spoken.protocol, spoken.oldest_protocol, spoken.software_version) == OURS
        await other.join(software_version="0.3.0", protocol=2, oldest_protocol=1)
        for peer in (learner, sampler, other):
            await peer.heartbeat()
        hub.clock.advance(1.1)  # all peers are looked at each second

        async def is_seen() -> bool:
            status = await asks.status()
            return sum(count.peers for count in status.peer_counts) == 3 and bool(status.unusual)

        await eventually(is_seen)
        status = await asks.status()
        shown = {one.node_id: (one.software_version, one.protocol) for one in status.peers}
        assert (shown["learner"], shown["sampler-2"]) == (("0.4.0[2J", 3), ("0.3.0", 2))
        assert [(one.what, list(one.node_ids)) for one in status.unusual] == [
            ("sampler of an older protocol: upgrade it", ["sampler-2"])
        ]
        query = membership_pb2.PeerQuery(roles=["sampler"], sort_by="name", is_reversed=True, limit=1)
        page = await asks.membership.GetStatus(membership_pb2.GetStatusRequest(query=query))
        assert ([peer.node_id for peer in page.peers], page.matching_peers) == (["sampler-2"], 2)
        assert page.headline.waits_for == "groups: 0 of 2 are ready"
        query = membership_pb2.PeerQuery(sort_by="age")
        wrong = asks.membership.GetStatus(membership_pb2.GetStatusRequest(query=query))
        assert (await refusal_of(wrong)).reason is Reason.MALFORMED
