"""The cheapest way, worked by hand."""

from node.policy import NO_BASE, Artifact, ArtifactKey
from node.weights.planning.cheapest_chain import (
    newest_reachable,
    plan,
    plan_catch_up,
    plan_fresh,
    plan_upload,
)


def artifact(version: int, base: int, size: int = 10) -> Artifact:
    return Artifact(ArtifactKey(version, base), size)


STEPS = tuple(artifact(version, version - 1) for version in range(1, 9))


def test_what_is_held_needs_nothing() -> None:
    assert plan(3, 3, STEPS) == ()
    assert plan(3, 3, ()) == ()


def test_steps_are_taken_in_order() -> None:
    assert plan(5, 8, STEPS) == (artifact(6, 5), artifact(7, 6), artifact(8, 7))


def test_a_skip_delta_is_taken_when_it_costs_less_than_its_steps() -> None:
    assert plan(4, 8, [*STEPS, artifact(8, 4, 39)]) == (artifact(8, 4, 39),)
    assert plan(4, 8, [*STEPS, artifact(8, 4, 41)]) == STEPS[4:]


def test_among_equals_the_fewest_artifacts() -> None:
    assert plan(4, 8, [*STEPS, artifact(8, 4, 40)]) == (artifact(8, 4, 40),)


def test_a_keyframe_on_the_way_is_as_good_as_any() -> None:
    keyframe = artifact(6, NO_BASE, 25)
    assert plan(2, 8, [*STEPS, keyframe]) == (keyframe, *STEPS[6:])
    assert plan(4, 8, [*STEPS, keyframe]) == STEPS[4:]


def test_without_weights_only_a_keyframe_helps() -> None:
    assert plan(NO_BASE, 8, STEPS) is None
    assert plan(NO_BASE, 8, [*STEPS, artifact(7, NO_BASE, 500)]) == (artifact(7, NO_BASE, 500), STEPS[7])


def test_a_fresh_peer_has_the_public_base_model() -> None:
    assert plan_fresh(2, STEPS) == STEPS[:2]
    assert plan_fresh(8, [*STEPS, artifact(8, NO_BASE, 50)]) == (artifact(8, NO_BASE, 50),)


def test_there_is_no_way_across_a_hole() -> None:
    assert plan(2, 8, [*STEPS[:4], *STEPS[5:]]) is None


def test_there_is_no_way_back() -> None:
    assert plan(8, 3, [*STEPS, artifact(3, NO_BASE)]) is None


def test_the_newest_reachable_version_is_before_the_hole() -> None:
    assert newest_reachable(()) is None
    assert newest_reachable(STEPS[1:]) is None
    assert newest_reachable([*STEPS[:4], *STEPS[5:]]) == 4
    assert newest_reachable([*STEPS[:4], *STEPS[5:], artifact(6, NO_BASE)]) == 8


def test_a_hub_gets_first_what_moves_its_head() -> None:
    assert plan_upload(STEPS, remote=STEPS[:6], head=8) == STEPS[6:]


def test_a_hub_that_has_all_gets_nothing() -> None:
    assert plan_upload(STEPS, remote=STEPS, head=8) == ()


def test_a_hub_gets_the_newest_keyframe_after_the_steps_and_before_the_rest() -> None:
    old, new = artifact(3, NO_BASE, 500), artifact(7, NO_BASE, 500)
    wanted = plan_upload([*STEPS, old, new], remote=STEPS[:7], head=8)
    assert wanted == (STEPS[7], new, old)


def test_what_a_hub_has_costs_nothing_to_send() -> None:
    # For a fresh peer the keyframe would be cheaper; the hub has the dear steps already.
    steps = [artifact(1, 0, 100), artifact(2, 1, 100), artifact(3, 2, 5)]
    assert plan_upload([*steps, artifact(3, NO_BASE, 50)], remote=steps[:2], head=3)[0] == steps[2]


def test_an_empty_hub_gets_the_cheapest_start() -> None:
    keyframe = artifact(7, NO_BASE, 25)
    assert plan_upload([*STEPS, keyframe], remote=(), head=8)[:2] == (keyframe, STEPS[7])


def test_nothing_is_sent_that_the_hub_would_drop() -> None:
    remote = [artifact(6, NO_BASE), *STEPS[6:]]
    assert plan_upload([*STEPS, artifact(2, NO_BASE)], remote=remote, head=8) == ()


def test_what_starts_at_the_oldest_keyframe_of_a_hub_is_sent() -> None:
    remote, stride = [artifact(6, NO_BASE), *STEPS[6:]], artifact(8, 6, 100)
    assert plan_upload([*STEPS, stride], remote=remote, head=8) == (stride,)


def test_a_step_that_was_damaged_on_the_hub_is_sent_again() -> None:
    remote = [artifact(2, NO_BASE), *STEPS[2:5], *STEPS[6:]]
    assert plan_upload([*STEPS, artifact(2, NO_BASE)], remote=remote, head=8) == (STEPS[5],)


def test_after_a_long_sleep_a_peer_may_start_from_the_public_base_model() -> None:
    public = artifact(8, 0, 30)
    assert plan_catch_up(2, 8, [*STEPS, public]) == (public,)
    assert plan_catch_up(6, 8, [*STEPS, public]) == STEPS[6:]
    assert plan_catch_up(9, 8, [public]) is None
    assert plan_catch_up(NO_BASE, 8, [public]) == (public,)
    assert plan_catch_up(8, 8, [public]) == ()


def test_each_artifact_costs_a_long_link_more_than_its_bytes() -> None:
    stride = artifact(8, 4, 41)
    assert plan_catch_up(4, 8, [*STEPS, stride]) == STEPS[4:]
    assert plan_catch_up(4, 8, [*STEPS, stride], artifact_cost_bytes=1) == (stride,)


def test_late_joiners_come_before_history_in_an_upload() -> None:
    local = [*STEPS, artifact(6, NO_BASE, 100), artifact(4, 0, 20), artifact(8, 0, 30)]
    wanted = plan_upload(local, remote=STEPS, head=8)
    assert [each.key for each in wanted] == [ArtifactKey(8, 0), ArtifactKey(6), ArtifactKey(4, 0)]
