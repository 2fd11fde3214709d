"""Two processes that speak a protocol in common work together; two that do not are told which to upgrade."""

import pytest

from node.errors import Reason
from node.values.protocol import OURS, Spoken, check_common, spoken_by
from support.refusals import refused


def test_a_release_speaks_its_own_protocol_and_the_one_before() -> None:
    assert OURS.oldest_protocol == OURS.protocol - 1


@pytest.mark.parametrize(
    ("peer", "coordinator"),
    [(Spoken(3, 2), Spoken(3, 2)), (Spoken(2, 1), Spoken(3, 2)), (Spoken(4, 3), Spoken(3, 2))],
)
def test_neighbours_speak_with_each_other(peer: Spoken, coordinator: Spoken) -> None:
    check_common(peer, coordinator, peer_name="sampler one")


def test_the_older_of_two_is_the_one_to_upgrade() -> None:
    old, new = Spoken(1, 1, "0.2.0"), Spoken(3, 2, "0.4.0")
    with refused(Reason.PROTOCOL_MISMATCH, "protocol 1 ", "0.2.0", "2 to 3", "upgrade sampler one", "0.4.0"):
        check_common(old, new, peer_name="sampler one")
    with refused(Reason.PROTOCOL_MISMATCH, "upgrade the coordinator", "0.4.0"):
        check_common(new, old, peer_name="sampler one")


def test_those_that_name_no_protocol_speak_the_first() -> None:
    spoken = spoken_by(protocol=0, oldest_protocol=0, software_version="0.2.0\x1b" + "x" * 99)
    assert spoken == Spoken(1, 1, "0.2.0" + "x" * 45)


@pytest.mark.parametrize(("protocol", "oldest"), [(-1, 1), (2, 3), (2, -1), (1 << 30, 1)])
def test_a_range_that_no_process_speaks_is_malformed(protocol: int, oldest: int) -> None:
    with refused(Reason.MALFORMED):
        spoken_by(protocol=protocol, oldest_protocol=oldest, software_version="")
