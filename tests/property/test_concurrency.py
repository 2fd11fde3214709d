"""Properties of the number of groups at once, whatever an engine says."""

from hypothesis import given, settings
from hypothesis import strategies as st

from node.values.limits import LEASES_PER_PEER
from sampler.engines.engine import MOST_ASKED, EngineUse
from sampler.rollouts.concurrency import ASKED, CACHE, GROWTH, Concurrency

USES = st.builds(EngineUse, st.floats(0.0, 1.0), st.floats(0.0, MOST_ASKED))
READINGS = st.lists(
    st.tuples(USES, st.booleans(), st.none() | st.floats(0.0, 100.0), st.floats(0.0, 300.0)), max_size=60
)
"""Use, whether held back, how long a group takes, and the time since the reading before."""


@given(READINGS)
@settings(deadline=None)
def test_it_stays_within_its_bounds_and_changes_at_most_once_in_a_groups_time(
    readings: list[tuple[EngineUse, bool, float | None, float]],
) -> None:
    concurrency = Concurrency(now=0.0)
    now = changed_s = 0.0
    for use, is_held_back, group_s, pause_s in readings:
        now += pause_s
        before = concurrency.groups
        concurrency.note(use, is_held_back=is_held_back, group_s=group_s, now=now)
        assert 1 <= concurrency.groups <= LEASES_PER_PEER
        assert before / GROWTH - 1 < concurrency.groups <= GROWTH * before
        if concurrency.groups != before:
            assert group_s is not None
            assert now - changed_s >= group_s
            changed_s = now


@given(USES, st.booleans(), st.floats(0.0, 100.0))
@settings(deadline=None)
def test_it_grows_below_both_bands_shrinks_above_one_and_else_stays(
    use: EngineUse, is_held_back: bool, group_s: float
) -> None:
    concurrency = Concurrency(now=0.0)
    before = concurrency.groups
    concurrency.note(use, is_held_back=is_held_back, group_s=group_s, now=1e6)
    if use.cache_share > CACHE.high or use.asked_share > ASKED.high:
        assert concurrency.groups < before
    elif use.cache_share >= CACHE.low or use.asked_share >= ASKED.low or is_held_back:
        assert concurrency.groups == before
    else:
        assert concurrency.groups > before
