"""Sources that are believed, and whose turn it is, by hand-worked histories; the clock is an argument."""

from dataclasses import replace

import pytest

from node.values.limits import ARTIFACTS_PER_ANNOUNCEMENT
from node.values.policy import NO_BASE, Announcement, Artifact, ArtifactKey, PolicyVersion
from node.weights.transfer.source_turns import PATIENCE_S, Fault, SourceTurns, bucket_of, merged
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
    turns = SourceTurns(["honest", "liar"])
    assert turns.heard("honest", said(1, (1, 0, manifest.size_bytes)))
    assert turns.heard("liar", said(1, (1, 0, 1)))
    assert artifacts_of(turns.announcement(0.0)) == (Artifact(KEY, 1),)
    assert turns.signed(manifest) == ("liar",)
    turns.fault("liar", Fault.LIED, now=0.0)
    assert artifacts_of(turns.announcement(0.0)) == (manifest.artifact,)
    assert turns.candidates(KEY, now=0.0) == ("honest",)
    assert not turns.heard("liar", said(1, (1, 0, 2)))
    assert not turns.heard("liar", said(1, root=b"r" * 16))


@pytest.mark.parametrize("fault", list(Fault))
def test_a_source_is_set_aside_for_longer_at_each_fault_and_then_asked_again(fault: Fault) -> None:
    turns = SourceTurns(["good", "bad"])
    for name in ("good", "bad"):
        turns.heard(name, said(1, (1, 0, 10)))
    ends, now = [], 0.0
    for _ in range(3):
        turns.fault("bad", fault, now=now)
        term_s = 0.0
        while "bad" not in turns.candidates(KEY, now=now + term_s):
            term_s += 0.5
        ends.append(term_s)
        now += term_s
    assert ends[1] == 2 * ends[0]
    assert ends[2] == 2 * ends[1]


@pytest.mark.parametrize("fault", [Fault.DAMAGED, Fault.LIED])
def test_what_a_doubted_source_announces_is_not_planned_with_until_its_term_is_over(fault: Fault) -> None:
    turns = SourceTurns(["good", "bad"])
    honest, promise = said(1, (1, 0, 10)), said(9, (9, NO_BASE, 1))
    turns.heard("good", honest)
    turns.heard("bad", promise)
    assert head_of(turns.announcement(0.0)) == 9
    turns.fault("bad", fault, now=0.0)
    assert turns.announcement(1.0) == honest
    # Neither what it says nor what it sends meanwhile makes up for it.
    turns.heard("bad", promise)
    turns.delivered("bad")
    assert turns.announcement(1.0) == honest
    assert "bad" not in turns.candidates(ArtifactKey(9), now=1.0)
    assert "bad" not in turns.standing(now=1.0)
    term_s = 30.0 if fault is Fault.DAMAGED else 60.0
    assert turns.announcement(term_s - 0.1) == honest
    assert head_of(turns.announcement(term_s)) == 9
    turns.fault("bad", fault, now=term_s)
    assert turns.announcement(term_s + 2 * term_s - 0.1) == honest


def test_a_source_that_was_only_lost_is_planned_with_all_the_same() -> None:
    turns = SourceTurns(["good", "lost"])
    turns.heard("good", said(1, (1, 0, 10)))
    turns.fault("lost", Fault.LOST, now=0.0)
    turns.heard("lost", said(9, (9, NO_BASE, 1)))
    assert head_of(turns.announcement(0.5)) == 9


def test_a_source_that_delivers_after_it_was_lost_begins_again_with_the_shortest_term() -> None:
    turns = SourceTurns(["one", "two"])
    for _ in range(3):
        turns.fault("one", Fault.LOST, now=0.0)
    assert not turns.is_standing("one", now=3.9)
    turns.delivered("one")
    assert turns.is_standing("one", now=0.0)
    turns.fault("one", Fault.LOST, now=10.0)
    assert turns.is_standing("one", now=11.0)


def test_a_lesser_fault_does_not_shorten_a_term() -> None:
    turns = SourceTurns(["one"])
    turns.fault("one", Fault.LIED, now=0.0)
    turns.delivered("one")
    turns.fault("one", Fault.LOST, now=1.0)
    assert not turns.is_standing("one", now=59.9)
    assert turns.is_standing("one", now=60.0)


