"""Whatever a disk is in the middle of when the machine stops: all of a thing is found afterwards, or none."""

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.forked_context import forked_context
from bench.held_policy import HeldPolicy
from learner.journal.progress import NewsEntry, Progress, Rollback, StepEntry
from learner.journal.step_journal import StepJournal, groups_of, read_journal
from learner.masters.master_words import MasterWords
from learner.model.model import load_policy
from learner.publishing.signer import raise_epoch
from learner.step_log import PART_BYTES, RollbackLine, StepLog
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.work.balance import Transaction
from node.coordinator.work.samplers.tallies import Tally
from node.coordinator.work.slots.slot import Attempt, Slot, SlotState
from node.identity.revocation import RevocationCopy, Revocations
from node.step_log_parts import files_of
from node.values.groups.rollout import EncodedGroup
from node.values.groups.verdict import Verdict
from node.values.policy import ArtifactKey
from node.weights.assembly.public_base import PublicBase
from node.weights.format.manifest import sign, signed_by
from node.weights.planning.cheapest_chain import newest_reachable
from node.weights.store.artifact_store import ArtifactStore
from node.weights.store.high_water import Head, HighWater
from sampler.versions.saved_policy import SavedPolicy
from sampler.versions.version_assembly import VersionAssembly
from sampler.versions.version_files import keep_base
from support.checkpoints import copy_of, open_checkpoints, origin_of, restore
from support.clock import ManualClock
from support.crashes import Acknowledged, Stop, every_stop
from support.journal_life import continued, entry_of, write_on
from support.model_words import live_words, words_of
from support.step_lines import make_step_line
from support.tiny_model import make_tiny_model
from support.weights import LAYOUT, Learner, put_version

LEARNER = Learner()
ARTIFACTS: tuple[tuple[int, int | None], ...] = ((1, 0), (1, None), (2, None), (2, 1))
ENCODED = {artifact: LEARNER.encode(*artifact) for artifact in ARTIFACTS}
SIGNED = {key: (sign(made.manifest, LEARNER.key), made.payloads) for key, made in ENCODED.items()}
EVERY_STOP = pytest.mark.parametrize("stop", list(Stop), ids=lambda stop: stop.value)
EVERY_STOP_BUT_TORN = pytest.mark.parametrize(
    "stop", [Stop.KILLED, Stop.POWER_CUT], ids=lambda stop: stop.value
)
"""Stops of what makes its files whole and then names them: none of them is written piece by piece."""


@pytest.fixture(autouse=True)
def _disks_are_modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip syncs of this machine's disk: what a sync makes last is the model's to say."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@EVERY_STOP_BUT_TORN
def test_a_store_has_what_it_announced_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: Stop
) -> None:
    told = Acknowledged()

    def live(directory: Path) -> None:
        told.newest = 0
        store = open_store(directory)
        announcement = store.announcement()
        for version, base in ((1, None), (2, None)):
            if announcement is None or version > announcement.head.number:
                put_version(store, *SIGNED[version, base])
                told.say(version)

    for directory in every_stop(tmp_path, monkeypatch, stop=stop, live=live, told=(told,), at_least=20):
        store = open_store(directory)
        announcement, head = store.announcement(), head_of(store)
        assert head >= told.newest
        if announcement is not None:
            assert announcement.head == LEARNER.versions[head].version
            assert newest_reachable(announcement.artifacts) == head
            for artifact in announcement.artifacts:
                read_whole(store, artifact.key)
        live(directory)
        assert head_of(open_store(directory)) == 2


def open_store(directory: Path) -> ArtifactStore:
    return LEARNER.store(directory / "versions", retained_keyframes=1)


def head_of(store: ArtifactStore) -> int:
    announcement = store.announcement()
    return 0 if announcement is None else announcement.head.number


def read_whole(store: ArtifactStore, key: ArtifactKey) -> None:
    """Hold every payload to what the learner made."""
    _, payloads = SIGNED[key.version, None if key.is_keyframe else key.base_version]
    for frame, payload in enumerate(payloads):
        assert store.read_payload(key, frame) == payload


