"""Which offers a hub believes, which artifacts it keeps, and what the newest version seen rules out."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from node.errors import Reason
from node.values.policy import NO_BASE, Artifact, ArtifactKey, PolicyVersion
from node.weights.format.manifest import Manifest
from node.weights.store.high_water import Head, HighWater
from node.weights.store.offers import admit_offer, is_behind, surplus, takeable
from support.refusals import refused
from support.weights import Learner

LEARNER = Learner()
STEP = {version: LEARNER.encode(version, version - 1).manifest for version in range(1, 7)}
KEYFRAME = {version: LEARNER.encode(version, None).manifest for version in range(1, 7)}
AT_4 = HighWater().after(STEP[4])
AT_4_EPOCH_2 = HighWater(learner_epoch=2, head=AT_4.head)
NO_HEAD = HighWater(learner_epoch=2)


def forked(manifest: Manifest, *, epoch: int) -> Manifest:
    """Return another policy of the same number."""
    return replace(manifest, root=b"f" * 16, learner_epoch=epoch)


FORK_6 = forked(STEP[6], epoch=2)
NEWER_6 = replace(STEP[6], learner_epoch=2)
OFFERS: dict[str, tuple[Manifest, list[Manifest], HighWater, Reason | set[ArtifactKey]]] = {
    "the first of a run": (STEP[3], [], HighWater(), set()),
    "the next version": (STEP[5], [STEP[4]], AT_4, set()),
    "behind the head, known to nobody": (STEP[2], [STEP[4]], AT_4, Reason.ROLLBACK),
    "behind the head, a later one vouches for it": (STEP[3], [STEP[4]], AT_4, set()),
    "the head, after the disk was lost and the epoch was raised": (KEYFRAME[4], [], AT_4_EPOCH_2, set()),
    "an older epoch": (STEP[5], [STEP[4]], AT_4_EPOCH_2, Reason.FENCED),
    "the same words, whatever the epoch": (KEYFRAME[4], [STEP[4]], AT_4_EPOCH_2, set()),
    "another policy of the head's number": (forked(STEP[4], epoch=2), [STEP[4]], AT_4, Reason.ROLLBACK),
    "that, with nothing retained": (forked(STEP[4], epoch=2), [], AT_4, Reason.ROLLBACK),
    "another policy behind the head": (forked(STEP[3], epoch=2), [STEP[4]], AT_4, Reason.ROLLBACK),
    "a version made twice by one learner": (
        *(forked(STEP[6], epoch=1), [STEP[4], STEP[6]], AT_4),
        Reason.ROLLBACK,
    ),
    "what a restarted learner never finished": (
        *(FORK_6, [STEP[4], STEP[6], KEYFRAME[6]], AT_4),
        {ArtifactKey(6, 5), ArtifactKey(6)},
    ),
    "the base of what is retained": (
        *(forked(STEP[5], epoch=2), [STEP[4], STEP[6]], AT_4),
        {ArtifactKey(6, 5)},
    ),
    "the older of two learners": (forked(STEP[6], epoch=1), [STEP[4], NEWER_6], AT_4, Reason.FENCED),
    "a mark without a head fences": (STEP[1], [], NO_HEAD, Reason.FENCED),
    "and does nothing else": (replace(STEP[1], learner_epoch=2), [], NO_HEAD, set()),
}


@pytest.mark.parametrize("name", OFFERS)
def test_an_offer_is_believed_refused_or_replaces_what_it_makes_worthless(name: str) -> None:
    offer, retained, mark, expected = OFFERS[name]
    if isinstance(expected, set):
        assert admit_offer(offer, retained=retained, mark=mark) == expected
        return
    with refused(expected):
        admit_offer(offer, retained=retained, mark=mark)


@pytest.mark.parametrize("name", OFFERS)
def test_what_is_known_to_be_refused_is_refused_as_a_rollback_and_nothing_else_is(name: str) -> None:
    offer, retained, mark, expected = OFFERS[name]
    newest = None if mark.head is None else mark.head.number
    behind = is_behind(offer.key, retained=[manifest.key for manifest in retained], newest=newest)
    assert not behind or expected is Reason.ROLLBACK
    assert behind == (name == "behind the head, known to nobody")


def test_a_store_takes_what_offers_newer_than_it_vouch_for() -> None:
    chain = [ArtifactKey(2), ArtifactKey(4, 2), ArtifactKey(6, 4), ArtifactKey(3, 1)]
    assert takeable(chain, retained=[], newest=6) == frozenset(chain[:3])
    assert takeable(chain[:2], retained=[ArtifactKey(6)], newest=6) == frozenset()
    assert takeable(chain[:2], retained=[ArtifactKey(6, 4)], newest=6) == frozenset(chain[:2])
    assert takeable(chain, retained=[], newest=None) == frozenset(chain)


def artifact(version: int, base: int = NO_BASE) -> Artifact:
    return Artifact(ArtifactKey(version, base), 10)


STEPS = tuple(artifact(version, version - 1) for version in range(1, 10))
PUBLIC = {version: artifact(version, 0) for version in (2, 3, 4, 6, 7, 8, 9)}


@pytest.mark.parametrize(
    ("kept", "gone", "head", "keyframes"),
    [
        ([*STEPS, artifact(6)], [], 9, 2),
        ([*STEPS, PUBLIC[2], PUBLIC[3], PUBLIC[4]], [], 9, 2),
        ([artifact(5), PUBLIC[9]], [artifact(2), STEPS[0]], None, 1),
        ([artifact(3), artifact(6), *STEPS[3:]], [artifact(0), *STEPS[:3]], 9, 2),
        ([artifact(5), PUBLIC[9]], [artifact(2), STEPS[0]], 9, 1),
        ([artifact(6), *STEPS[6:]], [artifact(8, 4)], 9, 1),
        ([artifact(6), artifact(7), *STEPS[6:], PUBLIC[7], PUBLIC[8]], [PUBLIC[2], PUBLIC[6]], 9, 2),
    ],
    ids=[
        "too few keyframes yet",
        "no keyframe: every delta from the public base model stays",
        "before a head is announced no way to it is kept",
        "what starts before the oldest kept keyframe goes",
        "the only way to the head stays",
        "a skip delta from before goes though it ends after",
        "the newest deltas from the public base model stay for late joiners",
    ],
)
def test_what_late_joiners_and_peers_a_little_behind_need_is_kept(
    kept: Sequence[Artifact], gone: Sequence[Artifact], head: int | None, keyframes: int
) -> None:
    assert surplus([*kept, *gone], wanted=(head,), retained_keyframes=keyframes) == {
        each.key for each in gone
    }


SEEN = HighWater().after(replace(STEP[6], learner_epoch=3))


def test_newer_versions_and_the_same_one_are_accepted() -> None:
    SEEN.check(learner_epoch=4, version=PolicyVersion(9, b"b" * 16))
    SEEN.check(learner_epoch=3, version=STEP[6].policy_version)


@pytest.mark.parametrize(
    ("epoch", "number", "reason"),
    [(3, 5, Reason.ROLLBACK), (4, 5, Reason.ROLLBACK), (2, 8, Reason.FENCED), (4, 6, Reason.ROLLBACK)],
    ids=["older version", "older version of a newer epoch", "older epoch", "fork"],
)
def test_a_replay_a_rollback_a_second_learner_and_a_fork_are_refused(
    epoch: int, number: int, reason: Reason
) -> None:
    with refused(reason):
        SEEN.check(learner_epoch=epoch, version=PolicyVersion(number, b"c" * 16))


def test_the_way_to_a_version_under_evaluation_is_kept_for_those_that_are_slow() -> None:
    """Seen where a slow sampler came to version 14, of which there was a keyframe, and 13 was asked of it."""
    made = [artifact(0), *STEPS, artifact(4), artifact(6)]
    gone = surplus(made, wanted=(9, 3), retained_keyframes=2)
    assert gone == surplus(made, wanted=(9,), retained_keyframes=2) - {each.key for each in STEPS[:3]}
    assert gone == {artifact(0).key, STEPS[3].key}


def test_no_flipped_bit_of_a_mark_is_read_and_a_mark_of_older_software_is(tmp_path: Path) -> None:
    path = tmp_path / "head.json"
    mark = HighWater(
        learner_epoch=3, head=Head(number=12, root="0" * 32, learner_epoch=3, published_at_s=1e9)
    )
    mark.save(path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError):  # noqa: PT011 - JSON's, pydantic's or ours
            HighWater.load(path)
    path.write_text(mark.model_dump_json())
    assert HighWater.load(path) == mark
