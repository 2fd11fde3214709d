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


async def test_software_is_shown_by_peer_and_what_is_older_is_unusual(hub: RunningHub) -> None:
    async with hub.peer() as learner, hub.peer(hub.made.sampler) as sampler:
        answer = await learner.join(protocol=3, oldest_protocol=2, software_version="0.4.0\x1b[2J")
        assert Spoken(answer.protocol, answer.oldest_protocol, answer.software_version) == OURS
        await sampler.join(software_version="0.3.0", protocol=2, oldest_protocol=1)
        hub.clock.advance(1.1)

        async def is_seen() -> bool:
            return bool((await learner.status()).unusual)

        await eventually(is_seen)
        status = await learner.status()
        shown = {one.node_id: (one.software_version, one.protocol) for one in status.peers}
        assert shown == {"learner": ("0.4.0[2J", 3), "sampler-1": ("0.3.0", 2)}
        assert [(one.what, list(one.node_ids)) for one in status.unusual] == [
            ("sampler of an older protocol: upgrade it", ["sampler-1"])
        ]


async def test_a_heartbeat_is_stamped_on_arrival_and_departure_and_repeats_its_number(
    hub: RunningHub,
) -> None:
    async with hub.peer(hub.made.sampler) as sampler:
        await sampler.join()
        answer = await sampler.heartbeat(sequence=7)
        assert answer.sequence == 7
        assert answer.received_at_s == answer.sent_at_s == hub.clock.now()


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
        assert (await refusal_of(sampler.heartbeat(sampler=wrong))).reason is Reason.NON_FINITE
    async with hub.peer() as learner:
        await learner.join()
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
        assert (await refusal_of(wrong)).reason is Reason.MALFORMED
