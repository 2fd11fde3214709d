"""Builds a sampler's services from its section of the configuration.

    policy sync --words--> engine thread <--requests-- rollouts --groups--> hub
         ^                                                ^
         `---- announcements, frames                      `---- settings, lost leases, clock: membership

Weights come from relays if there are any, otherwise from the hub, over channels of their own, so that a
heartbeat never waits behind them. Policy sync stops first, then rollouts, then membership: leases are renewed
until finished groups are submitted, and nobody writes to the engine's words once it is closed.
"""

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Final

from node.clients.heartbeats import Notices, PeerReports
from node.clients.membership_client import Member, MembershipClient
from node.clients.rollout_client import SamplerRolloutClient
from node.errors import StartupError
from node.identity.group_proof import GroupSigner
from node.identity.peer import Peer
from node.policy import PolicyVersion
from node.process.role_context import RoleContext
from node.process.service import Service, StopsAfter
from node.rpc.channel import Backoff, Purpose, dial
from node.run import Role
from node.telemetry.metrics import snapshot
from node.tokenizer import chat_template, chat_template_digest
from node.weights.transfer.fetcher import Fetcher
from node.weights.transfer.sources import Sources, dial_source
from sampler.config import SamplerConfig
from sampler.engines.engine import Engine
from sampler.engines.engine_registry import load_engine, load_in_own_process
from sampler.engines.engine_thread import EngineThread
from sampler.engines.restartable_engine import RestartableEngine
from sampler.metrics import SamplerMetrics
from sampler.rollouts.group_submitter import GroupSubmitter
from sampler.rollouts.leasing import TOO_OLD, Leasing
from sampler.rollouts.rollout_loop import RolloutLoop
from sampler.rollouts.work_queue import UNBEGUN, JobState, WorkQueue
from sampler.stopover import Stopover
from sampler.tasks.grader_pool import GraderPool
from sampler.tasks.grader_process import Grader
from sampler.tasks.local_graders import LocalGraders
from sampler.tasks.task import TaskSetup, task_setup
from sampler.versions.held_version import HeldVersion
from sampler.versions.policy_sync import PolicySync
from sampler.versions.saved_policy import SavedPolicy

BULK_CONNECTIONS: Final = 8
"""Connections for weights to each source, each opened when first needed: a step uses one, a keyframe all.
Eight fill 1 Gbit/s at 150 ms, and keep 100 Mbit/s busy where packets are lost."""

FLUSH_SHARE: Final = 0.8
"""Share of the daemon's time to drain that is spent submitting groups; the rest is for leaving the run."""


