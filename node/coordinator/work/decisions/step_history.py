"""Compares the steps a learner reports with those the ledger knows; pure.

    ledger    1 ........ last_step
    hello                     [ gap ]  oldest record ...... version

A learner repeats the records that the ledger may not have, and one that restarts always repeats its newest.
So its newest record proves nothing about those before it: the ledger is whole only where ledger and records
together cover every version up to the learner's. A gap, or a group that the ledger never took in, means that
the coordinator runs on an older ledger, which would lease slots again whose groups were trained on. The
learner is refused then; nothing is taken, and nobody is fenced. In the other direction, a learner that is
behind the ledger is an older copy of the run's learner, and is refused before it replaces anyone.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Transaction
from node.coordinator.work.decisions.decision import Decision
from node.coordinator.work.slots.slot import group_id, slot_and_attempt
from node.coordinator.work.terms.model_check import Learner, check_base, check_layout
from node.errors import Reason, RefusedError
from node.values.fact import Fact, Gone
from node.values.groups.verdict import Verdict
from node.values.policy import BaseModel
from node.values.run import StepRecord

WAYS_OUT: Final = (
    "restore the coordinator's newest ledger.sqlite with its -wal file, or accept the loss: "
    "`heterorl-node ledger restore FILE --accept-loss`"
)


@dataclass(frozen=True, slots=True)
class Hello:
    node_id: str
    epoch: int
    version: int
    """Version of the newest step whose record it has made."""
    records: tuple[StepRecord, ...] = ()
    """Records the ledger may lack: contiguous, ending with that of ``version``."""
    held_group_ids: tuple[str, ...] = ()
    trained_slots: tuple[tuple[int, int], ...] = ()
    """(first, last) of each run of slots that it counts as trained on, ``records`` included; empty: not
    told."""


@dataclass(frozen=True, slots=True)
class Trained:
    sampler_id: str
    group_id: str
    staleness_versions: int
    spooled_at_s: float | None
    """Unix seconds; None where the spool had another group of its slot, or none."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The changes that step records make. A refusal means that none of them was taken."""

    recorded: tuple[StepRecord, ...] = ()
    trained: tuple[Trained, ...] = ()
    lost: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()
    """Groups whose slot was settled before."""
    unknown: tuple[str, ...] = ()
    gap: str = ""
    """A sentence for people about what the ledger lacks; empty if nothing."""
    accepted_loss: range = range(0)
    """Versions whose records were lost, as an operator accepted."""

    @property
    def refusal(self) -> RefusedError | None:
        """Why the learner cannot go on; None: it can."""
        if self.doubled:
            return RefusedError(
                Reason.DUPLICATE,
                f"the learner has trained on {len(self.doubled)} groups that were settled before, "
                f"{self.doubled[0]} among them",
                fix="stop the learner: it trains on groups twice; keep both state directories",
            )
        return RefusedError(Reason.LEDGER_BEHIND, self.gap, fix=WAYS_OUT) if self.gap else None


def learner_joins(accounts: Accounts, request: Learner, *, now: float) -> Decision[None]:
    """Admit a learner as the run's; the first one's model becomes the run's.

    Raises:
        RefusedError: FENCED by a newer learner; ROLLBACK, where it is behind the ledger; LEDGER_BEHIND,
            where the ledger knows of no learner and this one has trained; LAYOUT_MISMATCH,
            TOKENIZER_MISMATCH, MALFORMED.
    """
    joining = request
    if joining.epoch < 1 or joining.vocabulary_size < 1:
        raise RefusedError(
            Reason.MALFORMED,
            f"a learner of epoch {joining.epoch} with a vocabulary of {joining.vocabulary_size}",
            fix="both are at least 1",
        )
    current = accounts.learner
    if current is None:
        if joining.version > 0 and accounts.open_loss is None:
            gap = _lacks(range(1, joining.version + 1), joining.version)
            raise RefusedError(Reason.LEDGER_BEHIND, gap, fix=WAYS_OUT)
        return Decision(None, Transaction(facts=(joining,)), is_last=True)
    is_current = (joining.epoch, joining.node_id) == (current.epoch, current.node_id)
    if not is_current and joining.epoch <= current.epoch:
        raise RefusedError(
            Reason.FENCED,
            f"learner {joining.node_id} has epoch {joining.epoch}, "
            f"learner {current.node_id} has joined with epoch {current.epoch}",
            fix="stop one of them; a run has one learner",
        )
    check_layout(joining.layout_digest, current, layout_summary=joining.layout_summary)
    joining.text.check(current)
    check_base(BaseModel(joining.base_root), current, of="the learner")
    _check_not_behind(accounts, joining.version)
    if is_current:
        return Decision(None, is_last=True)
    return Decision(None, Transaction(facts=(replace(joining, version=current.version),)), is_last=True)


