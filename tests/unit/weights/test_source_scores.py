"""Who is believed and asked, by hand-worked histories; the clock is an argument."""

from dataclasses import replace

import pytest

from node.limits import ARTIFACTS_PER_ANNOUNCEMENT
from node.policy import NO_BASE, Announcement, Artifact, ArtifactKey, PolicyVersion
from node.weights.transfer.source_scores import PATIENCE_S, Fault, SourceScores, merged
from support.weights import Learner

KEY = ArtifactKey(1, 0)


def said(head: int, *artifacts: tuple[int, int, int], root: bytes = b"") -> Announcement:
    """Announce ``head`` and artifacts as (version, base, bytes)."""
    return Announcement(
        PolicyVersion(head, root),
        1,
        0.0,
        tuple(Artifact(ArtifactKey(v, b), size) for v, b, size in artifacts),
    )


def test_what_can_be_had_is_what_any_source_has() -> None:
    both = merged([said(2, (1, 0, 10), (2, 1, 10)), said(3, (3, 2, 10))])
    assert both is not None
    assert both.head.number == 3
    assert [a.key.version for a in both.artifacts] == [1, 2, 3]


def test_a_head_there_is_no_way_to_hides_no_other() -> None:
    reachable = merged([said(1_000_000), said(3, (3, 0, 10))])
    assert reachable is not None
    assert reachable.head.number == 3
    assert merged([said(5)]) == said(5)
    assert merged([]) is None


def test_of_two_sizes_the_smaller_counts_until_a_manifest_tells_who_lied() -> None:
    learner = Learner()
    manifest = learner.encode(1, 0).manifest
    book = SourceScores(["honest", "liar"])
    assert book.heard("honest", said(1, (1, 0, manifest.size_bytes)))
    assert book.heard("liar", said(1, (1, 0, 1)))
    announced = book.announcement(0.0)
    assert announced is not None
    assert announced.artifacts == (Artifact(KEY, 1),)
    assert book.signed(manifest) == ("liar",)
    book.fault("liar", Fault.LIED, now=0.0)
    announced = book.announcement(0.0)
    assert announced is not None
    assert announced.artifacts == (manifest.artifact,)
    assert book.candidates(KEY, now=0.0) == ("honest",)
    assert not book.heard("liar", said(1, (1, 0, 2)))
    assert not book.heard("liar", said(1, root=b"r" * 16))


@pytest.mark.parametrize("fault", list(Fault))
def test_a_source_is_set_aside_for_longer_at_each_fault_and_then_asked_again(fault: Fault) -> None:
    book = SourceScores(["good", "bad"])
    for name in ("good", "bad"):
        book.heard(name, said(1, (1, 0, 10)))
    ends, now = [], 0.0
    for _ in range(3):
        book.fault("bad", fault, now=now)
        term_s = 0.0
        while "bad" not in book.candidates(KEY, now=now + term_s):
            term_s += 0.5
        ends.append(term_s)
        now += term_s
    assert ends[1] == 2 * ends[0]
    assert ends[2] == 2 * ends[1]


@pytest.mark.parametrize("fault", [Fault.DAMAGED, Fault.LIED])
def test_what_a_doubted_source_announces_is_not_planned_with_until_its_term_is_over(fault: Fault) -> None:
    book = SourceScores(["good", "bad"])
    honest, promise = said(1, (1, 0, 10)), said(9, (9, NO_BASE, 1))
    book.heard("good", honest)
    book.heard("bad", promise)
    announced = book.announcement(0.0)
    assert announced is not None
    assert announced.head.number == 9
    book.fault("bad", fault, now=0.0)
    assert book.announcement(1.0) == honest
    # Neither what it says nor what it sends meanwhile makes up for it.
    book.heard("bad", promise)
    book.delivered("bad", 1 << 20, took_s=1.0)
    assert book.announcement(1.0) == honest
    assert "bad" not in book.candidates(ArtifactKey(9), now=1.0)
    assert "bad" not in book.standing(now=1.0)
    term_s = 30.0 if fault is Fault.DAMAGED else 60.0
    assert book.announcement(term_s - 0.1) == honest
    announced = book.announcement(term_s)
    assert announced is not None
    assert announced.head.number == 9
    book.fault("bad", fault, now=term_s)
    assert book.announcement(term_s + 2 * term_s - 0.1) == honest


