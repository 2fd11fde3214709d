"""A few dozen simulated runs keep every promise; a broken one replays exactly and is told shortly.

Thousands more: `make simulate SEEDS=10000`; all planted faults: `make simulate PLANTED=1`.
"""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from node.rpc.call_ends import ConnectionLost
from simulation.faults import Fault, FaultKind, draw_plan
from simulation.network import Network, Stream
from simulation.planted import PLANTED
from simulation.shrinking import rule_of, shrunk, told
from simulation.virtual_loop import StandsStillError, VirtualLoop
from simulation.world import simulate

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (1, 9, 12, 16, 18, 21, 22, 27, 30, 32, 38, 40, 43, 51, 55, 56, 57, 61, 64, 67, 68)
"""Together they reach every fault, answer and wait that any of the first 70 does."""


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_fails_a_run_keeps_every_promise(seed: int) -> None:
    outcome = simulate(draw_plan(seed))
    assert not outcome.violations, told(outcome)
    assert outcome.steps > 0


def test_a_run_goes_on_after_the_coordinators_clock_was_set_back_and_a_sampler_died() -> None:
    """Found by the simulator: the dead one's leases stayed for as long as the clock had been wrong."""
    faults = (
        Fault(FaultKind.COORDINATOR_CLOCK, at_s=9.9, for_s=1.0, amount=0.1),
        Fault(FaultKind.SAMPLER_GONE, at_s=10.0, for_s=1.0, target="sampler-2"),
    )
    plan = replace(draw_plan(2), samplers=3, evaluates_every_versions=4, faults=faults)
    outcome = simulate(plan)
    assert not outcome.violations, told(outcome)


@pytest.mark.parametrize("kind", [FaultKind.TAKEN_OVER, FaultKind.RESTORED])
@pytest.mark.parametrize("seed", range(4))
def test_a_run_goes_on_after_all_that_was_announced_was_lost_with_its_coordinator(
    kind: FaultKind, seed: int
) -> None:
    plan = replace(draw_plan(seed), faults=(Fault(kind, at_s=12.0 + seed, for_s=4.0),))
    outcome = simulate(plan)
    assert not outcome.violations, told(outcome)
    assert outcome.reached[f"fault: {kind}"]


@pytest.mark.parametrize("seed", [19, 23])
def test_contributions_of_several_batches_come_together_under_a_low_bound_on_staleness(seed: int) -> None:
    """Found by the simulator: as many groups were leased as steps of one batch would take."""
    plan = draw_plan(seed).with_faults(())
    local_steps = dict(plan.merge)["local_steps"]
    assert plan.contributors * local_steps > plan.max_staleness_versions + 1
    outcome = simulate(plan)
    assert not outcome.violations, told(outcome)
    assert outcome.steps > 1
    assert outcome.reached["contribution merged"] > outcome.steps


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(235, id="a slot leased again as options change has two groups with two contributors"),
        pytest.param(30158, id="groups that a contributor claims and passes over"),
        pytest.param(40065, id="groups that a contributor claims, in a full buffer"),
        pytest.param(50011, id="one with a part of a contribution comes after all others each time"),
        pytest.param(90629, id="a group that its contributor has is dealt to it again, for a credit"),
        pytest.param(60237, id="groups that taught nothing, of a contribution merged before a kill"),
    ],
)
def test_what_the_simulator_has_found_stays_mended(seed: int) -> None:
    outcome = simulate(draw_plan(seed))
    assert not outcome.violations, told(outcome)


@pytest.mark.parametrize("seed", [17, 36])
def test_a_contribution_counts_although_its_sender_has_started_again_before_it_was_read(seed: int) -> None:
    faults = (
        Fault(FaultKind.LEARNER_STALLED, at_s=4.0, for_s=8.0),
        Fault(FaultKind.CONTRIBUTOR_KILLED, at_s=8.0 + seed % 5, for_s=0.5, target="contributor-1"),
    )
    outcome = simulate(draw_plan(seed).with_faults(faults))
    assert not outcome.violations, told(outcome)
    assert outcome.reached["contributions contributor-1 merged"]
    assert not outcome.reached["contributions contributor-1 groups"]


def test_plans_draw_every_kind_of_fault() -> None:
    drawn = {fault.kind for seed in range(200) for fault in draw_plan(seed).faults}
    assert drawn == set(FaultKind)


def test_a_seed_replays_exactly_in_another_process() -> None:
    seed = max(SEEDS, key=lambda seed: len(draw_plan(seed).faults))
    here = simulate(draw_plan(seed))
    program = (
        "from simulation.faults import draw_plan\nfrom simulation.world import simulate\n"
        f"print(simulate(draw_plan({seed})).digest)"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "12345",
        "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'proto'}",
    }
    there = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == here.digest


def test_a_planted_fault_is_found_shrunk_and_told_in_words() -> None:
    planted = next(one for one in PLANTED if one.name == "a commit that fails is answered as if it had not")
    full = {FaultKind.DISK_FULL, FaultKind.DISK_FAILS_NOW_AND_THEN}
    plans = (draw_plan(seed) for seed in range(200))
    with planted.plant():
        outcomes = (simulate(plan) for plan in plans if full & {fault.kind for fault in plan.faults})
        found = next(outcome for outcome in outcomes if outcome.violations)
        short = shrunk(found, runs=6)
        assert rule_of(short.violations[0]) == rule_of(found.violations[0])
        assert simulate(short.plan).story == short.story
    assert len(short.plan.faults) < len(found.plan.faults)
    assert full & {fault.kind for fault in short.plan.faults}
    story = told(short)
    assert str(short.plan.faults[0]) in story
    assert short.violations[0] in story
    assert not simulate(short.plan).violations, "the fault is production's, not the simulator's"


def test_a_loop_on_which_everybody_waits_for_ever_says_so() -> None:
    loop = VirtualLoop()
    with pytest.raises(StandsStillError):
        loop.run_until_complete(asyncio.Event().wait())
    assert loop.time() == 0
    loop.run_until_complete(asyncio.sleep(3600))
    assert loop.time() == pytest.approx(3600)
    loop.close()


def test_a_stream_keeps_its_order_and_loses_all_that_follows_a_loss() -> None:
    loop = VirtualLoop()
    network = Network(loop, seed=1)
    network.condition("learner").delay_factor = 30.0

    async def read() -> list[int]:
        stream: Stream[int] = Stream(loop, network.link("learner", "coordinator"))
        heard: list[int] = []
        for number in range(200):
            stream.send(number)
        await asyncio.sleep(60)
        network.condition("learner").cuts += 1
        stream.send(200)
        network.condition("learner").cuts -= 1
        stream.send(201)
        while len(heard) < 200:
            message = await stream.next()
            assert message is not None
            heard.append(message)
        with pytest.raises(ConnectionLost):
            await stream.next()
        return heard

    assert loop.run_until_complete(read()) == list(range(200))
    loop.close()