def drain_opens(accounts: Accounts, request: Hello, *, now: float) -> Decision[Outcome]:
    """Open a learner's stream, and take the records it repeats, if ledger and learner have the same history.

    Raises:
        RefusedError: FENCED; NOT_JOINED; MALFORMED; ROLLBACK, where the learner is behind the ledger, has
            another history, or counts other slots as trained on. Where the ledger is behind, the outcome has
            a refusal.
    """
    hello, learner = request, accounts.learner
    if learner is None or hello.epoch > learner.epoch:
        raise RefusedError(
            Reason.NOT_JOINED, f"no learner of epoch {hello.epoch} has joined", fix="join first"
        )
    if (hello.epoch, hello.node_id) != (learner.epoch, learner.node_id):
        raise RefusedError(
            Reason.FENCED,
            f"learner {hello.node_id} has epoch {hello.epoch}, "
            f"learner {learner.node_id} has joined with epoch {learner.epoch}",
            fix="stop one of them; a run has one learner",
        )
    _check_not_behind(accounts, hello.version)
    _check_contiguous(hello)
    _check_same_history(accounts, hello.records)
    first_missing = accounts.last_step + 1
    first_repeated = hello.records[0].version if hello.records else hello.version + 1
    missing = range(first_missing, max(first_missing, first_repeated))
    loss = accounts.open_loss
    fresh = tuple(record for record in hello.records if record.version > accounts.last_step)
    outcome, transaction = _settled(accounts, fresh)
    unheard = tuple(name for name in hello.held_group_ids if not accounts.slots.has_submitted(name))
    unknown = (*outcome.unknown, *unheard)
    is_gap_accepted = loss is not None or not missing
    if outcome.doubled or unknown or not is_gap_accepted:
        gap = _lacks(missing, hello.version) if not is_gap_accepted else _never_took_in(unknown)
        return Decision(Outcome(doubled=outcome.doubled, unknown=unknown, gap=gap), is_last=True)
    if loss is None:
        _check_same_slots(accounts, hello)
    facts: tuple[Fact | Gone, ...] = transaction.facts
    if loss is not None:
        facts = (*facts, replace(loss, lost_versions=missing))
    if loss is not None or hello.version != learner.version:
        facts = (*facts, replace(learner, version=hello.version))
    return Decision(replace(outcome, accepted_loss=missing), replace(transaction, facts=facts), is_last=True)


def step(accounts: Accounts, request: StepRecord, *, now: float) -> Decision[Outcome]:
    """Settle the groups a step consumed; a record that is on disk already changes nothing.

    Nothing is leased in the same batch: the ledger may turn out to be behind.
    """
    record = request
    if record.version <= accounts.last_step or accounts.learner is None:
        return Decision(Outcome(), is_last=True)
    missing = range(accounts.last_step + 1, record.version)
    if missing:
        return Decision(Outcome(gap=_lacks(missing, record.version)), is_last=True)
    outcome, transaction = _settled(accounts, (record,))
    if outcome.doubled or outcome.unknown:
        gap = _never_took_in(outcome.unknown)
        return Decision(Outcome(doubled=outcome.doubled, unknown=outcome.unknown, gap=gap), is_last=True)
    learner = replace(accounts.learner, version=max(record.version, accounts.learner.version))
    return Decision(outcome, replace(transaction, facts=(*transaction.facts, learner)), is_last=True)