def test_when_all_first_sources_are_doubted_they_still_count() -> None:
    turns = SourceTurns(["bad", "worse"])
    for name in ("bad", "worse"):
        turns.heard(name, said(1, (1, 0, 10)))
        turns.fault(name, Fault.LIED, now=0.0)
    assert turns.announcement(1.0) == said(1, (1, 0, 10))
    assert turns.candidates(KEY, now=1.0) == ("bad", "worse")
    assert not any(turns.is_standing(name, now=1.0) for name in ("bad", "worse"))


@pytest.mark.parametrize(
    ("fault", "longest_s"), [(Fault.LOST, 30.0), (Fault.SLOW, 30.0), (Fault.LIED, 3600.0)]
)
def test_a_term_has_an_end_however_many_faults_there_were(fault: Fault, longest_s: float) -> None:
    turns = SourceTurns(["one"])
    for _ in range(40):
        turns.fault("one", fault, now=0.0)
    assert not turns.is_standing("one", now=longest_s - 0.1)
    assert turns.is_standing("one", now=longest_s)


def test_what_a_liar_announced_is_forgotten_and_what_it_announces_next_is_checked() -> None:
    learner = Learner()
    manifest = learner.encode(1, 0).manifest
    turns = SourceTurns(["liar"])
    turns.heard("liar", said(1, (1, 0, manifest.size_bytes), root=b"r" * 16))
    assert turns.signed(manifest) == ("liar",)
    assert turns.announcement(0.0) is None
    assert not turns.heard("liar", said(1, (1, 0, manifest.size_bytes), root=b"r" * 16))
    assert turns.heard("liar", said(1, (1, 0, manifest.size_bytes), root=manifest.root))


def test_the_manifests_remembered_are_bounded() -> None:
    learner = Learner()
    oldest = learner.encode(1, None).manifest
    turns = SourceTurns(["one"])
    turns.signed(oldest)
    assert not turns.heard("one", said(1, (1, NO_BASE, oldest.size_bytes + 1)))
    for version in range(2, ARTIFACTS_PER_ANNOUNCEMENT + 1):
        turns.signed(replace(oldest, version=version))
    assert not turns.heard("one", said(1, (1, NO_BASE, oldest.size_bytes + 1)))
    turns.signed(replace(oldest, version=ARTIFACTS_PER_ANNOUNCEMENT + 1))
    assert turns.heard("one", said(1, (1, NO_BASE, oldest.size_bytes + 1), root=b"r" * 16))


def test_what_a_source_lacked_is_asked_of_it_again_when_it_announces_it_anew_beside_others() -> None:
    turns = SourceTurns(["one", "two"])
    for name in ("one", "two"):
        turns.heard(name, said(1, (1, 0, 10)))
    turns.lacks("one", KEY)
    assert turns.candidates(KEY, now=0.0) == ("two",)
    turns.lacks("two", KEY)
    assert turns.candidates(KEY, now=0.0) == ()
    assert artifacts_of(turns.announcement(0.0)) == ()
    for name in ("one", "two"):
        turns.heard(name, said(1, (1, 0, 10)))
    assert turns.candidates(KEY, now=0.0) == ("one", "two")


def test_sources_take_turns_and_one_that_is_done_sooner_has_its_turn_more_often() -> None:
    turns = SourceTurns(["slow", "fast"])
    asked = []
    for _ in range(4):
        asked.append(turns.next_of(["slow", "fast"]))
        turns.take_lane(asked[-1])
    assert asked == ["slow", "fast", "slow", "fast"]
    for _ in range(3):
        turns.leave_lane("fast")
        assert turns.next_of(["slow", "fast"]) == "fast"
        turns.take_lane("fast")


def test_the_last_resort_counts_only_when_the_others_have_been_behind_it_for_long() -> None:
    turns = SourceTurns(["relay"], last_resort="hub")
    hub = said(2, (1, 0, 10), (2, 1, 10))
    turns.heard("hub", hub)
    turns.heard("relay", said(1, (1, 0, 10)))
    key = ArtifactKey(2, 1)
    assert head_of(turns.announcement(0.0)) == 1
    turns.heard("relay", hub)
    assert turns.announcement(PATIENCE_S - 1) == hub
    assert turns.candidates(key, now=2 * PATIENCE_S) == ("relay",)
    turns.lost("relay")
    assert turns.announcement(2 * PATIENCE_S) is None
    assert turns.announcement(3 * PATIENCE_S) == hub
    assert turns.candidates(key, now=3 * PATIENCE_S) == ("hub",)
    turns.heard("relay", hub)
    assert turns.candidates(key, now=3 * PATIENCE_S) == ("relay",)
    # Whoever kept up in between has all of the patience again.
    turns.lost("relay")
    assert turns.announcement(4 * PATIENCE_S) is None
    assert turns.announcement(5 * PATIENCE_S) == hub


