"""The means by which a learner of a simulated run merges: production's MergeTaker, streams and servicer.

Tensors, journal and threads have stand-ins.

    contributor --over the network--> MergeServicer --> ContributorStreams --> MergeTaker --> journal
                                                          the learner's buffer --'
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Protocol

import torch

from learner.config import LearnerConfig
from learner.intake.batch_buffer import BatchBuffer
from learner.intake.trained_slots import TrainedSlots
from learner.merging.contribution import Contributed
from learner.merging.handed_in import HandedIn
from learner.merging.outer_optimizer import Merged, MergeInputs, merged_tensors
from learner.merging.outer_rates import OuterRates
from learner.training.merge_taker import MergeTaker
from learner.training.step_taken import StepTaken, merged_outcome
from node.clients.rollouts.outstanding_rollouts import OutstandingRollouts
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.identity.revocation import RevocationList
from node.rpc.call_ends import ConnectionLost
from node.serving.merge_servicer import MergeServicer
from node.values.groups.rollout import RolloutGroup
from node.values.groups.verdict import Verdict
from node.values.run import StepRecord
from simulation.faults import Plan
from simulation.hub import LAYOUT, root_of
from simulation.network import Stream
from simulation.reached import Instruments
from simulation.virtual_loop import Clock

SHAPES: Final = {"weights": torch.Size([8])}
"""Shapes of the only tensor, which is changed and merged as a model's are."""


class Account(Protocol):
    """The learner's own account of groups and steps."""

    version: int
    task_digest: bytes | None
    """Digest of the task's options, as the coordinator said last."""

    @property
    def trained_slots(self) -> TrainedSlots: ...

    def next_batch(
        self, groups: int, *, task_digest: bytes | None, is_wanted: Callable[[str], bool]
    ) -> tuple[RolloutGroup, ...]:
        """Evict what cannot be trained on any more, and take a batch."""

    async def keep(
        self, record: StepRecord, batch: tuple[RolloutGroup, ...], merged: Sequence[Contributed]
    ) -> None:
        """Put a step into the journal, then tell of it."""

    def passed_over(self, groups: Sequence[RolloutGroup], *, contributors: int) -> None:
        """Consume groups without a step, at so many connected contributors."""


def learner_config(plan: Plan) -> LearnerConfig:
    """Return the settings of a plan's learner."""
    return LearnerConfig.model_validate(
        {
            "model_dir": Path(),
            "learning_rate": 1e-6,
            "buffer_groups": plan.buffer_groups,
            "merge": {"listen": "127.0.0.1:0", **dict(plan.merge)},
        }
    )


@dataclass(frozen=True, slots=True)
class _Merge:
    """A merge that was made, and is not durable."""

    line: Any
    handed_in: tuple[HandedIn, ...]


class _State:
    """``TrainingState``, as far as a merge needs it."""

    def __init__(
        self,
        plan: Plan,
        account: Account,
        merged: Mapping[str, Contributed],
        revoked: Collection[str],
    ) -> None:
        self.config = learner_config(plan)
        self.policy = SimpleNamespace(
            parameters={name: torch.full(size, 10.0) for name, size in SHAPES.items()}
        )
        self.progress = SimpleNamespace(
            contributed=tuple(merged.values()), oldest_usable_version=0, outer_rates=OuterRates()
        )
        self.trainer = SimpleNamespace(words_before=None)
        self.merged = Merged()
        self._account = account
        self._revoked = revoked

    @property
    def version(self) -> int:
        return self._account.version

    @property
    def trained_slots(self) -> TrainedSlots:
        return self._account.trained_slots

    def take_merge(
        self, handed_in: Sequence[HandedIn], groups: Mapping[str, RolloutGroup], **_: object
    ) -> _Merge:
        assert self.config.merge is not None
        assert not {one.contributor for one in handed_in}.intersection(self._revoked)
        settings = self.config.merge.of_merge
        batch, outcome, _observed = merged_outcome(handed_in, groups, version=self.version, settings=settings)
        assert outcome.is_applied
        inputs = MergeInputs(handed_in, settings)
        merged = merged_tensors(inputs, SHAPES, words_before=None)  # type: ignore[arg-type]
        assert all(bool(change.isfinite().all()) for _name, change, _parts in merged)
        return _Merge(SimpleNamespace(groups=batch), tuple(handed_in))


