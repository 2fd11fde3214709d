from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.errors import Reason, RefusedError
from node.policy import NO_BASE, Announcement, Artifact, ArtifactKey, PolicyVersion
from node.weights.store.high_water import HighWater
from sampler.versions.fetch_plan import FetchPlan


def root(number: int) -> bytes:
    return bytes([number]) * 16


def version(number: int) -> PolicyVersion:
    return PolicyVersion(number, root(number))


def announcement(head: int, *artifacts: tuple[int, int, int], epoch: int = 1) -> Announcement:
    """Announce ``head`` and artifacts as (version, base, bytes)."""
    return Announcement(
        version(head), epoch, 0.0, tuple(Artifact(ArtifactKey(v, base), size) for v, base, size in artifacts)
    )


def holding(number: int) -> FetchPlan:
    return FetchPlan(version(number), HighWater())


def next_key(state: FetchPlan) -> tuple[int, int] | None:
    artifact = state.next_artifact()
    return None if artifact is None else (artifact.key.version, artifact.key.base_version)


def test_nothing_is_fetched_before_the_first_announcement() -> None:
    assert next_key(holding(0)) is None
    assert not holding(0).is_at_head


def test_the_first_artifact_of_the_cheapest_way_is_next() -> None:
    state = holding(0).announced(announcement(2, (1, 0, 10), (2, 1, 10), (2, NO_BASE, 100)))
    assert next_key(state) == (1, 0)
    state = state.advanced(version(1), state.high_water)
    assert next_key(state) == (2, 1)
    state = state.advanced(version(2), state.high_water)
    assert next_key(state) is None
    assert state.is_at_head


def test_a_version_at_which_to_stop_comes_before_the_head() -> None:
    offered = announcement(12, (10, 9, 10), (11, 10, 10), (12, 11, 10), (12, 8, 1), (9, 8, 10))
    state = replace(holding(8).announced(offered), stop_from=10)
    assert [a.key.version for a in state.path()] == [9, 10]
    assert not state.can_start(ArtifactKey(12, 8))
    state = state.advanced(version(10), state.high_water)
    assert [a.key.version for a in state.path()] == [11, 12]
    skipped = replace(state.advanced(version(8), state.high_water), stop_from=13)
    assert next_key(skipped) == (12, 8)


def test_where_no_way_leads_to_the_stop_the_head_comes_first() -> None:
    offered = announcement(12, (11, 10, 10), (12, 8, 1))
    state = replace(holding(8).announced(offered), stop_from=10)
    assert next_key(state) == (12, 8)


def test_a_newer_announcement_replaces_the_older() -> None:
    state = holding(1).announced(announcement(2, (2, 1, 10)))
    state = state.announced(announcement(3, (3, 1, 12), (2, 1, 10), (3, 2, 10)))
    assert next_key(state) == (3, 1)


def test_an_artifact_that_failed_is_planned_around_until_announced_again() -> None:
    offered = announcement(1, (1, 0, 10), (1, NO_BASE, 100))
    state = holding(0).announced(offered)
    around = state.failed(ArtifactKey(1, 0))
    assert next_key(around) == (1, NO_BASE)
    assert next_key(around.failed(ArtifactKey(1))) is None
    assert next_key(around.reconsidered()) == (1, 0)
    assert next_key(around.announced(offered)) == (1, 0)


def test_the_right_number_with_other_words_is_made_again_from_the_base_model_or_a_keyframe() -> None:
    wrong = FetchPlan(PolicyVersion(1, root(9)), HighWater())
    state = wrong.announced(announcement(1, (1, 0, 10), (1, NO_BASE, 100)))
    assert not state.is_at_head
    assert next_key(state) == (1, 0)
    assert next_key(state.failed(ArtifactKey(1, 0))) == (1, NO_BASE)


def test_after_a_long_sleep_the_public_base_model_may_be_the_cheapest_start() -> None:
    offered = announcement(9, (5, 4, 10), (9, 5, 10), (8, 0, 5), (9, 8, 10), (9, NO_BASE, 100))
    assert next_key(holding(4).announced(offered)) == (8, 0)
    assert next_key(holding(5).announced(offered)) == (9, 5)


def test_a_hub_that_is_behind_changes_nothing() -> None:
    assert next_key(holding(5).announced(announcement(4, (4, NO_BASE, 10)))) is None


