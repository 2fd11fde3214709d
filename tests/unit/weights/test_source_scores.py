"""Sources that are believed and asked, by hand-worked histories; the clock is an argument."""

from dataclasses import replace

import pytest

from node.limits import ARTIFACTS_PER_ANNOUNCEMENT
from node.policy import NO_BASE, Announcement, Artifact, ArtifactKey, PolicyVersion
from node.weights.transfer.source_scores import (
    JUDGED_AFTER_BYTES,
    PATIENCE_S,
    Fault,
    SourceScores,
    bucket_of,
    merged,
)
from support.weights import Learner

KEY = ArtifactKey(1, 0)
BUCKET = bucket_of("hub")


def said(head: int, *artifacts: tuple[int, int, int], root: bytes = b"") -> Announcement:
    """Announce ``head`` and artifacts as (version, base, bytes)."""
    return Announcement(
        PolicyVersion(head, root),
        1,
        0.0,
        tuple(Artifact(ArtifactKey(v, b), size) for v, b, size in artifacts),
    )


def in_bucket(announcement: Announcement) -> Announcement:
    """Announce the same artifacts, all of them in the hub's bucket."""
    return replace(announcement, in_bucket=tuple(artifact.key for artifact in announcement.artifacts))


def head_of(announcement: Announcement | None) -> int:
    assert announcement is not None
    return announcement.head.number


def artifacts_of(announcement: Announcement | None) -> tuple[Artifact, ...]:
    assert announcement is not None
    return announcement.artifacts


def test_what_can_be_had_is_what_any_source_has() -> None:
    both = merged([said(2, (1, 0, 10), (2, 1, 10)), said(3, (3, 2, 10))])
    assert head_of(both) == 3
    assert [a.key.version for a in artifacts_of(both)] == [1, 2, 3]
    assert head_of(merged([said(7, (7, NO_BASE, 100))])) == 7


def test_a_head_there_is_no_way_to_hides_no_other() -> None:
    assert head_of(merged([said(1_000_000), said(3, (3, 0, 10))])) == 3
    assert merged([said(5)]) == said(5)
    assert merged([]) is None


def test_of_two_sizes_the_smaller_counts_until_a_manifest_tells_who_lied() -> None:
    learner = Learner()
    manifest = learner.encode(1, 0).manifest
    scores = SourceScores(["honest", "liar"])
    assert scores.heard("honest", said(1, (1, 0, manifest.size_bytes)))
    assert scores.heard("liar", said(1, (1, 0, 1)))
    assert artifacts_of(scores.announcement(0.0)) == (Artifact(KEY, 1),)
    assert scores.signed(manifest) == ("liar",)
    scores.fault("liar", Fault.LIED, now=0.0)
    assert artifacts_of(scores.announcement(0.0)) == (manifest.artifact,)
    assert scores.candidates(KEY, now=0.0) == ("honest",)
    assert not scores.heard("liar", said(1, (1, 0, 2)))
    assert not scores.heard("liar", said(1, root=b"r" * 16))


@pytest.mark.parametrize("fault", list(Fault))
def test_a_source_is_set_aside_for_longer_at_each_fault_and_then_asked_again(fault: Fault) -> None:
    scores = SourceScores(["good", "bad"])
    for name in ("good", "bad"):
        scores.heard(name, said(1, (1, 0, 10)))
    ends, now = [], 0.0
    for _ in range(3):
        scores.fault("bad", fault, now=now)
        term_s = 0.0
        while "bad" not in scores.candidates(KEY, now=now + term_s):
            term_s += 0.5
        ends.append(term_s)
        now += term_s
    assert ends[1] == 2 * ends[0]
    assert ends[2] == 2 * ends[1]


