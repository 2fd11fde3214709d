"""A training loop in the background of a test, at a hub that the test drives."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from learner.config import LearnerConfig
from learner.disk_wait import DiskWait
from learner.metrics import LearnerMetrics
from learner.step_log import StepLog
from learner.training.checkpoint import CheckpointStore
from learner.training.master_access import MasterAccess
from learner.training.model import Policy, load_policy
from learner.training.training_loop import TrainingLoop
from learner.training.training_state import TrainingState
from node.clients.rollout_drain import RolloutDrain
from node.clock import SystemClock
from node.identity.peer import Peer
from node.rollout import DeliveredGroup
from node.rpc.channel import Backoff, Purpose, dial
from node.run import EvaluationNotice, Role, RunSettings
from node.telemetry.metrics import NodeMetrics
from support.groups import SAMPLING, make_group
from support.scripted_hub import ScriptedHub
from support.step_settings import make_step_settings

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
STEP = make_step_settings(staleness_half_life_versions=8.0, micro_batch_tokens=256)


@dataclass
class Told:
    """Evaluations, as answers to heartbeats tell them."""

    evaluations: EvaluationNotice
    answer: asyncio.Event

    def say(self, evaluations: EvaluationNotice) -> None:
        self.evaluations = evaluations
        self.answer.set()
        self.answer = asyncio.Event()

    async def next_answer(self) -> None:
        await self.answer.wait()


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

    def delivered(
        self, group_id: str, *, version: int = 0, sampler_id: str = "sampler-a", **changes: object
    ) -> DeliveredGroup:
        group = make_group(group_id, version=version, layout_digest=self.policy.layout.digest)
        return DeliveredGroup(replace(group, **changes), sampler_id=sampler_id, spooled_at_s=0.0)  # type: ignore[arg-type]

    @property
    def waits_for(self) -> str:
        return self.node_metrics.waits_for

    def shown(self, what: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"heterorl_learner_{what}", labels)


@asynccontextmanager
async def learner(
    hub: ScriptedHub,
    model_dir: Path,
    state: Path,
    *,
    run: RunSettings = RUN,
    buffer_groups: int = 8,
    max_versions: int = 0,
    quarantine_mismatch_nats: float = math.inf,
    stop_at_reward: float | None = None,
    stop_window_versions: int = 16,
    evaluations: EvaluationNotice = NOT_EVALUATED,
) -> AsyncIterator[RunningLearner]:
    clock = SystemClock()
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry)
    node_metrics = NodeMetrics(registry, roles=["learner"], clock=clock)
    policy = load_policy(model_dir, device="cpu")
    optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-3)
    checkpoints = CheckpointStore(state / "checkpoints")
    training_state = TrainingState(
        policy,
        optimizer,
        checkpoints=checkpoints,
        settings=STEP,
        reward_window_versions=stop_window_versions,
        reference=None,
        clock=clock,
    )
    channel = dial(
        hub.target, Peer("run", Role.LEARNER, "learner"), purpose=Purpose.ROLLOUTS, now=clock.now()
    )
    drain = RolloutDrain(
        channel,
        learner_epoch=1,
        version=training_state.version,
        capacity_groups=buffer_groups,
        unacknowledged=training_state.progress.unacknowledged,
        backoff=Backoff(lambda: 0.1),
        count_lost_stream=metrics.lost_drain_streams.inc,
        waiting=node_metrics.waiting,
    )

    async def run_settings() -> RunSettings:
        return run

    async def announced(version: int) -> None:
        assert version > 0
        assert stop_at_reward is not None or version == max_versions

    told = Told(evaluations, asyncio.Event())
    written: list[tuple[int, int]] = []
    log = StepLog(state / "steps.jsonl")
    log.catch_up(training_state.progress.step)
    loop = TrainingLoop(
        training_state,
        step_log=log,
        config=LearnerConfig(
            model_dir=model_dir,
            learning_rate=1e-3,
            buffer_groups=buffer_groups,
            max_versions=max_versions,
            quarantine_mismatch_nats=quarantine_mismatch_nats,
            stop_at_reward=stop_at_reward,
            stop_window_versions=stop_window_versions,
        ),
        run_id="run",
        tokenizer_digest=b"t" * 16,
        run_settings=run_settings,
        drain=drain,
        announced=announced,
        evaluations=lambda: told.evaluations,
        next_answer=lambda: told.next_answer(),
        on_step=lambda line, batch: written.append((line.report.version, len(batch))),
        published=lambda: (7, 0.25),
        coordinator_now=clock.now,
        clock=clock,
        disk_wait=DiskWait(node_metrics=node_metrics, clock=clock, random=lambda: 0.1),
        metrics=metrics,
        node_metrics=node_metrics,
    )
    stopping = asyncio.Event()
    tasks = [
        asyncio.create_task(service.run(ready=lambda: None, stopping=stopping)) for service in (drain, loop)
    ]
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
            node_metrics,
        )
    finally:
        stopping.set()
        _, late = await asyncio.wait(tasks, timeout=5)
        for task in late:
            task.cancel()
        await channel.close(None)
