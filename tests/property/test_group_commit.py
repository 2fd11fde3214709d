"""A run in seeds: production decisions in batches on a real ledger, commits that fail, a process that dies.

A process that is killed leaves its files as they are at that instant: before a commit, between the rows of
two of its transactions, once it is on disk, once it is applied, and between any two answers.
"""

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.work import leasing, step_history, upkeep, verdicts
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Balance, Transaction
from node.coordinator.work.decision import Batch, Decide
from node.coordinator.work.leasing import LeaseRequest
from node.coordinator.work.slots import group_id, parse_group_id
from node.coordinator.work.step_history import Hello
from node.coordinator.work.verdicts import Submission
from node.errors import Reason, RefusedError
from node.policy import PolicyVersion
from node.rollout import EncodedGroup
from node.run import StepRecord
from node.verdict import Verdict
from support.coordinator import BOUNDS, LEARNER, NOW_S, TTL_S, make_accounts
from support.groups import make_group

ROUNDS = 40


class Killed(Exception):  # noqa: N818 - not a failure
    """The process is gone; nothing it had not written is left."""


class DyingLedger(Ledger):
    """A ledger that copies its files between two transactions of a commit, as a kill would leave them."""

    dies_after: int | None = None
    fails = False
    on_death: Callable[[], None]
    _written = 0

    def record(self, *transactions: Transaction) -> None:
        self._written = 0
        super().record(*transactions)

    def _write(self, transaction: Transaction) -> None:
        if self._written == self.dies_after:
            self.on_death()
            raise Killed
        super()._write(transaction)
        self._written += 1
        if self.fails:
            raise RefusedError(Reason.DISK, "the disk is full")


