"""Hostile bytes at every door of the wire: none is accepted, none crashes its reader."""

from pathlib import Path

import pytest

from support.hostile_input import CORPUS, Door, doors, fate, fuzz, kept


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> list[Door]:
    return doors(tmp_path_factory.mktemp("run"))


def test_what_is_good_is_taken_so_that_damage_is_what_is_refused(every: list[Door]) -> None:
    ends = {door.name: {fate(door, data) for data in door.good} for door in every}
    assert ends["manifest"] == {"accepted"}
    assert (
        ends["signed-manifest"]
        == ends["payload"]
        == ends["client-hello"]
        == ends["group"]
        == ends["token"]
        == {"read"}
    )
    assert {name for name, found in ends.items() if found == {"refused"}} == set()


def test_damaged_messages_are_refused_or_read_as_values(tmp_path: Path) -> None:
    counts, faults = fuzz(8000, 1, tmp_path)
    assert [(name, end) for name, _, end in faults] == []
    assert counts["refused"] > 4000
    assert counts["read"] > 400


def test_what_was_found_once_stays_refused(every: list[Door]) -> None:
    for door in every:
        for data in kept(door):
            assert fate(door, data) in ("refused", "read"), f"{CORPUS / door.name}: {data[:50]!r}"