def test_a_source_that_was_only_lost_is_planned_with_all_the_same() -> None:
    book = SourceScores(["good", "lost"])
    book.heard("good", said(1, (1, 0, 10)))
    book.fault("lost", Fault.LOST, now=0.0)
    book.heard("lost", said(9, (9, NO_BASE, 1)))
    announced = book.announcement(0.5)
    assert announced is not None
    assert announced.head.number == 9


def test_a_source_that_delivers_after_it_was_lost_begins_again_with_the_shortest_term() -> None:
    book = SourceScores(["one", "two"])
    for _ in range(3):
        book.fault("one", Fault.LOST, now=0.0)
    assert not book.is_standing("one", now=3.9)
    book.delivered("one", 1 << 20, took_s=1.0)
    assert book.is_standing("one", now=0.0)
    book.fault("one", Fault.LOST, now=10.0)
    assert book.is_standing("one", now=11.0)


def test_a_lesser_fault_does_not_shorten_a_term() -> None:
    book = SourceScores(["one"])
    book.fault("one", Fault.LIED, now=0.0)
    book.delivered("one", 1 << 20, took_s=1.0)
    book.fault("one", Fault.LOST, now=1.0)
    assert not book.is_standing("one", now=59.9)
    assert book.is_standing("one", now=60.0)


def test_when_all_first_sources_are_doubted_they_still_count() -> None:
    book = SourceScores(["bad", "worse"])
    for name in ("bad", "worse"):
        book.heard(name, said(1, (1, 0, 10)))
        book.fault(name, Fault.LIED, now=0.0)
    assert book.announcement(1.0) == said(1, (1, 0, 10))
    assert book.candidates(KEY, now=1.0) == ("bad", "worse")


@pytest.mark.parametrize(("fault", "longest_s"), [(Fault.LOST, 30.0), (Fault.LIED, 3600.0)])
def test_a_term_has_an_end_however_many_faults_there_were(fault: Fault, longest_s: float) -> None:
    book = SourceScores(["one"])
    for _ in range(40):
        book.fault("one", fault, now=0.0)
    assert not book.is_standing("one", now=longest_s - 0.1)
    assert book.is_standing("one", now=longest_s)


def test_what_a_liar_announced_is_forgotten_and_what_it_announces_next_is_checked() -> None:
    learner = Learner()
    manifest = learner.encode(1, 0).manifest
    book = SourceScores(["liar"])
    book.heard("liar", said(1, (1, 0, manifest.size_bytes), root=b"r" * 16))
    assert book.signed(manifest) == ("liar",)
    assert book.announcement(0.0) is None
    assert not book.heard("liar", said(1, (1, 0, manifest.size_bytes), root=b"r" * 16))
    assert book.heard("liar", said(1, (1, 0, manifest.size_bytes), root=manifest.root))


def test_the_manifests_remembered_are_bounded() -> None:
    learner = Learner()
    oldest = learner.encode(1, None).manifest
    book = SourceScores(["one"])
    book.signed(oldest)
    assert not book.heard("one", said(1, (1, NO_BASE, oldest.size_bytes + 1)))
    for version in range(2, ARTIFACTS_PER_ANNOUNCEMENT + 2):
        book.signed(replace(oldest, version=version))
    assert book.heard("one", said(1, (1, NO_BASE, oldest.size_bytes + 1)))


def test_what_a_source_lacked_is_asked_of_it_again_when_it_announces_it_anew_beside_others() -> None:
    book = SourceScores(["one", "two"])
    for name in ("one", "two"):
        book.heard(name, said(1, (1, 0, 10)))
    book.lacks("one", KEY)
    assert book.candidates(KEY, now=0.0) == ("two",)
    book.heard("one", said(1, (1, 0, 10)))
    assert book.candidates(KEY, now=0.0) == ("one", "two")


def test_when_everyone_is_set_aside_everyone_is_asked() -> None:
    book = SourceScores(["one", "two"])
    for name in ("one", "two"):
        book.heard(name, said(1, (1, 0, 10)))
        book.fault(name, Fault.LOST, now=0.0)
    assert book.candidates(KEY, now=0.0) == ("one", "two")
    assert not any(book.is_standing(name, now=0.0) for name in ("one", "two"))


