"""A journal is read as it was written, or refused by file and entry."""

import math
import sqlite3
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from learner.journal.checkpoint_rules import CheckpointRules, Due
from learner.journal.entry_rows import Origin
from learner.journal.progress import BestVersion, NewsEntry, Progress, StepEntry
from learner.journal.restart import JournalPlace, RestartPlan, first_needed
from learner.journal.step_journal import FILE, StepJournal, groups_of, read_journal
from learner.objective.entropy_switch import EntropySwitch
from learner.step_log import TrainedGroup
from node.errors import Reason, RefusedError, StartupError
from node.values.groups.rollout import EncodedGroup
from node.values.policy import PolicyVersion
from support.full_disk import full_disk
from support.refusals import naming
from support.step_lines import make_step_line

ORIGIN = Origin("run", "aa", "bb")
GROUPS = [EncodedGroup(b"header", b"columns" * 9), EncodedGroup(b"other", bytes(range(256)) * 8)]
NEWS = NewsEntry(0.25, BestVersion(3))


def step(version: int) -> StepEntry:
    names = tuple(TrainedGroup(f"{2 * version + n}.1", "sampler", n) for n in range(len(GROUPS)))
    return StepEntry(
        line=make_step_line(version, groups=names, ess_ratio=math.nan),
        acknowledged_version=max(0, version - 3),
        best=BestVersion(1, 0.5),
        entropy_switch=EntropySwitch(threshold=math.inf).observe(1.5),
        settings={"learning_rate": 1e-3, "betas": [0.9, 0.999], "objective_options": {}},
    )


def opened(directory: Path, place: JournalPlace | None = None, *, origin: Origin = ORIGIN) -> StepJournal:
    return StepJournal(directory, origin=origin, place=place or JournalPlace(), since=JournalPlace())


def append(journal: StepJournal, *versions: int) -> None:
    for version in versions:
        journal.append(step(version), random_state=b"random", groups=GROUPS)


def read(
    directory: Path,
    place: JournalPlace | None = None,
    *,
    version: int = 0,
    published: PolicyVersion | None = None,
) -> RestartPlan:
    """Read a journal and all groups in it."""
    plan = read_journal(
        directory, Progress(version), place or JournalPlace(), origin=ORIGIN, published=published
    )
    for record in plan.records:
        if isinstance(record.entry, StepEntry):
            assert groups_of(directory, record) == GROUPS
    return plan


def versions(plan: RestartPlan) -> list[int]:
    return [record.entry.version for record in plan.records if isinstance(record.entry, StepEntry)]


def refused(directory: Path, place: JournalPlace | None = None, **options: object) -> str:
    with pytest.raises(StartupError) as caught:
        read(directory, place, **options)  # type: ignore[arg-type]
    assert str(directory) in str(caught.value)
    return str(caught.value)


@contextmanager
def changed(directory: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(directory / FILE)) as connection, connection:
        yield connection


def test_an_entry_is_read_as_it_was_written(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    append(journal, 1)
    journal.append(NEWS)
    first, second = read(tmp_path).records
    assert repr(first.entry) == repr(step(1))
    assert first.row.random_state == b"random"
    assert (second.entry, read(tmp_path).version) == (NEWS, 1)
    assert not list(tmp_path.glob(".*"))


def test_an_entry_says_how_much_of_the_random_state_is_cudas_and_those_before_had_none(
    tmp_path: Path,
) -> None:
    journal = opened(tmp_path)
    journal.append(replace(step(1), cuda_state_bytes=2), random_state=b"random", groups=GROUPS)
    [record] = read(tmp_path).records
    assert isinstance(record.entry, StepEntry)
    assert record.entry.cuda_state_bytes == 2
    older = asdict(step(1))
    del older["cuda_state_bytes"]
    assert TypeAdapter(StepEntry).validate_python(older).cuda_state_bytes == 0
    journal.append(replace(step(2), cuda_state_bytes=7), random_state=b"random", groups=GROUPS)
    assert "entry 2 has a random state of 6 bytes, 7" in refused(tmp_path)


@pytest.fixture(scope="module")
def three_steps() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        append(opened(Path(directory)), 1, 2, 3)
        return (Path(directory) / FILE).read_bytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_bit_that_flips_anywhere_is_found_or_changes_nothing(
    three_steps: bytes, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(three_steps) - 1))
    flipped = bytearray(three_steps)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / FILE
        path.write_bytes(flipped)
        try:
            plan = read(Path(directory))
        except StartupError:
            return
        assert [repr(record.entry) for record in plan.records] == [repr(step(n)) for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("statements", "entry"),
    [
        (["UPDATE entries SET text = replace(text, '0.75', '0.25') WHERE number = 2"], 2),
        (["UPDATE entries SET random_state = x'00' WHERE number = 2"], 2),
        (["UPDATE entries SET group_digests = zeroblob(32) WHERE number = 2"], 2),
        (["UPDATE groups SET header = x'00' WHERE entry = 2 AND place = 0"], 2),
        (["UPDATE groups SET columns = x'00' WHERE entry = 3 AND place = 1"], 3),
        (["UPDATE groups SET place = 1 - place WHERE entry = 3"], 3),
        (["UPDATE groups SET entry = 1 WHERE entry = 3"], 1),
        (["DELETE FROM groups WHERE entry = 3 AND place = 1"], 3),
        (["DELETE FROM entries WHERE number = 2"], 2),
        (["DELETE FROM entries WHERE number = 3"], 3),
        (["DELETE FROM entries WHERE number = 1", "UPDATE entries SET number = number - 1"], 1),
        (
            [
                "UPDATE entries SET number = 9 WHERE number = 2",
                "UPDATE entries SET number = 2 WHERE number = 3",
                "UPDATE entries SET number = 3 WHERE number = 9",
            ],
            2,
        ),
    ],
)
def test_what_was_changed_moved_doubled_or_left_out_is_found_by_its_entry(
    tmp_path: Path, statements: list[str], entry: int
) -> None:
    append(opened(tmp_path), 1, 2, 3)
    with changed(tmp_path) as connection:
        for statement in statements:
            assert connection.execute(statement).rowcount
    assert f"entry {entry} " in refused(tmp_path)


