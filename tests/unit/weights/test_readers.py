"""Artifacts being read, or to be read on, stay; and no more than a few artifacts beyond retention."""

from contextlib import ExitStack

import pytest

from node.values.policy import ArtifactKey
from node.weights.store.readers import LINGER_S, LINGERING_ARTIFACTS, Readers


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ask(readers: Readers, key: ArtifactKey, *, lingers: bool = True) -> None:
    with readers.reading(key, find=lambda: None, lingers=lingers):
        pass


def test_what_was_asked_for_stays_for_a_while_after_it_became_surplus() -> None:
    clock = Clock()
    readers, asked, other = Readers(monotonic=clock), ArtifactKey(10), ArtifactKey(20)
    ask(readers, asked)
    ask(readers, other, lingers=False)
    assert readers.removable([asked, other]) == {other}
    assert readers.lingering_artifacts == 1
    clock.now = LINGER_S
    assert readers.removable([asked]) == {asked}
    assert readers.lingering_artifacts == 0


def test_those_asked_for_last_stay_and_no_more_of_them_than_the_disk_can_bear() -> None:
    clock = Clock()
    readers = Readers(monotonic=clock)
    keys = [ArtifactKey(number) for number in range(LINGERING_ARTIFACTS + 3)]
    for clock.now, key in enumerate(keys):
        ask(readers, key)
    assert readers.removable(keys) == {*keys[:3]}
    assert readers.lingering_artifacts == LINGERING_ARTIFACTS


def test_what_is_read_is_not_removed_whoever_else_is_done_with_it() -> None:
    readers, key = Readers(), ArtifactKey(1)
    removed: list[ArtifactKey] = []

    def remove() -> bool:
        removed.append(key)
        return True

    with ExitStack() as readings:
        for _ in range(2):
            readings.enter_context(readers.reading(key, find=lambda: None, lingers=False))
        ask(readers, key, lingers=False)
        assert readers.remove_unless_read(key, remove) is None
    assert readers.remove_unless_read(key, remove)
    assert removed == [key]


def test_who_asks_for_what_is_not_there_reads_nothing() -> None:
    readers, key = Readers(), ArtifactKey(1)

    def missing() -> None:
        raise KeyError(key)

    with pytest.raises(KeyError), readers.reading(key, find=missing, lingers=True):
        pass
    assert readers.removable([key]) == {key}