async def build(context: RoleContext) -> list[Service]:
    """Load the base model, in a thread, and return the sampler's services.

    Raises:
        ConfigError: the engine cannot be imported.
        StartupError: the model cannot be used, or the hub's address is missing.
    """
    config = context.config.section(SamplerConfig)
    target = context.config.node.coordinator
    if target is None:
        raise StartupError("The sampler has no coordinator to dial", fix="Set node.coordinator = HOST:PORT.")
    clock, run_id, node_metrics = context.clock, context.run.run_id, context.node_metrics
    # This takes seconds to minutes, during which the watchdog and /healthz must be answered.
    engine = await asyncio.to_thread(RestartableEngine, partial(load_configured_engine, config))
    caller = context.identity or Peer(run_id, Role.SAMPLER, context.node_id)
    control = dial(target, caller, purpose=Purpose.CONTROL, now=clock.now())
    signer = None if context.identity is None else GroupSigner.of(context.identity)
    leases, submissions = (
        SamplerRolloutClient(dial(address, caller, purpose=Purpose.ROLLOUTS, now=clock.now()), signer)
        for address in (target, config.rollout_via or target)
    )
    hub, *relays = (
        dial_source(
            address,
            caller,
            connections=BULK_CONNECTIONS,
            now=clock.now(),
            control=control if address == target else None,
        )
        for address in dict.fromkeys((target, *config.weight_sources))
    )
    is_listed = target in config.weight_sources
    sources = Sources(
        [hub, *relays] if is_listed or not relays else relays,
        last_resort=None if is_listed or not relays else hub,
        clock=clock,
        random=random.random,
        metrics=context.transfer_metrics,
    )
    metrics = SamplerMetrics(context.registry)
    engine_thread = EngineThread(
        engine,
        # A process of its own bounds every call itself.
        step_limit_s=None if config.engine_process == "own" else config.engine_step_limit_s,
        metrics=metrics,
        lost=lambda: policy_sync.lose(),
    )
    work_queue = WorkQueue(
        concurrency_groups=config.concurrency_groups, unsubmitted_groups=config.outbox_groups
    )
    stopover = Stopover(
        is_generating=work_queue.is_generating_by,
        arrived=lambda: leasing.notice_change(),
        left=lambda: policy_sync.look_again(),
    )
    held_version = HeldVersion(
        engine.weights,
        layout=engine.layout,
        in_place=config.apply == "in_place",
        hand_over=engine_thread.hand_over,
        saved=SavedPolicy(
            context.state_dir,
            layout=engine.layout,
            public_key=context.run.learner_public_key,
            run_id=run_id,
            save_every_s=config.save_policy_every_s,
            count_refusal=lambda reason: node_metrics.count_refusal(service="PolicyService", reason=reason),
            clock=clock,
        ),
    )
    policy_sync = PolicySync(
        Fetcher(
            sources,
            public_key=context.run.learner_public_key,
            run_id=run_id,
            metrics=context.transfer_metrics,
            random=random.random,
        ),
        watch=sources.announcements,
        held=held_version,
        stopover=stopover,
        layout=engine.layout,
        found_damage=lambda: repair(),
        transfer_metrics=context.transfer_metrics,
        metrics=metrics,
        count_refusal=node_metrics.count_refusal,
        waiting=node_metrics.waiting,
        monotonic=clock.monotonic,
        random=random.random,
    )

    def waits_for() -> str:
        what, bound_versions = node_metrics.waits_for, membership.max_staleness_versions
        if leasing.is_too_old and bound_versions is not None:
            return f"{TOO_OLD}: {policy_sync.distance(bound_versions=bound_versions)}"
        return what

    def repair() -> None:
        if engine_thread.served is not None:
            metrics.repairs.inc()
            engine_thread.withdraw()
            rollouts.forget_doubtful()
            policy_sync.doubt()

    def held() -> PolicyVersion | None:
        if engine_thread.served is not None:
            policy_sync.scrub()
        return engine_thread.served

    membership = MembershipClient(
        control,
        Member(
            run_id,
            Role.SAMPLER,
            layout_digest=engine.layout.digest,
            layout_summary=engine.layout.summary,
            tokenizer_digest=engine.tokenizer.digest,
            chat_template_digest=chat_template_digest(config.model_dir),
        ),
        reports=PeerReports(
            held=held,
            waits_for=waits_for,
            metrics=lambda: snapshot(context.registry, Role.SAMPLER),
            running_leases=lambda: work_queue.lease_ids,
            base=lambda: held_version.base_model,
        ),
        notices=Notices(
            verdict=lambda verdict: rollouts.note_verdict(verdict),
            lost_leases=lambda lease_ids: rollouts.forget_lost(lease_ids),
            task_changed=lambda: rollouts.note_task_change(),
            must_repair=repair,
        ),
        clock=clock,
        backoff=Backoff(random.random),
        waiting=node_metrics.waiting,
        identity=context.identity,
    )
    leasing = Leasing(
        leases,
        work_queue=work_queue,
        engine_thread=engine_thread,
        stopover=stopover,
        node_metrics=node_metrics,
        random=random.random,
        monotonic=clock.monotonic,
    )
    rollouts = RolloutLoop(
        engine,
        run_id=run_id,
        membership=membership,
        engine_thread=engine_thread,
        leasing=leasing,
        submitter=GroupSubmitter(
            submissions.submit, capacity_groups=config.outbox_groups, random=random.random
        ),
        work_queue=work_queue,
        task_setup=configured_setup(config),
        make_graders=configured_graders(config, metrics),
        flush_timeout_s=FLUSH_SHARE * context.config.node.drain_timeout_s,
        metrics=metrics,
        node_metrics=node_metrics,
        clock=clock,
    )
    metrics.watch(
        unbegun=lambda: work_queue.count(*UNBEGUN),
        unsubmitted=lambda: work_queue.count(JobState.SUBMITTING),
        leases=lambda: len(work_queue),
        policy_age_s=lambda: held_version.age_s(clock.now() + membership.clock_offset_s),
        starving_s=policy_sync.starving_s,
    )
    syncing = StopsAfter(policy_sync)
    sampling = StopsAfter(rollouts, other=syncing)
    return [StopsAfter(membership, other=sampling), syncing, sampling]


def configured_setup(config: SamplerConfig) -> Callable[..., TaskSetup]:
    """Return what says, of a task's name and options, what it is on this sampler; see ``task_setup``."""
    return partial(
        task_setup,
        custom=config.custom_tasks,
        allowed_graders=config.allowed_graders,
        has_chat_template=bool(chat_template(config.model_dir)),
        local_graders=LocalGraders(
            judge=config.judge,
            run_code=config.run_code,
            wall_limit_s=config.grader_wall_limit_s,
            memory_limit_bytes=config.grader_memory_limit_bytes,
            environment=config.grader_environment,
        ),
    )


def configured_graders(config: SamplerConfig, metrics: SamplerMetrics) -> Callable[[TaskSetup], GraderPool]:
    """Return what makes the graders of a task."""
    return lambda setup: GraderPool(
        lambda: Grader(
            setup,
            wall_limit_s=config.grader_wall_limit_s,
            cpu_limit_s=config.grader_cpu_limit_s,
            memory_limit_bytes=config.grader_memory_limit_bytes,
            killed=metrics.grader_kills.inc,
            failed=metrics.count_grader_outage,
        ),
        most=config.grader_processes,
    )


def load_configured_engine(config: SamplerConfig) -> Engine:
    """Load the engine that a sampler's configuration names, in the process it names.

    Raises:
        ConfigError, StartupError: see ``load_engine``.
    """
    if config.engine_process == "own":
        return load_in_own_process(config.engine, config, step_limit_s=config.engine_step_limit_s)
    return load_engine(config.engine, config)
