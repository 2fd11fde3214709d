"""A ledger's rows: what is written of a transaction and read at a start, in SQL that every engine takes.

An engine runs the statements on a connection of its own: ``ledger_file``, a SQLite file of one coordinator;
``ledger_postgresql``, a database of several, of which one leads. A row has the fields of its value, in order.

Blocking: one thread calls this, never the event loop's.
"""

import enum
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from typing import Any, Final, Protocol

from node.coordinator.ledger.ledger_schema import OF_TRAINING, OPEN_STATES, digest_of
from node.coordinator.work.accounts import Balance, Transaction
from node.coordinator.work.bad_prompts import BAD_PROMPTS
from node.coordinator.work.check_queue import Held
from node.coordinator.work.evaluations import ANSWERS_KEPT, EvaluationBalance
from node.coordinator.work.model_check import Learner
from node.coordinator.work.run_data import NO_DATA, DataSeen
from node.coordinator.work.sampler_standing import Standing
from node.coordinator.work.slot_generations import Generation
from node.coordinator.work.slot_table import SlotBalance
from node.coordinator.work.slots import (
    HELD_OUT_FROM,
    SETTLED,
    UNTRAINED,
    Attempt,
    HeldOutAnswer,
    Slot,
    SlotState,
    group_id,
    slot_and_attempt,
)
from node.coordinator.work.version_log import VERSIONS_REMEMBERED, Announced
from node.errors import Reason, RefusedError
from node.evaluation import Evaluation
from node.failure import BadPrompt, Failure
from node.rollout import EncodedGroup
from node.run import StepRecord
from node.verdict import Verdict


class LedgerEngine(Protocol):
    """A ledger as the coordinator uses it, whatever keeps its rows. What ``record`` wrote is durable."""

    def balance(self) -> Balance:
        """Read what the accounts start from. Raises RefusedError: DISK, where it cannot be read."""
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


class Put(enum.Enum):
    """The fate of a row whose key is there already. The values are SQLite's words."""

    REPLACE = "INSERT OR REPLACE"
    KEEP = "INSERT OR IGNORE"
    REFUSE = "INSERT"


_WAITING: Final = f"groups JOIN slots ON slot = number WHERE state IN ({OPEN_STATES})"
"""Groups of slots that are not settled. The others are kept to be checked."""


class Rows(Protocol):
    """The rows that a query found."""

    def __iter__(self) -> Iterator[Any]: ...
    def fetchone(self) -> Any: ...


