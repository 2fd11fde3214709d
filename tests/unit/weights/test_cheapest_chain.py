"""The cheapest way, worked by hand."""

from collections.abc import Sequence

import pytest

from node.values.policy import NO_BASE, Artifact, ArtifactKey
from node.weights.planning.cheapest_chain import newest_reachable, plan_catch_up, plan_fresh, plan_upload


def artifact(version: int, base: int, size: int = 10) -> Artifact:
    return Artifact(ArtifactKey(version, base), size)


STEPS = tuple(artifact(version, version - 1) for version in range(1, 9))
HOLE = [*STEPS[:4], *STEPS[5:]]
EQUAL, DEAR = (artifact(8, 4, size) for size in (40, 41))
KEYFRAME_6, KEYFRAME_7 = artifact(6, NO_BASE, 25), artifact(7, NO_BASE, 500)
PUBLIC = artifact(8, 0, 30)


@pytest.mark.parametrize(
    ("held", "head", "artifacts", "way"),
    [
        (3, 3, STEPS, ()),
        (5, 8, STEPS, STEPS[5:]),
        (4, 8, [*STEPS, DEAR], STEPS[4:]),
        (4, 8, [*STEPS, EQUAL], (EQUAL,)),
        (2, 8, [*STEPS, KEYFRAME_6], (KEYFRAME_6, *STEPS[6:])),
        (2, 8, HOLE, None),
        (8, 3, [*STEPS, artifact(3, NO_BASE)], None),
        (2, 8, [*STEPS, PUBLIC], (PUBLIC,)),
        (NO_BASE, 8, [PUBLIC], (PUBLIC,)),
    ],
    ids=[
        "held",
        "steps in order",
        "a skip delta that costs more",
        "among equals the fewest artifacts",
        "a keyframe on the way",
        "no way across a hole",
        "no way back",
        "from the public base model after a long sleep",
        "without weights, from the public base model",
    ],
)
def test_the_cheapest_way_is_planned(
    held: int, head: int, artifacts: Sequence[Artifact], way: tuple[Artifact, ...] | None
) -> None:
    assert plan_catch_up(held, head, artifacts) == way


def test_a_fresh_peer_has_the_public_base_model() -> None:
    assert plan_fresh(2, STEPS) == STEPS[:2]
    assert plan_fresh(8, [*STEPS, artifact(8, NO_BASE, 50)]) == (artifact(8, NO_BASE, 50),)


def test_each_artifact_costs_a_long_link_more_than_its_bytes() -> None:
    assert plan_catch_up(4, 8, [*STEPS, DEAR]) == STEPS[4:]
    assert plan_catch_up(4, 8, [*STEPS, DEAR], artifact_cost_bytes=1) == (DEAR,)


@pytest.mark.parametrize(
    ("artifacts", "newest"), [((), None), (STEPS[1:], None), (HOLE, 4), ([*HOLE, artifact(6, NO_BASE)], 8)]
)
def test_the_newest_reachable_version_is_before_the_hole(
    artifacts: Sequence[Artifact], newest: int | None
) -> None:
    assert newest_reachable(artifacts) == newest


OLD = artifact(3, NO_BASE, 500)
AT_6 = [artifact(6, NO_BASE), *STEPS[6:]]
DAMAGED = [artifact(2, NO_BASE), *STEPS[2:5], *STEPS[6:]]
HISTORY = [artifact(6, NO_BASE, 100), artifact(4, 0, 20), PUBLIC]


@pytest.mark.parametrize(
    ("local", "remote", "sent"),
    [
        (STEPS, STEPS[:6], STEPS[6:]),
        (STEPS, STEPS, ()),
        ([*STEPS, OLD, KEYFRAME_7], STEPS[:7], (STEPS[7], KEYFRAME_7, OLD)),
        ([*STEPS, artifact(2, NO_BASE)], AT_6, ()),
        ([*STEPS, artifact(8, 6, 100)], AT_6, (artifact(8, 6, 100),)),
        ([*STEPS, artifact(2, NO_BASE)], DAMAGED, (STEPS[5],)),
        ([*STEPS, *HISTORY], STEPS, (PUBLIC, HISTORY[0], HISTORY[1])),
    ],
    ids=[
        "first what moves the head",
        "nothing where all is there",
        "the newest keyframe after the steps and before the rest",
        "nothing that the hub would drop",
        "what starts at the hub's oldest keyframe",
        "a step that was damaged on the hub",
        "late joiners before history",
    ],
)
def test_a_hub_is_sent_what_it_lacks_in_order_of_urgency(
    local: Sequence[Artifact], remote: Sequence[Artifact], sent: tuple[Artifact, ...]
) -> None:
    assert plan_upload(local, remote=remote, head=8) == sent


def test_what_a_hub_has_costs_nothing_to_send_and_an_empty_one_gets_the_cheapest_start() -> None:
    # For a fresh peer the keyframe would be cheaper; the hub has the dear steps already.
    steps = [artifact(1, 0, 100), artifact(2, 1, 100), artifact(3, 2, 5)]
    assert plan_upload([*steps, artifact(3, NO_BASE, 50)], remote=steps[:2], head=3)[0] == steps[2]
    keyframe = artifact(7, NO_BASE, 25)
    assert plan_upload([*STEPS, keyframe], remote=(), head=8)[:2] == (keyframe, STEPS[7])
