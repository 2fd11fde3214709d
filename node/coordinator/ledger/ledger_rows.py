"""A ledger's rows: what is written of a transaction and read at a start, in SQL that every engine takes.

An engine runs the statements on a connection of its own: ``ledger_file``, a SQLite file of one coordinator;
``ledger_postgresql``, a database of several, of which one leads.

Blocking: one thread calls this, never the event loop's.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from typing import Any, Final, Protocol

from node.coordinator.ledger.fact_rows import facts_of, row_of
from node.coordinator.ledger.ledger_schema import (
    OF_TRAINING,
    OPEN_STATES,
    Put,
    columns_of,
    digest_of,
    insertion,
)
from node.coordinator.work.balance import Balance, Transaction
from node.coordinator.work.checks.check_queue import Held
from node.coordinator.work.evaluation.evaluations import ANSWERS_KEPT
from node.coordinator.work.slots.slot import (
    HELD_OUT_FROM,
    SETTLED,
    UNTRAINED,
    Attempt,
    HeldOutAnswer,
    Slot,
    SlotBalance,
    SlotState,
    group_id,
    slot_and_attempt,
)
from node.coordinator.work.slots.slot_generations import Generation
from node.coordinator.work.version_log import VERSIONS_REMEMBERED, Announced
from node.errors import Reason, RefusedError
from node.values.fact import Fact, Gone, MalformedFactError
from node.values.groups.failure import Failure
from node.values.groups.rollout import EncodedGroup
from node.values.run import StepRecord


class LedgerEngine(Protocol):
    """A ledger as the coordinator uses it, whatever keeps its rows. What ``record`` wrote is durable."""

    def balance(self) -> Balance:
        """Read what the accounts start from.

        Raises:
            RefusedError: DISK, where it cannot be read; DAMAGED, where a fact in it says nothing of its kind.
        """
        ...

    def record(self, *transactions: Transaction) -> None:
        """Write transactions, all of them or none, with one sync.

        Raises:
            RefusedError: DISK: they could not be written, nothing was changed. STANDBY: another coordinator
                leads by now, or nobody can say whether they were written; this ledger takes no more.
        """
        ...

    def group(self, slot: int) -> EncodedGroup | None:
        """Return the group in the spool for ``slot``; None where there is none.

        Raises:
            RefusedError: DAMAGED, where the bytes are not those that were stored; STANDBY as for ``record``.
        """
        ...

    def close(self) -> None: ...


_WAITING: Final = f"groups JOIN slots ON slot = number WHERE state IN ({OPEN_STATES})"
"""Groups of slots that are not settled. The others are kept to be checked."""


class Cursor(Protocol):
    """The rows that a query found."""

    def __iter__(self) -> Iterator[Any]: ...
    def fetchone(self) -> Any: ...


class LedgerRows(ABC):
    """The half of an engine that knows the tables. Statements mark values with ``?``."""

    @abstractmethod
    def _execute(self, statement: str, values: Sequence[Any] = ()) -> Cursor: ...

    @abstractmethod
    def _execute_each(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None: ...

    @abstractmethod
    def _is_loss_accepted(self, first_slot: int) -> bool: ...

    def _read_balance(self) -> Balance:
        rows = self._execute
        by_state = rows(f"SELECT state, count(*) FROM slots WHERE {OF_TRAINING} GROUP BY state")
        settled = {SlotState(state): n for state, n in by_state}
        facts, unknown_facts = facts_of(rows(f"SELECT {columns_of('facts')} FROM facts ORDER BY kind, key"))
        generations = sorted((f for f in facts if isinstance(f, Generation)), key=lambda one: one.number)
        (newest,) = rows(f"SELECT coalesce(max(number), -1) FROM slots WHERE {OF_TRAINING}").fetchone()
        select_slots = f"SELECT {columns_of('slots')} FROM slots"
        newest_held_out = f"{select_slots} WHERE number >= ? ORDER BY number DESC LIMIT ?"
        held_out = tuple(map(_slot, rows(newest_held_out, [HELD_OUT_FROM, ANSWERS_KEPT])))
        slots = SlotBalance(
            open_ones=tuple(
                map(_slot, rows(f"{select_slots} WHERE state IN ({OPEN_STATES}) ORDER BY number"))
            ),
            settled={state: n for state, n in settled.items() if state in SETTLED},
            next_slot=max([newest + 1, *(generation.first_slot for generation in generations)]),
            next_held_out=held_out[0].number + 1 if held_out else HELD_OUT_FROM,
            lost=tuple(
                n
                for (n,) in rows(
                    "SELECT number FROM slots WHERE state = ? ORDER BY number", [SlotState.LOST.value]
                )
            ),
            found=tuple(
                number
                for one in generations
                for (number,) in rows(
                    "SELECT number FROM slots WHERE number >= ? AND number < ? ORDER BY number",
                    [one.lost_from_slot, one.first_slot],
                )
            ),
        )
        select_steps = f"SELECT {columns_of('steps')} FROM steps"
        return Balance(
            slots=slots,
            spooled_at_s=dict(rows(f"SELECT slot, spooled_at_s FROM {_WAITING}")),
            spooled_bytes=dict(rows(f"SELECT slot, length(header) + length(columns) FROM {_WAITING}")),
            last_step=next(map(_step, rows(f"{select_steps} ORDER BY version DESC LIMIT 1")), None),
            rollbacks=sum(1 for _ in rows("SELECT version FROM steps WHERE restored_version IS NOT NULL")),
            announced=tuple(
                Announced(number, root, at_s)
                for number, root, at_s in rows(
                    "SELECT number, root, at_s FROM versions ORDER BY number DESC LIMIT ?",
                    [VERSIONS_REMEMBERED],
                )
            ),
            facts=facts,
            unknown_facts=unknown_facts,
            accepts_loss=bool(generations) and self._is_loss_accepted(generations[-1].first_slot),
            held_out=held_out,
            owed_checks=tuple(
                Held(slot, group_id(slot, attempt), name, at_s, prompt_index=index, size_bytes=size_bytes)
                for slot, attempt, name, at_s, index, size_bytes in rows(
                    "SELECT slot, attempt, sampler_id, spooled_at_s, prompt_index, "
                    "length(header) + length(columns) FROM groups JOIN slots ON slot = number "
                    f"WHERE state NOT IN ({OPEN_STATES}) ORDER BY slot"
                )
            ),
        )

    def _read_group(self, slot: int) -> EncodedGroup | None:
        """Return the group of a slot. Raises RefusedError: DAMAGED; it is not what was stored."""
        row = self._execute(
            "SELECT attempt, sampler_id, spooled_at_s, digest, header, columns FROM groups WHERE slot = ?",
            (slot,),
        ).fetchone()
        if row is None:
            return None
        attempt, sampler_id, spooled_at_s, digest, header, columns = row
        if digest_of((header, columns)) != digest:
            raise RefusedError(Reason.DAMAGED, f"the group of slot {slot} is not what was stored")
        name = group_id(slot, attempt)
        return EncodedGroup(header, columns, name, sampler_id, spooled_at_s=spooled_at_s)

    def _write_all(self, transactions: Sequence[Transaction]) -> None:
        """Write transactions that become true together; of what several say of one fact, the last word."""
        for transaction in transactions:
            self._write(transaction)
        self._write_facts([fact for transaction in transactions for fact in transaction.facts])

    def _write(self, transaction: Transaction) -> None:
        """Write what a transaction says besides its facts."""
        put, write_each = self._put, self._write_each
        put("slots", *map(_row, transaction.slots))
        out_of_play = [slot.number for slot in transaction.slots if slot.state not in UNTRAINED]
        deleted = (number for number in (*out_of_play, *transaction.freed) if number not in transaction.kept)
        write_each("DELETE FROM groups WHERE slot = ?", ((number,) for number in deleted))
        for group, how in ((transaction.stored, Put.REFUSE), (transaction.graded, Put.REPLACE)):
            if group is not None:
                whose = (*slot_and_attempt(group.group_id), group.sampler_id, group.spooled_at_s)
                put("groups", (*whose, digest_of(group.parts), *group.parts), how=how)
        for step in transaction.steps:
            lists = (json.dumps(step.group_ids), json.dumps(step.staleness_versions))
            put("steps", (step.version, *lists, step.restored_version), how=Put.REFUSE)
        put("versions", *map(astuple, transaction.announced), how=Put.KEEP)

    def _write_facts(self, facts: Sequence[Fact | Gone]) -> None:
        if not facts:
            return
        last_words = {(fact.kind, fact.key): fact for fact in facts}
        self._write_each(
            "DELETE FROM facts WHERE kind = ? AND key = ?",
            (name for name, fact in last_words.items() if isinstance(fact, Gone)),
        )
        self._put("facts", *(row_of(fact) for fact in last_words.values() if isinstance(fact, Fact)))

    def _write_each(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        if parameters := tuple(rows):  # SQLite takes 3 us for a statement without any
            self._execute_each(statement, parameters)

    def _put(self, table: str, *rows: tuple[Any, ...], how: Put = Put.REPLACE) -> None:
        if rows:
            self._execute_each(insertion(table, how), rows)


def damaged(ledger: str, error: MalformedFactError) -> RefusedError:
    """Return the error for a ledger with a fact that cannot be read."""
    return RefusedError(
        Reason.DAMAGED,
        f"{ledger} is damaged: {error}",
        fix="restore an older copy with `heterorl-node ledger restore`; where a newer release wrote the "
        "fact, start that one",
    )


def _step(row: tuple[int, str, str, int | None]) -> StepRecord:
    version, group_ids, staleness, restored_version = row
    return StepRecord(version, tuple(json.loads(group_ids)), tuple(json.loads(staleness)), restored_version)


def _flat(value: Any) -> tuple[Any, ...]:
    """Return the fields of a dataclass that holds no other: ``astuple`` copies each deeply, in 15 us."""
    return tuple(getattr(value, name) for name in value.__slots__)


def _row(slot: Slot) -> tuple[int, int, str, str, int, int, str, str | None]:
    attempts = json.dumps([_flat(attempt) for attempt in slot.attempts])
    answer = None if slot.answer is None else json.dumps(_flat(slot.answer))
    fixed = (slot.number, slot.prompt_index, slot.state.value, attempts, slot.granted, slot.winner)
    return (*fixed, slot.kind.value, answer)


def _slot(row: tuple[int, int, str, str, int, int, str, str | None]) -> Slot:
    number, prompt_index, state, attempts, granted, winner, _, answered = row
    held = tuple(_attempt(*attempt) for attempt in json.loads(attempts))
    answer = None if answered is None else HeldOutAnswer(*json.loads(answered))
    return Slot(number, prompt_index, SlotState(state), held, granted, winner, answer)


def _attempt(number: int, holder: str, is_submitted: bool, failure: str | None = None) -> Attempt:
    return Attempt(number, holder, is_submitted, None if failure is None else Failure(failure))
