"""Replay, rollback, a second learner, a fork: each alone."""

import pytest

from node.errors import Reason, RefusedError
from node.policy import PolicyVersion
from node.weights.store.high_water import HighWater

SEEN = HighWater().admit(learner_epoch=3, version=PolicyVersion(7, b"a" * 16))


def refusal(*, epoch: int, number: int, root: bytes) -> Reason:
    with pytest.raises(RefusedError) as refused:
        SEEN.admit(learner_epoch=epoch, version=PolicyVersion(number, root))
    return refused.value.reason


def test_newer_versions_are_admitted_and_remembered() -> None:
    next_version = PolicyVersion(9, b"b" * 16)
    assert SEEN.admit(learner_epoch=4, version=next_version) == HighWater(4, next_version)


def test_the_same_version_again_changes_nothing() -> None:
    assert SEEN.admit(learner_epoch=3, version=PolicyVersion(7, b"a" * 16)) == SEEN


def test_an_older_version_is_a_rollback_whatever_its_epoch() -> None:
    assert refusal(epoch=3, number=6, root=b"c" * 16) is Reason.ROLLBACK
    assert refusal(epoch=4, number=6, root=b"c" * 16) is Reason.ROLLBACK


def test_an_older_epoch_is_fenced_though_its_version_is_newer() -> None:
    assert refusal(epoch=2, number=8, root=b"c" * 16) is Reason.FENCED


def test_another_policy_of_the_same_number_is_a_fork() -> None:
    assert refusal(epoch=4, number=7, root=b"c" * 16) is Reason.ROLLBACK