class World:
    """Samplers and a learner that remember what they were told, and a coordinator that may forget."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.random = directory, random.Random(seed)
        self.now = NOW_S
        self.life = 0
        self.held: dict[str, str] = {}
        """Leases that samplers were told of and have no answer for yet, by id: whose."""
        self.safe: set[str] = set()
        """Groups that were answered as spooled."""
        self.version = 0
        self.unacknowledged: list[StepRecord] = []
        self.trained: list[str] = []
        self.delivered: set[str] = set()
        """By the learner."""
        self.seen: set[str] = set()
        """Which instants were reached."""
        self.before: Balance | None = None
        """Content of the ledger before the commit that a death cut short."""
        self._open(directory / "0" / "ledger.sqlite")
        self.settle([partial(step_history.learner_joins, request=LEARNER)], "fine")
        self.reconnect()

    def _open(self, path: Path) -> None:
        self.path = path
        self.ledger = DyingLedger.open(path, run_id="run")
        self.accounts = make_accounts(self.ledger.balance(), now=self.now, bounds=BOUNDS)
        self.now += 1

    def copy(self) -> None:
        """Keep the files as they are."""
        target = self.directory / str(self.life + 1)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for name in ("ledger.sqlite", "ledger.sqlite-wal"):
            if (self.path.parent / name).exists():
                shutil.copy(self.path.parent / name, target / name)

    def die_within(self, before: Balance) -> None:
        self.before = before
        self.copy()

    def restart(self) -> None:
        """Begin a new process on the files that were kept."""
        self.ledger.close()
        self.life += 1
        self._open(self.directory / str(self.life) / "ledger.sqlite")
        if self.before is not None:  # died within a commit: none of it is there
            assert self.ledger.balance() == self.before
        self.reconnect()

    def reconnect(self) -> None:
        """Open the learner's stream: it repeats what it has no acknowledgement for."""
        hello = Hello("learner", 1, self.version, tuple(self.unacknowledged), tuple(self.delivered))
        [outcome] = self.settle([partial(step_history.drain_opens, request=hello)], "fine")
        assert outcome.refusal is None, outcome.refusal
        self.accounts.confirm()
        self.accounts.slots.open.deliver_anew(frozenset(self.delivered))
        self.unacknowledged.clear()

    def settle(self, requests: list[Decide[Any]], fate: str) -> list[Any]:
        """Do what ``RunLedger`` does with a batch, up to an instant; return the answers given."""
        batch, answers = Batch(self.accounts), []
        for decide in requests:
            try:
                answers.append(batch.decide(decide, now=self.now).answer)
            except RefusedError as refused:
                answers.append(refused)
        self.seen.add(fate)
        self.before = None
        self.ledger.on_death = partial(self.die_within, self.ledger.balance())
        self.ledger.fails = fate == "fails"
        self.ledger.dies_after = 0 if fate == "before" else 1 if fate == "between rows" else None
        transactions = batch.transactions
        if not transactions or (fate == "between rows" and len(transactions) == 1):
            self.ledger.dies_after, self.ledger.fails, fate = None, False, "fine"
        if transactions:
            try:
                self.ledger.record(*transactions)
            except RefusedError as refused:
                if batch.is_applied_in_part:
                    self.accounts.go_back(self.ledger.balance(), now=self.now)
                    self.check()
                    self.reconnect()
                return [refused] * len(requests)
        if fate == "on disk":
            self.copy()
            raise Killed
        batch.apply()
        self.check()
        if fate in ("applied", "answered in part"):
            self.copy()
            self.answered = answers[: len(answers) // 2 if fate == "answered in part" else 0]
            raise Killed
        return answers

    def check(self) -> None:
        """Memory is what the ledger adds up to, and all that anyone was told is in it."""
        again = make_accounts(self.ledger.balance(), now=self.now, bounds=BOUNDS)
        assert dict(self.accounts.slots.open_slots) == dict(again.slots.open_slots)
        assert self.accounts.load() == again.load()
        assert self.accounts.tallies.total() == again.tallies.total()
        assert self.accounts.newest_record == again.newest_record
        for name in self.safe:
            assert self.accounts.slots.has_submitted(name)
        assert len(self.trained) == len(set(self.trained))
        assert len({name.split(".")[0] for name in self.trained}) == len(self.trained)

    def requests(self) -> list[tuple[str, str, Decide[Any]]]:
        """Return what may be asked of the coordinator now, each with its kind and subject."""
        accounts = self.accounts

        def lease(sampler: str) -> Decide[Any]:
            return partial(leasing.lease, request=LeaseRequest(sampler, 2, PolicyVersion(self.version)))

        def submit(name: str, sampler: str) -> Decide[Any]:
            number, _ = parse_group_id(name) or (0, 0)
            group = make_group(name, prompt_index=prompt_of(accounts, number))
            encoded = EncodedGroup(b"header", name.encode() * 300, name, sampler)
            return partial(verdicts.submission, request=Submission(encoded, group.header))

        found = [("lease", one, lease(one)) for one in ("s1", "s2", "s3")]
        found += [("submit", name, submit(name, holder)) for name, holder in self.held.items()]
        found += [("submit", name, submit(name, holder)) for name, holder in list(self.held.items())[:1]]
        found.append(("expire", "", upkeep.expiry))
        return found

    def turn(self) -> None:
        possible = self.requests()
        chosen = self.random.sample(possible, min(len(possible), self.random.randint(1, 6)))
        fate = self.random.choice(
            ("fine",) * 8 + ("fails", "before", "between rows", "on disk", "applied", "answered in part")
        )
        self.now += self.random.choice((0.1, 1.0, TTL_S))
        self.answered = []
        try:
            self.answered = self.settle([decide for *_, decide in chosen], fate)
            self.hear(chosen)
        except Killed:
            self.hear(chosen)
            self.restart()
        self.learn()

    def hear(self, chosen: list[tuple[str, str, Any]]) -> None:
        for (kind, subject, _), answer in zip(chosen, self.answered, strict=False):
            if isinstance(answer, RefusedError):
                continue
            if kind == "lease":
                self.held |= {lease.lease_id: subject for lease in answer.leases}
            elif kind == "submit":
                if answer.verdict is Verdict.SPOOLED:
                    self.safe.add(subject)
                if answer.verdict in (Verdict.SPOOLED, Verdict.DUPLICATE, Verdict.FOREIGN):
                    self.held.pop(subject, None)

    def learn(self) -> None:
        """Deliver what is on disk, and now and then take a step on two groups."""
        while (slot := self.accounts.slots.open.next_undelivered()) is not None:
            stored = self.ledger.group(slot.number)
            assert stored is not None
            name = stored.group_id
            assert name not in self.trained
            self.delivered.add(name)
        if len(self.delivered) < 2 or self.random.random() < 0.3:
            return
        names = tuple(sorted(self.delivered)[:2])
        self.version += 1
        record = StepRecord(self.version, names, (0, 0))
        self.unacknowledged.append(record)  # in its journal first
        self.trained += names
        self.delivered -= set(names)
        fate = self.random.choice(("fine", "fine", "fails", "before", "on disk", "applied"))
        try:
            [outcome] = self.settle([partial(step_history.step, request=record)], fate)
            if isinstance(outcome, RefusedError):
                self.reconnect()
                return
            assert not outcome.doubled
            assert not outcome.unknown
            self.unacknowledged.clear()
        except Killed:
            self.restart()


def prompt_of(accounts: Accounts, number: int) -> int:
    slot = accounts.slots.open_slots.get(number)
    return 0 if slot is None else slot.prompt_index


@pytest.mark.parametrize("seed", range(12))
def test_whatever_dies_or_fails_no_group_is_lost_or_trained_on_twice(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed)
    for _ in range(ROUNDS):
        world.turn()
    world.check()
    assert world.trained
    # What was answered is settled, or waits to be trained on.
    waiting = {group_id(slot.number, slot.winner) for slot in world.accounts.slots.open.untrained_slots()}
    assert world.safe <= waiting | set(world.trained)
    world.ledger.close()


def test_the_seeds_reach_every_instant(tmp_path: Path) -> None:
    seen: set[str] = set()
    for seed in range(4):
        world = World(tmp_path / str(seed), seed)
        for _ in range(ROUNDS):
            world.turn()
        world.ledger.close()
        seen |= world.seen
    assert seen == {"fine", "fails", "before", "between rows", "on disk", "applied", "answered in part"}
