"""When what is broken, and that no fault passes for repaired without its evidence."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from deploy.demo import damaging_node
from deploy.demo.chaos import DAMAGED_FRAMES, NOTICED_FRAMES, SCHEDULE, Chaos, Fault, evaluate
from deploy.demo.plan import FAR, NEAR
from deploy.runs.observation import Metrics, Observation, Scrapes
from deploy.runs.records import Step, Trained
from deploy.runs.run_directory import COORDINATOR, LEARNER
from node.values.policy import PolicyVersion
from node.values.roles import Role
from node.values.run import PeerStatus, RunStatus
from support.demo_records import make_steps

FAULTS = (Fault(NEAR, 8, at_s=1008.5, away_s=5.0), Fault(COORDINATOR, 18, at_s=1018.5, away_s=1.0))
DAMAGE = f"{DAMAGED_FRAMES} frames of weights damaged in flight after version 18"


class _Victims:
    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []

    async def wait_until_busy(self, name: str) -> None:
        self.log.append(("busy", name))

    async def kill(self, name: str) -> None:
        self.log.append(("kill", name))

    async def start(self, name: str, *, environ: Mapping[str, str], module: str) -> None:
        self.log.append(("start", name, module, *environ))


def test_each_strike_is_due_once_in_the_order_of_the_schedule() -> None:
    chaos = Chaos(_Victims(), versions=100)
    due = [(version, strike.name) for version in range(101) if (strike := chaos.due(version))]
    assert due == [(25, NEAR), (60, COORDINATOR)]


def test_strikes_that_were_slept_through_come_one_after_the_other() -> None:
    chaos = Chaos(_Victims(), versions=100)
    assert [strike and strike.name for strike in (chaos.due(100), chaos.due(100), chaos.due(100))] == [
        NEAR,
        COORDINATOR,
        None,
    ]


async def test_a_sampler_is_killed_while_it_works_and_the_new_coordinator_damages_frames() -> None:
    victims = _Victims()
    chaos = Chaos(victims, versions=100)
    for strike in SCHEDULE:
        await chaos.strike(strike, version=30)
    assert victims.log == [
        ("busy", NEAR),
        ("kill", NEAR),
        ("start", NEAR, "node"),
        ("kill", COORDINATOR),
        ("start", COORDINATOR, "deploy.demo.damaging_node", damaging_node.VARIABLE),
    ]
    assert [(fault.name, fault.version) for fault in chaos.faults] == [(NEAR, 30), (COORDINATOR, 30)]


def _status(*names: str) -> RunStatus:
    peers = tuple(
        PeerStatus(name, Role.SAMPLER, "live", None, 0, 0.0, 0.0, 0.0, "", {}, 0.0, 1, 0, 0.0)
        for name in names
    )
    return RunStatus("run", PolicyVersion(30), 1, peers, {}, {}, None, 0, "buffer", 0.0)


def _gauge(**values: float) -> Metrics:
    return Metrics("".join(f"# TYPE {name} untyped\n{name} {value}\n" for name, value in values.items()))


def _seen(
    *,
    steps: Sequence[Step] | None = None,
    joined: Sequence[str] = (LEARNER, NEAR, FAR),
    expired: int = 16,
    damaged: int = NOTICED_FRAMES,
    held: int = 29,
) -> Observation:
    scrapes = Scrapes()
    scrapes.put(COORDINATOR, 1, _gauge(heterorl_coordinator_lease_expiries_total=expired))
    scrapes.put(COORDINATOR, 2, _gauge(heterorl_coordinator_lease_expiries_total=0))
    scrapes.put(NEAR, 2, _gauge(heterorl_node_frames_damaged_total=damaged, heterorl_sampler_held_version=30))
    scrapes.put(FAR, 1, _gauge(heterorl_sampler_held_version=held))
    steps = _steps_with_second_attempt() if steps is None else steps
    return Observation(elapsed_s=50.0, steps=steps, status=_status(*joined), scrapes=scrapes)


def _steps_with_second_attempt() -> list[Step]:
    steps = make_steps()
    steps[12] = replace(steps[12], groups=(Trained("26.2", NEAR, 4), *steps[12].groups[1:]))
    return steps


def _broken(seen: Observation, faults: Sequence[Fault] = FAULTS) -> list[str]:
    return [check.promise for check in evaluate(faults, seen) if not check.is_kept]


def test_every_fault_with_all_its_evidence_counts_as_repaired() -> None:
    assert _broken(_seen()) == []


NEVER_BACK = [
    replace(step, groups=(replace(step.groups[0], sampler_id=FAR), *step.groups[1:]))
    for step in _steps_with_second_attempt()
]


@pytest.mark.parametrize(
    ("seen", "broken"),
    [
        pytest.param(_seen(expired=0), f"{NEAR} killed at version 8", id="no lease expired"),
        pytest.param(_seen(steps=make_steps()), f"{NEAR} killed at version 8", id="no prompt leased again"),
        pytest.param(_seen(steps=NEVER_BACK), f"{NEAR} killed at version 8", id="sampler not back"),
        pytest.param(_seen(joined=(LEARNER, FAR)), "coordinator killed at version 18", id="peer away"),
        pytest.param(_seen(damaged=NOTICED_FRAMES - 1), DAMAGE, id="damage not counted"),
        pytest.param(_seen(held=18), DAMAGE, id="sampler not past the damage"),
    ],
)
def test_a_fault_is_not_repaired_without_each_piece_of_its_evidence(seen: Observation, broken: str) -> None:
    assert _broken(seen) == [broken]


def test_a_coordinator_after_which_no_step_was_made_is_not_repaired() -> None:
    assert "coordinator killed at version 18" in _broken(_seen(steps=_steps_with_second_attempt()[:18]))


def test_a_fault_that_never_took_place_proves_nothing() -> None:
    assert _broken(_seen(), FAULTS[:1]) == ["every fault took place"]


def test_the_pause_that_a_fault_caused_is_told() -> None:
    steps = [
        replace(step, at_s=step.at_s + (7.5 if step.version > 18 else 0.0))
        for step in _steps_with_second_attempt()
    ]
    checks = {check.promise: check.figures for check in evaluate(FAULTS, _seen(steps=steps))}
    assert "longest pause between steps 8.5 s" in checks["coordinator killed at version 18"]
