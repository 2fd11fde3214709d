"""Rows that may take the place of those a run began with."""

from dataclasses import replace

import pytest

from node.coordinator.work.terms.run_data import NO_DATA, DataSeen, agreed_data
from node.errors import ConfigError
from support.refusals import naming

SEEN = DataSeen(b"d" * 16, 100, 10, held_out_at=90)


@pytest.mark.parametrize(
    "now", [NO_DATA, replace(SEEN, digest=b"e" * 16), replace(SEEN, evaluation_rows=20, held_out_at=80)]
)
def test_a_run_that_has_leased_keeps_its_data(now: DataSeen) -> None:
    assert agreed_data(SEEN, SEEN, known_part=SEEN.digest, next_slot=5) is None
    assert agreed_data(SEEN, now, known_part=b"", next_slot=0) == now
    with naming(ConfigError, "100 rows", "646464646464", "row 90"):
        agreed_data(SEEN, now, known_part=now.digest, next_slot=5)


def test_rows_may_be_added_and_are_asked_for_from_the_next_slot_on() -> None:
    more = replace(SEEN, digest=b"e" * 16, rows=120)
    grown = agreed_data(SEEN, more, known_part=SEEN.digest, next_slot=5)
    assert grown == replace(more, first_slot=5)
    assert agreed_data(grown, more, known_part=more.digest, next_slot=9) is None
    for wrong in (replace(more, held_out_at=110), replace(more, evaluation_rows=0), replace(more, rows=99)):
        with pytest.raises(ConfigError):
            agreed_data(SEEN, wrong, known_part=SEEN.digest, next_slot=5)
    with naming(ConfigError, "100 rows"):
        agreed_data(SEEN, more, known_part=b"f" * 16, next_slot=5)


def test_a_run_that_began_without_data_goes_on_without() -> None:
    with pytest.raises(ConfigError):
        agreed_data(NO_DATA, SEEN, known_part=b"", next_slot=5)
