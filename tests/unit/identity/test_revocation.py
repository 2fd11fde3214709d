import os
from pathlib import Path

import pytest

from node import limits
from node.identity.revocation import RevocationList, Revocations


def test_without_a_file_nobody_is_shut_out(tmp_path: Path) -> None:
    assert not RevocationList(tmp_path / "revoked").is_revoked("s1")


def test_a_name_added_to_or_taken_from_the_file_counts_at_the_next_question(tmp_path: Path) -> None:
    path = tmp_path / "revoked"
    revocations = RevocationList(path)
    path.write_text("# stolen laptops\n\ns1  # on the train\ns2\n")
    assert [revocations.is_revoked(name) for name in ("s1", "s2", "s3", "", "#")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    path.write_text("s2\n")
    assert not revocations.is_revoked("s1")
    path.unlink()
    assert not revocations.is_revoked("s2")


def test_a_change_of_the_same_size_in_the_same_tick_counts_when_the_file_is_replaced(tmp_path: Path) -> None:
    path, new = tmp_path / "revoked", tmp_path / "new"
    path.write_text("s1\n")
    revocations = RevocationList(path)
    assert revocations.is_revoked("s1")
    new.write_text("s2\n")
    status = path.stat()
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.replace(path)
    assert revocations.is_revoked("s2")


def test_a_line_that_is_no_name_is_reported_and_the_others_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "revoked"
    path.write_bytes(b"s1\nsampler two\n\xff\xfe\ns3\n")
    revocations = RevocationList(path)
    assert revocations.is_revoked("s1")
    assert revocations.is_revoked("s3")
    bad_lines = [
        record.__dict__["line"] for record in caplog.records if "not a valid node id" in record.message
    ]
    assert bad_lines == [2, 3]


def test_whoever_is_shut_out_stays_out_while_the_file_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "revoked"
    path.write_text("s1\n")
    revocations = RevocationList(path)
    assert revocations.is_revoked("s1")
    path.unlink()
    path.mkdir()
    assert revocations.is_revoked("s1")
    assert "list of nodes unreadable" in caplog.messages


def test_a_name_in_any_of_the_files_is_shut_out_and_all_are_listed_in_order(tmp_path: Path) -> None:
    own, copy = tmp_path / "revoked", tmp_path / "copy"
    revocations = RevocationList(own, copy)
    own.write_text("s2\ns1\n")
    Revocations(("s0", "s2")).save(copy)
    assert [revocations.is_revoked(name) for name in ("s0", "s1", "s2", "s3")] == [True, True, True, False]
    assert revocations.current() == Revocations(("s0", "s1", "s2"))


def test_what_was_saved_has_the_digest_it_came_with_and_another_list_another(tmp_path: Path) -> None:
    given = Revocations(("s1", "s2"))
    given.save(tmp_path / "copy")
    assert RevocationList(tmp_path / "copy").current().digest == given.digest
    assert Revocations(("s1s2",)).digest != given.digest != Revocations().digest


def test_a_list_for_relays_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REVOCATIONS", 2)
    (tmp_path / "revoked").write_text("s3\ns2\ns1\n")
    revocations = RevocationList(tmp_path / "revoked")
    assert revocations.current() == Revocations(("s1", "s2"))
    assert revocations.is_revoked("s3")
