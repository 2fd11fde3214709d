"""Which offers a hub believes."""

from dataclasses import replace

import pytest

from node.errors import Reason, RefusedError
from node.policy import ArtifactKey, PolicyVersion
from node.weights.format.manifest import Manifest
from node.weights.store.high_water import HighWater
from node.weights.store.offers import admit_offer
from support.weights import Learner

LEARNER = Learner()
STEP = {version: LEARNER.encode(version, version - 1).manifest for version in range(1, 7)}
KEYFRAME = {version: LEARNER.encode(version, None).manifest for version in range(1, 7)}
AT_4 = HighWater(1, STEP[4].policy_version)


def forked(manifest: Manifest, *, epoch: int) -> Manifest:
    """Return another policy of the same number."""
    return replace(manifest, root=b"f" * 16, learner_epoch=epoch)


def refusal(offer: Manifest, retained: list[Manifest], mark: HighWater) -> Reason:
    with pytest.raises(RefusedError) as refused:
        admit_offer(offer, retained=retained, mark=mark)
    return refused.value.reason


def test_the_first_offer_of_a_run_is_believed() -> None:
    assert admit_offer(STEP[3], retained=[], mark=HighWater()) == set()


def test_the_next_version_is_believed() -> None:
    assert admit_offer(STEP[5], retained=[STEP[4]], mark=AT_4) == set()


def test_a_version_behind_the_head_that_nobody_knows_is_a_rollback() -> None:
    assert refusal(STEP[2], [STEP[4]], AT_4) is Reason.ROLLBACK


def test_a_version_behind_the_head_is_believed_if_a_later_one_vouches_for_it() -> None:
    assert admit_offer(STEP[3], retained=[STEP[4]], mark=AT_4) == set()


def test_the_head_is_believed_again_after_the_disk_was_lost_though_the_epoch_was_bumped() -> None:
    assert admit_offer(KEYFRAME[4], retained=[], mark=replace(AT_4, learner_epoch=2)) == set()


def test_a_learner_of_an_older_epoch_is_fenced() -> None:
    assert refusal(STEP[5], [STEP[4]], replace(AT_4, learner_epoch=2)) is Reason.FENCED


def test_the_same_words_are_believed_whatever_the_epoch() -> None:
    assert admit_offer(KEYFRAME[4], retained=[STEP[4]], mark=replace(AT_4, learner_epoch=2)) == set()


def test_another_policy_with_a_number_that_was_announced_is_refused() -> None:
    assert refusal(forked(STEP[4], epoch=2), [STEP[4]], AT_4) is Reason.ROLLBACK
    assert refusal(forked(STEP[4], epoch=2), [], AT_4) is Reason.ROLLBACK
    assert refusal(forked(STEP[3], epoch=2), [STEP[4]], AT_4) is Reason.ROLLBACK


def test_one_learner_cannot_make_a_version_twice_even_before_it_is_announced() -> None:
    assert refusal(forked(STEP[6], epoch=1), [STEP[4], STEP[6]], AT_4) is Reason.ROLLBACK


def test_a_restarted_learner_replaces_what_it_never_finished() -> None:
    retained = [STEP[4], STEP[6], KEYFRAME[6]]
    dropped = admit_offer(forked(STEP[6], epoch=2), retained=retained, mark=AT_4)
    assert dropped == {ArtifactKey(6, 5), ArtifactKey(6)}


def test_what_starts_from_the_replaced_version_is_dropped_too() -> None:
    dropped = admit_offer(forked(STEP[5], epoch=2), retained=[STEP[4], STEP[6]], mark=AT_4)
    assert dropped == {ArtifactKey(6, 5)}


def test_the_older_of_two_learners_cannot_replace_what_the_newer_is_sending() -> None:
    retained = [STEP[4], replace(STEP[6], learner_epoch=2)]
    assert refusal(forked(STEP[6], epoch=1), retained, AT_4) is Reason.FENCED


def test_the_mark_of_a_store_without_a_head_only_fences() -> None:
    mark = HighWater(2, None)
    assert refusal(STEP[1], [], mark) is Reason.FENCED
    assert admit_offer(replace(STEP[1], learner_epoch=2), retained=[], mark=mark) == set()
    assert HighWater(1, PolicyVersion(1, STEP[1].root)).head == STEP[1].policy_version
