import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from heterorl.v1 import common_pb2, membership_pb2, membership_pb2_grpc
from node.clients.membership import heartbeats
from node.clients.membership.heartbeats import Notices, PeerReports
from node.clients.membership.join_call import Member, OwnTask
from node.clients.membership.membership_client import MembershipClient, Uplink
from node.errors import Reason, Recovery, RefusedError
from node.identity.peer import Peer
from node.rpc.call_ends import REASON_KEY
from node.rpc.channel import Purpose, dial
from node.system.backoff import Backoff
from node.system.clock import SystemClock
from node.values.evaluation import EvaluationNotice
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.peer_figures import MachineFigures, SamplerFigures
from node.values.policy import PolicyVersion
from node.values.protocol import OURS
from node.values.roles import Role
from support.refusals import refused

HELD = PolicyVersion(3, b"r" * 16)


class Hub(membership_pb2_grpc.MembershipServiceServicer):
    """A hub of its own few lines: remembers what it was sent, answers what the test sets."""

    def __init__(self) -> None:
        self.joins: asyncio.Queue[membership_pb2.JoinRequest] = asyncio.Queue()
        self.heartbeats: asyncio.Queue[membership_pb2.HeartbeatRequest] = asyncio.Queue()
        self.goodbyes = asyncio.Event()
        self.refuse_join: Reason | None = None
        self.refuse_heartbeat: Reason | None = None
        self.answers = True
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.repeats = False
        """Whether every answer says what the one before said."""
        self.clock_ahead_s = 0.0
        self.task_digest = b"old"
        self.protocols = (OURS.protocol, OURS.oldest_protocol)
        self.answer = membership_pb2.HeartbeatResponse()

    async def Join(self, request: Any, context: Any) -> membership_pb2.JoinResponse:  # noqa: N802
        await self.joins.put(request)
        if self.refuse_join is not None:
            await refuse(context, self.refuse_join)
        return membership_pb2.JoinResponse(
            task_digest=self.task_digest,
            protocol=self.protocols[0],
            oldest_protocol=self.protocols[1],
            task="addition",
            group_size=4,
            batch_groups=8,
            max_staleness_versions=2,
            heartbeat_interval_s=0.02,
            sampling=common_pb2.SamplingParameters(temperature=1, top_p=1, max_new_tokens=8),
        )

    async def Heartbeat(  # noqa: N802
        self, requests: Any, context: Any
    ) -> AsyncIterator[membership_pb2.HeartbeatResponse]:
        async for request in requests:
            received_at_s = time.time() + self.clock_ahead_s
            await self.heartbeats.put(request)
            if self.refuse_heartbeat is not None:
                reason, self.refuse_heartbeat = self.refuse_heartbeat, None
                await refuse(context, reason)
            await self.may_answer.wait()
            if self.answers:
                answer = membership_pb2.HeartbeatResponse(
                    sequence=request.sequence,
                    received_at_s=received_at_s,
                    sent_at_s=time.time() + self.clock_ahead_s,
                )
                answer.MergeFrom(self.answer)
                if not self.repeats:
                    self.answer = membership_pb2.HeartbeatResponse()
                yield answer
        self.goodbyes.set()

    async def GetStatus(self, request: Any, context: Any) -> membership_pb2.GetStatusResponse:  # noqa: N802
        raise NotImplementedError


@pytest.fixture
def hub() -> Hub:
    return Hub()


async def refuse(context: Any, reason: Reason) -> None:
    await context.abort(grpc.StatusCode[reason.status], "no", ((REASON_KEY, reason.value),))


