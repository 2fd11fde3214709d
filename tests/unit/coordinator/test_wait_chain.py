"""A run without progress is explained link by link, and every wait that a peer can name has a remedy."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import learner
import node
import sampler
from node.commands.why_stalled_command import told
from node.coordinator.fleet.headline import Facts, headline
from node.coordinator.fleet.wait_chain import REMEDIES, WAITS_SHOWN, WaitingSamplers, chain, remedy
from node.rpc import clock_comparison
from node.run import RunStatus, Wait
from sampler.rollouts.leasing import BOUNDS

FACTS = Facts(
    version=7,
    version_for_s=90.0,
    started_for_s=600.0,
    ledger_gap="",
    is_confirmed=True,
    is_task_known=True,
    live_learners=1,
    learner_unheard_s=1.0,
    learner_waits_for="",
    live_samplers=2,
    sampler_unheard_s=1.0,
    idle_s=0.0,
    capacity_groups=4,
    capacity_bound="concurrency",
    ready_groups=8,
    batch_groups=8,
)
GENERATES = WaitingSamplers("", ("s1", "s2"), 2, 30.0)


def waits(*samplers: WaitingSamplers, learner_for_s: float = 40.0, **facts: Any) -> tuple[Wait, ...]:
    return chain(replace(FACTS, **facts), samplers or (GENERATES,), learner_for_s=learner_for_s)


def test_a_run_that_moves_waits_for_nothing() -> None:
    assert waits() == ()
    assert waits(learner_waits_for="rollout groups") == ()  # for a moment, between two batches


@pytest.mark.parametrize(
    ("facts", "waits_for", "for_s"),
    [
        ({"ledger_gap": "steps 3 to 4"}, "the newest ledger", 600.0),
        ({"live_learners": 0, "learner_unheard_s": None}, "the learner", 600.0),
        ({"live_learners": 0, "learner_unheard_s": 25.0}, "the learner", 25.0),
        ({"learner_waits_for": "done: version 9 of 9"}, "nothing: it is over", 40.0),
        ({"live_samplers": 0, "sampler_unheard_s": None}, "a sampler", 600.0),
        ({"live_samplers": 0, "sampler_unheard_s": 75.0}, "a sampler", 75.0),
        ({"is_confirmed": False}, "the learner to find the ledger whole", 600.0),
        ({"is_task_known": False}, "agreement on how many prompts the task has", 600.0),
        ({"idle_s": 300.0}, "a group that teaches something", 300.0),
        ({"ready_groups": 3}, "groups: 3 of 8 are ready", 40.0),
        ({"learner_waits_for": "disk"}, "the learner", 90.0),
    ],
)
def test_the_first_link_is_what_the_run_waits_for(
    facts: dict[str, Any], waits_for: str, for_s: float
) -> None:
    first, *others = waits(**facts)
    assert (first.waits_for, first.for_s) == (waits_for, for_s)
    assert [first, *others][-1].remedy


def test_without_groups_the_samplers_are_asked_the_most_first() -> None:
    kinds = [
        WaitingSamplers("prompt lease: staleness", ("a",), 1, 5.0),
        WaitingSamplers("policy fetch", ("b", "c", "d"), 7, 60.0),
        WaitingSamplers("", ("e",), 1, 3.0),
        WaitingSamplers("hub", ("f",), 1, 3.0),
    ]
    first, *others = waits(*kinds, ready_groups=0)
    assert first.who == "the learner"
    assert [one.who for one in others] == ["7 samplers: b, c, d, ...", "1 sampler: e", "1 sampler: f"]
    assert len(others) == WAITS_SHOWN
    assert all(one.remedy for one in others)


@pytest.mark.parametrize("name", ["disk", "checkpoint", "policy upload", "newest ledger", "evaluation"])
def test_with_groups_ready_the_learners_own_wait_is_the_cause(name: str) -> None:
    first, second = waits(learner_waits_for=name)
    assert (first.who, first.waits_for) == ("the run", "the learner")
    assert (second.who, second.waits_for, second.for_s, second.remedy) == (
        "the learner",
        name,
        40.0,
        REMEDIES[name],
    )


def test_a_wait_with_a_distance_after_its_name_has_the_remedy_of_the_name() -> None:
    assert remedy("policy version: 9 versions, 40 MB to go") == REMEDIES["policy version"]
    assert remedy("something that no version of ours names") == ""


def test_every_wait_that_our_code_can_name_has_a_remedy() -> None:
    """Also those that are added later: waits are literals or constants in calls of ``waiting``."""
    literals = set()
    for package in (node, learner, sampler):
        for path in Path(package.__file__ or "").parent.rglob("*.py"):
            for call in ast.walk(ast.parse(path.read_text())):
                if isinstance(call, ast.Call) and getattr(call.func, "attr", "").endswith("waiting"):
                    literals |= {one.value for one in call.args if isinstance(one, ast.Constant)}
    assert len(literals) > 8
    bounds = {f"prompt lease: {bound}" for bound in BOUNDS}
    named = {
        "policy version",
        "policy fetch",
        "newest ledger",
        "prompt lease",
        *map(str, clock_comparison.Wait),
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
    moving = told(replace(status, headline=headline(FACTS)))
    assert moving[0].startswith("it moves: training after version 7")