@pytest.mark.parametrize(
    ("epoch", "head", "reason"), [(1, 7, Reason.FENCED), (2, 4, Reason.ROLLBACK), (1, 4, Reason.FENCED)]
)
def test_what_contradicts_a_signed_version_is_refused(epoch: int, head: int, reason: Reason) -> None:
    state = FetchPlan(version(5), HighWater(2, version(5)))
    with pytest.raises(RefusedError) as caught:
        state.announced(announcement(head, (head, NO_BASE, 10), epoch=epoch))
    assert caught.value.reason is reason


def test_an_announcement_alone_never_raises_the_mark() -> None:
    state = FetchPlan(version(5), HighWater(2, version(5))).announced(announcement(99, epoch=9))
    assert state.high_water == HighWater(2, version(5))


def test_a_fetch_that_a_keyframe_made_needless_is_useless() -> None:
    state = holding(0).announced(announcement(1, (1, 0, 10)))
    assert not state.is_useless(ArtifactKey(1, 0))
    state = state.announced(announcement(9, (1, 0, 10), (9, 1, 90), (9, NO_BASE, 40)))
    assert state.is_useless(ArtifactKey(1, 0))


def test_a_fetch_whose_rest_costs_as_much_as_another_way_is_useless() -> None:
    state = holding(0).announced(announcement(9, (9, 1, 40), (9, NO_BASE, 40)))
    assert state.is_useless(ArtifactKey(1, 0))


def test_what_a_source_sends_before_it_is_announced_is_not_useless() -> None:
    state = holding(5).announced(announcement(9, (9, 5, 10)))
    assert not state.is_useless(ArtifactKey(10, 5))
    assert state.is_useless(ArtifactKey(8, 5))
    assert holding(9).announced(announcement(9)).is_useless(ArtifactKey(9, NO_BASE))


def test_a_version_of_unknown_words_is_not_made_again() -> None:
    unknown = FetchPlan(PolicyVersion(1), HighWater())
    assert next_key(unknown.announced(announcement(1, (1, 0, 10)))) is None


def test_the_distance_to_the_head_is_never_negative() -> None:
    assert holding(5).behind_versions == 0
    assert [holding(5).announced(announcement(head)).behind_versions for head in (4, 5, 9)] == [0, 0, 4]


@pytest.mark.parametrize(
    ("version", "base", "expected"),
    [(6, 5, True), (6, 0, True), (6, NO_BASE, True), (6, 4, False), (5, 0, False), (4, NO_BASE, False)],
)
def test_what_starts_from_what_is_here_and_goes_up_can_start(version: int, base: int, expected: bool) -> None:
    key = ArtifactKey(version, base)
    assert holding(5).can_start(key) == expected
    assert not holding(5).failed(key).can_start(key)


def test_a_fetch_that_newer_deltas_build_on_is_finished() -> None:
    state = holding(0).announced(announcement(3, (1, 0, 10), (2, 1, 10), (3, 2, 10), (3, NO_BASE, 100)))
    assert not state.is_useless(ArtifactKey(1, 0))


def test_a_fetch_that_leads_nowhere_any_more_is_useless() -> None:
    state = holding(1).announced(announcement(3, (2, 1, 10), (3, 2, 10)))
    assert not state.is_useless(ArtifactKey(2, 1))
    assert state.announced(announcement(3, (2, 1, 10), (3, 1, 100))).is_useless(ArtifactKey(2, 1))


def test_a_delta_without_bytes_is_not_useless() -> None:
    assert not holding(0).announced(announcement(1, (1, 0, 0))).is_useless(ArtifactKey(1, 0))


@settings(deadline=None)
@given(
    head=st.integers(1, 12),
    edges=st.lists(st.tuples(st.integers(1, 12), st.integers(-1, 11), st.integers(0, 50)), max_size=30),
)
def test_following_the_plan_only_ever_goes_up_and_ends(head: int, edges: list[tuple[int, int, int]]) -> None:
    state = holding(0).announced(announcement(head, *(edge for edge in edges if edge[1] < edge[0])))
    seen = [0]
    while (artifact := state.next_artifact()) is not None:
        assert artifact.key.base_version in (seen[-1], NO_BASE)
        seen.append(artifact.key.version)
        assert seen[-1] > seen[-2]
        assert not state.is_useless(artifact.key)
        state = state.advanced(version(artifact.key.version), state.high_water)
    assert seen[-1] in (0, head)
