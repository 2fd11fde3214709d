"""Who is shut out: as somebody else keeps it, and a relay's copy of it."""

from pathlib import Path

import pytest

from node.identity.revocation import RevocationCopy, RevocationList, Revocations
from node.values import limits
from support.refusals import cannot_start


def test_by_default_nobody_is_shut_out() -> None:
    assert not RevocationList().is_revoked("s1")
    assert RevocationList().current() == Revocations()


def test_a_name_that_is_added_or_taken_away_counts_at_the_next_question() -> None:
    names = {"s2", "s1"}
    revocations = RevocationList(lambda: names)
    assert [revocations.is_revoked(name) for name in ("s1", "s2", "s3", "")] == [True, True, False, False]
    assert revocations.current() == Revocations(("s1", "s2"))
    names.remove("s1")
    assert not revocations.is_revoked("s1")
    assert revocations.current() == Revocations(("s2",))
    assert revocations.everyone() == {"s2"}


def test_a_list_for_relays_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REVOCATIONS", 2)
    revocations = RevocationList(lambda: ("s3", "s2", "s1"))
    assert revocations.current() == Revocations(("s1", "s2"))
    assert revocations.is_revoked("s3")


def test_a_copy_counts_at_once_and_after_a_restart(tmp_path: Path) -> None:
    given = Revocations(("s1", "s2"))
    copy = RevocationCopy(tmp_path / "copy")
    assert (copy.node_ids, copy.saved) == (frozenset(), Revocations())
    copy.learn(given)
    for known in (copy, RevocationCopy(tmp_path / "copy")):
        assert known.node_ids == {"s1", "s2"}
        assert known.saved.digest == given.digest
    assert Revocations(("s1s2",)).digest != given.digest != Revocations().digest


def test_a_copy_that_cannot_be_written_counts_and_is_not_taken_for_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = RevocationCopy(tmp_path / "gone" / "copy")
    copy.learn(Revocations(("s1",)))
    assert copy.node_ids == {"s1"}
    assert copy.saved == Revocations()
    assert "revocations not kept" in caplog.messages


def test_a_relay_does_not_start_without_its_copy_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    with cannot_start(str(tmp_path / "copy")):
        RevocationCopy(tmp_path / "copy")