def test_a_transaction_that_was_cut_off_is_not_there(tmp_path: Path) -> None:
    """A kill within the commit leaves SQLite's own journal, with the pages as they were."""
    journal = opened(tmp_path)
    append(journal, 1)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as connection:
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE written SET newest = 2")
        connection.execute("INSERT INTO groups VALUES (2, 0, x'00', zeroblob(1 << 20))")
        killed = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(killed[f"{FILE}-journal"]) > 512
    for name, content in killed.items():
        (tmp_path / name).write_bytes(content)
    assert versions(read(tmp_path)) == [1]
    append(journal, 2)
    assert versions(read(tmp_path)) == [1, 2]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 3), min_size=1, max_size=5), start=st.integers(0, 4))
def test_a_restart_from_any_place_takes_every_later_step_once(sizes: list[int], start: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory, places, version = Path(name), [JournalPlace()], 0
        for steps in sizes:  # lives of a learner
            journal = opened(directory, places[-1])
            append(journal, *range(version + 1, version + steps + 1))
            version += steps
            places.append(journal.roll())
            assert journal.new_bytes == 0
        start = min(start, len(sizes))
        plan = read(directory, places[start], version=sum(sizes[:start]))
        assert versions(plan) == list(range(sum(sizes[:start]) + 1, version + 1))
        assert (plan.version, plan.end) == (version, places[-1])


@pytest.mark.parametrize(("published", "compared"), [(None, False), (1, False), (2, True), (4, True)])
def test_published_words_are_compared_where_the_replay_comes_to_them(
    tmp_path: Path, published: int | None, compared: bool
) -> None:
    journal = opened(tmp_path)
    append(journal, 1, 2)
    place = journal.roll()
    append(journal, 3, 4)
    head = None if published is None else PolicyVersion(published, b"r" * 16)
    assert read(tmp_path, place, version=2, published=head).compare == (head if compared else None)


def test_a_journal_that_does_not_fit_its_checkpoint_is_refused(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    append(journal, 1, 2)
    place = journal.roll()
    append(journal, 3)
    assert "entry 1 is of step 1" in refused(tmp_path, version=1)
    assert "entry 3 is not" in refused(tmp_path, replace(place, digest="00" * 16), version=2)
    assert "version 4 was published" in refused(tmp_path, published=PolicyVersion(4, b"r" * 16))
    other = tmp_path / "other"
    append(opened(other, origin=replace(ORIGIN, run_id="another")), 1)
    assert "run_id is another, here it is run" in refused(other)
    with changed(other) as connection:
        connection.execute("PRAGMA user_version = 99")
    assert "it has format 99" in refused(other)
    (other / FILE).write_bytes(b"no database")
    assert FILE in refused(other)


def test_a_full_disk_takes_no_part_of_an_entry_and_the_whole_entry_later(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    append(journal, 1)
    with full_disk(1_000), pytest.raises(RefusedError) as full:
        append(journal, 2)
    assert full.value.reason is Reason.DISK
    assert FILE in str(full.value)
    assert versions(read(tmp_path)) == [1]
    append(journal, 2)
    assert versions(read(tmp_path)) == [1, 2]


def test_an_entry_waits_for_a_reader(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    append(journal, 1)
    reader = sqlite3.connect(tmp_path / FILE, isolation_level=None, check_same_thread=False)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM written").fetchall()
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(append, journal, 2)
        reader.execute("COMMIT")
        written.result(timeout=20)
    reader.close()
    assert versions(read(tmp_path)) == [1, 2]


def test_entries_that_no_checkpoint_needs_are_forgotten_and_their_room_is_used_again(tmp_path: Path) -> None:
    journal, places = opened(tmp_path), [JournalPlace()]
    sizes = []
    for version in range(1, 12):
        append(journal, version)
        if version % 2 == 0:
            places = [places[-1], journal.roll()]
            journal.cut(places)
        sizes.append((tmp_path / FILE).stat().st_size)
    assert versions(read(tmp_path, places[0], version=8)) == [9, 10, 11]
    assert "entry 1 is missing" in refused(tmp_path)
    assert sizes[-1] <= max(sizes[:6])
    assert 0 < journal.new_bytes < journal.size_bytes
    again = opened(tmp_path, places[-1])
    assert again.size_bytes == journal.size_bytes


def segments_of_0_3(directory: Path, *numbers: int) -> None:
    (directory / "journal").mkdir()
    for number in numbers:
        (directory / "journal" / f"{number:012d}.segment").write_bytes(b"steps")


@pytest.mark.parametrize("next_segment", [0, 3])
def test_steps_of_release_0_3_behind_its_last_checkpoint_are_not_passed_over(
    tmp_path: Path, next_segment: int
) -> None:
    segments_of_0_3(tmp_path, 2, 3)
    said = refused(tmp_path, JournalPlace(next_segment=next_segment))
    assert "release 0.3" in said
    assert f"segment {next_segment or 2}" in said


def test_a_journal_of_release_0_3_that_its_checkpoint_has_all_of_goes_once_two_newer_ones_are_there(
    tmp_path: Path,
) -> None:
    segments_of_0_3(tmp_path, 2)
    place = JournalPlace(next_segment=3)
    assert read(tmp_path, place, version=7).end == JournalPlace()
    journal = opened(tmp_path)
    append(journal, 8)
    journal.cut([place, journal.roll()])
    assert versions(read(tmp_path, place, version=7)) == [8]
    append(journal, 9)
    assert (tmp_path / "journal").exists()
    journal.cut([JournalPlace(2), journal.roll()])
    assert not (tmp_path / "journal").exists()


def test_progress_follows_from_the_entries() -> None:
    progress = Progress(0)
    for version in range(1, 6):
        progress = progress.after(step(version), window=3)
    assert [record.version for record in progress.unacknowledged] == [3, 4, 5]
    assert progress.trained_slots == ((2, 11),)
    assert progress.step is not None
    assert (progress.version, progress.step.version) == (5, 5)
    progress = progress.after(NEWS, window=3)
    assert (progress.recent_rewards, progress.best, progress.version) == ((0.5, 0.5, 0.25), BestVersion(3), 5)
    assert progress.after(NewsEntry(None, None), window=3).recent_rewards == (0.5, 0.5, 0.25)
    with naming(ValueError, "step 7", "version 5"):
        progress.after(step(7), window=3)


RULES = CheckpointRules(20, 600.0, keep_every_versions=0, journal_bytes=1000)


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ({}, Due.NOT),
        ({"version": 120}, Due.SOON),
        ({"age_s": 600.0}, Due.SOON),
        ({"age_s": 600.0, "version": 100}, Due.NOT),
        ({"new_bytes": 250}, Due.SOON),
        ({"new_bytes": 250, "version": 100}, Due.SOON),
        ({"all_bytes": 1000}, Due.NOW),
        ({"all_bytes": 1000, "new_bytes": 0}, Due.NOT),
    ],
)
def test_a_checkpoint_is_due_by_steps_time_or_the_size_of_the_journal(
    changes: dict[str, int], due: Due
) -> None:
    state = {"version": 119, "copied_version": 100, "age_s": 599.0, "new_bytes": 249, "all_bytes": 999}
    assert RULES.due(**{**state, **changes}) is due  # type: ignore[arg-type]


def test_a_version_that_is_to_be_kept_has_a_checkpoint_of_its_own() -> None:
    rules = replace(RULES, keep_every_versions=7)
    due = [
        rules.due(version=version, copied_version=6, age_s=0.0, new_bytes=1, all_bytes=1)
        for version in range(6, 10)
    ]
    assert due == [Due.NOT, Due.NOW, Due.NOT, Due.NOT]


@given(st.lists(st.integers(1, 9), max_size=2))
def test_the_journal_is_cut_behind_the_older_of_two_checkpoints(needed: list[int]) -> None:
    assert first_needed([JournalPlace(number) for number in needed]) == (
        min(needed) if len(needed) == 2 else 1
    )
