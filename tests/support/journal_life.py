"""A journal that is written until its process is killed."""

from multiprocessing.connection import Connection
from pathlib import Path

from learner.journal.entry_rows import Origin
from learner.journal.progress import Progress, StepEntry
from learner.journal.restart import JournalPlace
from learner.journal.step_journal import StepJournal, groups_of, read_journal
from learner.objective.entropy_switch import EntropySwitch
from learner.step_log import TrainedGroup
from node.values.groups.rollout import EncodedGroup
from support.step_lines import make_step_line

ORIGIN = Origin("run", "aa", "bb")


def entry_of(version: int) -> StepEntry:
    return StepEntry(
        line=make_step_line(version, groups=(TrainedGroup(f"{version}.1", "sampler", 0),)),
        acknowledged_version=0,
        best=None,
        entropy_switch=EntropySwitch(),
        settings={},
    )


def group_of(version: int) -> EncodedGroup:
    """Return a group of its version, larger than SQLite's cache: pages are written before the commit."""
    return EncodedGroup(b"header", bytes([version % 251]) * (3 << 20))


def continued(directory: Path) -> tuple[int, StepJournal]:
    """Return the newest version in a journal, all of which was read, and the journal to go on with."""
    plan = read_journal(directory, Progress(0), JournalPlace(), origin=ORIGIN, published=None)
    for version, record in enumerate(plan.records, start=1):
        assert isinstance(record.entry, StepEntry)
        assert record.entry.version == version
        assert groups_of(directory, record) == [group_of(version)]
    return plan.version, StepJournal(directory, origin=ORIGIN, place=plan.end, since=JournalPlace())


def write_on(directory: Path, told: Connection) -> None:
    """Write step after step, and tell each that is durable."""
    version, journal = continued(directory)
    while True:
        version += 1
        journal.append(entry_of(version), random_state=b"random", groups=[group_of(version)])
        told.send(version)
