"""A run in one thread over a real ledger file: leases, groups, steps, cuts, crashes, backups, restores.

Coordinator: the real decisions on the real ledger. Learner: the real outstanding rollouts, and a
checkpoint that is a value. Everything random is drawn from one seed.
"""

import random
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from node.clients.rollouts.outstanding_rollouts import OutstandingRollouts
from node.coordinator.ledger.ledger_copies import back_up, restore
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.work.decisions import judged_groups, step_history
from node.coordinator.work.decisions.step_history import Hello
from node.coordinator.work.slots.slot import group_id
from node.errors import Reason, RefusedError
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.run import StepRecord
from support.coordinator import BOUNDS, LEARNER, NOW_S
from support.ledgers import LedgerDesk

CAPACITY: Final = 4
BATCH: Final = BOUNDS.batch_groups


@dataclass
class Checkpoint:
    """A learner's disk."""

    version: int = 0
    unacknowledged: tuple[StepRecord, ...] = ()
    log: list[StepRecord] = field(default_factory=list)


class Learner:
    """A learner's process: goes with its memory when killed."""

    def __init__(self, disk: Checkpoint, *, epoch: int) -> None:
        self.disk = disk
        self.epoch = epoch
        self.outstanding = OutstandingRollouts(
            version=disk.version, capacity_groups=CAPACITY, unacknowledged=disk.unacknowledged
        )
        self.buffer: list[str] = []
        self.credits = 0
        self.is_connected = False
        self.refused: Reason | None = None
        """Why it waits, or has ended."""

    @property
    def has_ended(self) -> bool:
        return self.refused not in (None, Reason.LEDGER_BEHIND, Reason.NOT_JOINED)

    def connect(self, desk: LedgerDesk) -> None:
        try:
            desk.settle(
                step_history.learner_joins(
                    desk.accounts,
                    replace(LEARNER, epoch=self.epoch, version=self.disk.version),
                    now=desk.now,
                )
            )
            hello = Hello(
                LEARNER.node_id,
                self.epoch,
                self.outstanding.version,
                self.outstanding.unacknowledged,
                self.outstanding.held_group_ids,
            )
            self.outstanding.connected()
            refusal = desk.open_drain(hello).refusal
        except RefusedError as refused:
            refusal = refused
        self.refused = None if refusal is None else refusal.reason
        self.is_connected = refusal is None
        if self.is_connected:
            self.outstanding.acknowledged(self.outstanding.version)
            self.sent = set(self.outstanding.held_group_ids)
            self.credits = self.outstanding.take_owed().credit_groups

    def receive(self, desk: LedgerDesk) -> None:
        """Take one group, if there is one and room for it."""
        waiting = [group_id(slot.number, slot.winner) for slot in desk.accounts.slots.open.untrained_slots()]
        name = next((name for name in waiting if name not in self.sent), None)
        if name is None or self.credits == 0:
            return
        self.credits -= 1
        self.sent.add(name)
        if self.outstanding.delivered(name):
            self.outstanding.judged(GroupVerdict(name, Verdict.ACCEPTED))
            desk.settle(
                judged_groups.judgement(desk.accounts, GroupVerdict(name, Verdict.ACCEPTED), now=desk.now)
            )
            self.buffer.append(name)

    def step(self, desk: LedgerDesk | None, draw: random.Random) -> None:
        """Train on a batch if there is one; the record or its acknowledgement may be lost."""
        if len(self.buffer) < BATCH:
            return
        names, self.buffer = tuple(self.buffer[:BATCH]), self.buffer[BATCH:]
        record = StepRecord(self.disk.version + 1, names, (0,) * BATCH)
        self.disk.version = record.version
        self.disk.unacknowledged = (*self.outstanding.unacknowledged, record)
        self.disk.log.append(record)
        if draw.random() < 0.1:
            raise KilledError  # durable, and nobody knows
        self.outstanding.stepped(record)
        if desk is None or not self.is_connected:
            return
        if draw.random() < 0.2:
            self.is_connected = False  # the stream was cut: on its way, or never to come
        if draw.random() < 0.5 or self.is_connected:
            refusal = desk.settle(step_history.step(desk.accounts, record, now=desk.now)).refusal  # type: ignore[attr-defined]
            assert refusal is None, refusal
        if self.is_connected:
            self.outstanding.acknowledged(record.version)
            self.credits += self.outstanding.take_owed().credit_groups


class KilledError(Exception):
    """The learner was killed between its checkpoint and anything else."""


