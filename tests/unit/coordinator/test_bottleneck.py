"""Looks at a run add up to one answer about what bounds its pace."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from learner.contributor import contributor_state
from node.coordinator.config import CoordinatorConfig
from node.coordinator.fleet.bottleneck import HOLD_S, BottleneckWatch, Look
from node.coordinator.fleet.held_back import (
    CAUSES,
    DELIVERY,
    FULL_QUEUE,
    MERGED,
    NEWCOMERS,
    SHARE,
    UNFIT,
    VERIFIERS,
    WAITS,
)
from node.coordinator.fleet.peer_reports import HeartbeatReport, Joining, LearnerReport
from node.coordinator.fleet.wait_chain import DONE, REMEDIES, ROLLOUT_GROUPS
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.peers.peer_table import PeerTable
from node.coordinator.peers.peers import Peers
from node.coordinator.run_status import RunReport
from node.coordinator.work.balance import Balance
from node.identity.peer import Peer
from node.telemetry.own_faults import OwnFaults
from node.values.bottleneck import Bottleneck, BoundBy
from node.values.roles import Role
from node.values.run import PeerQuery, StepReport
from sampler.config import SamplerConfig
from support.clock import ManualClock
from support.coordinator import LEARNER, NOW_S, make_accounts

GENERATE: Mapping[str, int] = {"": 3, "policy fetch": 1}
AT_LIMIT = "prompt lease: concurrency"
ANSWERS = {(cause.by.value, cause.setting) for cause in CAUSES}


class Run:
    """A run at which somebody looks once a second."""

    def __init__(self) -> None:
        self.watch = BottleneckWatch()
        self.at_s = 1000.0

    def goes_on(
        self,
        seconds: float,
        *,
        samplers: Mapping[str, int] = GENERATE,
        step_s: float = 1.14,
        wait_s: float = 0.97,
        **more: Any,
    ) -> Bottleneck | None:
        """Let steps be taken, each ``step_s`` after the one before, of which the learner waits ``wait_s``."""
        for _ in range(int(seconds)):
            self.at_s += 1.0
            version, into_s = int(self.at_s / step_s), self.at_s % step_s
            self.watch.look(
                Look(
                    self.at_s,
                    version,
                    wait_s,
                    waiting_s=into_s if into_s < wait_s else 0.0,
                    samplers=samplers,
                    **more,
                )
            )
        return self.watch.found


def answer(**situation: Any) -> tuple[str, str]:
    """Return what bounds a run that has been so for some time."""
    found = Run().goes_on(120, **situation)
    assert found is not None
    return found.by, found.setting


NEVER_WAITS: Mapping[str, Any] = {"step_s": 0.3, "wait_s": 0.0}


@pytest.mark.parametrize(
    ("situation", "by"),
    [
        ({"samplers": GENERATE}, BoundBy.SAMPLERS),
        ({"samplers": {"prompt lease": 4}}, BoundBy.SAMPLERS),
        ({"samplers": dict.fromkeys(UNFIT, 1)}, BoundBy.SAMPLERS),
        ({"samplers": {"": 9, AT_LIMIT: 1}}, BoundBy.SAMPLERS),
        ({"samplers": {"prompt lease: buffer": 4}, **NEVER_WAITS}, BoundBy.LEARNER),
        ({"samplers": {"prompt lease: staleness": 1, "": 2}, **NEVER_WAITS}, BoundBy.LEARNER),
        ({"samplers": {SHARE: 1}, "tightest_limit": "bytes", **NEVER_WAITS}, BoundBy.LEARNER),
        ({"samplers": {"prompt lease: buffer": 2, "": 1}, "step_s": 0.5, "wait_s": 0.1}, BoundBy.LEARNER),
        ({"samplers": GENERATE, "step_s": 0.5, "wait_s": 0.1}, BoundBy.SAMPLERS),
        ({"samplers": {"policy version: 9 behind": 3, "": 1}}, BoundBy.LINK),
        ({"samplers": {"policy version: 9 behind": 1, "": 3}}, BoundBy.SAMPLERS),
        ({"samplers": {"hub": 1, "submission": 2, "policy fetch": 1}}, BoundBy.LINK),
        ({"samplers": GENERATE, "withheld_by": DELIVERY}, BoundBy.LINK),
        ({"samplers": GENERATE, "withheld_by": VERIFIERS}, BoundBy.VERIFIERS),
        ({"samplers": {"prompt lease: grading": 4}}, BoundBy.VERIFIERS),
        ({"samplers": GENERATE, **NEVER_WAITS}, BoundBy.NOTHING),
        ({"samplers": {AT_LIMIT: 4}, **NEVER_WAITS}, BoundBy.NOTHING),
        ({"samplers": GENERATE, "withheld_by": DELIVERY, **NEVER_WAITS}, BoundBy.NOTHING),
    ],
    ids=str,
)
def test_a_situation_has_its_bound(situation: Mapping[str, Any], by: BoundBy) -> None:
    assert answer(**situation) == (by, "")


@pytest.mark.parametrize(
    ("samplers", "more", "setting"),
    [
        ({AT_LIMIT: 4}, {}, "coordinator.concurrency_groups"),
        ({AT_LIMIT: 1, "": 2}, {}, "coordinator.concurrency_groups"),
        ({AT_LIMIT: 1, "prompt lease: buffer": 3}, {}, "coordinator.buffer_groups"),
        ({"prompt lease: staleness": 4}, {}, "coordinator.max_staleness_versions"),
        ({"prompt lease: bytes": 4}, {}, "coordinator.buffer_bytes"),
        ({"prompt lease: prompts": 4}, {}, "coordinator.prompt_retry_s"),
        ({SHARE: 4}, {"tightest_limit": "concurrency"}, "coordinator.concurrency_groups"),
        ({"graders": 2, "": 2}, {}, "sampler.grader_processes"),
        ({"groups at once": 1, "": 2}, {}, "sampler.concurrency_groups"),
        (GENERATE, {"withheld_by": NEWCOMERS}, "coordinator.newcomers_part"),
        ({AT_LIMIT: 1, "task that works": 9}, {}, "coordinator.concurrency_groups"),
    ],
)
def test_a_limit_that_holds_samplers_back_while_the_learner_waits_is_named_by_its_key(
    samplers: Mapping[str, int], more: Mapping[str, Any], setting: str
) -> None:
    assert answer(samplers=samplers, **more) == (BoundBy.SETTING, setting)


QUEUED: Mapping[str, Any] = {"samplers": {"prompt lease: buffer": 4}, **NEVER_WAITS}


@pytest.mark.parametrize(
    ("contributors", "by"),
    [
        ({"a": ""}, BoundBy.CONTRIBUTORS),
        ({"a": "", "b": MERGED, "c": MERGED}, BoundBy.CONTRIBUTORS),
        ({"a": "learner that merges", "b": "groups dealt"}, BoundBy.CONTRIBUTORS),
        ({"a": MERGED}, BoundBy.EXCHANGE),
        ({"a": MERGED, "b": MERGED}, BoundBy.EXCHANGE),
    ],
)
def test_where_a_learner_merges_its_contributors_or_the_way_to_them_bound_the_pace(
    contributors: Mapping[str, str], by: BoundBy
) -> None:
    assert answer(contributors=contributors, **QUEUED) == (by, "")
    assert answer(contributors=contributors) == (BoundBy.SAMPLERS, "")


def test_the_exchange_is_the_bound_where_the_slowest_contributor_waits_longer_than_it_trains() -> None:
    run = Run()
    for number in range(40):
        run.goes_on(3, contributors={"a": MERGED, "b": "" if number % 3 else MERGED}, **QUEUED)
    assert run.watch.found is not None
    assert run.watch.found.by == BoundBy.CONTRIBUTORS
    for number in range(40):
        run.goes_on(3, contributors={"a": MERGED, "b": MERGED if number % 3 else ""}, **QUEUED)
    assert run.watch.found.by == BoundBy.EXCHANGE


def test_the_answer_shows_the_numbers_it_rests_on_and_says_what_to_do() -> None:
    found = Run().goes_on(120, samplers={AT_LIMIT: 3, "": 1}, step_s=1.25, wait_s=1.0)
    assert found is not None
    assert found.text.startswith(
        "bound by coordinator.concurrency_groups: the learner waited for groups 1.00 s of each 1.25 s step"
    )
    assert found.shown_by.endswith("75% of their time")
    assert found.remedy
    assert (found.learner_wait_ratio, found.held_back_ratio) == pytest.approx((0.8, 0.75), abs=0.01)


@pytest.mark.parametrize("step_s", [0.05, 1.0, 7.0, 600.0])
def test_however_long_a_step_takes_each_of_its_moments_has_the_same_answer(step_s: float) -> None:
    run = Run()
    run.goes_on(12 * step_s + 60, step_s=step_s, wait_s=0.5 * step_s)
    answers = {run.goes_on(max(1.0, step_s / 16), step_s=step_s, wait_s=0.5 * step_s) for _ in range(32)}
    assert {one.by for one in answers if one is not None} == {BoundBy.SAMPLERS}
    assert all(one is not None and one.learner_wait_ratio == pytest.approx(0.5, abs=0.1) for one in answers)


def test_a_wait_that_does_not_end_counts_as_it_lasts() -> None:
    run = Run()
    assert run.goes_on(120, samplers={"prompt lease: buffer": 1}, **NEVER_WAITS) is not None
    last = replace(Look(run.at_s, int(run.at_s / 0.3), 0.0, 0.0, {"": 1}))
    for waited_s in range(1, 200):
        run.watch.look(replace(last, at_s=run.at_s + waited_s, waiting_s=float(waited_s)))
    assert run.watch.found is not None
    assert run.watch.found.by == BoundBy.SAMPLERS


def test_an_answer_changes_once_the_window_has_said_otherwise_for_some_time() -> None:
    run, answers = Run(), []
    run.goes_on(120, samplers={AT_LIMIT: 4})
    for _ in range(120):
        run.goes_on(1, samplers=GENERATE)
        assert run.watch.found is not None
        answers.append(run.watch.found.by)
    changes = [before != after for before, after in pairwise(answers)]
    assert (answers[0], answers[-1], sum(changes)) == (BoundBy.SETTING, BoundBy.SAMPLERS, 1)
    assert answers[: int(HOLD_S)] == [BoundBy.SETTING] * int(HOLD_S)


def test_limits_that_come_and_go_every_few_seconds_make_one_answer() -> None:
    """They hold samplers back for a quarter of their time in the mean, which is the threshold."""
    run, answers = Run(), []
    for number in range(120):
        run.goes_on(5, samplers={AT_LIMIT: 2, "": 2} if number % 2 else {"": 4})
        answers.append(run.watch.found and run.watch.found.by)
    changes = sum(before != after for before, after in pairwise(answers[12:]))
    assert changes <= 1


@pytest.mark.parametrize("ends", ["it stands still", "an older version"])
def test_what_was_seen_before_a_stop_says_nothing_about_what_comes_after(ends: str) -> None:
    run = Run()
    assert run.goes_on(120) is not None
    run.watch.look(None if ends == "it stands still" else Look(run.at_s, 0, 0.0, 0.0, GENERATE))
    assert run.watch.found is None
    found = run.goes_on(60, samplers={"prompt lease: buffer": 1}, **NEVER_WAITS)
    assert found is not None
    assert found.by == BoundBy.LEARNER


def test_nothing_is_said_before_some_steps_and_the_loading_of_models_is_no_wait() -> None:
    run = Run()
    assert run.goes_on(600, step_s=1e9, wait_s=1e8) is None
    started = Look(run.at_s, 1, 600.0, 0.0, {"prompt lease: buffer": 1})
    for number in range(20):
        wait_s = 600.0 if number == 0 else 0.0
        run.watch.look(replace(started, at_s=run.at_s + number, version=2 + number, groups_wait_s=wait_s))
    assert run.watch.found is not None
    assert run.watch.found.by == BoundBy.LEARNER


LOOKS = st.builds(
    Look,
    at_s=st.floats(-1e3, 1e3),
    version=st.integers(0, 40),
    groups_wait_s=st.floats(0.0, 1e4),
    waiting_s=st.floats(0.0, 1e4),
    contributors=st.dictionaries(st.sampled_from("abc"), st.sampled_from(["", MERGED, "groups dealt"])),
    samplers=st.dictionaries(
        st.sampled_from(["", SHARE, "policy version: x", *WAITS, *UNFIT]), st.integers(0, 5)
    ),
    withheld_by=st.sampled_from([None, DELIVERY, NEWCOMERS, VERIFIERS]),
    tightest_limit=st.sampled_from(["concurrency", "staleness", "buffer", "bytes", "grading", "learner"]),
)


@settings(deadline=None)
@given(st.lists(LOOKS | st.none(), min_size=4, max_size=60), st.booleans())
def test_there_is_one_answer_of_the_closed_set_or_none_yet(
    looks: list[Look | None], is_in_order: bool
) -> None:
    if is_in_order:
        moments = sorted(look.at_s for look in looks if look is not None)
        versions = sorted(look.version for look in looks if look is not None)
        told = iter(zip(moments, versions, strict=True))
        looks = [
            None if look is None else replace(look, at_s=(next_one := next(told))[0], version=next_one[1])
            for look in looks
        ]
    registry = CollectorRegistry()
    metrics, watch = CoordinatorMetrics(registry), BottleneckWatch()
    for look in looks:
        watch.look(look)
        metrics.show_pace(watch.found)
        if (found := watch.found) is not None:
            assert (found.by, found.setting) in ANSWERS
            assert (found.by == BoundBy.SETTING) == bool(found.setting)
            assert 0.0 <= found.learner_wait_ratio <= 1.0
            assert -1e-9 <= found.held_back_ratio <= 1.0 + 1e-9
    samples = (one for metric in registry.collect() for one in metric.samples)
    shown = {
        (one.labels["by"], one.labels["setting"]): one.value
        for one in samples
        if one.name == "heterorl_coordinator_bottleneck"
    }
    assert shown.keys() == ANSWERS
    assert sum(shown.values()) == (watch.found is not None)


def test_each_wait_in_the_table_is_one_that_peers_name_and_each_setting_exists() -> None:
    assert MERGED == contributor_state.MERGED
    assert {*WAITS, *UNFIT, SHARE} <= REMEDIES.keys()
    assert {*WAITS.values()} >= FULL_QUEUE
    keys = {f"coordinator.{name}" for name in CoordinatorConfig.model_fields}
    keys |= {f"sampler.{name}" for name in SamplerConfig.model_fields}
    assert {setting for _, setting in ANSWERS if setting} <= keys


# From heartbeats to the answer.

LEARNER_PEER = Peer("run", Role.LEARNER, "learner")
STEP = StepReport(1, 0.5, 1.0, 2, 0.1, 0.9, 0.1, 1.0, 0.17, 0.5, groups_wait_s=0.97)


class Fleet:
    """A learner and two samplers that report to a coordinator."""

    def __init__(self) -> None:
        self.clock = ManualClock(NOW_S)
        accounts = make_accounts(Balance(facts=(LEARNER,)))
        accounts.is_confirmed = True
        metrics = CoordinatorMetrics(CollectorRegistry())
        self.peers = Peers(
            accounts, silent_after_s=30, heartbeat_interval_s=2.0, head=lambda: None, metrics=metrics
        )
        self.table = PeerTable(self.peers, revoked=tuple)
        self.report = RunReport("run", self.table, OwnFaults(self.clock.monotonic), self.clock)
        self.samplers = [Peer("run", Role.SAMPLER, name) for name in ("s1", "s2")]
        self.contributor = Peer("run", Role.CONTRIBUTOR, "c1")
        for peer in (LEARNER_PEER, *self.samplers):
            self.peers.join(peer, Joining(None), now=NOW_S)

    def reports(
        self,
        seconds: int,
        *,
        step: StepReport = STEP,
        learner: str = ROLLOUT_GROUPS,
        samplers: str = "",
        contributor: str | None = None,
    ) -> Bottleneck | None:
        """Let all report once a second, a step each second; return what is said to bound the run.

        Args:
            contributor: what a contributor waits for; None: there is none.
        """
        if contributor is not None:
            self.peers.join(self.contributor, Joining(None), now=self.clock.now())
        for _ in range(seconds):
            self.clock.advance(1.0)
            now = self.clock.now()
            said = LearnerReport(step=replace(step, version=int(now)))
            self.peers.heartbeat(
                LEARNER_PEER, HeartbeatReport(None, waits_for=learner, learner=said), now=now
            )
            for peer in self.samplers:
                self.peers.heartbeat(peer, HeartbeatReport(None, waits_for=samplers), now=now)
            if contributor is not None:
                self.peers.heartbeat(self.contributor, HeartbeatReport(None, waits_for=contributor), now=now)
            for _ in self.table.survey_parts(now):
                pass
            self.report.look(now)
        return self.report.status(PeerQuery()).bottleneck


@pytest.mark.parametrize(
    ("reports", "answer"),
    [
        ({}, (BoundBy.SAMPLERS, "")),
        ({"samplers": AT_LIMIT}, (BoundBy.SETTING, "coordinator.concurrency_groups")),
        ({"step": replace(STEP, groups_wait_s=0.0), "learner": ""}, (BoundBy.NOTHING, "")),
        (
            {"step": replace(STEP, groups_wait_s=0.0), "learner": "", "samplers": "prompt lease: buffer"},
            (BoundBy.LEARNER, ""),
        ),
        (
            {
                "step": replace(STEP, groups_wait_s=0.0),
                "learner": "contributions: c1 (0 of 1 in)",
                "samplers": "prompt lease: buffer",
                "contributor": "",
            },
            (BoundBy.CONTRIBUTORS, ""),
        ),
        ({"step": replace(STEP, groups_wait_s=None)}, None),
        ({"learner": f"{DONE}: version 9 of 9"}, None),
    ],
    ids=str,
)
def test_what_peers_report_adds_up_to_the_answer(
    reports: Mapping[str, Any], answer: tuple[BoundBy, str] | None
) -> None:
    found = Fleet().reports(30, **reports)
    assert (found and (found.by, found.setting)) == answer


def test_a_run_without_samplers_or_a_learner_that_found_the_ledger_whole_has_no_pace() -> None:
    fleet = Fleet()
    assert fleet.reports(30) is not None
    fleet.peers.accounts.is_confirmed = False
    assert fleet.reports(1) is None
    fleet.peers.accounts.is_confirmed = True
    assert fleet.reports(30) is not None
    for peer in fleet.samplers:
        fleet.peers.leave(peer)
    fleet.samplers.clear()
    assert fleet.reports(1) is None