@pytest.mark.parametrize("fault", [Fault.DAMAGED, Fault.LIED])
def test_what_a_doubted_source_announces_is_not_planned_with_until_its_term_is_over(fault: Fault) -> None:
    scores = SourceScores(["good", "bad"])
    honest, promise = said(1, (1, 0, 10)), said(9, (9, NO_BASE, 1))
    scores.heard("good", honest)
    scores.heard("bad", promise)
    assert head_of(scores.announcement(0.0)) == 9
    scores.fault("bad", fault, now=0.0)
    assert scores.announcement(1.0) == honest
    # Neither what it says nor what it sends meanwhile makes up for it.
    scores.heard("bad", promise)
    scores.delivered("bad", 1 << 20, took_s=1.0)
    assert scores.announcement(1.0) == honest
    assert "bad" not in scores.candidates(ArtifactKey(9), now=1.0)
    assert "bad" not in scores.standing(now=1.0)
    term_s = 30.0 if fault is Fault.DAMAGED else 60.0
    assert scores.announcement(term_s - 0.1) == honest
    assert head_of(scores.announcement(term_s)) == 9
    scores.fault("bad", fault, now=term_s)
    assert scores.announcement(term_s + 2 * term_s - 0.1) == honest


def test_a_source_that_was_only_lost_is_planned_with_all_the_same() -> None:
    scores = SourceScores(["good", "lost"])
    scores.heard("good", said(1, (1, 0, 10)))
    scores.fault("lost", Fault.LOST, now=0.0)
    scores.heard("lost", said(9, (9, NO_BASE, 1)))
    assert head_of(scores.announcement(0.5)) == 9


def test_a_source_that_delivers_after_it_was_lost_begins_again_with_the_shortest_term() -> None:
    scores = SourceScores(["one", "two"])
    for _ in range(3):
        scores.fault("one", Fault.LOST, now=0.0)
    assert not scores.is_standing("one", now=3.9)
    scores.delivered("one", 1 << 20, took_s=1.0)
    assert scores.is_standing("one", now=0.0)
    scores.fault("one", Fault.LOST, now=10.0)
    assert scores.is_standing("one", now=11.0)


def test_a_lesser_fault_does_not_shorten_a_term() -> None:
    scores = SourceScores(["one"])
    scores.fault("one", Fault.LIED, now=0.0)
    scores.delivered("one", 1 << 20, took_s=1.0)
    scores.fault("one", Fault.LOST, now=1.0)
    assert not scores.is_standing("one", now=59.9)
    assert scores.is_standing("one", now=60.0)


def test_when_all_first_sources_are_doubted_they_still_count() -> None:
    scores = SourceScores(["bad", "worse"])
    for name in ("bad", "worse"):
        scores.heard(name, said(1, (1, 0, 10)))
        scores.fault(name, Fault.LIED, now=0.0)
    assert scores.announcement(1.0) == said(1, (1, 0, 10))
    assert scores.candidates(KEY, now=1.0) == ("bad", "worse")


@pytest.mark.parametrize(("fault", "longest_s"), [(Fault.LOST, 30.0), (Fault.LIED, 3600.0)])
def test_a_term_has_an_end_however_many_faults_there_were(fault: Fault, longest_s: float) -> None:
    scores = SourceScores(["one"])
    for _ in range(40):
        scores.fault("one", fault, now=0.0)
    assert not scores.is_standing("one", now=longest_s - 0.1)
    assert scores.is_standing("one", now=longest_s)


def test_what_a_liar_announced_is_forgotten_and_what_it_announces_next_is_checked() -> None:
    learner = Learner()
    manifest = learner.encode(1, 0).manifest
    scores = SourceScores(["liar"])
    scores.heard("liar", said(1, (1, 0, manifest.size_bytes), root=b"r" * 16))
    assert scores.signed(manifest) == ("liar",)
    assert scores.announcement(0.0) is None
    assert not scores.heard("liar", said(1, (1, 0, manifest.size_bytes), root=b"r" * 16))
    assert scores.heard("liar", said(1, (1, 0, manifest.size_bytes), root=manifest.root))


def test_the_manifests_remembered_are_bounded() -> None:
    learner = Learner()
    oldest = learner.encode(1, None).manifest
    scores = SourceScores(["one"])
    scores.signed(oldest)
    assert not scores.heard("one", said(1, (1, NO_BASE, oldest.size_bytes + 1)))
    for version in range(2, ARTIFACTS_PER_ANNOUNCEMENT + 1):
        scores.signed(replace(oldest, version=version))
    assert not scores.heard("one", said(1, (1, NO_BASE, oldest.size_bytes + 1)))
    scores.signed(replace(oldest, version=ARTIFACTS_PER_ANNOUNCEMENT + 1))
    assert scores.heard("one", said(1, (1, NO_BASE, oldest.size_bytes + 1), root=b"r" * 16))


