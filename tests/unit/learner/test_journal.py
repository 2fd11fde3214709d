"""The journal's bytes and what a restart makes of them: every entry that was told of, once, in order."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from learner.journal.progress import BestVersion, NewsEntry, Progress, StepEntry
from learner.journal.records import (
    NO_DIGEST,
    DamagedJournalError,
    Origin,
    Segment,
    SegmentHeader,
    entry_record,
    header_record,
    read_segment,
)
from learner.journal.restart import (
    CheckpointRules,
    Due,
    JournalPlace,
    RestartError,
    plan_restart,
    surplus_segments,
)
from learner.objective.entropy_switch import EntropySwitch
from learner.step_log import TrainedGroup
from node.policy import PolicyVersion
from node.rollout import EncodedGroup
from support.step_lines import make_step_line

ORIGIN = Origin("run", "aa", "bb")
GROUPS = [EncodedGroup(b"header", b"columns" * 9), EncodedGroup(b"other", b"\x89HRLj" * 40)]


def step(version: int, *, groups: Sequence[EncodedGroup] = GROUPS) -> StepEntry:
    names = tuple(TrainedGroup(f"{2 * version + n}.1", "sampler", n) for n in range(len(groups)))
    return StepEntry(
        line=make_step_line(version, groups=names, ess_ratio=math.nan),
        acknowledged_version=max(0, version - 3),
        best=BestVersion(1, 0.5),
        entropy_switch=EntropySwitch(threshold=math.inf).observe(1.5),
        settings={"learning_rate": 1e-3, "betas": (0.9, 0.999), "objective_options": {}},
        expected_kl_nats=tuple({version - 1: 0.1 + version} for _ in groups),
        random_state_bytes=6,
        group_bytes=tuple((len(group.header), len(group.columns)) for group in groups),
    )


NEWS = NewsEntry(0.25, BestVersion(3))


def blobs(entry: StepEntry | NewsEntry) -> tuple[bytes, ...]:
    return (
        ()
        if isinstance(entry, NewsEntry)
        else (b"random", *(part for group in GROUPS for part in group.parts))
    )


class Writer:
    """Segments as a learner writes them; keeps where each record begins."""

    def __init__(self, *, origin: Origin = ORIGIN) -> None:
        self.segments: list[bytes] = []
        self.starts: list[list[int]] = []
        self.version = 0
        self._origin = origin
        self._digest, self._key = NO_DIGEST, b""

    def begin(self) -> None:
        header = SegmentHeader(
            origin=self._origin,
            number=len(self.segments) + 1,
            version=self.version,
            learner_epoch=1,
            previous_digest=self._digest.hex(),
            salt=f"{len(self.segments):032x}",
        )
        record, self._key = header_record(header)
        self._digest = self._key
        self.segments.append(record)
        self.starts.append([])

    def append(self, entry: StepEntry | NewsEntry) -> None:
        record, self._digest = entry_record(entry, blobs(entry), previous=self._digest, key=self._key)
        self.starts[-1].append(len(self.segments[-1]))
        self.segments[-1] += record
        self.version += isinstance(entry, StepEntry)

    def step(self) -> None:
        self.append(step(self.version + 1))

    def read(self) -> list[Segment]:
        return [read_segment(memoryview(segment)) for segment in self.segments]


def written(*segments: int) -> Writer:
    """So many steps in each segment."""
    writer = Writer()
    for steps in segments:
        writer.begin()
        for _ in range(steps):
            writer.step()
    return writer


def versions(segment: Segment) -> list[int]:
    return [record.entry.version for record in segment.records if isinstance(record.entry, StepEntry)]


def test_an_entry_is_read_as_it_was_written() -> None:
    writer = written(1)
    writer.append(NEWS)
    [segment] = writer.read()
    first, second = segment.records
    assert isinstance(first.entry, StepEntry)
    assert repr(first.entry) == repr(replace(step(1), settings=json.loads(json.dumps(step(1).settings))))
    assert (first.random_state, first.groups) == (b"random", GROUPS)
    assert (second.entry, segment.torn_bytes, segment.version) == (NEWS, 0, 1)


def test_an_entry_says_how_much_of_the_random_state_is_cudas_and_those_before_had_none() -> None:
    writer = written(0)
    writer.append(replace(step(1), cuda_state_bytes=2))
    entry = writer.read()[0].records[0].entry
    assert isinstance(entry, StepEntry)
    assert entry.cuda_state_bytes == 2
    older = asdict(step(1))
    del older["cuda_state_bytes"]
    assert TypeAdapter(StepEntry).validate_python(older).cuda_state_bytes == 0
    writer.append(replace(step(2), cuda_state_bytes=7))
    with pytest.raises(DamagedJournalError, match="random state of 6 bytes, 7 of them CUDA's"):
        writer.read()


@settings(max_examples=300)
@given(st.data())
def test_a_segment_that_was_cut_anywhere_has_every_whole_entry_and_no_other(data: st.DataObject) -> None:
    """With nothing, zeros or other bytes where the write stopped."""
    writer = written(3)
    [whole], [starts] = writer.segments, writer.starts
    cut = data.draw(st.integers(starts[0], len(whole) - 1))
    rest = data.draw(st.one_of(st.just(b""), st.just(bytes(len(whole) - cut)), st.binary(max_size=200)))
    if whole.startswith(rest, cut):
        rest = b""
    segment = read_segment(memoryview(whole[:cut] + rest))
    ends = [*starts[1:], len(whole)]
    assert versions(segment) == list(range(1, 1 + sum(end <= cut for end in ends)))
    assert segment.torn_bytes == cut + len(rest) - max([starts[0], *(end for end in ends if end <= cut)])


@settings(max_examples=300)
@given(st.data())
def test_a_bit_that_flips_before_the_last_entry_is_found_and_in_the_last_entry_drops_it(
    data: st.DataObject,
) -> None:
    writer = written(3)
    [whole], [starts] = writer.segments, writer.starts
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    if at >= starts[-1]:
        segment = read_segment(memoryview(bytes(flipped)))
        assert (versions(segment), segment.torn_bytes) == ([1, 2], len(whole) - starts[-1])
        return
    number = sum(start <= at for start in starts)
    with pytest.raises(DamagedJournalError, match=f"entry {number}, at" if number else "its header"):
        read_segment(memoryview(bytes(flipped)))


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (0, 0, 1), (0, 2)])
def test_entries_that_were_moved_doubled_or_left_out_are_found(order: tuple[int, ...]) -> None:
    writer = written(3)
    [whole], [starts] = writer.segments, writer.starts
    ends = [*starts[1:], len(whole)]
    changed = whole[: starts[0]] + b"".join(whole[starts[n] : ends[n]] for n in order)
    with pytest.raises(DamagedJournalError, match="does not follow on the entry before"):
        read_segment(memoryview(changed))


def test_a_group_cannot_pretend_to_be_a_record() -> None:
    """A torn entry that holds the bytes of a record of another segment is torn all the same."""
    other = Writer(origin=replace(ORIGIN, run_id="another"))
    other.begin()
    other.step()
    forged = other.segments[0][other.starts[0][0] :]
    writer = written(1)
    torn = writer.segments[0] + forged[:20] + forged
    assert read_segment(memoryview(torn)).torn_bytes == 20 + len(forged)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.integers(0, 4),
)
def test_a_restart_from_any_place_takes_every_later_step_once_whatever_was_torn_in_between(
    sizes: list[int], torn: list[bool], start: int
) -> None:
    writer = written(*sizes)
    segments = [
        read_segment(memoryview(segment + b"\x89HRLj half an entry" * is_torn))
        for segment, is_torn in zip(writer.segments, torn, strict=False)
    ]
    start = min(start, len(segments))
    place = JournalPlace(start + 1, segments[start - 1].digest.hex()) if start else JournalPlace()
    progress = Progress(sum(sizes[:start]))
    plan = plan_restart(progress, place, segments[start:], origin=ORIGIN, published=None)
    for record in plan.records:
        progress = progress.after(record.entry, window=4)
    assert progress.version == plan.version == sum(sizes)
    assert plan.end == JournalPlace(len(sizes) + 1, segments[-1].digest.hex()) if sizes[start:] else place


@pytest.mark.parametrize(("published", "compared"), [(None, False), (1, False), (2, True), (4, True)])
def test_published_words_are_compared_where_the_replay_comes_to_them(
    published: int | None, compared: bool
) -> None:
    segments = written(2, 2).read()
    head = None if published is None else PolicyVersion(published, b"r" * 16)
    place = JournalPlace(2, segments[0].digest.hex())
    plan = plan_restart(Progress(2), place, segments[1:], origin=ORIGIN, published=head)
    assert plan.compare == (head if compared else None)


def test_a_journal_that_does_not_fit_names_its_segment() -> None:
    segments = written(2, 2, 1).read()
    other_run = Writer(origin=replace(ORIGIN, run_id="another"))
    other_run.begin()
    cases: list[tuple[Progress, list[Segment], PolicyVersion | None, int, str]] = [
        (Progress(0), [segments[0], segments[2]], None, 2, "is missing"),
        (Progress(0), segments[1:], None, 1, "is missing"),
        (Progress(1), segments, None, 1, "begins after version 0"),
        (Progress(0), [segments[0], *written(3, 2).read()[1:]], None, 2, "does not follow on"),
        (Progress(0), other_run.read(), None, 1, "run_id is another, here it is run"),
        (Progress(0), segments, PolicyVersion(6, b"r" * 16), 0, "version 6 was published"),
    ]
    for progress, given_, published, number, message in cases:
        with pytest.raises(RestartError, match=message) as caught:
            plan_restart(progress, JournalPlace(), given_, origin=ORIGIN, published=published)
        assert caught.value.segment == number


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
    with pytest.raises(ValueError, match="step 7 does not follow version 5"):
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


@given(st.lists(st.integers(1, 9), max_size=2), st.integers(1, 9))
def test_the_journal_is_cut_behind_the_older_of_two_checkpoints(needed: list[int], last: int) -> None:
    gone = surplus_segments(range(1, last + 1), places=[JournalPlace(number) for number in needed])
    assert gone == [number for number in range(1, last + 1) if len(needed) == 2 and number < min(needed)]
