"""A run without progress is explained link by link, and every wait that a peer can name has a remedy."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import learner
import node
import sampler
from learner.contributor import contributor_state
from node.commands.status.why_stalled_command import told
from node.coordinator.fleet.wait_chain import (
    CONTRIBUTIONS,
    CONTRIBUTORS,
    PASSING,
    PASSING_S,
    REMEDIES,
    ROLLOUT_GROUPS,
    WAITS_SHOWN,
    WORK_AS_USUAL,
    Facts,
    WaitingPeers,
    explained,
    remedy,
)
from node.rpc import clock_comparison
from node.values.bottleneck import Bottleneck
from node.values.run import Headline, RunStatus, Wait
from sampler.rollouts.leasing import BACKLOGS, BOUNDS, TOO_FEW_GROUPS

FACTS = Facts(
    version=7,
    version_for_s=90.0,
    started_for_s=600.0,
    ledger_gap="",
    is_confirmed=True,
    live_learners=1,
    learner_unheard_s=1.0,
    learner_waits_for="",
    learner_waits_s=40.0,
    live_samplers=2,
    sampler_unheard_s=1.0,
    idle_s=0.0,
    capacity_groups=4,
    capacity_bound="concurrency",
    ready_groups=8,
    batch_groups=8,
)
GENERATES = WaitingPeers("", ("s1", "s2"), 2, 30.0)


def waits(*samplers: WaitingPeers, **facts: Any) -> tuple[Wait, ...]:
    return explained(replace(FACTS, **facts), samplers or (GENERATES,))[1]


@pytest.mark.parametrize(
    "also",
    [
        {},
        {"ledger_gap": "step 4"},
        {"paused": "by an operator"},
        {"live_learners": 0},
        {"live_samplers": 0},
        {"ready_groups": 0},
        {"learner_waits_for": "policy upload"},
    ],
    ids=str,
)
def test_the_coordinators_own_fault_is_told_before_anything_that_others_wait_for(also: Any) -> None:
    what = "the ledger could not be written: database or disk is full"
    facts = replace(FACTS, own_fault=what, own_fault_s=61.0, own_fault_fix="Free space.", **also)
    hub = WaitingPeers("hub", ("s1",), 1, 60.0)
    headline, [wait] = explained(facts, (hub,))
    assert headline == Headline("nothing new is taken in at version 7", f"the coordinator: {what}", 61.0)
    assert wait.remedy == "Free space."


@pytest.mark.parametrize(
    ("facts", "doing"),
    [
        ({"live_learners": 0, "live_samplers": 1}, "1 sampler goes on with version 7"),
        ({"live_learners": 0, "version": None}, "2 samplers go on with no version yet"),
        ({"live_samplers": 1, "ready_groups": 1}, "1 sampler fills the batch after version 7"),
        ({"live_samplers": 0}, "the learner holds version 7"),
        ({"lacks_verifier": True, "ready_groups": 1}, "1 group waits at version 7"),
        ({"ready_groups": 1, "batch_groups": 1}, "training at version 7, with 1 group ready"),
        ({"ledger_gap": "steps 3 to 4"}, "nothing is leased at version 7"),
        ({"idle_s": 300.0, "ready_groups": 0}, "batches are consumed at version 7"),
        ({"learner_waits_for": "disk"}, "8 groups are ready for the learner after version 7"),
    ],
)
def test_a_headline_says_what_goes_on(facts: Any, doing: str) -> None:
    assert explained(replace(FACTS, **facts), (GENERATES,))[0].doing == doing


def test_a_pause_is_told_before_what_follows_from_it_with_its_end() -> None:
    facts = replace(FACTS, paused="by an operator: the judge is down", paused_s=70.0, live_samplers=0)
    headline, [wait] = explained(facts, ())
    assert headline == Headline(
        "nothing new is leased at version 7", "an end to its pause by an operator: the judge is down", 70.0
    )
    assert wait.remedy == "`heterorl-node resume` leases again."


def test_a_run_that_moves_waits_for_nothing() -> None:
    moving = Headline("training at version 7, with 8 groups ready", "", 90.0)
    assert explained(FACTS, ()) == (moving, ())
    between_two_batches = replace(FACTS, learner_waits_for="rollout groups")
    assert explained(between_two_batches, ()) == (moving, ())
    full, _ = explained(replace(FACTS, capacity_groups=0), ())
    assert full.doing.endswith("with 8 groups ready, and no more are leased (bound by concurrency)")


NOT_HEARD = "the learner, which is not heard of"
UNCONFIRMED = "the learner to find the ledger whole"
NO_GROUP = "a group that teaches something"


@pytest.mark.parametrize(
    ("facts", "waits_for", "for_s"),
    [
        ({"ledger_gap": "steps 3 to 4", "live_learners": 0}, "the newest ledger", 600.0),
        ({"live_learners": 0, "learner_unheard_s": None}, "a learner", 600.0),
        ({"live_learners": 0, "learner_unheard_s": 25.0, "live_samplers": 0}, NOT_HEARD, 25.0),
        ({"learner_waits_for": "done: version 9 of 9", "live_samplers": 0}, "nothing: it is over", 40.0),
        ({"live_samplers": 0, "sampler_unheard_s": None}, "samplers", 600.0),
        ({"live_samplers": 0, "sampler_unheard_s": 75.0, "idle_s": 5.0}, "samplers", 75.0),
        ({"is_confirmed": False}, UNCONFIRMED, 600.0),
        ({"idle_s": 300.0, "ready_groups": 0}, NO_GROUP, 300.0),
        ({"ready_groups": 3}, "groups: 3 of 8 are ready", 40.0),
        ({"learner_waits_for": "disk", "capacity_groups": 0}, "disk", 40.0),
    ],
)
def test_the_cause_that_hides_the_others_is_the_headline_and_the_first_link(
    facts: dict[str, Any], waits_for: str, for_s: float
) -> None:
    headline, links = explained(replace(FACTS, **facts), (GENERATES,))
    assert (headline.waits_for, headline.for_s) == (waits_for, for_s)
    assert (links[0].waits_for, links[0].for_s) == (waits_for, for_s)
    assert links[-1].remedy


def test_without_groups_the_samplers_are_asked_the_most_first() -> None:
    kinds = [
        WaitingPeers("prompt lease: staleness", ("a",), 1, 5.0),
        WaitingPeers("policy fetch", ("b", "c", "d"), 7, 60.0),
        WaitingPeers("", ("e",), 1, 3.0),
        WaitingPeers("hub", ("f",), 1, 3.0),
    ]
    first, *others = waits(*kinds, ready_groups=0)
    assert first.who == "the learner"
    assert [one.who for one in others] == ["7 samplers: b, c, d, ...", "1 sampler: e", "1 sampler: f"]
    assert len(others) == WAITS_SHOWN
    assert all(one.remedy for one in others)


@pytest.mark.parametrize("name", ["disk", "checkpoint", "policy upload", "newest ledger", "evaluation"])
def test_with_groups_ready_the_learners_own_wait_is_the_cause(name: str) -> None:
    assert waits(learner_waits_for=name) == (Wait("the learner", name, 40.0, REMEDIES[name]),)


def test_a_merge_waits_for_contributors_by_name_and_they_for_what_they_name() -> None:
    kinds = [WaitingPeers("", ("c2",), 1, 41.0), WaitingPeers("merged version", ("c1", "c3"), 2, 9.0)]
    facts = replace(FACTS, learner_waits_for="contributions: c2 (2 of 3 in)", learner_waits_s=3.0)
    headline, [first, *others] = explained(facts, (GENERATES,), kinds)
    assert headline == Headline("3 contributors train from version 7", "c2 (2 of 3 in)", 90.0)
    assert (first.who, first.waits_for) == ("the merge of version 8", "c2 (2 of 3 in)")
    assert [one.who for one in others] == ["2 contributors: c1, c3", "1 contributor: c2"]
    assert all(one.remedy for one in others)


def test_groups_that_contributors_have_are_no_reason_not_to_ask_the_samplers_for_more() -> None:
    kinds = [WaitingPeers("groups dealt", ("c1", "c2"), 2, 9.0)]
    held_back = WaitingPeers("prompt lease: staleness", ("s1",), 1, 9.0)
    facts = replace(FACTS, learner_waits_for=ROLLOUT_GROUPS, ready_groups=16)
    headline, [first, sampler] = explained(facts, (held_back,), kinds)
    assert headline.doing == "2 samplers fill the batch after version 7"
    assert first.who == "the learner"
    assert "16" in first.waits_for
    assert sampler.waits_for == held_back.waits_for


@pytest.mark.parametrize("ready_groups", [0, 8])
def test_a_learner_that_merges_says_that_no_contributor_is_there_before_groups_are(ready_groups: int) -> None:
    (wait,) = waits(learner_waits_for="contributors", ready_groups=ready_groups)
    assert (wait.who, wait.waits_for) == ("the learner", "contributors")
    assert "learner.merge.listen" in wait.remedy


def test_a_wait_with_a_distance_after_its_name_has_the_remedy_of_the_name() -> None:
    assert remedy("policy version: 9 versions, 40 MB to go") == REMEDIES["policy version"]
    assert remedy("something that no version of ours names") == ""


@pytest.mark.parametrize("name", sorted(PASSING))
def test_a_wait_that_every_run_has_blames_nobody_before_it_lasts(name: str) -> None:
    assert remedy(name, for_s=0.0) == remedy(name, for_s=PASSING_S - 1) == WORK_AS_USUAL
    assert remedy(name, for_s=PASSING_S) == REMEDIES[name]
    young = waits(WaitingPeers(name, ("a",), 1, 0.0), ready_groups=0)
    assert young[-1].remedy == WORK_AS_USUAL
    assert waits(learner_waits_for=name, learner_waits_s=0.0)[-1].remedy == WORK_AS_USUAL


def test_every_wait_that_our_code_can_name_has_a_remedy() -> None:
    """Also those that are added later: waits are literals or constants in calls of ``waiting``."""
    literals = set()
    for package in (node, learner, sampler):
        for path in Path(package.__file__ or "").parent.rglob("*.py"):
            if "waiting(" not in (text := path.read_text()):
                continue
            for call in ast.walk(ast.parse(text)):
                if isinstance(call, ast.Call) and getattr(call.func, "attr", "").endswith("waiting"):
                    literals |= {one.value for one in call.args if isinstance(one, ast.Constant)}
    assert len(literals) > 8
    bounds = {f"prompt lease: {bound}" for bound in BOUNDS}
    named = {
        "policy version",
        "policy fetch",
        *(ROLLOUT_GROUPS, CONTRIBUTORS, CONTRIBUTIONS),  # a learner that merges
        "newest ledger",
        "prompt lease",
        TOO_FEW_GROUPS,
        *BACKLOGS.values(),
        *map(str, clock_comparison.AwaitedClock),
        *(contributor_state.LEARNER, contributor_state.GROUPS, contributor_state.MERGED),
    }
    assert literals | bounds | named == REMEDIES.keys()


def test_people_read_the_chain_in_lines_and_peers_send_no_escapes() -> None:
    status = RunStatus("run", None, 1, (), {}, {}, None, 0, "", 0.0)
    links = (
        Wait("the run", "the learner", 90.0, ""),
        Wait("the learner", "disk\x1b[2J", 300.0, "Free space."),
    )
    assert told(replace(status, waits=links)) == [
        "the run waits for the learner, for 90 s",
        "  the learner waits for disk[2J, for 5 min",
        "    -> Free space.",
    ]
    moving = told(replace(status, headline=explained(FACTS, ())[0]))
    assert moving[0].startswith("it moves: training at version 7")


def test_what_bounds_the_pace_is_told_below_the_chain_with_what_to_do() -> None:
    status = RunStatus("run", None, 1, (), {}, {}, None, 0, "", 0.0)
    slow = Bottleneck("setting", "the learner waited", "Raise it.", "coordinator.buffer_groups")
    assert told(replace(status, bottleneck=slow)) == [
        "its pace is bound by coordinator.buffer_groups: the learner waited",
        "  -> Raise it.",
    ]
    even = told(replace(status, bottleneck=Bottleneck("nothing", "the learner\x1b[2J waited")))
    assert even == ["its pace is bound by nothing alone: the learner[2J waited"]


def test_a_batch_is_not_waited_for_longer_than_the_newest_version_is_old() -> None:
    ages = [waits(ready_groups=3, version_for_s=version_s)[0].for_s for version_s in (0.2, 90.0)]
    assert ages == [0.2, FACTS.learner_waits_s]


@pytest.mark.parametrize(
    ("verifiers", "whom"), [(0, "a verifier, which"), (1, "1 verifier to"), (2, "2 verifiers to")]
)
def test_groups_without_grades_are_named_with_whom_they_wait_for(verifiers: int, whom: str) -> None:
    first, second = waits(ready_groups=3, ungraded_groups=6, ungraded_s=9.0, verifiers=verifiers)
    assert first.waits_for == "groups: 3 of 8 are ready"
    assert (second.who, second.for_s) == ("6 groups", 9.0)
    assert second.waits_for.startswith(whom)
    assert "log" in second.remedy


def test_samplers_are_asked_where_verifiers_have_too_little_to_grade() -> None:
    _, second = waits(ready_groups=3, ungraded_groups=2, verifiers=1)
    assert second.who == "2 samplers: s1, s2"
    assert waits(ready_groups=8, ungraded_groups=9) == ()


def test_a_run_that_requires_a_verifier_says_that_it_waits_for_one() -> None:
    (wait,) = waits(lacks_verifier=True, learner_waits_for="rollout groups")
    assert (wait.who, wait.waits_for) == ("the learner", "a verifier, without which nothing is trained on")
    assert "require_verifier" in wait.remedy
