"""Faults planted in production code, each of which the simulator has to find within SEEDS seeds.

Each is a mistake that a person might make: a condition turned, a step left out, an order changed.

    python -m simulation --planted      finds each, and tells its shortest story
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from learner.intake.batch_buffer import BatchBuffer
from learner.merging.contributor_streams import ContributorStreams
from learner.merging.deals import Deals
from learner.merging.doubts import Doubts
from learner.training.merge_taker import MergeTaker
from node.clients.rollouts.outstanding_rollouts import OutstandingRollouts
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.streams.learner_stream import LearnerStreams
from node.coordinator.transactions.run_ledger import RunLedger
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.decisions import leasing
from node.coordinator.work.samplers.sampler_standing import Standing
from node.coordinator.work.samplers.standings import Standings
from node.coordinator.work.slots.open_slots import OpenSlots
from node.coordinator.work.slots.slot_table import Claim, SlotTable
from node.values.run import StepRecord

SEEDS = 200


@dataclass(frozen=True, slots=True)
class Planted:
    name: str
    """The mistake, as a sentence."""
    plant: Callable[[], AbstractContextManager[object]]


def _patched(owner: object, name: str, wrong: Any) -> Callable[[], AbstractContextManager[object]]:
    return lambda: mock.patch.object(owner, name, wrong)


_claim = SlotTable.claim


def _claim_of_anybody(self: SlotTable, slot: int, attempt: int, holder: str) -> Claim:
    entry = self.open_slots.get(slot)
    named = None if entry is None else entry.attempt(attempt)
    return _claim(self, slot, attempt, holder if named is None else named.holder)


def _answers_before_disk(self: RunLedger, batch: Any) -> Any:
    async def commit() -> Exception | None:
        failure = await _commit(self, batch)
        return None if failure is not None else failure

    return commit()


_commit = RunLedger._commit


@contextmanager
def _keeps_what_failed() -> Iterator[None]:
    async def stays(self: RunLedger) -> None:
        self._is_ahead = False

    with mock.patch.object(RunLedger, "_go_back", stays):
        yield


def _never_delivers_anew(self: OpenSlots, held: Any) -> None:
    """Leave out what a new stream is owed again."""


def _acknowledges_first(self: OutstandingRollouts, step: Any) -> None:
    _stepped(self, step)
    self._unacknowledged.clear()


_stepped = OutstandingRollouts.stepped


def _evicts_late(self: BatchBuffer, *, version: int, **others: Any) -> Any:
    return _evict(self, version=version - 1, **others)


_evict = BatchBuffer.evict


def _counts_bound_twice(accounts: Accounts, *, behind_versions: int = 0) -> Any:
    found = _room(accounts, behind_versions=behind_versions)
    return replace(found, groups=found.groups + 2)


_room = leasing.room


def _expires_nothing(self: SlotTable, now: float) -> tuple[Any, ...]:
    return ()


def _forgets_standings(self: Ledger, facts: Sequence[Any]) -> None:
    _write_facts(self, [fact for fact in facts if not isinstance(fact, Standing)])


_write_facts = Ledger._write_facts


def _gives_newcomers_all(self: Standings, sampler_id: str, *, held: int, free: int, **others: Any) -> Any:
    found = _share(self, sampler_id, held=held, free=free, **others)
    return replace(found, leases=held + free, pause_s=0.0)


_share = Standings.share


def _forgets_newest_slot(self: Ledger) -> Any:
    balance = _balance(self)
    newest = max(0, balance.slots.next_slot - 1)
    is_open = any(slot.number == newest for slot in balance.slots.open_ones)
    slots = balance.slots if is_open else replace(balance.slots, next_slot=newest)
    return replace(balance, slots=slots)


_balance = Ledger.balance


async def _acknowledges_unwritten(self: LearnerStreams, stream: Any, said: Any) -> None:
    if not isinstance(said, StepRecord):
        await _hear(self, stream, said)
        return
    stream.acknowledgement = said.version
    stream.wake()
    with contextlib.suppress(Exception):
        await _hear(self, stream, said)


_hear = LearnerStreams.hear


def _knows_what_is_announced(self: Accounts, version: int) -> bool:
    return version == 0 or version in self.versions or self.is_on_offer(version)


def _gives_back_what_is_merged(self: MergeTaker, handed_in: Any, doubted: Any) -> None:
    groups = [group for one in handed_in for group in self._deals.handed_in(one.contributor).values()]
    _end_round(self, handed_in, doubted)
    self._buffer.put_back(groups)


_end_round = MergeTaker._end_round


def _knows_no_merged_contribution(self: ContributorStreams, deals: Any, terms: Any, **others: Any) -> None:
    _begin(self, deals, terms, **{**others, "merged": ()})


_begin = ContributorStreams.__init__


def _believes_anybody(self: Doubts, name: str, disputed: Any, **_: Any) -> frozenset[str]:
    return frozenset()


def _forgets_what_the_gone_held(self: Deals, *, now: float) -> list[Any]:
    _expire(self, now=now)
    return []


_expire = Deals.expire


PLANTED = (
    Planted("anybody may submit for anybody's lease", _patched(SlotTable, "claim", _claim_of_anybody)),
    Planted(
        "a commit that fails is answered as if it had not",
        _patched(RunLedger, "_commit", _answers_before_disk),
    ),
    Planted("memory keeps what the disk refused", _keeps_what_failed),
    Planted(
        "what the learner holds is never delivered again",
        _patched(OpenSlots, "deliver_anew", _never_delivers_anew),
    ),
    Planted(
        "the learner takes every step for acknowledged",
        _patched(OutstandingRollouts, "stepped", _acknowledges_first),
    ),
    Planted("groups one version too stale are trained on", _patched(BatchBuffer, "evict", _evicts_late)),
    Planted("two leases more than there is room for", _patched(leasing, "room", _counts_bound_twice)),
    Planted("leases never expire", _patched(SlotTable, "expire", _expires_nothing)),
    Planted("a standing is not written down", _patched(Ledger, "_write_facts", _forgets_standings)),
    Planted("whoever asks may hold all leases there are", _patched(Standings, "share", _gives_newcomers_all)),
    Planted(
        "a restart takes the newest slot number again", _patched(Ledger, "balance", _forgets_newest_slot)
    ),
    Planted(
        "a step is acknowledged before it is written",
        _patched(LearnerStreams, "hear", _acknowledges_unwritten),
    ),
    Planted(
        "groups are dealt again although merged",
        _patched(MergeTaker, "_end_round", _gives_back_what_is_merged),
    ),
    Planted(
        "a learner that starts again knows of no contribution that it merged",
        _patched(ContributorStreams, "__init__", _knows_no_merged_contribution),
    ),
    Planted(
        "one contributor's word that groups taught nothing consumes them",
        _patched(Doubts, "doubted", _believes_anybody),
    ),
    Planted(
        "groups of a contributor that is gone are dealt to nobody",
        _patched(Deals, "expire", _forgets_what_the_gone_held),
    ),
    Planted(
        "a version that is merged counts as one batch for the bound on staleness",
        _patched(Accounts, "bounds", property(lambda self: self.terms.bounds)),
    ),
    Planted(
        "a coordinator knows no version but those that it finds announced",
        _patched(Accounts, "has_been_made", _knows_what_is_announced),
    ),
)