@EVERY_STOP
@pytest.mark.parametrize("save_every_s", [0.0, 3600.0], ids=["copied at every version", "logged"])
def test_a_sampler_holds_what_it_served_or_a_newer_version_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: Stop, save_every_s: float
) -> None:
    served = Acknowledged()

    def live(directory: Path) -> None:
        served.newest = 0
        disk = open_saved_policy(directory, save_every_s=save_every_s)
        weights = live_words(LEARNER.versions[0].words)
        disk.open(weights.live)
        held = disk.load(weights)
        for version, base in ((1, 0), (2, 1)):
            if version <= held.number:
                continue
            encoded = ENCODED[version, base]
            payloads = disk.begin(signed_by(encoded.manifest, LEARNER.key))
            assembly = VersionAssembly(
                encoded.manifest,
                layout=LAYOUT,
                base=weights.live,
                base_version=held,
                payloads=payloads,
                weights=weights,
            )
            assembly.take_held()
            for frame in assembly.missing():
                assembly.put(frame, encoded.payloads[frame])
            assembly.finish()
            disk.remember(encoded.manifest, payloads)
            assembly.apply()
            held = encoded.manifest.policy_version
            served.say(version)
            disk.compact(held, weights.live)

    for directory in every_stop(tmp_path, monkeypatch, stop=stop, live=live, told=(served,), at_least=9):
        before = served.newest
        disk = open_saved_policy(directory, save_every_s=save_every_s)
        weights = live_words(LEARNER.versions[0].words)
        disk.open(weights.live)
        mark = disk.mark
        held = disk.load(weights)
        assert held.number >= before
        assert held == LEARNER.versions[held.number].version
        np.testing.assert_array_equal(words_of(weights.live), LEARNER.versions[held.number].words)
        assert mark.head is None or mark.head.number <= held.number
        live(directory)


def open_saved_policy(directory: Path, *, save_every_s: float) -> SavedPolicy:
    return SavedPolicy(
        directory,
        layout=LAYOUT,
        public_key=LEARNER.key.public_key,
        run_id=LEARNER.run_id,
        save_every_s=save_every_s,
        count_refusal=lambda _: None,
        clock=ManualClock(),
    )


def mark_of(number: int) -> HighWater:
    root = LEARNER.versions[number].version.root.hex()
    head = Head(number=number, root=root, learner_epoch=1, published_at_s=1.0)
    return HighWater(learner_epoch=1, head=head)


@EVERY_STOP
def test_a_learner_has_every_step_it_told_of_from_checkpoint_and_journal_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: Stop
) -> None:
    """Each step sets a parameter to its number; after every second one comes a checkpoint, and a cut.

    Version 5 is a rollback's, which is in a checkpoint and not in the journal.
    """
    policy = load_policy(make_tiny_model(tmp_path / "model", hidden=16, layers=1), device="cpu")
    optimizer = torch.optim.AdamW(policy.parameters.values())
    name, origin = next(iter(policy.tensors)), origin_of(policy)
    told = Acknowledged()

    def restart(directory: Path) -> tuple[Progress, StepJournal]:
        policy.tensors[name].data.fill_(0)
        progress, place = restore(open_checkpoints(directory / "checkpoints", policy), policy, optimizer)
        assert bool((policy.tensors[name] == progress.version).all())
        plan = read_journal(directory, progress, place, origin=origin, published=None)
        for record in plan.records:
            progress = progress.after(record.entry, window=1)
        policy.tensors[name].data.fill_(progress.version)
        for record in plan.records:
            if isinstance(record.entry, StepEntry):
                assert groups_of(directory, record) == [GROUP]
        journal = StepJournal(directory, origin=origin, place=plan.end, since=place)
        return progress, journal

    def live(directory: Path) -> None:
        told.newest = 0
        progress, journal = restart(directory)
        store = open_checkpoints(directory / "checkpoints", policy)
        while progress.version < 7:
            if progress.version == 4:
                line = RollbackLine(version=5, restored_version=2, at_s=1.0, step_s=0.1)
                progress = progress.rolled_back(line, "order", unacknowledged=progress.unacknowledged)
                policy.tensors[name].data.fill_(5)
                store.write(copy_of(policy, optimizer, progress, journal.roll()))
                journal.cut(store.places())
                told.say(5)
                continue
            entry = entry_of(progress.version + 1)
            journal.append(entry, random_state=b"random", groups=[GROUP])
            progress = progress.after(entry, window=1)
            told.say(progress.version)
            policy.tensors[name].data.fill_(progress.version)
            if progress.version % 2 == 0:
                journal.append(NewsEntry(0.5, None))
                store.write(copy_of(policy, optimizer, progress, journal.roll()))
                journal.cut(store.places())

    (tmp_path / "states").mkdir()
    for directory in every_stop(
        tmp_path / "states", monkeypatch, stop=stop, live=live, told=(told,), at_least=7
    ):
        before = told.newest
        assert before <= restart(directory)[0].version <= before + 1
        live(directory)
        progress, _ = restart(directory)
        assert (progress.version, progress.rollback) == (7, Rollback("order", 5, 2, 1.0))