class LedgerRows(ABC):
    """The half of an engine that knows the tables. Statements mark values with ``?``."""

    @abstractmethod
    def _execute(self, statement: str, values: Sequence[Any] = ()) -> Rows: ...

    @abstractmethod
    def _execute_each(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None: ...

    @abstractmethod
    def _put_all(self, table: str, rows: Sequence[tuple[Any, ...]], how: Put) -> None: ...

    @abstractmethod
    def _is_loss_accepted(self, first_slot: int) -> bool: ...

    def _read_balance(self) -> Balance:
        rows = self._execute
        by_state = rows(f"SELECT state, count(*) FROM slots WHERE {OF_TRAINING} GROUP BY state")
        settled = {SlotState(state): n for state, n in by_state}
        generations = tuple(map(_generation, rows("SELECT * FROM generations ORDER BY number")))
        (newest,) = rows(f"SELECT coalesce(max(number), -1) FROM slots WHERE {OF_TRAINING}").fetchone()
        held_out = tuple(
            _slot(row)
            for row in rows(
                "SELECT * FROM slots WHERE number >= ? ORDER BY number DESC LIMIT ?",
                [HELD_OUT_FROM, ANSWERS_KEPT],
            )
        )
        slots = SlotBalance(
            open_ones=tuple(
                _slot(row)
                for row in rows(f"SELECT * FROM slots WHERE state IN ({OPEN_STATES}) ORDER BY number")
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
                for (number,) in rows(
                    "SELECT DISTINCT slots.number FROM slots JOIN generations "
                    "ON slots.number >= lost_from_slot AND slots.number < first_slot ORDER BY slots.number"
                )
            ),
            generations=generations,
            data=next((DataSeen(*row) for _, *row in rows("SELECT * FROM data")), NO_DATA),
        )
        return Balance(
            slots=slots,
            spooled_at_s=dict(rows(f"SELECT slot, spooled_at_s FROM {_WAITING}")),
            spooled_bytes=dict(rows(f"SELECT slot, length(header) + length(columns) FROM {_WAITING}")),
            verdicts=tuple(
                (sampler_id, Verdict(verdict), n)
                for sampler_id, verdict, n in rows("SELECT * FROM verdicts ORDER BY sampler_id, verdict")
            ),
            staleness=tuple(map(tuple, rows("SELECT * FROM staleness ORDER BY sampler_id"))),
            last_step=next(map(_step, rows("SELECT * FROM steps ORDER BY version DESC LIMIT 1")), None),
            rollbacks=sum(1 for _ in rows("SELECT version FROM steps WHERE restored_version IS NOT NULL")),
            learner=next((Learner(*row) for _, *row in rows("SELECT * FROM learner")), None),
            announced=tuple(
                Announced(*row)
                for row in rows("SELECT * FROM versions ORDER BY number DESC LIMIT ?", [VERSIONS_REMEMBERED])
            ),
            accepts_loss=bool(generations) and self._is_loss_accepted(generations[-1].first_slot),
            bad_prompts=tuple(
                _bad_prompt(row)
                for row in rows("SELECT * FROM bad_prompts ORDER BY at_s DESC LIMIT ?", [BAD_PROMPTS])
            ),
            standings=tuple(Standing(*row) for row in rows("SELECT * FROM standings ORDER BY sampler_id")),
            evaluations=EvaluationBalance(
                tuple(Evaluation(*row) for row in rows("SELECT * FROM evaluations ORDER BY version")),
                held_out,
            ),
            task_digest=next((digest for _, digest in rows("SELECT * FROM task_options")), b""),
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

    def _write(self, transaction: Transaction) -> None:
        put, write_each = self._put, self._write_each
        put("slots", *map(_row, transaction.slots))
        out_of_play = [slot.number for slot in transaction.slots if slot.state not in UNTRAINED]
        deleted = (number for number in (*out_of_play, *transaction.freed) if number not in transaction.kept)
        write_each("DELETE FROM groups WHERE slot = ?", ((number,) for number in deleted))
        for group, how in ((transaction.stored, Put.REFUSE), (transaction.graded, Put.REPLACE)):
            if group is not None:
                whose = (*slot_and_attempt(group.group_id), group.sampler_id, group.spooled_at_s)
                put("groups", (*whose, digest_of(group.parts), *group.parts), how=how)
        write_each(
            "INSERT INTO verdicts VALUES (?, ?, 1) "
            "ON CONFLICT (sampler_id, verdict) DO UPDATE SET n = verdicts.n + 1",
            ((sampler_id, verdict.value) for sampler_id, verdict in transaction.verdicts),
        )
        write_each(
            "INSERT INTO staleness VALUES (?, ?) "
            "ON CONFLICT (sampler_id) DO UPDATE SET versions = staleness.versions + excluded.versions",
            transaction.staleness,
        )
        for step in transaction.steps:
            lists = (json.dumps(step.group_ids), json.dumps(step.staleness_versions))
            put("steps", (step.version, *lists, step.restored_version), how=Put.REFUSE)
        if (generation := transaction.generation) is not None:
            *columns, lost = astuple(generation)
            first_and_last = (None, None) if lost is None else (lost.start, lost.stop - 1)
            put("generations", (*columns, *first_and_last))
        put("versions", *map(astuple, transaction.announced), how=Put.KEEP)
        write_each(
            "DELETE FROM bad_prompts WHERE prompt_index = ?", ((n,) for n in transaction.prompts.lifted)
        )
        for bad in transaction.prompts.bad:
            put("bad_prompts", (*astuple(bad)[:-2], json.dumps(bad.said_by)))
        put("standings", *map(_flat, transaction.standings))
        for table, only in (("data", transaction.data), ("learner", transaction.learner)):
            if only is not None:
                put(table, (1, *astuple(only)))
        if transaction.task_digest is not None:
            put("task_options", (1, transaction.task_digest))
        put("evaluations", *map(_flat, transaction.evaluations))

    def _write_each(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        if parameters := tuple(rows):  # SQLite takes 3 us for a statement without any
            self._execute_each(statement, parameters)

    def _put(self, table: str, *rows: tuple[Any, ...], how: Put = Put.REPLACE) -> None:
        if rows:
            self._put_all(table, rows, how)


def _step(row: tuple[int, str, str, int | None]) -> StepRecord:
    version, group_ids, staleness, restored_version = row
    return StepRecord(version, tuple(json.loads(group_ids)), tuple(json.loads(staleness)), restored_version)


def _generation(row: tuple[Any, ...]) -> Generation:
    number, first_slot, lost_from_slot, begun_at_s, first, last = row
    lost = None if first is None else range(first, last + 1)
    return Generation(number, first_slot, lost_from_slot, begun_at_s, lost)


def _bad_prompt(row: tuple[int, str, str, int, int, float, str]) -> BadPrompt:
    prompt_index, reason, detail, times, slot, at_s, said_by = row
    return BadPrompt(prompt_index, Failure(reason), detail, times, slot, at_s, tuple(json.loads(said_by)))


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
