"""A contributor of a simulated run: production's Contributor, state and stream; no tensors but one of eight.

It follows versions as far as their numbers go. What it hands in is coded as a model's change is.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from bench.shared.fed_back_encoder import FedBackEncoder
from heterorl.v1 import merge_pb2
from learner.contributor.contributor import Contributor
from learner.contributor.local_trainer import OwnContribution
from learner.contributor.terms import Terms
from learner.merging.contribution import ContributionReport, LocalStep
from learner.step.train_step import StepOutcome
from learner.step_log import TrainedGroup
from learner.step_numbers import BatchFigures, StepNumbers
from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost
from node.system.backoff import Backoff
from node.values.contribution import Contribution, ContributionAnswer
from node.values.groups.rollout import EncodedGroup
from node.values.policy import Announcement, PolicyVersion
from node.values.roles import Role
from simulation.faults import Plan
from simulation.hub import LAYOUT, Hub, announcement, peer_of, root_of
from simulation.hub_calls import HubCalls
from simulation.learner import SimulatedLearner
from simulation.merging import SHAPES
from simulation.network import Network, Stream
from simulation.reached import Instruments, NamedWaits
from simulation.virtual_loop import Clock, Process
from simulation.witness import Witness

LOOK_S: Final = 1.0
FETCH_S: Final = 0.5
NOT_FINITE: Final = 0.02
"""Share of the batches."""
GROUP_TOKENS: Final = 6

_FIGURES: Final = BatchFigures(
    reward_mean=0.5,
    reward_deviation=0.5,
    zero_advantage_ratio=0.0,
    completion_tokens_mean=3.0,
    completion_tokens_p95=3.0,
    completion_tokens_max=3,
    prompt_tokens_mean=3.0,
    cut_ratio=0.0,
    staleness_mean_versions=0.0,
    staleness_max_versions=0,
    grader_metrics={},
)


class SimulatedContributor:
    """One life of a contributor."""

    def __init__(
        self,
        plan: Plan,
        process: Process,
        *,
        network: Network,
        hub: Callable[[], Hub | None],
        learner: Callable[[], SimulatedLearner | None],
        draw: random.Random,
        clock: Clock,
        witness: Witness,
        reached: Counter[str],
        replaced: Callable[["SimulatedContributor"], None],
    ) -> None:
        self.process = process
        self._replaced = replaced
        self.name = process.name
        self.peer = peer_of(process.name, Role.CONTRIBUTOR)
        self.slowness = 1.0
        self.lies = False
        """Whether it says what is not so: of its groups, its steps, its change."""
        self.network, self.learner, self.witness = network, learner, witness
        self._call = HubCalls(process, network, hub)
        self._draw = draw
        self._waits = NamedWaits(reached)
        self._stopping = asyncio.Event()
        self.words = _Words()
        trainer: Any = _Trainer(self, plan, draw)
        parts: dict[str, Any] = {
            "words": self.words,
            "store": self.words,
            "metrics": Instruments(reached),
            "node_metrics": self._waits,
            "run_settings": self._run_settings,
            "channel": _Channel(self, draw),
        }
        self._contributor = _Slow(
            trainer=trainer,
            layout_digest=LAYOUT,
            numbered_after=int(1000 * clock.now()),
            clock=clock,
            random=draw.random,
            **parts,
        )
        self._contributor.owner = self
        self._plan = plan

    @property
    def waits_for(self) -> str:
        return self._waits.waits_for

    def step_s(self) -> float:
        return self._plan.step_s * self.slowness * self._draw.uniform(0.5, 1.5)

    def start(self) -> None:
        self.process.spawn(self._run())
        self.process.spawn(self._mirror())

    def stop(self) -> None:
        """Let it end in good order, as by SIGTERM."""
        self._stopping.set()

    async def _run(self) -> None:
        try:
            await self._contributor.run(ready=lambda: None, stopping=self._stopping)
        except RefusedError as refused:
            if refused.reason is Reason.REVOKED:
                return
            if refused.reason is not Reason.DUPLICATE:
                self.witness.violated(f"{self.name} is refused for good: {refused}")
            self._replaced(self)

    async def _run_settings(self) -> Any:
        backoff = Backoff(self._draw.random)
        while True:
            try:
                return await self._announced()
            except (ConnectionLost, RefusedError):
                await backoff.wait()

    async def _announced(self) -> "_Head":
        announced: Announcement | None = await self._call(announcement)
        return _Head(None if announced is None else announced.head)

    async def _mirror(self) -> None:
        """Fetch the newest version, as soon as it is announced."""
        while True:
            await asyncio.sleep(LOOK_S * self._draw.uniform(0.5, 1.5))
            try:
                head = (await self._announced()).head
            except (ConnectionLost, RefusedError):
                continue
            if head is not None and head.number > self.words.newest():
                await asyncio.sleep(FETCH_S * self._draw.random())
                self.words.fetched(head.number)


class _Head:
    """``RunSettings``, as far as a contributor needs them."""

    def __init__(self, head: PolicyVersion | None) -> None:
        self.head = head


class _Slow(Contributor):
    """Takes its time for a step, and says what it is told."""

    owner: SimulatedContributor

    async def _train(self, batch: Sequence[EncodedGroup]) -> None:
        await asyncio.sleep(self.owner.step_s())
        await super()._train(batch)

    def _note_answer(self, answer: ContributionAnswer) -> None:
        self.owner.witness.answered(self.owner.name, answer.number, answer.merged_version)
        super()._note_answer(answer)


class _Words:
    """``HeldWords`` and the store that they are made of."""

    def __init__(self) -> None:
        self.version = PolicyVersion(0, root_of(0))
        self._newest = 0
        self._listeners: list[Callable[[], None]] = []

    def newest(self) -> int:
        return self._newest

    def fetched(self, version: int) -> None:
        self._newest = version
        for listener in self._listeners:
            listener()

    def move_to(self, version: int) -> None:
        self.version = PolicyVersion(version, root_of(version))

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)


class _Trainer:
    """``LocalTrainer`` without a model."""

    notice = ""

    def __init__(self, contributor: SimulatedContributor, plan: Plan, draw: random.Random) -> None:
        self._contributor = contributor
        self._plan = plan
        self._draw = draw
        self._terms: Terms | None = None
        self._steps: list[LocalStep] = []
        self._uninformative: list[TrainedGroup] = []
        self._not_finite: list[TrainedGroup] = []

    def take(self, terms: Terms) -> None:
        self._terms = terms

    def step(self, batch: Sequence[EncodedGroup], *, version: int) -> StepOutcome:
        groups = tuple(TrainedGroup(one.group_id, one.sampler_id, 0) for one in batch)
        drawn = self._draw.random()
        is_finite, teaches = drawn >= NOT_FINITE, drawn >= NOT_FINITE + self._plan.uninformative
        kl_nats = (0.0,) * len(groups)
        outcome = StepOutcome(is_finite, 0.0, kl_nats, _numbers(len(groups) if teaches else 0))
        if not is_finite:
            self._not_finite += groups
        elif not teaches:
            self._uninformative += groups
        else:
            self._steps.append(LocalStep(outcome.numbers, groups, kl_nats))
        return outcome

    def hand_in(self, number: int, *, version: int) -> OwnContribution:
        assert self._terms is not None
        steps, lie = tuple(self._steps), self._draw.randrange(5) if self._contributor.lies else None
        report = ContributionReport(steps, tuple(self._uninformative), tuple(self._not_finite))
        self._steps, self._uninformative, self._not_finite = [], [], []
        payload, size = b"", 1e9 if lie == 0 else 1.0
        if steps:
            change = {
                name: torch.full(shape, size * self._draw.uniform(0.9, 1.1)) for name, shape in SHAPES.items()
            }
            payload = FedBackEncoder(self._terms.merge, SHAPES).encode(change)
        match lie:
            case 1:
                report = ContributionReport(report.steps * 2, report.uninformative, report.not_finite)
            case 2:
                more = tuple(
                    TrainedGroup(name, "", 0) for name in self._contributor.witness.some_groups(self._draw)
                )
                report = ContributionReport(report.steps, report.uninformative + more, report.not_finite)
            case 3:
                payload = payload[:-1]
            case 4:
                version += 1000
        if lie is not None and number % 3 == 0:
            report, payload = ContributionReport((), tuple(report.groups)), b""
        # Those that taught nothing are told of after the version, or trained on again.
        trained_on = tuple(one.group_id for step in report.steps for one in step.groups)
        self._contributor.witness.handed_in(self._contributor.name, number, trained_on)
        idle = (*report.uninformative, *report.not_finite)
        self._contributor.witness.said_nothing(self._contributor.name, (one.group_id for one in idle))
        contribution = Contribution.of(number, version, report.to_json(), payload)
        return OwnContribution(contribution, len(report.steps), norm=1.0)

    def adopt(self, version: int, *, is_refused: bool) -> None:
        self._contributor.words.move_to(version)


def _numbers(groups: int) -> StepNumbers:
    return StepNumbers(
        batch=_FIGURES,
        teaching_groups=groups,
        tokens=groups * GROUP_TOKENS,
        gradient_norm=1.0,
        learning_rate=1e-6,
        kl_nats=0.0,
        surprisal_nats=1.0,
        ess_ratio=1.0,
        clip_fraction=0.0,
        clamped_tokens=0,
        reference_kl_nats=None,
        truncated_fraction=None,
    )


class _Channel:
    """A channel to the learner, as its stub uses it."""

    def __init__(self, contributor: SimulatedContributor, draw: random.Random) -> None:
        self._contributor = contributor
        self._draw = draw

    def stream_stream(self, *_: object, **__: object) -> Callable[[], "_Call"]:
        return lambda: _Call(self._contributor, self._draw)


class _Call:
    """One stream to the learner. Contributions come twice now and then, as after a reconnection."""

    def __init__(self, contributor: SimulatedContributor, draw: random.Random) -> None:
        self._contributor = contributor
        self._draw = draw
        process, learner = contributor.process, contributor.learner()
        self._link = contributor.network.link(contributor.name, "learner")
        self._said: Stream[Any] = Stream(process.loop, self._link)
        self._told: Stream[Any] = Stream(process.loop, self._link)
        self._newest: list[merge_pb2.ContributeRequest] = []
        """The newest contribution, as far as it was sent."""
        self._serving: asyncio.Task[None] | None = None
        self._server = None if learner is None else learner.process
        if learner is None or learner.merging is None or self._link.is_cut:
            self._told.end(ConnectionLost("the learner cannot be reached"))
        else:
            serve = learner.merging.serve(contributor.peer, self._said, self._told)
            self._serving = learner.process.spawn(serve)

    async def write(self, message: merge_pb2.ContributeRequest) -> None:
        if message.HasField("hello") and self._contributor.lies:
            message.hello.held_group_ids.extend(self._contributor.witness.some_groups(self._draw))
        self._said.send(message)
        if message.HasField("contribution"):
            self._newest = []
        self._newest.append(message)
        begun = self._newest[0].contribution
        if begun.number and sum(len(one.payload) for one in self._newest) == begun.payload_bytes:
            if self._link.repeats():
                for one in self._newest:
                    self._said.send(one)
            self._newest = []

    async def read(self) -> Any:
        return await self._told.next()

    def cancel(self) -> None:
        self._said.end(ConnectionLost("the contributor's stream ended"))
        self._told.end(ConnectionLost("the contributor's stream ended"))
        if self._serving is not None and self._server is not None and self._server.is_alive:
            self._contributor.process.loop.call_later(self._link.delay_s(), self._serving.cancel)
