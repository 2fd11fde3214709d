"""The learner's side of Contribute as a test plays it: it deals, merges and publishes when it is told to."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from prometheus_client import CollectorRegistry
from torch import Tensor

from bench.held_policy import HeldPolicy
from heterorl.v1 import merge_pb2, merge_pb2_grpc
from learner.contributor.contributor import Contributor
from learner.contributor.held_words import HeldWords
from learner.contributor.local_masters import LocalMasters
from learner.contributor.local_trainer import LocalTrainer
from learner.contributor.metrics import ContributorMetrics
from learner.masters.master_words import MasterWords
from learner.merging.changes.coder import decode_tensors
from learner.merging.changes.word_changes import WordsBefore
from learner.merging.contribution import ContributionReport
from learner.merging.formulas.outer_step import mean_change, outer_step
from learner.merging.merge_settings import MergeSettings
from learner.model.model import Policy, load_policy
from learner.step.trainer import Trainer
from learner.step_settings import StepSettings
from node.errors import RefusedError
from node.identity.signatures import SigningKey
from node.rpc.channel import Purpose, dial
from node.system.clock import SystemClock
from node.telemetry.metrics import NodeMetrics
from node.values.groups.rollout import RolloutGroup
from node.values.policy import PolicyVersion
from node.values.roles import Role
from node.values.run import RunSettings
from node.weights.assembly.public_base import PublicBase
from node.weights.assembly.stored import StoredVersions
from node.weights.store.artifact_store import ArtifactStore
from node.wire.rollouts import group_to_wire
from support.groups import SAMPLING
from support.identity import MadeRun
from support.rpc import Serving, serving
from support.waiting import until
from support.weights import put_words

BATCH = 2


@dataclass
class HandedIn:
    """A contribution that came whole."""

    header: merge_pb2.ContributionHeader
    payload: bytes

    @property
    def report(self) -> ContributionReport:
        return ContributionReport.of_json(self.header.report)


@dataclass
class MergingLearner(merge_pb2_grpc.MergeServiceServicer):
    """Masters, their versions in a store, and streams of one contributor."""

    policy: Policy
    store: ArtifactStore
    key: SigningKey
    step: StepSettings
    merge: MergeSettings
    version: int = 0
    hellos: list[merge_pb2.ContributorHello] = field(default_factory=list)
    handed_in: list[HandedIn] = field(default_factory=list)
    credits: int = 0
    refuses: RefusedError | None = None
    """Refusal of all further streams."""
    _outgoing: "asyncio.Queue[merge_pb2.ContributeResponse | None]" = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self._words: dict[int, HeldPolicy] = {0: self._held(0)}

    async def Contribute(  # noqa: N802
        self, request: AsyncIterator[merge_pb2.ContributeRequest], context: Any
    ) -> AsyncIterator[merge_pb2.ContributeResponse]:
        if self.refuses is not None:
            raise self.refuses
        hello = (await anext(request)).hello
        self.hellos.append(hello)
        self.credits, self._outgoing = 0, asyncio.Queue()
        reading = asyncio.create_task(self._read(request))
        try:
            yield merge_pb2.ContributeResponse(terms=self.terms)
            while (message := await self._outgoing.get()) is not None:
                yield message
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        finally:
            reading.cancel()

    async def _read(self, request: AsyncIterator[merge_pb2.ContributeRequest]) -> None:
        async for message in request:
            match message.WhichOneof("message"):
                case "credit":
                    self.credits += message.credit.groups
                case "contribution":
                    payload = b""
                    while len(payload) < message.contribution.payload_bytes:
                        payload += (await anext(request)).payload
                    self.handed_in.append(HandedIn(message.contribution, payload))

    @property
    def terms(self) -> merge_pb2.MergeTerms:
        return merge_pb2.MergeTerms(
            step_settings=json.dumps(self.step.model_dump()).encode(),
            merge_settings=self.merge.model_dump_json().encode(),
            batch_groups=BATCH,
        )

    @property
    def masters(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.policy.parameters.items()}

    async def deal(self, *groups: RolloutGroup) -> None:
        """Deal groups, once there are credits for them."""
        await until(lambda: self.credits >= len(groups))
        self.credits -= len(groups)
        for group in groups:
            encoded = group_to_wire(group)
            response = merge_pb2.ContributeResponse()
            response.group.group_id, response.group.sampler_id = group.group_id, group.sampler_id
            response.group.header, response.group.columns = encoded.header, encoded.columns
            self._outgoing.put_nowait(response)

    def cut(self) -> None:
        """End the stream, as a cut connection does."""
        self._outgoing.put_nowait(None)

    def say(self, **message: Any) -> None:
        """Send a message."""
        self._outgoing.put_nowait(merge_pb2.ContributeResponse(**message))

    async def contribution(self, number: int) -> HandedIn:
        """Wait for a contribution."""
        await until(lambda: any(one.header.number == number for one in self.handed_in))
        return next(one for one in self.handed_in if one.header.number == number)

    def answer(self, number: int, version: int | None, detail: str = "") -> None:
        """Say into which version a contribution was merged; None: refused."""
        self.say(answer=merge_pb2.ContributionAnswer(number=number, merged_version=version, detail=detail))

    def merge_in(self, *contributions: HandedIn) -> int:
        """Make the next version of contributions of equal weight; return its number."""
        changes = [self.change_of(one) for one in contributions]
        for name, theta in self.masters.items():
            if name in changes[0]:
                mean = mean_change([(1 / len(changes), one[name]) for one in changes])
                outer_step(theta, None, mean, rate=self.merge.outer_rate, beta=self.merge.outer_momentum)
        return self.make_version()

    def make_version(self) -> int:
        """Publish the masters as the next version; return its number."""
        self.version += 1
        self._words[self.version] = self._held(self.version)
        self._publish()
        return self.version

    def change_of(self, one: HandedIn) -> dict[str, Tensor]:
        """Return what a contribution hands in."""
        shapes = {name: tensor.shape for name, tensor in self.masters.items()}
        before = self._words[one.header.base_version].words
        layout = self.policy.layout
        words = WordsBefore(layout, lambda frame: before[layout.frames[frame].slice])
        return dict(decode_tensors(one.payload, self.merge, shapes, words_before=words))

    def _publish(self) -> None:
        """Put the newest version where the contributor's mirror would."""
        put_words(
            self.store,
            self.key,
            self._words[self.version].words,
            version=self.version,
            base=self._words[self.version - 1],
            layout=self.policy.layout,
        )

    def _held(self, version: int) -> HeldPolicy:
        words = np.empty(self.policy.layout.words, np.uint16)
        self.policy.snapshot(words)
        return HeldPolicy.of(version, words, layout=self.policy.layout)


