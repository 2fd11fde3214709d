"""Which old versions are kept for a rollback that reaches far back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.publishing.spaced_versions import Spacing


def kept_over_a_run(head: int, *, every: int, most: int, published: int = 1) -> dict[int, frozenset[int]]:
    """Return the kept versions after each keyframe of a run whose store has two keyframes' versions."""
    kept, history, rule = frozenset[int](), {}, Spacing(every, most=most)
    for newest in range(every, head + 1, every):
        stored = set(range(max(published, newest - 2 * every), newest + 1, published))
        kept = rule.chosen(kept | stored)
        history[newest] = kept
    return history


def test_ages_of_what_is_kept_double() -> None:
    ages = [1920 - version for version in sorted(kept_over_a_run(1920, every=64, most=4)[1920])]
    assert ages == [896, 384, 128, 64]


def test_the_defaults_reach_500_to_1000_versions_back() -> None:
    history = kept_over_a_run(64 * 100, every=64, most=4)
    reach = [newest - min(kept) for newest, kept in history.items() if newest > 1000]
    assert (min(reach), max(reach)) == (512, 960)


@pytest.mark.parametrize("every", [1, 3, 64])
@pytest.mark.parametrize("published", [1, 2, 7])
def test_what_is_kept_was_kept_before_or_can_still_be_had_and_is_bounded(every: int, published: int) -> None:
    before = frozenset[int]()
    for newest, kept in kept_over_a_run(40 * every, every=every, most=3, published=published).items():
        assert len(kept) <= 3
        assert all(version in before or version >= newest - 2 * every for version in kept)
        before = kept


@given(st.sets(st.integers(1, 3000), min_size=1), st.integers(1, 100), st.integers(0, 8))
def test_a_choice_is_of_what_there_is_and_choosing_again_changes_nothing(
    available: set[int], every: int, most: int
) -> None:
    rule, head = Spacing(every, most=most), max(available)
    chosen = rule.chosen(available)
    assert chosen <= available
    assert len(chosen) <= most
    assert rule.chosen(chosen | {head}) == chosen
