from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.values.policy import NO_BASE, Announcement, Artifact, ArtifactKey, PolicyVersion
from sampler.versions.way_to_head import FetchPlan, Starvation


def root(number: int) -> bytes:
    return bytes([number]) * 16


def version(number: int) -> PolicyVersion:
    return PolicyVersion(number, root(number))


def announcement(head: int, *artifacts: tuple[int, int, int], epoch: int = 1) -> Announcement:
    """Announce ``head`` and artifacts as (version, base, bytes)."""
    return Announcement(
        version(head), epoch, 0.0, tuple(Artifact(ArtifactKey(v, base), size) for v, base, size in artifacts)
    )


def holding(number: int, announced: Announcement | None = None) -> FetchPlan:
    return FetchPlan(version(number), announced)


def next_key(state: FetchPlan) -> tuple[int, int] | None:
    artifact = state.next_artifact()
    return None if artifact is None else (artifact.key.version, artifact.key.base_version)


def test_the_first_artifact_of_the_cheapest_way_is_next() -> None:
    state = holding(0, announcement(2, (1, 0, 10), (2, 1, 10), (2, NO_BASE, 100)))
    assert next_key(state) == (1, 0)
    state = replace(state, held=version(1))
    assert next_key(state) == (2, 1)
    state = replace(state, held=version(2))
    assert next_key(state) is None


def test_a_version_at_which_to_stop_comes_before_the_head() -> None:
    offered = announcement(12, (10, 9, 10), (11, 10, 10), (12, 11, 10), (12, 8, 1), (9, 8, 10))
    state = replace(holding(8, offered), stop_from=10)
    assert [a.key.version for a in state.path()] == [9, 10]
    assert not state.can_start(ArtifactKey(12, 8))
    state = replace(state, held=version(10))
    assert [a.key.version for a in state.path()] == [11, 12]
    skipped = replace(state, held=version(8), stop_from=13)
    assert next_key(skipped) == (12, 8)


def test_where_no_way_leads_to_the_stop_the_head_comes_first() -> None:
    offered = announcement(12, (11, 10, 10), (12, 8, 1))
    state = replace(holding(8, offered), stop_from=10)
    assert next_key(state) == (12, 8)


def test_an_artifact_that_cannot_be_used_is_planned_around() -> None:
    offered = announcement(1, (1, 0, 10), (1, NO_BASE, 100))
    state = holding(0, offered)
    assert next_key(replace(state, unusable=frozenset({ArtifactKey(1, 0)}))) == (1, NO_BASE)
    assert next_key(replace(state, unusable=frozenset({ArtifactKey(1, 0), ArtifactKey(1)}))) is None


def test_the_right_number_with_other_words_is_made_again_from_the_base_model_or_a_keyframe() -> None:
    wrong = FetchPlan(PolicyVersion(1, root(9)))
    state = replace(wrong, announcement=announcement(1, (1, 0, 10), (1, NO_BASE, 100)))
    assert next_key(state) == (1, 0)
    assert next_key(replace(state, unusable=frozenset({ArtifactKey(1, 0)}))) == (1, NO_BASE)


def test_after_a_long_sleep_the_public_base_model_may_be_the_cheapest_start() -> None:
    offered = announcement(9, (5, 4, 10), (9, 5, 10), (8, 0, 5), (9, 8, 10), (9, NO_BASE, 100))
    assert next_key(holding(4, offered)) == (8, 0)
    assert next_key(holding(5, offered)) == (9, 5)


def test_a_hub_that_is_behind_changes_nothing() -> None:
    assert next_key(holding(5, announcement(4, (4, NO_BASE, 10)))) is None


def test_a_version_of_unknown_words_is_not_made_again() -> None:
    unknown = FetchPlan(PolicyVersion(1))
    assert next_key(replace(unknown, announcement=announcement(1, (1, 0, 10)))) is None


def test_the_distance_to_the_head_is_never_negative() -> None:
    assert holding(5).behind_versions == 0
    assert [holding(5, announcement(head)).behind_versions for head in (4, 5, 9)] == [
        0,
        0,
        4,
    ]


@pytest.mark.parametrize(
    ("version", "base", "expected"),
    [(6, 5, True), (6, 0, True), (6, NO_BASE, True), (6, 4, False), (5, 0, False), (4, NO_BASE, False)],
)
def test_an_artifact_can_start_from_a_base_that_is_here(version: int, base: int, expected: bool) -> None:
    key = ArtifactKey(version, base)
    assert holding(5).can_start(key) == expected
    assert not replace(holding(5), unusable=frozenset({key})).can_start(key)


@given(
    head=st.integers(1, 12),
    edges=st.lists(st.tuples(st.integers(1, 12), st.integers(-1, 11), st.integers(0, 50)), max_size=30),
)
def test_following_the_plan_only_ever_goes_up_and_ends(head: int, edges: list[tuple[int, int, int]]) -> None:
    state = holding(0, announcement(head, *(edge for edge in edges if edge[1] < edge[0])))
    seen = [0]
    while (artifact := state.next_artifact()) is not None:
        assert artifact.key.base_version in (seen[-1], NO_BASE)
        seen.append(artifact.key.version)
        assert seen[-1] > seen[-2]
        state = replace(state, held=version(artifact.key.version))
    assert seen[-1] in (0, head)


def test_a_sampler_starves_while_newer_versions_are_available_and_none_is_taken() -> None:
    """One that takes an older version on the way does not."""
    starvation = Starvation()
    assert starvation.for_s(100.0) == 0.0
    starvation.note(behind_versions=1, is_taken=False, now=0.0)
    starvation.note(behind_versions=9, is_taken=False, now=20.0)
    assert starvation.for_s(20.0) == 20.0
    starvation.note(behind_versions=3, is_taken=True, now=25.0)
    assert starvation.for_s(30.0) == 5.0
    starvation.note(behind_versions=0, is_taken=True, now=41.0)
    assert starvation.for_s(90.0) == 0.0