def test_a_learner_that_is_killed_within_a_commit_has_each_step_it_told_of(tmp_path: Path) -> None:
    """Kills come at any time of a commit, or between two."""
    context, chance = forked_context("support.journal_life"), random.Random(0)
    newest = 0
    for _ in range(4):
        ours, theirs = context.Pipe()
        process = context.Process(target=write_on, args=(tmp_path, theirs))
        process.start()
        assert ours.poll(60)
        time.sleep(chance.random() / 20)  # a moment of its life, whichever
        process.kill()
        process.join()
        while ours.poll():
            newest = ours.recv()
        durable, _ = continued(tmp_path)
        assert newest <= durable <= newest + 1
    assert newest >= 4


GROUP = EncodedGroup(b"header", b"columns" * 99)


def _mark(directory: Path, number: int) -> None:
    mark_of(number).save(directory / "mark.json")


def _read_mark(directory: Path) -> int:
    head = HighWater.load(directory / "mark.json").head
    return 0 if head is None else head.number


def _epoch(directory: Path, number: int) -> None:
    assert raise_epoch(directory / "epoch") >= number


def _read_epoch(directory: Path) -> int:
    path = directory / "epoch"
    return int(json.loads(path.read_text())) if path.exists() else 0


def _revocations(directory: Path, number: int) -> None:
    RevocationCopy(directory / "revoked").learn(Revocations(tuple(f"s{n}" for n in range(number))))


def _read_revocations(directory: Path) -> int:
    return len(RevocationCopy(directory / "revoked").saved.node_ids)


@EVERY_STOP_BUT_TORN
@pytest.mark.parametrize(
    ("write", "read"),
    [(_mark, _read_mark), (_epoch, _read_epoch), (_revocations, _read_revocations)],
    ids=["the mark of a store", "a learner's epoch", "a relay's revocations"],
)
def test_a_small_file_is_the_old_one_or_the_new_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: Stop,
    write: Callable[[Path, int], None],
    read: Callable[[Path], int],
) -> None:
    written = Acknowledged()

    def live(directory: Path) -> None:
        written.newest = 0
        for number in (1, 2):
            write(directory, number)
            written.say(number)

    for directory in every_stop(tmp_path, monkeypatch, stop=stop, live=live, told=(written,), at_least=3):
        assert written.newest <= read(directory) <= written.newest + 1