class _Records:
    """``StepRecords``, as far as a merge needs it."""

    groups_wait_s = 0.0

    def __init__(self, account: Account) -> None:
        self._account = account
        self.contributors = 0
        """Connected."""

    async def keep(self, taken: _Merge | StepTaken, batch: Sequence[RolloutGroup]) -> bool:
        if isinstance(taken, StepTaken):
            self._account.passed_over(batch, contributors=self.contributors)
            return True
        names = tuple(group.group_id for group in batch)
        ages = tuple(self._account.version - group.oldest_version for group in batch)
        record = StepRecord(self._account.version + 1, names, ages)
        merged = [one.contributed for one in taken.handed_in]
        await self._account.keep(record, tuple(batch), merged)
        return True

    def refuse(self, groups: Sequence[RolloutGroup], *, verdict: Verdict) -> None:
        assert verdict is Verdict.UNINFORMATIVE
        self._account.passed_over(groups, contributors=self.contributors)


class _Drain:
    """``RolloutDrain``, as far as a merge needs it."""

    def __init__(self, outstanding: OutstandingRollouts, wake: Callable[[], None]) -> None:
        self._outstanding = outstanding
        self.wake = wake

    @property
    def unacknowledged(self) -> Sequence[StepRecord]:
        return self._outstanding.unacknowledged


class _Thread:
    async def do(self, work: Callable[[], Any]) -> Any:
        return work()


class Merging:
    """One life of it."""

    def __init__(
        self,
        plan: Plan,
        account: Account,
        merged: Mapping[str, Contributed],
        revoked: Collection[str],
        *,
        buffer: BatchBuffer,
        drain: OutstandingRollouts,
        wake: Callable[[], None],
        clock: Clock,
        reached: Counter[str],
    ) -> None:
        metrics: Any = Instruments(reached)
        records: Any = _Records(account)
        metrics.contributors = SimpleNamespace(set=partial(setattr, records, "contributors"))
        self.servicer = MergeServicer(root_of(0), LAYOUT, RevocationList(lambda: revoked))
        parts: dict[str, Any] = {
            "coordinator": account,
            "buffer": buffer,
            "intake": account,
            "drain": _Drain(drain, wake),
            "thread": _Thread(),
            "instruments": SimpleNamespace(clock=clock, metrics=SimpleNamespace(merging=metrics)),
        }
        state: Any = _State(plan, account, merged, revoked)
        run: Any = SimpleNamespace(
            batch_groups=plan.batch_groups, max_staleness_versions=plan.max_staleness_versions
        )
        self.taker = MergeTaker(state, records, self.servicer, run, **parts)

    async def serve(self, peer: Peer, said: Stream[Any], told: Stream[Any]) -> None:
        """Serve a contributor's stream until it ends."""
        context: Any = _Context(peer)
        try:
            if self.servicer.revocations.is_revoked(peer.node_id):
                raise RefusedError(Reason.REVOKED, f"{peer.node_id} was revoked")
            async with aclosing(self.servicer.Contribute(_messages(said), context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    told.send(response)
            told.end()
        except (RefusedError, ConnectionLost) as error:
            told.end(error)
        except asyncio.CancelledError:
            told.end(ConnectionLost("the learner is gone"))
            raise


class _Context:
    """The caller, as TLS proves it."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"peer_uri": [self._peer.spiffe_id.encode()]}


async def _messages(said: Stream[Any]) -> AsyncIterator[Any]:
    while (message := await said.next()) is not None:
        yield message
