"""What is kept, by hand."""

from node.policy import NO_BASE, Artifact, ArtifactKey
from node.weights.planning.retention import surplus


def artifact(version: int, base: int = NO_BASE) -> Artifact:
    return Artifact(ArtifactKey(version, base), 10)


STEPS = tuple(artifact(version, version - 1) for version in range(1, 10))


def test_everything_is_kept_until_there_are_enough_keyframes() -> None:
    assert surplus([*STEPS, artifact(6)], head=9, retained_keyframes=2) == set()


def test_without_keyframes_every_delta_from_the_public_base_model_stays() -> None:
    public = [artifact(version, 0) for version in (2, 3, 4)]
    assert surplus([*STEPS, *public], head=9, retained_keyframes=2) == set()


def test_before_a_head_is_announced_no_way_to_it_is_kept() -> None:
    artifacts = [artifact(2), artifact(5), artifact(9, 0), STEPS[0]]
    gone = surplus(artifacts, head=None, retained_keyframes=1)
    assert gone == {artifact(2).key, STEPS[0].key}


def test_what_starts_before_the_oldest_kept_keyframe_goes() -> None:
    kept = [artifact(3), artifact(6), *STEPS[3:]]
    gone = [artifact(0), *STEPS[:3]]
    assert surplus([*kept, *gone], head=9, retained_keyframes=2) == {each.key for each in gone}


def test_the_only_way_to_the_head_stays_whatever_it_starts_from() -> None:
    merged = artifact(9, 0)
    assert surplus([artifact(2), artifact(5), merged, STEPS[0]], head=9, retained_keyframes=1) == {
        artifact(2).key,
        STEPS[0].key,
    }


def test_a_skip_delta_from_before_goes_though_it_ends_after() -> None:
    assert surplus([artifact(6), *STEPS[6:], artifact(8, 4)], head=9, retained_keyframes=1) == {
        ArtifactKey(8, 4)
    }


def test_the_newest_deltas_from_the_public_base_model_stay_for_late_joiners() -> None:
    public = [artifact(version, 0) for version in (2, 6, 7, 8)]
    kept = [artifact(6), artifact(7), *STEPS[6:], *public[2:]]
    assert surplus([*kept, *public[:2]], head=9, retained_keyframes=2) == {each.key for each in public[:2]}