@asynccontextmanager
async def serving(hub: Hub, port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    membership_pb2_grpc.add_MembershipServiceServicer_to_server(hub, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


class Peering:
    """A client and what the test needs to see of it."""

    def __init__(self, port: int, **notices: Callable[..., None]) -> None:
        self.readies = 0
        self.held = HELD
        self.stopping = asyncio.Event()
        self.channel = dial(
            f"127.0.0.1:{port}", Peer("run", Role.SAMPLER, "one"), purpose=Purpose.CONTROL, now=time.time()
        )
        self.client = MembershipClient(
            self.channel,
            Member("run", Role.SAMPLER, b"l" * 16, b"t" * 16),
            Uplink(SystemClock(), Backoff(lambda: 0.1)),
            reports=PeerReports(
                held=lambda: self.held,
                waits_for=lambda: "prompt lease",
                machine=lambda: MachineFigures(disk_free_ratio=0.5),
                sampler=lambda: SamplerFigures(tokens_per_s=7.0),
                running_leases=lambda: ("5.1",),
            ),
            notices=Notices(**notices),
        )

    def ready(self) -> None:
        self.readies += 1

    async def run(self) -> None:
        try:
            await self.client.run(ready=self.ready, stopping=self.stopping)
        finally:
            await self.channel.close()


@asynccontextmanager
async def peering(port: int, **notices: Callable[..., None]) -> AsyncIterator[Peering]:
    """Run a client beside the body; where it fails, the body ends with it."""
    peer = Peering(port, **notices)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(peer.run())
        yield peer
        peer.stopping.set()


async def test_it_joins_says_ready_and_hands_out_the_settings(hub: Hub) -> None:
    async with serving(hub) as port, peering(port) as peer:
        settings = await peer.client.settings()
        assert (settings.task, settings.group_size, settings.batch_groups) == ("addition", 4, 8)
        request = await hub.joins.get()
        assert (request.run_id, request.layout_digest, request.held.number) == ("run", b"l" * 16, 3)
        assert peer.readies == 1


async def test_a_heartbeat_says_what_the_peer_holds_works_on_and_waits_for(hub: Hub) -> None:
    async with serving(hub) as port, peering(port):
        heartbeat = await hub.heartbeats.get()
        assert (heartbeat.held.number, heartbeat.held.root) == (HELD.number, HELD.root)
        assert list(heartbeat.running_lease_ids) == ["5.1"]
        assert heartbeat.waits_for == "prompt lease"
        assert not heartbeat.HasField("step")
        assert (heartbeat.machine.disk_free_ratio, heartbeat.sampler.tokens_per_s) == (0.5, 7.0)
        assert not heartbeat.machine.HasField("mended_frames")
        assert not heartbeat.sampler.HasField("price_per_hour")
        assert [heartbeat.sequence, (await hub.heartbeats.get()).sequence] == [1, 2]


async def test_the_next_heartbeat_goes_when_the_coordinator_asks_and_not_much_sooner_than_the_run_says(
    hub: Hub,
) -> None:
    async with serving(hub) as port, peering(port):
        hub.answer = membership_pb2.HeartbeatResponse(next_heartbeat_s=3600)
        await hub.heartbeats.get()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):  # 10 intervals
                await hub.heartbeats.get()
    for asked_s, expected_s in ((None, 2.0), (5.0, 5.0), (0.0, 1.0), (1e9, heartbeats.LONGEST_PAUSE_S)):
        assert heartbeats.pause_s(asked_s, interval_s=2.0) == expected_s


async def test_verdicts_lost_leases_and_repairs_are_passed_on(hub: Hub) -> None:
    verdicts: asyncio.Queue[GroupVerdict] = asyncio.Queue()
    lost: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
    repair = asyncio.Event()
    hub.answer = membership_pb2.HeartbeatResponse(
        lost_lease_ids=["5.1"],
        verdicts=[
            membership_pb2.GroupVerdict(group_id="4.1", verdict=common_pb2.VERDICT_STALE, detail="late")
        ],
        must_repair=True,
    )
    notices: dict[str, Callable[..., None]] = {
        "verdict": verdicts.put_nowait,
        "lost_leases": lost.put_nowait,
        "must_repair": repair.set,
    }
    async with serving(hub) as port, peering(port, **notices):
        assert await verdicts.get() == GroupVerdict("4.1", Verdict.STALE, "late")
        assert await lost.get() == ("5.1",)
        await repair.wait()


async def test_what_was_repaired_before_the_answer_came_is_not_repaired_again() -> None:
    hub, repaired, repairs = Hub(), PolicyVersion(HELD.number, b"s" * 16), list[PolicyVersion]()
    hub.may_answer.clear()
    async with serving(hub) as port, peering(port, must_repair=lambda: repairs.append(peer.held)) as peer:
        assert (await hub.heartbeats.get()).held.root == HELD.root
        peer.held, hub.answer = repaired, membership_pb2.HeartbeatResponse(must_repair=True)
        hub.may_answer.set()
        # A heartbeat acknowledges the answer to the one before.
        assert (await hub.heartbeats.get()).held.root == repaired.root
        assert repairs == []
        hub.answer = membership_pb2.HeartbeatResponse(must_repair=True)
        for _ in range(3):
            await hub.heartbeats.get()
        assert repairs == [repaired]


async def test_a_learner_hears_which_version_is_best_and_which_is_under_evaluation(hub: Hub) -> None:
    hub.repeats = True
    head = common_pb2.PolicyVersion(number=9)
    hub.answer = membership_pb2.HeartbeatResponse(best_version=0, evaluating_version=8, head=head)
    async with serving(hub) as port, peering(port) as peer:
        assert peer.client.heartbeats.evaluations == EvaluationNotice()
        while (await hub.heartbeats.get()).sequence < 2:
            pass
        assert peer.client.heartbeats.evaluations == EvaluationNotice(
            best=0, under_way=8, announced=9, is_told=True
        )
        hub.answer = membership_pb2.HeartbeatResponse(best_version=8, is_evaluated=True)
        for _ in range(3):
            await hub.heartbeats.get()
        assert peer.client.heartbeats.evaluations == EvaluationNotice(best=8, is_evaluated=True, is_told=True)


async def test_a_verdict_told_again_is_passed_on_once(hub: Hub) -> None:
    """As by a hub that cannot know whether its last answer arrived."""
    hub.repeats = True
    verdicts: asyncio.Queue[GroupVerdict] = asyncio.Queue()
    told = [
        membership_pb2.GroupVerdict(group_id=f"{number}.1", verdict=common_pb2.VERDICT_TRAINED)
        for number in range(3)
    ]
    hub.answer = membership_pb2.HeartbeatResponse(verdicts=told[:2])
    async with serving(hub) as port, peering(port, verdict=verdicts.put_nowait):
        while (await hub.heartbeats.get()).sequence < 4:
            pass
        hub.refuse_heartbeat = Reason.NOT_JOINED
        hub.answer = membership_pb2.HeartbeatResponse(verdicts=told)
        # A new stream: the two of the last answer are told again, with one that is new.
        while (await hub.heartbeats.get()).sequence != 1:
            pass
        while (await hub.heartbeats.get()).sequence < 4:
            pass
        assert [(await verdicts.get()).group_id for _ in range(3)] == ["0.1", "1.1", "2.1"]
        assert verdicts.empty()


async def test_it_joins_again_as_the_same_peer_when_the_hub_comes_back() -> None:
    first, second = Hub(), Hub()
    async with AsyncExitStack() as stack:
        async with serving(first) as port:
            peer = await stack.enter_async_context(peering(port))
            await first.heartbeats.get()
        await stack.enter_async_context(serving(second, port))
        assert await second.joins.get() == await first.joins.get()
        assert (await second.heartbeats.get()).sequence == 1
        assert peer.readies == 1


@pytest.mark.parametrize("reason", [r for r in Reason if r.recovery is Recovery.STOP])
async def test_a_final_refusal_ends_it(hub: Hub, reason: Reason) -> None:
    hub.refuse_join = reason
    async with serving(hub) as port:
        peer = Peering(port)
        with refused(reason):
            await peer.run()
        assert peer.readies == 0


@pytest.mark.parametrize(
    ("spoken", "to_upgrade"),
    [((99, 98), "this sampler"), ((0, 0), "relay of release 0.3")],
    ids=["a later coordinator", "a relay that carries samplers"],
)
async def test_a_peer_that_speaks_no_protocol_of_what_answers_ends(
    hub: Hub, spoken: tuple[int, int], to_upgrade: str
) -> None:
    hub.protocols = spoken
    async with serving(hub) as port:
        peer = Peering(port)
        with refused(Reason.PROTOCOL_MISMATCH, to_upgrade):
            await peer.run()
        assert peer.readies == 0


async def test_a_sampler_whose_task_has_changed_meanwhile_is_told_and_stays() -> None:
    hub, told = Hub(), asyncio.Event()
    async with serving(hub) as port, peering(port, task_changed=told.set) as peer:
        await peer.client.settings()
        await peer.client.tell_task(OwnTask(100, b"old", b"g" * 16))
        hub.task_digest = b"new"
        hub.refuse_heartbeat = Reason.NOT_JOINED
        await told.wait()
        assert (await peer.client.settings()).task_digest == peer.client.task_digest == b"new"
        _, first, again = [await hub.joins.get() for _ in range(3)]
        for join in (first, again):
            assert (join.prompts, join.task_digest, join.grader_digest) == (100, b"old", b"g" * 16)


@pytest.mark.parametrize("reason", [Reason.BUSY, Reason.NAME_IN_USE])
async def test_a_refusal_that_may_pass_is_tried_again_by_the_same_process(hub: Hub, reason: Reason) -> None:
    hub.refuse_join = reason
    async with serving(hub) as port, peering(port) as peer:
        first, second = await hub.joins.get(), await hub.joins.get()
        assert first.instance == second.instance != ""
        hub.refuse_join = None
        await peer.client.settings()
        assert (await hub.heartbeats.get()).instance == first.instance


async def test_a_process_whose_name_was_taken_while_it_was_cut_off_ends(hub: Hub) -> None:
    hub.refuse_heartbeat = Reason.NAME_IN_USE
    async with serving(hub) as port:
        peer = Peering(port)
        with pytest.raises(RefusedError) as caught:
            await peer.run()
    assert caught.value.reason is Reason.NAME_IN_USE
    assert hub.joins.qsize() == 1


async def test_a_hub_that_stops_answering_is_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "ANSWER_TIMEOUT_S", 0.1)
    hub = Hub()
    hub.answers = False
    async with serving(hub) as port, peering(port):
        await hub.joins.get()
        await hub.joins.get()


async def test_the_hubs_clock_is_estimated_from_the_heartbeats(hub: Hub) -> None:
    hub.clock_ahead_s = 100.0
    async with serving(hub) as port, peering(port) as peer:
        while (await hub.heartbeats.get()).sequence < 3:
            pass
        assert peer.client.heartbeats.clock_offset_s == pytest.approx(100.0, abs=0.5)


async def test_stopping_says_goodbye(hub: Hub) -> None:
    async with serving(hub) as port, peering(port) as peer:
        await hub.heartbeats.get()
        peer.stopping.set()
        await asyncio.wait_for(hub.goodbyes.wait(), timeout=5)


async def test_stopping_does_not_wait_for_a_hub_that_is_away() -> None:
    async with serving(Hub()) as port:
        pass
    async with asyncio.timeout(5), peering(port) as peer:
        peer.stopping.set()
    assert peer.readies == 0