@dataclass
class Contributing:
    """A contributor at such a learner."""

    learner: MergingLearner
    policy: Policy
    trainer: LocalTrainer
    registry: CollectorRegistry
    node_metrics: NodeMetrics
    stopping: asyncio.Event
    task: "asyncio.Task[None]"
    serving: Serving

    @property
    def masters(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.policy.parameters.items()}

    @property
    def version(self) -> float | None:
        return self.shown("version")

    def shown(self, what: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"heterorl_contributor_{what}", labels)

    async def stop(self) -> None:
        self.stopping.set()
        await asyncio.wait_for(self.task, timeout=60)


@asynccontextmanager
async def contributing(
    made: MadeRun,
    directory: Path,
    model_dir: Path,
    *,
    step: StepSettings,
    merge: MergeSettings,
    head: PolicyVersion | None = None,
) -> AsyncIterator[Contributing]:
    """Run a contributor until the body ends."""
    key, clock = SigningKey.generate(), SystemClock()
    store = ArtifactStore(
        directory / "versions", public_key=key.public_key, run_id="run", retained_keyframes=1
    )
    learner = MergingLearner(load_policy(model_dir, device="cpu"), store, key, step, merge)
    policy, registry = load_policy(model_dir, device="cpu"), CollectorRegistry()
    words = policy.master_words
    assert isinstance(words, MasterWords)
    base = PublicBase.keep(directory / "base", words.digests(), words.copy_frames, layout=words.layout)
    held = HeldWords(StoredVersions(store, policy.layout, base.words), base.version)
    node_metrics = NodeMetrics(registry, roles=["contributor"], clock=clock)

    async def run_settings() -> RunSettings:
        return RunSettings("addition", 2, BATCH, 8, 1.0, head, SAMPLING)

    add = partial(merge_pb2_grpc.add_MergeServiceServicer_to_server, learner)
    async with serving(made, add, identity=made.learner) as served:
        channel = dial(
            served.address,
            made.contributor,
            purpose=Purpose.CONTRIBUTIONS,
            now=time.time(),
            server=Role.LEARNER,
        )
        async with channel:
            steps = Trainer(policy, None, load_reference=lambda: load_policy(model_dir, device="cpu"))
            trainer = LocalTrainer(steps, LocalMasters(policy), held)
            contributor = Contributor(
                channel,
                trainer,
                held,
                store,
                layout_digest=policy.layout.digest,
                numbered_after=0,
                run_settings=run_settings,
                clock=clock,
                random=lambda: 0.1,
                metrics=ContributorMetrics(registry),
                node_metrics=node_metrics,
            )
            stopping = asyncio.Event()
            task = asyncio.create_task(contributor.run(ready=lambda: None, stopping=stopping))
            running = Contributing(learner, policy, trainer, registry, node_metrics, stopping, task, served)
            try:
                yield running
            finally:
                stopping.set()
                task.cancel()
                await asyncio.wait({task})
