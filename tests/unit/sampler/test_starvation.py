"""A sampler that takes no version for long says so, soon at first and then ever more rarely."""

from node.weights.planning.link_time import Link
from sampler.versions.starvation import FIRST_LOGGED_S, DroppedFetch, Starvation


def told_at(starvation: Starvation, link: Link, *, until_s: int) -> list[int]:
    return [now for now in range(until_s) if starvation.is_log_due(link, now=float(now))]


def test_starving_is_told_after_a_while_and_again_after_twice_as_long() -> None:
    starvation = Starvation()
    assert starvation.for_s(100.0) == 0.0
    starvation.announced(behind_versions=1, now=0.0)
    starvation.announced(behind_versions=9, now=20.0)
    assert starvation.for_s(20.0) == 20.0
    assert told_at(starvation, Link(), until_s=300) == [
        FIRST_LOGGED_S,
        2 * FIRST_LOGGED_S,
        4 * FIRST_LOGGED_S,
        8 * FIRST_LOGGED_S,
    ]


def test_on_a_far_line_it_is_told_only_when_something_is_wrong() -> None:
    starvation = Starvation(behind_since_s=0.0)
    assert told_at(starvation, Link(10.0), until_s=100) == [60]


def test_a_sampler_that_takes_an_older_version_on_the_way_does_not_starve() -> None:
    starvation = Starvation(behind_since_s=0.0)
    starvation.dropped[DroppedFetch.SUPERSEDED] += 1
    starvation.took(behind_versions=3, now=25.0)
    assert not starvation.dropped
    assert starvation.for_s(30.0) == 5.0
    assert not starvation.is_log_due(Link(), now=40.0)
    starvation.took(behind_versions=0, now=41.0)
    assert starvation.for_s(90.0) == 0.0


def test_fetches_that_are_refused_are_not_blamed_on_the_link() -> None:
    starvation = Starvation(behind_since_s=0.0)
    starvation.dropped[DroppedFetch.SUPERSEDED] += 1
    assert starvation.fix.startswith("put a relay near this sampler")
    starvation.dropped[DroppedFetch.REFUSED] += 2
    assert (
        starvation.fix == "the link is not at fault: 2 fetches were refused; 'artifact not usable' says why"
    )
