"""Fetches broken off and gone on with."""

from collections import deque

from prometheus_client import CollectorRegistry

from node.telemetry.transfer_metrics import TransferMetrics
from node.weights.transfer.ranges import PausedTransfers, Range, Transfer, Unasked
from support.weights import manifest_of_sizes

SIZES = (4, 9, 6)


class Kept:
    """What is kept, and what the metrics say of it."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.paused = PausedTransfers(TransferMetrics(self._registry))

    @property
    def size_bytes(self) -> float | None:
        return self._registry.get_sample_value("heterorl_node_unfinished_fetch_bytes")

    def keep(self, transfer: Transfer) -> None:
        self.paused.keep(transfer)

    def take(self, version: int, *frames: int) -> Transfer | None:
        return self.paused.take(manifest_of_sizes(SIZES, version=version), frames, lambda *_: None)


def broken_off(version: int) -> Transfer:
    """Return a transfer that has the first five bytes of frame 1, three of them as a part; nothing else."""
    manifest = manifest_of_sizes(SIZES, version=version)
    unasked = Unasked(manifest, [2], part_bytes=None)
    part, rest = Range(deque([1]), 0, 3, source="hub"), Range(deque([1]), 3, 9, source="hub")
    transfer = Transfer(manifest, lambda *_: None, deque(), unasked)
    transfer.reading |= {part, rest}
    assert transfer.whole(part.take(1, 0, b"abc", manifest)) == []
    assert rest.take(1, 3, b"de", manifest) == []
    transfer.pause()
    return transfer


def test_a_fetch_of_the_same_frames_goes_on_and_the_gauge_says_what_is_kept_until_then() -> None:
    kept, transfer = Kept(), broken_off(1)
    kept.keep(transfer)
    assert kept.size_bytes == 5
    assert kept.take(1, 1, 2) is transfer
    assert kept.size_bytes == 0
    assert kept.take(1, 1, 2) is None


def test_what_was_kept_for_other_frames_is_forgotten() -> None:
    kept = Kept()
    kept.keep(broken_off(1))
    assert kept.take(1, 0, 1, 2) is None
    assert kept.size_bytes == 0
    assert kept.take(1, 1, 2) is None


def test_two_are_kept_and_the_oldest_goes_first() -> None:
    kept = Kept()
    for version in (1, 2, 1, 3):
        kept.keep(broken_off(version))
    assert kept.size_bytes == 10
    assert [kept.take(version, 1, 2) is not None for version in (1, 2, 3)] == [True, False, True]
    assert kept.size_bytes == 0