@EVERY_STOP
@pytest.mark.parametrize("part_bytes", [1, PART_BYTES])
def test_every_step_that_was_told_of_has_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: Stop, part_bytes: int
) -> None:
    told, durable_step = Acknowledged(), Acknowledged()

    def live(directory: Path) -> None:
        told.newest = 0
        log = StepLog(directory / "steps.jsonl", part_bytes=part_bytes)
        log.catch_up(make_step_line(durable_step.newest) if durable_step.newest else None)
        for version in range(durable_step.newest + 1, 4):
            durable_step.say(version)  # its journal entry is there
            log.append(make_step_line(version))
            told.say(version)

    def content(directory: Path) -> bytes:
        files = files_of(directory / "steps.jsonl")
        return b"".join(path.read_bytes() for path in files if path.exists())

    def versions(directory: Path) -> list[int]:
        return [json.loads(line)["version"] for line in content(directory).splitlines()]

    for directory in every_stop(
        tmp_path, monkeypatch, stop=stop, live=live, told=(told, durable_step), at_least=4
    ):
        assert content(directory).count(b"\n") >= told.newest
        live(directory)
        assert versions(directory) == [1, 2, 3]


@EVERY_STOP_BUT_TORN
@pytest.mark.parametrize("who", ["learner", "sampler"])
def test_the_public_base_is_kept_whole_or_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: Stop, who: str
) -> None:
    words = LEARNER.versions[0].words
    masters = {
        span.name: torch.from_numpy(words[span.start_word : span.start_word + span.words].copy())
        .view(torch.bfloat16)
        .view(span.shape)
        for span in LAYOUT.tensors
    }

    kept_whole = Acknowledged()

    def live(directory: Path) -> None:
        kept_whole.newest = 0
        path = directory / "base.words"
        if who == "learner":
            words_of = MasterWords(masters, LAYOUT)
            kept = PublicBase.keep(path, words_of.digests(), words_of.copy_frames, layout=LAYOUT).words
        else:
            kept = keep_base(path, live_words(words).live, layout=LAYOUT).words
        assert HeldPolicy.of(0, np.array(kept), layout=LAYOUT).version == LEARNER.versions[0].version
        kept_whole.say(1)

    for directory in every_stop(tmp_path, monkeypatch, stop=stop, live=live, told=(kept_whole,), at_least=2):
        if kept_whole.newest:
            assert (directory / "base.words").read_bytes() == words.tobytes()
        live(directory)


def _record_groups(path: Path) -> Iterator[None]:
    ledger = Ledger.open(path, run_id="run")
    for number in range(3):
        group = EncodedGroup(b"", bytes([number]) * 700, f"{number}.1", "s1", spooled_at_s=1.0)
        slot = Slot(number, number, SlotState.SPOOLED, (Attempt(1, "s1", is_submitted=True),), 1, 1)
        tally = Tally("s1", {Verdict.SPOOLED: number + 1})
        ledger.record(Transaction(slots=(slot,), stored=group, facts=(tally,)))
        yield
    ledger.close()


def _recorded_groups(path: Path) -> int:
    ledger = Ledger.open(path, run_id="run")
    balance = ledger.balance()
    groups = [ledger.group(number) for number in balance.spooled_at_s]
    ledger.close()
    assert [group.columns for group in groups if group] == [
        bytes([number]) * 700 for number in range(len(groups))
    ]
    assert sum(tally.verdicts[Verdict.SPOOLED] for tally in balance.of(Tally)) == len(groups)
    return len(groups)


def test_a_ledger_has_every_transaction_that_was_answered_and_none_in_part(tmp_path: Path) -> None:
    """Whatever was being written behind them: the log is cut off at byte after byte."""
    path = tmp_path / "live.sqlite"
    log = tmp_path / "live.sqlite-wal"
    sizes = []
    kept = (b"", b"")
    for _ in _record_groups(path):
        sizes.append(log.stat().st_size)
        kept = (path.read_bytes(), log.read_bytes())
    database, written = kept
    for cut in range(sizes[0], sizes[-1] + 1, 1021):
        copy = tmp_path / f"{cut}.sqlite"
        copy.write_bytes(database)
        copy.with_name(copy.name + "-wal").write_bytes(written[:cut])
        assert _recorded_groups(copy) >= sum(size <= cut for size in sizes)