class Run:
    """The whole of it."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.ledger = directory / "coordinator" / "ledger.sqlite"
        self.backups: list[Path] = []
        self.disk = Checkpoint()
        self.epoch = 0
        self.desk: LedgerDesk | None = None
        self.learner: Learner | None = None
        self.leases: list[str] = []
        self.now = NOW_S
        self.start_coordinator()
        self.start_learner()

    # processes

    def start_coordinator(self) -> None:
        if self.desk is None:
            ledger = Ledger.open(self.ledger, run_id="run")
            # Power cuts are another test's: nothing here depends on what reached the disk when.
            ledger._connection.execute("PRAGMA synchronous = OFF")
            self.desk = LedgerDesk(ledger)
            self.desk.now = self.now

    def stop_coordinator(self) -> None:
        if self.desk is not None:
            self.desk.ledger.close()
            self.desk = None
        if self.learner is not None:
            self.learner.is_connected = False

    def start_learner(self) -> None:
        if self.learner is None:
            self.epoch += 1
            self.learner = Learner(self.disk, epoch=self.epoch)

    def stop_learner(self) -> None:
        self.learner = None

    # what happens by itself

    def turn(self) -> None:
        """Let something happen: a lease, a submission, a delivery, a step, a reconnection."""
        self.now += 0.001
        if self.learner is None or self.learner.has_ended:
            return
        if self.desk is not None and not self.learner.is_connected:
            self.learner.connect(self.desk)
        if self.desk is not None:
            self.sample(self.desk)
        if self.desk is not None and self.learner.is_connected:
            self.learner.receive(self.desk)
        try:
            self.learner.step(self.desk, self.draw)
        except KilledError:
            self.stop_learner()
            self.start_learner()

    def sample(self, desk: LedgerDesk) -> None:
        if self.draw.random() < 0.6:
            self.leases += desk.lease(wanted=self.draw.randint(1, 3), held=desk.accounts.load().version)
        self.draw.shuffle(self.leases)
        for name in self.leases[: self.draw.randint(0, 2)]:
            try:
                desk.submit(name)
            except RefusedError as refused:
                assert refused.reason is Reason.BUSY  # noqa: PT017
            else:
                self.leases.remove(name)

    def back_up(self) -> None:
        path = self.ledger.parent / f"backup-{len(self.backups)}.sqlite"
        back_up(self.ledger, to=path)
        self.backups.append(path)

    # what goes wrong, and what an operator does

    def disaster(self) -> Path:
        """Stop the coordinator and put an older ledger back; return where the newest one was kept."""
        without_wal = self.ledger.parent / "without-wal.sqlite"
        shutil.copy(self.ledger, without_wal)  # as it is when the -wal of a killed coordinator is deleted
        self.stop_coordinator()
        newest = self.ledger.parent / "newest.sqlite"
        back_up(self.ledger, to=newest)
        older = self.draw.choice(self.backups)
        match self.draw.choice(("raw", "lost -wal", "restore", "accept-loss")):
            case "raw":
                shutil.copy(older, self.ledger)
            case "lost -wal":
                shutil.copy(without_wal, self.ledger)
            case "restore":
                restore(older, ledger=self.ledger, accepts_loss=False, now=self.now)
            case "accept-loss":
                restore(older, ledger=self.ledger, accepts_loss=True, now=self.now)
        return newest

    def restart(self) -> None:
        """Bring everything back, in any order, some of it more than once."""
        moves = [self.start_coordinator, self.start_learner]
        if self.draw.random() < 0.5:
            moves += [self.stop_learner, self.start_learner]
        if self.draw.random() < 0.3:
            moves += [self.stop_coordinator, self.start_coordinator]
        self.draw.shuffle(moves)
        for move in (*moves, self.start_coordinator, self.start_learner):
            move()
            for _ in range(self.draw.randint(0, 3)):
                self.turn()

    def mend(self, newest: Path) -> None:
        """Do as the refusal says: the newest ledger, or the loss is accepted."""
        self.stop_coordinator()
        if self.draw.random() < 0.5:
            restore(newest, ledger=self.ledger, accepts_loss=False, now=self.now)
        else:
            restore(self.ledger, ledger=self.ledger, accepts_loss=True, now=self.now)

    def goes_on(self, *, within_turns: int = 60) -> bool:
        """Say whether a step is made within some turns."""
        before = self.disk.version
        for _ in range(within_turns):
            self.turn()
            if self.disk.version > before + 1:
                return True
        return False

    @property
    def loud(self) -> str:
        """An operator's view of a run that stands; empty: nothing."""
        assert self.desk is not None
        assert self.learner is not None
        said = self.learner.refused
        return f"{said}: {self.desk.accounts.gap}" if said is not None else ""

    @property
    def trained_slots(self) -> list[str]:
        """Slots trained on, in the order of the learner's own log."""
        return [name.partition(".")[0] for record in self.disk.log for name in record.group_ids]
