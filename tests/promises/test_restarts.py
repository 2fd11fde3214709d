"""A coordinator that stops at any point of a group's way, and what every peer finds afterwards."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from heterorl.v1 import common_pb2, membership_pb2, rollout_pb2
from node.errors import Reason, StartupError
from support.by_rpc import (
    ACCEPTED,
    DUPLICATE,
    SPOOLED,
    STALE,
    acknowledged,
    disk_of,
    refusal_of,
    slots,
    until_confirmed,
    until_slots,
    verdicts,
)
from support.groups import make_completion
from support.hub import HandDrain, HandPeer, RunningHub, joined, members, running_hub, step_record
from support.identity import MadeRun, make_run
from support.weights import Learner

GROUPS = 2
"""The first is trained on, the second refused as stale."""


@dataclass(slots=True)
class Way:
    """The way of two groups, on a coordinator that may be stopped between any two of its steps.

    Stopped dead: the next one finds the disk as it lay while the one before still ran. Peers repeat what they
    said last, as they do where an answer is lost.
    """

    made: MadeRun
    copies: Path
    forgets: bool
    """Whether the learner loses its memory, too, but for its journal of steps."""
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    hub: RunningHub = field(init=False)
    learner: HandPeer = field(init=False)
    sampler: HandPeer = field(init=False)
    drain: HandDrain = field(init=False)
    epoch: int = 1
    leases: list[rollout_pb2.PromptLease] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    """Groups that the learner has."""
    trained: list[str] = field(default_factory=list)

    async def begin(self) -> None:
        self.hub = await self.stack.enter_async_context(running_hub(self.made))
        self.learner = await self.stack.enter_async_context(self.hub.peer())
        self.sampler = await self.stack.enter_async_context(self.hub.peer(self.made.sampler))

    async def restart(self) -> None:
        lies = disk_of(self.made, self.copies)
        await self.stack.aclose()
        self.made = lies
        if self.forgets:
            self.epoch += 1
            self.held = []
        await self.begin()
        await self.join()
        version = 1 if self.trained else 0
        steps = [step_record(1, *self.trained)] if self.trained else []
        self.drain = await self.learner.drain(
            learner_epoch=self.epoch, version=version, steps=steps, held_group_ids=self.held, credits=9
        )
        await until_confirmed(self.learner)

    async def join(self) -> None:
        version = common_pb2.PolicyVersion(number=1 if self.trained else 0)
        await self.learner.join(held=version, learner_epoch=self.epoch)
        await self.sampler.join()

    async def lease(self) -> None:
        if not self.leases:
            self.leases = list((await self.sampler.lease(GROUPS)).leases)
        names = [lease.lease_id for lease in self.leases]
        assert names == ["0.1", "1.1"]
        assert list((await self.sampler.heartbeat(*names)).lost_lease_ids) == []

    async def submit(self) -> None:
        answers = [(await self.sampler.submit(lease)).verdict for lease in self.leases]
        assert answers == [SPOOLED] * GROUPS or answers == [DUPLICATE] * GROUPS

    async def deliver(self) -> None:
        if not hasattr(self, "drain"):
            self.drain = await self.learner.drain(credits=9)
        while len(self.held) < GROUPS:
            self.held.append(await self.drain.group())
        assert sorted(self.held) == [lease.lease_id for lease in self.leases]

    async def judge(self) -> None:
        trained, refused = (lease.lease_id for lease in self.leases)
        await self.drain.judge(trained, ACCEPTED)
        await self.drain.judge(refused, STALE)
        await until_slots(self.learner, accepted=1, available=1)
        self.held = [trained]

    async def step(self) -> None:
        self.trained = [self.leases[0].lease_id]
        await self.drain.step(1, *self.trained)
        await acknowledged(self.drain, 1)


STEPS: dict[str, Callable[[Way], Awaitable[None]]] = {
    "join": Way.join,
    "lease": Way.lease,
    "submit": Way.submit,
    "deliver": Way.deliver,
    "judge": Way.judge,
    "step": Way.step,
}


@pytest.mark.parametrize("forgets", [False, True], ids=["alone", "with the learner"])
@pytest.mark.parametrize("stops_after", [*STEPS, "each"])
async def test_every_group_is_trained_on_or_refused_once_wherever_the_coordinator_stops(
    made: MadeRun, tmp_path: Path, stops_after: str, forgets: bool
) -> None:
    way = Way(made, tmp_path, forgets)
    async with way.stack:
        await way.begin()
        for name, step in STEPS.items():
            await step(way)
            if stops_after in (name, "each"):
                await way.restart()
                if name in ("lease", "submit"):
                    await step(way)  # the answer may have been lost
        for lease in way.leases:
            assert (await way.sampler.submit(lease)).verdict == DUPLICATE
        assert await verdicts(way.learner) == {"spooled": 2, "accepted": 1, "stale": 1, "trained": 1}
        assert await slots(way.learner) == {"trained": 1, "available": 1}
        assert [one.lease_id for one in (await way.sampler.lease(2)).leases] == ["1.2", "2.1"]
        await way.drain.step(2)
        await acknowledged(way.drain, 2)


async def test_what_was_told_before_a_restart_is_true_after_it(made: MadeRun, tmp_path: Path) -> None:
    weights = Learner(run_id=made.run_id, key=made.signing_key)
    fault = rollout_pb2.LEASE_FAULT_PROMPT_FAILED
    async with joined(made, made.sampler, made.other_sampler) as (_, learner, sampler, other):
        await learner.publish(*weights.signed(1, None))
        spooled, failed = (await sampler.lease(2)).leases
        (running,) = (await other.lease()).leases
        drawn = (make_completion(version=1),) * 2
        assert (await sampler.submit(spooled, completions=drawn)).verdict == SPOOLED
        failure = rollout_pb2.FailedLease(lease_id=failed.lease_id, fault=fault)
        await sampler.rollout.ReleaseLeases(rollout_pb2.ReleaseLeasesRequest(failed=[failure]))
        before = await learner.status()
        lies = disk_of(made, tmp_path)
    async with joined(lies, made.sampler, made.other_sampler) as (_, learner, sampler, other):
        after = await learner.status()
        for name in ("head", "slots", "verdicts", "learner_epoch", "bad_prompts"):
            assert getattr(after, name) == getattr(before, name), name
        assert after.head.root == weights.versions[1].version.root
        assert list((await other.heartbeat(running.lease_id)).lost_lease_ids) == []
        # Nothing new before the learner has said that the ledger is whole.
        assert (await other.lease()).waits_for == "learner"
        assert (await other.submit(running)).verdict == SPOOLED
        assert {group.group_id for group in await learner.groups(2)} == {spooled.lease_id, running.lease_id}


async def test_after_a_restart_every_peer_joins_again_and_leases_have_a_full_term(
    made: MadeRun, tmp_path: Path
) -> None:
    async with joined(made) as (hub, _, sampler):
        (lease,) = (await sampler.lease()).leases
        hub.clock.advance(59)
        lies = disk_of(made, tmp_path)
    async with running_hub(lies) as hub, hub.peer() as learner, hub.peer(made.sampler) as sampler:
        assert (await refusal_of(sampler.lease())).reason is Reason.NOT_JOINED
        assert (await refusal_of(sampler.heartbeat())).reason is Reason.NOT_JOINED
        await learner.join()
        await sampler.join()
        hub.clock.advance(59)
        assert list((await sampler.heartbeat(lease.lease_id)).lost_lease_ids) == []
        assert await slots(learner) == {"leased": 1}


async def test_a_ledger_that_was_lost_is_not_begun_anew_beside_what_was_published(made: MadeRun) -> None:
    weights = Learner(run_id=made.run_id, key=made.signing_key)
    async with running_hub(made) as hub, hub.peer() as learner:
        await learner.join()
        await learner.publish(*weights.signed(1, None))
    (made.directory / "coordinator" / "ledger.sqlite").unlink()
    with pytest.raises(StartupError) as error:
        async with running_hub(made):
            pass
    assert "version 1" in error.value.what


async def test_a_coordinator_that_stops_says_so_on_every_open_stream_and_finishes_what_it_took(
    hub: RunningHub,
) -> None:
    async with members(hub) as (learner, sampler):
        drain = await learner.drain(credits=1)
        heartbeats = sampler.membership.Heartbeat()
        await heartbeats.write(membership_pb2.HeartbeatRequest(sequence=1))
        await heartbeats.read()
        (lease,) = (await sampler.lease()).leases
        assert (await sampler.submit(lease)).verdict == SPOOLED
        assert await drain.group() == lease.lease_id
        hub.stopping.set()
        assert (await refusal_of(drain.stream.read())).reason is Reason.DRAINING
        assert (await refusal_of(heartbeats.read())).reason is Reason.DRAINING
        async with asyncio.timeout(20):
            await asyncio.wait({hub.running})
    async with running_hub(replace(hub.made)) as again, again.peer() as learner:
        assert await slots(learner) == {"spooled": 1}


async def test_settings_that_peers_are_told_are_the_next_coordinators(made: MadeRun) -> None:
    wanted: dict[str, Any] = {"group_size": 4, "batch_groups": 3, "max_new_tokens": 16}
    async with joined(made) as (_, _, sampler):
        (lease,) = (await sampler.lease()).leases
    async with running_hub(made, **wanted) as hub, hub.peer() as learner, hub.peer(made.sampler) as sampler:
        told = await learner.join()
        assert {name: getattr(told, name) for name in ("group_size", "batch_groups")} == {
            "group_size": 4,
            "batch_groups": 3,
        }
        await sampler.join()
        answer = await sampler.submit(lease)  # leased and made by the settings before
        assert answer.verdict != SPOOLED
        await learner.drain()
        await until_confirmed(learner)
        (again,) = (await sampler.lease()).leases
        assert (again.lease_id, again.group_size, again.sampling.max_new_tokens) == ("0.2", 4, 16)


async def test_a_port_that_is_taken_stops_the_start_and_frees_the_ledger(
    hub: RunningHub, tmp_path: Path
) -> None:
    other = make_run(tmp_path / "other", now=time.time(), run_id="other")
    with pytest.RaisesGroup(StartupError, flatten_subgroups=True):
        async with running_hub(other, listen=hub.address):
            pass
    async with running_hub(other):
        pass
