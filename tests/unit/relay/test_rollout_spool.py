"""Groups that a relay keeps on disk until the coordinator has answered."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from node.errors import Reason, RefusedError, StartupError
from node.relay.rollout_spool import RolloutSpool
from node.rollout import EncodedGroup


def group(sampler_id: str, group_id: str, columns: bytes) -> EncodedGroup:
    return EncodedGroup(b"", columns, group_id, sampler_id)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.sqlite"


@pytest.fixture
def spool(path: Path) -> Iterator[RolloutSpool]:
    with closing(RolloutSpool.open(path, capacity_groups=3, capacity_bytes=1 << 30)) as spool:
        yield spool


def test_groups_wait_in_the_order_they_came_and_each_once(spool: RolloutSpool) -> None:
    assert spool.put(group("s1", "0.1", b"first"))
    assert spool.put(group("s2", "0.1", b"second"))
    assert not spool.put(group("s1", "0.1", b"again"))
    assert len(spool) == 2
    waiting = {1: group("s1", "0.1", b"first"), 2: group("s2", "0.1", b"second")}
    assert list(spool.oldest(9).items()) == list(waiting.items())
    assert spool.oldest(1) == {1: waiting[1]}
    spool.remove(1)
    spool.remove(1)
    assert (len(spool), spool.oldest(9)) == (1, {2: waiting[2]})


def test_a_full_spool_takes_no_group_until_one_has_left(spool: RolloutSpool) -> None:
    for number in range(3):
        assert spool.put(group("s1", f"{number}.1", b""))
    with pytest.raises(RefusedError, match="3 groups of 0 bytes wait") as error:
        spool.put(group("s1", "3.1", b""))
    assert error.value.reason is Reason.BUSY
    spool.remove(1)
    assert spool.put(group("s1", "3.1", b""))
    assert list(spool.oldest(9)) == [2, 3, 4]


def test_a_spool_is_full_by_bytes_too_also_after_a_restart(path: Path) -> None:
    with closing(RolloutSpool.open(path, capacity_groups=3, capacity_bytes=100)) as spool:
        assert spool.put(group("s1", "0.1", b"x" * 60))
    with closing(RolloutSpool.open(path, capacity_groups=3, capacity_bytes=100)) as spool:
        with pytest.raises(RefusedError, match="1 groups of 60 bytes wait") as error:
            spool.put(group("s1", "1.1", b"x" * 41))
        assert error.value.reason is Reason.BUSY
        assert spool.put(group("s1", "1.1", b"x" * 40))
        spool.remove(1)
        assert spool.size_bytes == 40


def test_what_was_put_is_there_after_a_restart_and_no_number_comes_twice(path: Path) -> None:
    with closing(RolloutSpool.open(path, capacity_groups=3, capacity_bytes=1 << 30)) as spool:
        spool.put(group("s1", "0.1", b"group"))
        spool.put(group("s1", "1.1", b"group"))
        spool.remove(2)
    with closing(RolloutSpool.open(path, capacity_groups=3, capacity_bytes=1 << 30)) as again:
        assert (len(again), again.oldest(9)) == (1, {1: group("s1", "0.1", b"group")})
        again.put(group("s1", "1.1", b"group"))
        assert list(again.oldest(9)) == [1, 3]


def test_a_group_that_the_disk_changed_is_not_given_out(path: Path) -> None:
    with closing(RolloutSpool.open(path, capacity_groups=3, capacity_bytes=1 << 30)) as spool:
        spool.put(group("s1", "0.1", b"group"))
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE groups SET columns = CAST('gruop' AS BLOB)")
    with closing(RolloutSpool.open(path, capacity_groups=3, capacity_bytes=1 << 30)) as again:
        (damaged,) = again.oldest(1).values()
        assert isinstance(damaged, RefusedError)
        assert (damaged.reason, damaged.what) == (Reason.DAMAGED, "group 0.1 of s1 is not what was stored")


def test_nobody_else_reads_or_writes_an_open_spool(path: Path, spool: RolloutSpool) -> None:
    spool.put(group("s1", "0.1", b"group"))
    with closing(sqlite3.connect(path, timeout=0)) as other, pytest.raises(sqlite3.OperationalError):
        other.execute("SELECT * FROM groups").fetchall()


def test_each_group_is_synced_by_whichever_thread_writes_it(spool: RolloutSpool) -> None:
    assert spool._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert spool._connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    assert asyncio.run(asyncio.to_thread(spool.put, group("s1", "0.1", b"group")))


def test_a_spool_that_cannot_be_read_ends_the_start_and_a_full_disk_refuses(
    path: Path, spool: RolloutSpool
) -> None:
    pages = spool._connection.execute("PRAGMA page_count").fetchone()[0]
    spool._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(RefusedError, match="make room") as error:
        spool.put(group("s1", "0.1", bytes(1 << 20)))
    assert error.value.reason is Reason.DISK
    assert len(spool) == 0
    damaged = path.with_name("damaged.sqlite")
    damaged.write_bytes(b"\x7fELF" * 2000)
    with pytest.raises(StartupError, match="cannot be opened"):
        RolloutSpool.open(damaged, capacity_groups=3, capacity_bytes=1 << 30)


def test_changes_that_share_a_commit_are_on_disk_together_or_not_at_all(spool: RolloutSpool) -> None:
    def half_of_two() -> None:
        with spool.one_commit():
            spool.put(group("s1", "1.1", b"second"))
            spool.remove(1)
            raise KeyError

    with spool.one_commit():
        assert spool.put(group("s1", "0.1", b"first"))
        assert not spool.put(group("s1", "0.1", b"again"))
    with pytest.raises(KeyError):
        half_of_two()
    assert (len(spool), spool.size_bytes) == (1, 5)
    assert spool.oldest(9) == {1: group("s1", "0.1", b"first")}


def test_the_oldest_groups_are_read_up_to_a_size_and_one_in_any_case(spool: RolloutSpool) -> None:
    for number in range(3):
        spool.put(group("s1", f"{number}.1", bytes(100)))
    assert [len(spool.oldest(9, limit_bytes=limit)) for limit in (1, 100, 101, 300, 301)] == [1, 1, 2, 3, 3]