def test_a_relay_that_promises_a_version_it_cannot_give_does_not_keep_the_last_resort_away() -> None:
    turns = SourceTurns(["relay"], last_resort="hub")
    hub = said(1, (1, 0, 10))
    turns.heard("hub", hub)
    turns.heard("relay", replace(hub, artifacts=()))
    assert turns.announcement(0.0) == replace(hub, artifacts=())
    assert turns.announcement(PATIENCE_S) == hub


def test_what_nobody_has_yet_is_asked_of_who_announces_and_is_not_set_aside() -> None:
    turns = SourceTurns(["silent", "heard", "faulty"], last_resort="hub")
    assert turns.standing(now=0.0) == ("silent", "heard", "faulty")
    for name in ("heard", "faulty", "hub"):
        turns.heard(name, said(1, (1, 0, 10)))
    turns.fault("faulty", Fault.LOST, now=0.0)
    assert turns.standing(now=0.5) == ("heard",)
    assert turns.standing(now=1.0) == ("heard", "faulty")
    turns.fault("silent", Fault.LOST, now=1.0)
    turns.fault("heard", Fault.LOST, now=1.0)
    turns.fault("faulty", Fault.LOST, now=1.0)
    assert turns.standing(now=1.0) == ("heard", "faulty")


def test_a_source_that_refuses_this_peer_is_set_aside_for_a_while_and_its_word_still_counts() -> None:
    turns = SourceTurns(["here", "revoked-me"])
    turns.heard("here", said(1, (1, 0, 10)))
    turns.fault("revoked-me", Fault.REFUSED, now=0.0)
    turns.heard("revoked-me", said(2, (2, 1, 10), (1, 0, 10)))
    assert "revoked-me" not in turns.standing(now=1.0)
    assert head_of(turns.announcement(6.0)) == 2
    for _ in range(20):
        turns.fault("revoked-me", Fault.REFUSED, now=100.0)
    assert "revoked-me" in turns.standing(now=161.0)


def test_what_is_in_a_hubs_bucket_is_read_there_and_not_from_the_hub() -> None:
    turns = SourceTurns(["hub", "relay"])
    turns.heard("hub", in_bucket(said(1, (1, 0, 10))))
    turns.heard("relay", said(2, (1, 0, 10), (2, 1, 10)))
    assert turns.readable(KEY, now=0.0) == (BUCKET, "relay")
    assert turns.candidates(KEY, now=0.0) == ("hub", "relay")
    assert turns.readable(ArtifactKey(2, 1), now=0.0) == ("relay",)
    assert turns.standing(now=0.0) == ("hub", "relay")


def test_a_bucket_that_fails_is_set_aside_for_its_hub_and_comes_back() -> None:
    turns = SourceTurns(["hub"])
    turns.heard("hub", in_bucket(said(1, (1, 0, 10))))
    turns.fault(BUCKET, Fault.DAMAGED, now=0.0)
    assert turns.readable(KEY, now=29.0) == ("hub",)
    assert turns.readable(KEY, now=30.0) == (BUCKET,)
    turns.heard("hub", said(1, (1, 0, 10)))
    assert turns.readable(KEY, now=30.0) == ("hub",)


def test_a_bucket_is_read_while_its_hub_is_away() -> None:
    turns = SourceTurns(["hub"])
    turns.heard("hub", in_bucket(said(1, (1, 0, 10))))
    turns.lost("hub")
    assert turns.readable(KEY, now=0.0) == (BUCKET,)


def test_the_bucket_of_a_last_resort_waits_as_its_hub_does() -> None:
    turns = SourceTurns(["relay"], last_resort="hub")
    turns.heard("hub", in_bucket(said(1, (1, 0, 10))))
    turns.heard("relay", said(1, (1, 0, 10)))
    assert turns.readable(KEY, now=0.0) == ("relay",)