def _settled(accounts: Accounts, records: Sequence[StepRecord]) -> tuple[Outcome, Transaction]:
    """Settle the groups of records that the ledger does not have, all or none."""
    training = accounts.slots.trained([name for record in records for name in record.group_ids])
    staleness = {
        name: versions
        for record in records
        for name, versions in zip(record.group_ids, record.staleness_versions, strict=True)
    }
    trained = []
    for slot in training.slots:
        if (winner := slot.attempt(slot.winner)) is not None:
            name = group_id(slot.number, winner.number)
            in_spool = accounts.slots.open_slots[slot.number].winner == winner.number
            spooled_at_s = accounts.spooled.at_s.get(slot.number) if in_spool else None
            trained.append(Trained(winner.holder, name, staleness[name], spooled_at_s))
    outcome = Outcome(
        recorded=tuple(records),
        trained=tuple(trained),
        lost=training.lost,
        doubled=training.doubled,
        unknown=training.unknown,
    )
    transaction = Transaction(
        slots=training.slots,
        facts=accounts.tallies.after(
            ((group.sampler_id, Verdict.TRAINED) for group in trained),
            staleness=((group.sampler_id, group.staleness_versions) for group in trained),
        ),
        steps=tuple(records),
    )
    return outcome, transaction


def _check_not_behind(accounts: Accounts, version: int) -> None:
    if version < accounts.last_step:
        raise RefusedError(
            Reason.ROLLBACK,
            f"the learner's newest step is {version}, steps up to {accounts.last_step} are recorded",
            fix="this is an older copy of the run's learner: stop it, or restore its newest state directory",
        )


def _check_contiguous(hello: Hello) -> None:
    versions = [record.version for record in hello.records]
    is_contiguous = all(after == before + 1 for before, after in pairwise(versions))
    if not is_contiguous or (versions and versions[-1] != hello.version):
        raise RefusedError(
            Reason.MALFORMED,
            f"a learner at version {hello.version} repeats the records of {len(versions)} steps, "
            f"{versions[0]} to {versions[-1]}, which are not all versions up to its own",
        )


def _check_same_history(accounts: Accounts, records: Sequence[StepRecord]) -> None:
    ours = accounts.newest_record
    theirs = next((record for record in records if ours is not None and record.version == ours.version), None)
    if ours is not None and theirs is not None and theirs.group_ids != ours.group_ids:
        raise RefusedError(
            Reason.ROLLBACK,
            f"step {ours.version} consumed {', '.join(ours.group_ids[:3])}... by the ledger and "
            f"{', '.join(theirs.group_ids[:3])}... by the learner: this learner has another history",
            fix="stop it and start the run's own, from its newest state directory",
        )


def _check_same_slots(accounts: Accounts, hello: Hello) -> None:
    """Check that the learner counts no slot as trained on that is open here, or was never leased.

    It would refuse the groups of these slots, each as trained on before.
    """
    told = {slot_and_attempt(name)[0] for record in hello.records for name in record.group_ids}
    counted = [
        f"{number} ({slot.state})"
        for number, slot in accounts.slots.open_slots.items()
        if number not in told and _is_in(hello.trained_slots, number)
    ]
    beyond = [last for _, last in hello.trained_slots if last >= accounts.slots.next_slot]
    counted += [f"{last} (never leased)" for last in beyond]
    if counted:
        raise RefusedError(
            Reason.ROLLBACK,
            f"the learner counts {len(counted)} slots as trained on that are not by the ledger: "
            f"{', '.join(counted[:3])}",
            fix="its checkpoint is damaged, or of another history: remove the newest checkpoint, and the "
            "learner takes the steps of its journal again; or restore its newest state directory",
        )


def _is_in(runs: Sequence[tuple[int, int]], slot: int) -> bool:
    place = bisect_right(runs, slot, key=lambda run: run[0]) - 1
    return place >= 0 and slot <= runs[place][1]


def _lacks(versions: range, newest: int) -> str:
    return (
        f"the learner is at version {newest} and the ledger lacks the steps of versions "
        f"{versions[0]} to {versions[-1]}"
    )


def _never_took_in(group_ids: Sequence[str]) -> str:
    if not group_ids:
        return ""
    return (
        f"the learner has {len(group_ids)} groups that the ledger never took in, "
        f"{group_ids[0][:100]} among them"
    )