def test_a_source_without_an_artifact_is_not_asked_for_it_until_it_announces_again() -> None:
    book = SourceScores(["one"])
    book.heard("one", said(1, (1, 0, 10)))
    book.lacks("one", KEY)
    assert book.candidates(KEY, now=0.0) == ()
    announced = book.announcement(0.0)
    assert announced is not None
    assert announced.artifacts == ()
    book.heard("one", said(1, (1, 0, 10)))
    assert book.candidates(KEY, now=0.0) == ("one",)


def test_lanes_go_to_sources_in_proportion_to_their_goodput() -> None:
    book = SourceScores(["slow", "fast"])
    book.delivered("slow", 1 << 20, took_s=1.0)
    book.delivered("fast", 3 << 20, took_s=1.0)
    lanes = []
    for _ in range(8):
        lanes.append(book.choose(["slow", "fast"]))
        book.take_lane(lanes[-1])
    assert (lanes.count("fast"), lanes.count("slow")) == (6, 2)
    book.leave_lane("fast")
    assert book.choose(["slow", "fast"]) == "fast"


def test_a_source_never_tried_is_tried() -> None:
    book = SourceScores(["known", "new"])
    book.delivered("known", 1 << 20, took_s=1.0)
    book.take_lane("known")
    assert book.choose(["known", "new"]) == "new"


def test_goodput_follows_what_is_measured_by_its_weight_in_bytes() -> None:
    book = SourceScores(["one"])
    book.delivered("one", 8 << 20, took_s=1.0)
    book.delivered("one", 2 << 20, took_s=1.0)
    assert book.bytes_per_s("one") == 5 << 20


def test_the_last_resort_counts_only_when_the_others_have_been_behind_it_for_long() -> None:
    book = SourceScores(["relay"], last_resort="hub")
    hub = said(2, (1, 0, 10), (2, 1, 10))
    book.heard("hub", hub)
    book.heard("relay", said(1, (1, 0, 10)))
    key = ArtifactKey(2, 1)
    announced = book.announcement(0.0)
    assert announced is not None
    assert announced.head.number == 1
    book.heard("relay", hub)
    assert book.announcement(PATIENCE_S - 1) == hub
    assert book.candidates(key, now=2 * PATIENCE_S) == ("relay",)
    book.lost("relay")
    assert book.announcement(2 * PATIENCE_S) is None
    assert book.announcement(3 * PATIENCE_S) == hub
    assert book.candidates(key, now=3 * PATIENCE_S) == ("hub",)
    book.heard("relay", hub)
    assert book.candidates(key, now=3 * PATIENCE_S) == ("relay",)
    # Whoever kept up in between has all of the patience again.
    book.lost("relay")
    assert book.announcement(4 * PATIENCE_S) is None
    assert book.announcement(5 * PATIENCE_S) == hub


def test_a_relay_that_promises_a_version_it_cannot_give_does_not_keep_the_last_resort_away() -> None:
    book = SourceScores(["relay"], last_resort="hub")
    hub = said(1, (1, 0, 10))
    book.heard("hub", hub)
    book.heard("relay", replace(hub, artifacts=()))
    assert book.announcement(0.0) == replace(hub, artifacts=())
    assert book.announcement(PATIENCE_S) == hub


def test_a_keyframe_is_a_way_for_everyone() -> None:
    announced = merged([said(7, (7, NO_BASE, 100))])
    assert announced is not None
    assert announced.head.number == 7


def test_what_nobody_has_yet_is_asked_of_who_announces_and_is_not_set_aside() -> None:
    book = SourceScores(["silent", "heard", "faulty"], last_resort="hub")
    assert book.standing(now=0.0) == ("silent", "heard", "faulty")
    for name in ("heard", "faulty", "hub"):
        book.heard(name, said(1, (1, 0, 10)))
    book.fault("faulty", Fault.LOST, now=0.0)
    assert book.standing(now=0.5) == ("heard",)
    assert book.standing(now=1.0) == ("heard", "faulty")
    book.fault("silent", Fault.LOST, now=1.0)
    book.fault("heard", Fault.LOST, now=1.0)
    book.fault("faulty", Fault.LOST, now=1.0)
    assert book.standing(now=1.0) == ("heard", "faulty")
