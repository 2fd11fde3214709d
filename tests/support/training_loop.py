"""A training loop in the background of a test, at a hub that the test drives."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from heterorl.v1 import merge_pb2_grpc
from learner.config import LearnerConfig
from learner.intake.batch_buffer import BatchBuffer
from learner.journal.entry_rows import Origin
from learner.masters.master_access import MasterAccess
from learner.masters.master_words import PolicyWords, root_of
from learner.metrics import Instruments
from learner.model.model import Policy, load_policy
from learner.publishing.earlier_versions import EarlierVersions
from learner.step_log import StepLine, StepLog
from learner.training.evidence import Evidence
from learner.training.training_loop import TrainingLoop
from learner.training.training_state import TrainingState
from node.clients.rollouts.rollout_drain import RolloutDrain
from node.identity.peer import Peer
from node.identity.revocation import RevocationList
from node.rpc.calls.live_rpcs import Admission
from node.rpc.calls.server import RpcServer
from node.rpc.channel import Purpose, dial
from node.serving.merge_servicer import MergeServicer
from node.system.backoff import Backoff
from node.system.clock import SystemClock
from node.telemetry.metrics import NodeMetrics
from node.values.evaluation import EvaluationNotice
from node.values.groups.rollout import RolloutGroup
from node.values.policy import PolicyVersion
from node.values.roles import Role
from node.values.run import RunSettings, StepReport
from node.weights.assembly.public_base import PublicBase
from support.groups import SAMPLING, make_group
from support.scripted_hub import ScriptedHub, scripted_hub
from support.waiting import until

BATCH = 2
NOT_EVALUATED = EvaluationNotice(announced=1 << 32)
RUN = RunSettings(
    task="addition",
    group_size=2,
    batch_groups=BATCH,
    max_staleness_versions=1,
    heartbeat_interval_s=1.0,
    head=None,
    sampling=SAMPLING,
)


@dataclass
class Told:
    """A coordinator that says of evaluations what the test lets it say."""

    run: RunSettings
    evaluations: EvaluationNotice
    answer: asyncio.Event = field(default_factory=asyncio.Event)
    run_id: str = "run"
    tokenizer_digest: bytes = b"t" * 16
    task_digest: bytes | None = None

    def say(self, evaluations: EvaluationNotice) -> None:
        self.evaluations = evaluations
        self.answer.set()
        self.answer = asyncio.Event()

    async def next_answer(self) -> None:
        await self.answer.wait()

    async def settings(self) -> RunSettings:
        return self.run

    async def announced(self, version: int) -> None:
        assert version > 0

    def now(self) -> float:
        return time.time()


@dataclass
class RunningLearner:
    loop: TrainingLoop
    drain: RolloutDrain
    access: MasterAccess
    policy: Policy
    registry: CollectorRegistry
    tasks: list[asyncio.Task[None]]
    stopping: asyncio.Event
    written: list[tuple[int, int]]
    """Version and number of groups of every step that observers were told of."""
    told: Told
    node_metrics: NodeMetrics
    state: TrainingState
    evidence: Evidence
    published: list[PolicyVersion]
    """Versions that a publisher would have published, the newest last."""
    hub: ScriptedHub
    directory: Path
    base: PublicBase
    server: RpcServer | None
    """The contributors' server, where the learner merges."""
    revoked: set[str]
    """Contributors that are shut out."""

    @property
    def report(self) -> StepReport | None:
        """The newest step, as heartbeats would report it."""
        return self.evidence.report_of(self.state.progress.step)

    def delivered(
        self, group_id: str, *, version: int = 0, sampler_id: str = "sampler-a", **changes: object
    ) -> RolloutGroup:
        """Return a group of its own prompt: the same completions of the same one would be copies."""
        group = make_group(group_id, version=version, layout_digest=self.policy.layout.digest)
        prompt = np.array([int(digit) for digit in group_id if digit.isdigit()], np.int32)
        return replace(group, **{"sampler_id": sampler_id, "prompt_token_ids": prompt, **changes})  # type: ignore[arg-type]

    async def give(self, *group_ids: str, **changes: Any) -> None:
        """Let the hub deliver groups, as ``delivered`` makes them."""
        await self.hub.give(*(self.delivered(one, **changes) for one in group_ids))

    async def train(self, onto: int, *, groups: int = BATCH, **changes: Any) -> None:
        """Let the hub deliver a batch to a learner at version ``onto``, and wait until that is the next.

        Args:
            changes: as for ``delivered``; the groups are of version ``onto`` unless they say otherwise.
        """
        await self.give(*(f"{onto}{n}.1" for n in range(groups)), **{"version": onto, **changes})
        await until(lambda: self.loop.version > onto)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of the step log."""
        return [json.loads(line) for line in (self.directory / "steps.jsonl").read_text().splitlines()]

    @property
    def waits_for(self) -> str:
        return self.node_metrics.waits_for

    def shown(self, what: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"heterorl_learner_{what}", labels)


def kept_base(state: Path, words: PolicyWords) -> PublicBase:
    state.mkdir(exist_ok=True)
    return PublicBase.keep(state / "base.words", words.digests(), words.copy_frames, layout=words.layout)


def contributors_server(contributors: MergeServicer, *, listen: str) -> RpcServer:
    return RpcServer(
        "contributors",
        listen=listen,
        servicers=(partial(merge_pb2_grpc.add_MergeServiceServicer_to_server, contributors),),
        identity=None,
        admission=Admission("run", contributors.revocations, SystemClock(), lambda **_: None),
        drain_grace_s=1.0,
    )


@asynccontextmanager
async def learner(
    hub: ScriptedHub,
    model_dir: Path,
    state: Path,
    *,
    run: RunSettings = RUN,
    evaluations: EvaluationNotice = NOT_EVALUATED,
    head: PolicyVersion | None = None,
    device: str = "cpu",
    **settings: Any,
) -> AsyncIterator[RunningLearner]:
    clock = SystemClock()
    registry = CollectorRegistry()
    instruments = Instruments.of(registry, NodeMetrics(registry, roles=["learner"], clock=clock), clock=clock)
    config = LearnerConfig(
        model_dir=model_dir,
        device=device,
        weight_decay=0.01,
        kl_coefficient=0.0,
        staleness_half_life_versions=8.0,
        micro_batch_tokens=256,
        **{"learning_rate": 1e-3, "buffer_groups": 8, "quarantine_mismatch_nats": math.inf, **settings},
    )
    policy = load_policy(model_dir, device=device)
    words = policy.master_words
    published = [PolicyVersion(0, root_of(words))]
    base = kept_base(state, words)
    if head is not None:
        published.append(head)
    training_state = TrainingState(
        config,
        policy,
        directory=state,
        origin=Origin("run", policy.layout.digest.hex(), published[0].root.hex()),
        clock=clock,
        published=lambda: published[-1],
    )
    training_state.master_access.newest_published = (7, 0.25)
    channel = dial(
        hub.target, Peer("run", Role.LEARNER, "learner"), purpose=Purpose.ROLLOUTS, now=clock.now()
    )
    buffer = BatchBuffer(capacity_groups=config.buffer_groups)
    drain = RolloutDrain(
        channel,
        buffer.arrive,
        learner_epoch=1,
        version=training_state.version,
        capacity_groups=config.buffer_groups,
        unacknowledged=training_state.progress.unacknowledged,
        backoff=Backoff(lambda: 0.1),
        count_lost_stream=instruments.metrics.lost_drain_streams.inc,
        waiting=instruments.node_metrics.waiting,
    )
    told = Told(run, evaluations)
    written: list[tuple[int, int]] = []

    def on_step(line: StepLine | None, batch: Sequence[RolloutGroup]) -> None:
        if line is not None:
            written.append((line.version, len(batch)))

    log = StepLog(state / "steps.jsonl")
    log.catch_up(training_state.progress.step)
    evidence = Evidence(config, clock=clock, metrics=instruments.metrics)
    contributors, server, revoked = None, None, set[str]()
    if config.merge is not None:
        contributors = MergeServicer(base.model.root, policy.layout.digest, RevocationList(lambda: revoked))
        server = contributors_server(contributors, listen=config.merge.listen)
    loop = TrainingLoop(
        training_state,
        coordinator=told,
        buffer=buffer,
        drain=drain,
        evidence=evidence,
        step_log=log,
        on_step=on_step,
        earlier=EarlierVersions(state, base, policy.layout),
        was_skipped=lambda _: False,
        instruments=instruments,
        contributors=contributors,
    )
    stopping = asyncio.Event()
    tasks = [
        asyncio.create_task(service.run(ready=lambda: None, stopping=stopping)) for service in (drain, loop)
    ]
    if server is not None:
        tasks.append(asyncio.create_task(server.run(ready=lambda: None, stopping=stopping)))
    try:
        yield RunningLearner(
            loop,
            drain,
            training_state.master_access,
            policy,
            registry,
            tasks,
            stopping,
            written,
            told,
            instruments.node_metrics,
            training_state,
            evidence,
            published,
            hub,
            state,
            base,
            server,
            revoked,
        )
    finally:
        stopping.set()
        _, late = await asyncio.wait(tasks, timeout=5)
        for task in late:
            task.cancel()
        await channel.close(None)


Start = Callable[..., AbstractAsyncContextManager[RunningLearner]]


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedHub]:
    async with scripted_hub() as hub:
        yield hub


@pytest.fixture
def start(scripted: ScriptedHub, model_dir: Path, tmp_path: Path) -> Start:
    """Start learners of one directory at one hub, one after the other."""
    return partial(learner, scripted, model_dir, tmp_path)
