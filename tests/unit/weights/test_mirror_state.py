"""A relay's choice of what to copy next, and of what still helps."""

from dataclasses import replace

from node.values.policy import NO_BASE, Announcement, Artifact, ArtifactKey, PolicyVersion
from node.weights.planning.cheapest_chain import PUBLIC_VERSION
from node.weights.transfer.mirror_state import MirrorState


def artifact(version: int, base: int, size_bytes: int = 1) -> Artifact:
    return Artifact(ArtifactKey(version, base), size_bytes)


def announcement(head: int, *artifacts: Artifact) -> Announcement:
    return Announcement(PolicyVersion(head, bytes(16)), 1, 0.0, artifacts)


STEPS = tuple(artifact(version, version - 1) for version in range(1, 9))
KEYFRAME = artifact(8, NO_BASE, 100)


def test_nothing_is_copied_before_anything_is_announced() -> None:
    state = MirrorState(own=STEPS[:2])
    assert state.next_artifact() is None
    assert (state.head_version, state.held_version) == (PUBLIC_VERSION, 2)


def test_the_head_comes_before_the_keyframe() -> None:
    state = MirrorState(own=STEPS[:6]).announced(announcement(8, *STEPS, KEYFRAME))
    assert state.path() == STEPS[6:]
    assert state.next_artifact() == STEPS[6]


def test_at_the_head_the_keyframe_is_copied_for_late_joiners() -> None:
    state = MirrorState(own=STEPS).announced(announcement(8, *STEPS, KEYFRAME))
    assert state.path() == ()
    assert state.next_artifact() == KEYFRAME


def test_what_was_refused_is_not_copied_until_something_else_is_announced() -> None:
    state = MirrorState(own=STEPS).announced(announcement(8, *STEPS, KEYFRAME))
    assert state.refused(KEYFRAME.key).next_artifact() is None
    assert not state.refused(KEYFRAME.key).can_start(KEYFRAME.key)
    again = state.refused(KEYFRAME.key).announced(announcement(8, *STEPS, KEYFRAME))
    assert again.next_artifact() == KEYFRAME


def test_what_is_older_than_this_stores_head_is_copied_only_if_something_here_leads_on_from_it() -> None:
    own = artifact(8, PUBLIC_VERSION)
    offered = announcement(8, artifact(6, NO_BASE), artifact(7, 6))
    at_head = MirrorState(own=(own,), retained=(own.key,), newest=8).announced(offered)
    assert at_head.next_artifact() is None
    vouched = replace(at_head, retained=(own.key, ArtifactKey(8, 7)))
    assert vouched.next_artifact() == artifact(7, 6)
    lost_its_disk = MirrorState(newest=8).announced(announcement(8, artifact(6, NO_BASE), KEYFRAME))
    assert lost_its_disk.next_artifact() == KEYFRAME


def test_only_what_starts_from_what_is_stored_and_leads_further_can_be_started() -> None:
    state = MirrorState(own=STEPS[:4]).announced(announcement(8, *STEPS, KEYFRAME))
    assert state.can_start(ArtifactKey(5, 4))
    assert state.can_start(ArtifactKey(8, PUBLIC_VERSION))
    assert state.can_start(KEYFRAME.key)
    assert not state.can_start(ArtifactKey(6, 5))
    assert not state.can_start(ArtifactKey(4, NO_BASE))