def test_what_a_source_lacked_is_asked_of_it_again_when_it_announces_it_anew_beside_others() -> None:
    scores = SourceScores(["one", "two"])
    for name in ("one", "two"):
        scores.heard(name, said(1, (1, 0, 10)))
    scores.lacks("one", KEY)
    assert scores.candidates(KEY, now=0.0) == ("two",)
    scores.lacks("two", KEY)
    assert scores.candidates(KEY, now=0.0) == ()
    assert artifacts_of(scores.announcement(0.0)) == ()
    for name in ("one", "two"):
        scores.heard(name, said(1, (1, 0, 10)))
    assert scores.candidates(KEY, now=0.0) == ("one", "two")


def test_when_everyone_is_set_aside_everyone_is_asked() -> None:
    scores = SourceScores(["one", "two"])
    for name in ("one", "two"):
        scores.heard(name, said(1, (1, 0, 10)))
        scores.fault(name, Fault.LOST, now=0.0)
    assert scores.candidates(KEY, now=0.0) == ("one", "two")
    assert not any(scores.is_standing(name, now=0.0) for name in ("one", "two"))


def test_lanes_go_to_sources_in_proportion_to_their_goodput() -> None:
    scores = SourceScores(["slow", "fast"])
    scores.delivered("slow", 1 << 20, took_s=1.0)
    scores.delivered("fast", 3 << 20, took_s=1.0)
    lanes = []
    for _ in range(8):
        lanes.append(scores.choose(["slow", "fast"]))
        scores.take_lane(lanes[-1])
    assert (lanes.count("fast"), lanes.count("slow")) == (6, 2)
    scores.leave_lane("fast")
    assert scores.choose(["slow", "fast"]) == "fast"


def test_a_source_never_tried_counts_as_the_best_of_the_others() -> None:
    scores = SourceScores(["slow", "fast", "new"])
    scores.delivered("slow", 1 << 20, took_s=1.0)
    scores.delivered("fast", 3 << 20, took_s=1.0)
    assert scores.choose(["fast", "new"]) == "fast"
    scores.take_lane("fast")
    assert scores.choose(["fast", "new"]) == "new"


def test_the_first_measurement_counts_whole_and_later_ones_by_their_weight_in_bytes() -> None:
    scores = SourceScores(["one", "instant"])
    scores.delivered("one", 1000, took_s=2.0)
    assert scores.bytes_per_s("one") == 500
    scores.delivered("one", 8 << 20, took_s=1.0)
    scores.delivered("one", 2 << 20, took_s=1.0)
    assert scores.bytes_per_s("one") == 5 << 20
    scores.delivered("instant", 1000, took_s=0.0)
    assert scores.choose(["one", "instant"]) == "instant"


def test_the_last_resort_counts_only_when_the_others_have_been_behind_it_for_long() -> None:
    scores = SourceScores(["relay"], last_resort="hub")
    hub = said(2, (1, 0, 10), (2, 1, 10))
    scores.heard("hub", hub)
    scores.heard("relay", said(1, (1, 0, 10)))
    key = ArtifactKey(2, 1)
    assert head_of(scores.announcement(0.0)) == 1
    scores.heard("relay", hub)
    assert scores.announcement(PATIENCE_S - 1) == hub
    assert scores.candidates(key, now=2 * PATIENCE_S) == ("relay",)
    scores.lost("relay")
    assert scores.announcement(2 * PATIENCE_S) is None
    assert scores.announcement(3 * PATIENCE_S) == hub
    assert scores.candidates(key, now=3 * PATIENCE_S) == ("hub",)
    scores.heard("relay", hub)
    assert scores.candidates(key, now=3 * PATIENCE_S) == ("relay",)
    # Whoever kept up in between has all of the patience again.
    scores.lost("relay")
    assert scores.announcement(4 * PATIENCE_S) is None
    assert scores.announcement(5 * PATIENCE_S) == hub


def test_a_relay_that_promises_a_version_it_cannot_give_does_not_keep_the_last_resort_away() -> None:
    scores = SourceScores(["relay"], last_resort="hub")
    hub = said(1, (1, 0, 10))
    scores.heard("hub", hub)
    scores.heard("relay", replace(hub, artifacts=()))
    assert scores.announcement(0.0) == replace(hub, artifacts=())
    assert scores.announcement(PATIENCE_S) == hub


