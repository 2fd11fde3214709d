"""Does what ``contributor_state`` says: trains, hands in, goes over to versions; a service.

    stream --terms, groups, answers--> state --next move--> trainer, in a thread
    mirror --versions--> store ----------^                     '--contribution--> stream

Nothing of it is durable: a contributor that starts again begins at the newest version, with moments of zero,
and the learner deals the groups that it held to others.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import grpc.aio

from learner.contributor.contributor_state import (
    Adopt,
    ContributorState,
    HandIn,
    Leave,
    Train,
    WaitFor,
)
from learner.contributor.held_words import HeldWords
from learner.contributor.local_trainer import LocalTrainer
from learner.contributor.metrics import ContributorMetrics
from learner.contributor.terms import Terms
from node.clients.contributions.contribute_stream import (
    OwedToLearner,
    contribute_stream,
    say_goodbye,
)
from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost
from node.system.backoff import CONTRIBUTOR_BACKOFF_CAP_S, Backoff
from node.system.clock import Clock
from node.system.waits import run_until, side_by_side, wait_at_most
from node.telemetry.metrics import NodeMetrics
from node.values.contribution import (
    ContributionAnswer,
    ContributorHello,
    GroupsTaken,
    MergeTerms,
    ToContributor,
)
from node.values.groups.rollout import EncodedGroup
from node.values.run import RunSettings
from node.weights.store.artifact_store import ArtifactStore

logger = logging.getLogger(__name__)

LAST_ANSWER_LIMIT_S: Final = 10.0
"""Longest wait for the answer to the last contribution once the contributor stops: a merge may wait for
others, and the learner has the contribution then."""


class Contributor:
    """A service; ready at once."""

    name = "contributor"

    def __init__(
        self,
        channel: grpc.aio.Channel,
        trainer: LocalTrainer,
        words: HeldWords,
        store: ArtifactStore,
        *,
        layout_digest: bytes,
        numbered_after: int,
        run_settings: Callable[[], Awaitable[RunSettings]],
        clock: Clock,
        random: Callable[[], float],
        metrics: ContributorMetrics,
        node_metrics: NodeMetrics,
    ) -> None:
        """Contribute over ``channel``, to the learner; ``numbered_after``: see ``ContributorState``."""
        self._state = ContributorState(numbered_after=numbered_after)
        self._trainer = trainer
        self._words = words
        self._store = store
        self._run_settings = run_settings
        self._clock = clock
        self._backoff = Backoff(random)
        self._metrics = metrics
        self._node_metrics = node_metrics
        self._changed = asyncio.Event()
        self._terms: Terms | None = None
        """The terms that the trainer goes by."""
        self._handed_in_at_s = 0.0
        self._stops_at_s: float | None = None
        self._layout_digest = layout_digest
        self._base_root = words.version.root
        self._channel = channel
        self._stream = contribute_stream(
            channel, self, backoff=Backoff(random, cap_s=CONTRIBUTOR_BACKOFF_CAP_S)
        )

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Contribute until ``stopping``; then end the step, hand in what is trained and give the rest back.

        Raises:
            RefusedError: the learner has another model. StartupError: its terms cannot be kept.
            TrainingError: masters were not finite.
        """
        ready()
        loop = asyncio.get_running_loop()
        await run_until(stopping, self._join())
        if stopping.is_set():
            return
        with self._store.listening(lambda: loop.call_soon_threadsafe(self._changed.set)):
            async with side_by_side() as tasks:
                stream = tasks.create_task(self._stream.run())
                stopped = tasks.create_task(self._wake_at(stopping))
                await self._work(stopping)
                stream.cancel()
                stopped.cancel()
        if self._state.held_group_ids:
            await say_goodbye(self._channel, self._hello(self._state.travelling_group_ids))

    def hello(self) -> ContributorHello:
        """Begin a new stream: say what is here; a contribution under way is owed again."""
        self._state.connected()
        return self._hello(self._state.held_group_ids)

    def take_owed(self) -> OwedToLearner:
        """Return what to send now, and count it as sent."""
        return self._state.take_owed()

    def hear(self, told: ToContributor) -> None:
        """Take what the learner tells. Raises StartupError, ConnectionLost: as ``Account``."""
        match told:
            case MergeTerms():
                self._state.told(told)
            case EncodedGroup():
                if not self._state.has_room_for(told.group_id):
                    raise ConnectionLost(f"the learner dealt group {told.group_id} beyond the credits")
                self._state.delivered(told)
            case ContributionAnswer():
                if self._state.answered(told):
                    self._note_answer(told)
            case GroupsTaken():
                self._state.taken(told.group_ids)
        self._stream.wake()
        self._changed.set()

    def lost(self) -> None:
        """Note that a stream was lost."""
        self._metrics.lost_streams.inc()

    def refused(self, reason: Reason) -> None:
        """Note that a stream was refused, for now."""
        self._metrics.refused_streams.labels(reason).inc()

    def _hello(self, held_group_ids: tuple[str, ...]) -> ContributorHello:
        return ContributorHello(self._layout_digest, self._base_root, held_group_ids)

    async def _join(self) -> None:
        head = (await self._run_settings()).head
        self._state.starts_from(0 if head is None else head.number)

    async def _wake_at(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._changed.set()

    async def _work(self, stopping: asyncio.Event) -> None:
        while True:
            self._changed.clear()
            self._state.available(await asyncio.to_thread(self._words.newest))
            if (terms := self._state.terms) is not None and terms != self._terms:
                await asyncio.to_thread(self._trainer.take, terms)
                self._terms = terms
                continue  # the next move goes by the terms that the trainer has
            self._metrics.held_groups.set(self._state.held_groups)
            match self._state.next_move(is_stopping=stopping.is_set()):
                case Train(batch):
                    await self._train(batch)
                case HandIn(number):
                    await self._hand_in(number)
                case Adopt() as move:
                    await self._adopt(move)
                case WaitFor(what):
                    limit_s = self._rest_s(stopping)
                    if limit_s == 0:
                        return
                    with self._node_metrics.waiting(what):
                        await wait_at_most(self._changed, limit_s)
                case Leave():
                    return
            self._stream.wake()

    def _rest_s(self, stopping: asyncio.Event) -> float | None:
        """Return how long the contributor may still wait; None: it is not to stop."""
        if not stopping.is_set():
            return None
        now = self._clock.monotonic()
        self._stops_at_s = self._stops_at_s or now + LAST_ANSWER_LIMIT_S
        return max(0.0, self._stops_at_s - now)

    async def _train(self, batch: Sequence[EncodedGroup]) -> None:
        started_s, version = self._clock.monotonic(), self._state.version
        outcome = await asyncio.to_thread(self._trainer.step, batch, version=version)
        self._state.trained([group.group_id for group in batch])
        step_s = self._clock.monotonic() - started_s
        self._metrics.step_seconds.observe(step_s)
        applied = "step" if outcome.is_applied else "uninformative"
        what = applied if outcome.is_finite else "not_finite"
        self._metrics.batches.labels(what).inc()
        self._metrics.idle_steps.inc(outcome.is_applied and bool(self._trainer.notice))
        fields = {"version": version, "groups": len(batch), "outcome": what, "step_s": round(step_s, 3)}
        logger.info("batch trained on", extra={**fields, "reward_mean": outcome.numbers.batch.reward_mean})

    async def _hand_in(self, number: int) -> None:
        started_s, version = self._clock.monotonic(), self._state.version
        own = await asyncio.to_thread(self._trainer.hand_in, number, version=version)
        self._handed_in_at_s = self._clock.monotonic()
        self._state.handed_in(own.contribution)
        self._metrics.hand_in_seconds.observe(self._handed_in_at_s - started_s)
        payload_bytes = len(own.contribution.payload)
        self._metrics.payload_bytes.inc(payload_bytes)
        self._metrics.change_norm.set(own.norm)
        fields = {"number": number, "version": version, "steps": own.steps, "norm": own.norm}
        if own.steps and not own.norm:
            logger.warning("a contribution changes nothing", extra={**fields, "why": self._trainer.notice})
        logger.info("contribution handed in", extra={**fields, "bytes": payload_bytes})

    def _note_answer(self, answer: ContributionAnswer) -> None:
        if answer.merged_version is not None:
            self._metrics.contributions.labels("merged").inc()
            logger.info(
                "contribution merged", extra={"number": answer.number, "version": answer.merged_version}
            )
            return
        self._metrics.contributions.labels("refused").inc()
        logger.warning(
            "contribution refused, its groups are dealt again",
            extra={"number": answer.number, "detail": answer.detail},
        )

    async def _adopt(self, move: Adopt) -> None:
        travelled = not self._state.is_idle
        try:
            await asyncio.to_thread(self._trainer.adopt, move.version, is_refused=move.is_refused)
        except RefusedError as refused:
            self._node_metrics.count_refusal(service="PolicyService", reason=refused.reason)
            logger.warning("version not made", extra={"version": move.version, "detail": str(refused)})
            await self._backoff.wait(self._changed)
            return
        self._backoff.reset()
        if travelled:
            self._metrics.answer_seconds.observe(self._clock.monotonic() - self._handed_in_at_s)
        self._state.adopted(move.version)
        self._metrics.version.set(move.version)
        logger.info("trains from a version", extra={"version": move.version})