def test_what_nobody_has_yet_is_asked_of_who_announces_and_is_not_set_aside() -> None:
    scores = SourceScores(["silent", "heard", "faulty"], last_resort="hub")
    assert scores.standing(now=0.0) == ("silent", "heard", "faulty")
    for name in ("heard", "faulty", "hub"):
        scores.heard(name, said(1, (1, 0, 10)))
    scores.fault("faulty", Fault.LOST, now=0.0)
    assert scores.standing(now=0.5) == ("heard",)
    assert scores.standing(now=1.0) == ("heard", "faulty")
    scores.fault("silent", Fault.LOST, now=1.0)
    scores.fault("heard", Fault.LOST, now=1.0)
    scores.fault("faulty", Fault.LOST, now=1.0)
    assert scores.standing(now=1.0) == ("heard", "faulty")


def test_a_source_that_refuses_this_peer_is_set_aside_for_a_while_and_its_word_still_counts() -> None:
    scores = SourceScores(["here", "revoked-me"])
    scores.heard("here", said(1, (1, 0, 10)))
    scores.fault("revoked-me", Fault.REFUSED, now=0.0)
    scores.heard("revoked-me", said(2, (2, 1, 10), (1, 0, 10)))
    assert "revoked-me" not in scores.standing(now=1.0)
    assert head_of(scores.announcement(6.0)) == 2
    for _ in range(20):
        scores.fault("revoked-me", Fault.REFUSED, now=100.0)
    assert "revoked-me" in scores.standing(now=161.0)


def test_what_is_in_a_hubs_bucket_is_read_there_and_not_from_the_hub() -> None:
    scores = SourceScores(["hub", "relay"])
    scores.heard("hub", in_bucket(said(1, (1, 0, 10))))
    scores.heard("relay", said(2, (1, 0, 10), (2, 1, 10)))
    assert scores.readable(KEY, now=0.0) == (BUCKET, "relay")
    assert scores.candidates(KEY, now=0.0) == ("hub", "relay")
    assert scores.readable(ArtifactKey(2, 1), now=0.0) == ("relay",)
    assert scores.standing(now=0.0) == ("hub", "relay")


def test_a_bucket_that_fails_is_set_aside_for_its_hub_and_comes_back() -> None:
    scores = SourceScores(["hub"])
    scores.heard("hub", in_bucket(said(1, (1, 0, 10))))
    scores.fault(BUCKET, Fault.DAMAGED, now=0.0)
    assert scores.readable(KEY, now=29.0) == ("hub",)
    assert scores.readable(KEY, now=30.0) == (BUCKET,)
    scores.heard("hub", said(1, (1, 0, 10)))
    assert scores.readable(KEY, now=30.0) == ("hub",)


def test_a_bucket_is_read_while_its_hub_is_away() -> None:
    scores = SourceScores(["hub"])
    scores.heard("hub", in_bucket(said(1, (1, 0, 10))))
    scores.lost("hub")
    assert scores.readable(KEY, now=0.0) == (BUCKET,)


def test_a_slow_bucket_shares_with_its_hub_unless_that_is_no_faster() -> None:
    scores = SourceScores(["hub"])
    scores.heard("hub", in_bucket(said(1, (1, 0, 10))))
    scores.delivered(BUCKET, 10_000, took_s=1.0)
    assert scores.readable(KEY, now=0.0) == (BUCKET,), "so few bytes say nothing"
    scores.delivered(BUCKET, JUDGED_AFTER_BYTES, took_s=1000.0)
    assert scores.readable(KEY, now=0.0) == (BUCKET, "hub")
    scores.delivered("hub", 1 << 20, took_s=1000.0)
    assert scores.readable(KEY, now=0.0) == (BUCKET,)
    scores.delivered("hub", 1 << 30, took_s=1.0)
    assert scores.readable(KEY, now=0.0) == (BUCKET, "hub")


def test_the_bucket_of_a_last_resort_waits_as_its_hub_does() -> None:
    scores = SourceScores(["relay"], last_resort="hub")
    scores.heard("hub", in_bucket(said(1, (1, 0, 10))))
    scores.heard("relay", said(1, (1, 0, 10)))
    assert scores.readable(KEY, now=0.0) == ("relay",)
