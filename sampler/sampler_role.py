"""Builds a sampler's services from its section of the configuration.

    policy sync --words--> engine thread <--requests-- group pipeline --groups--> hub
         ^  |                    |                        ^
         |  '------> served policy <--- leasing ----------'---- settings, lost leases, clock: membership
         '---- announcements, frames

The hub is the coordinator, through the first of the sampler's relays that leads to it, or straight. Weights
come from relays if there are any, over channels of their own, so that a heartbeat never waits behind them.
Policy sync stops first, then rollouts, then membership: leases are renewed until finished groups are
submitted, and nobody writes to the engine's words once it is closed.
"""

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Final

from node.clients.membership.heartbeats import Notices, PeerReports
from node.clients.membership.join_call import Member
from node.clients.membership.membership_client import MembershipClient
from node.clients.rollouts.rollout_client import SamplerRolloutClient
from node.process.coordinator_link import CoordinatorLink
from node.process.role_context import RoleContext
from node.process.service import Service, StopsAfter
from node.rpc.channel import Purpose
from node.rpc.hub import Hub
from node.telemetry.metrics import NodeMetrics
from node.values.peer_figures import SamplerFigures
from node.values.roles import Role
from node.weights.transfer.fetcher import Fetcher
from node.weights.transfer.sources import Sources, dial_source
from sampler.config import SamplerConfig
from sampler.engines.engine import Engine
from sampler.engines.engine_registry import load_engine, load_in_own_process
from sampler.engines.engine_thread import EngineThread
from sampler.engines.restartable_engine import RestartableEngine
from sampler.metrics import Pace, SamplerMetrics
from sampler.rollouts.concurrency import FIRST_GROUPS
from sampler.rollouts.group_pipeline import GroupPipeline
from sampler.rollouts.group_submitter import GroupSubmitter
from sampler.rollouts.leasing import TOO_OLD, Leasing
from sampler.rollouts.rollout_loop import RolloutLoop
from sampler.rollouts.work_queue import UNBEGUN, JobState, WorkQueue
from sampler.served_policy import ServedPolicy
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
    link = CoordinatorLink.of(context, relays=config.relays)
    # This takes seconds to minutes, during which the watchdog and /healthz must be answered.
    engine = await asyncio.to_thread(RestartableEngine, partial(load_configured_engine, config))
    metrics = SamplerMetrics(context.registry)
    work_queue = WorkQueue(
        concurrency_groups=config.concurrency_groups or FIRST_GROUPS, unsubmitted_groups=config.outbox_groups
    )
    policy = ServedPolicy(is_generating=work_queue.is_generating_by)
    # A process of its own bounds every call itself.
    step_limit_s = None if config.engine_process == "own" else config.engine_step_limit_s
    engine_thread = EngineThread(engine, policy, step_limit_s=step_limit_s, metrics=metrics)
    held = _held_version(context, engine, engine_thread, policy)
    policy_sync = _policy_sync(context, _sources(link), held, metrics)
    pipeline = _pipeline(link, engine, engine_thread, policy, work_queue, metrics=metrics)
    pace = Pace(lambda: metrics.drawn_tokens, monotonic=context.clock.monotonic)
    membership = _membership(
        link,
        engine,
        pipeline,
        policy_sync,
        policy,
        held,
        figures=lambda: SamplerFigures(
            starving_s=policy_sync.starving_s(),
            tokens_per_s=pace.per_s(),
            price_per_hour=config.price_per_hour or None,
        ),
    )
    rollouts = RolloutLoop(
        pipeline,
        membership=membership,
        engine_thread=engine_thread,
        config=config,
        flush_timeout_s=FLUSH_SHARE * context.config.node.drain_timeout_s,
        metrics=metrics,
        node_metrics=context.node_metrics,
    )
    metrics.price_per_hour.set(config.price_per_hour)
    metrics.watch(
        held_version=lambda: -1 if policy.served is None else policy.served.number,
        unbegun_groups=lambda: work_queue.count(*UNBEGUN),
        outbox_groups=lambda: work_queue.count(JobState.SUBMITTING),
        running_leases=lambda: len(work_queue),
        concurrency_groups=lambda: work_queue.concurrency_groups,
        engine_cache_ratio=lambda: engine.use.cache_share,
        engine_asked_ratio=lambda: engine.use.asked_share,
        policy_age_seconds=lambda: held.age_s(context.clock.now() + membership.heartbeats.clock_offset_s),
        starving_seconds=policy_sync.starving_s,
    )
    syncing = StopsAfter(policy_sync)
    sampling = StopsAfter(rollouts, other=syncing)
    return [StopsAfter(membership, other=sampling), syncing, sampling]


def _sources(link: CoordinatorLink) -> Sources:
    context = link.context
    config, target = context.config.section(SamplerConfig), context.config.node.coordinator
    dial_one = partial(dial_source, caller=link.caller, connections=BULK_CONNECTIONS, now=context.clock.now())
    wanted = dict.fromkeys((*config.relays, *config.weight_sources))
    coordinators = Hub(target) if target else None
    if coordinators is not None and set(coordinators.addresses) <= set(config.relays):
        coordinators = None  # reached by relays alone, which have weights themselves
    known = () if coordinators is None else tuple(set(coordinators.addresses) - set(config.relays))
    relays = [dial_one(address, server=Role.RELAY) for address in wanted if address not in known]
    if coordinators is None:
        coordinator = None
    elif config.relays:
        coordinator = dial_one(link.moved.follow(coordinators))
    else:  # over the channel, and to the address, that membership has
        coordinator = dial_one(link.hub, control=link.control)
    is_last_resort = bool(relays) and len(relays) == len(wanted)
    return Sources(
        relays if coordinator is None or is_last_resort else [coordinator, *relays],
        last_resort=coordinator if is_last_resort else None,
        clock=context.clock,
        random=random.random,
        metrics=context.transfer_metrics,
    )


def _held_version(
    context: RoleContext, engine: Engine, engine_thread: EngineThread, policy: ServedPolicy
) -> HeldVersion:
    config = context.config.section(SamplerConfig)
    return HeldVersion(
        engine.weights,
        policy,
        layout=engine.layout,
        in_place=config.apply == "in_place",
        hand_over=engine_thread.hand_over,
        saved=SavedPolicy(
            context.state_dir,
            layout=engine.layout,
            public_key=context.run.learner_public_key,
            run_id=context.run.run_id,
            save_every_s=config.save_policy_every_s,
            count_refusal=lambda reason: context.node_metrics.count_refusal(
                service="PolicyService", reason=reason
            ),
            clock=context.clock,
        ),
        monotonic=context.clock.monotonic,
    )


def _policy_sync(
    context: RoleContext, sources: Sources, held: HeldVersion, metrics: SamplerMetrics
) -> PolicySync:
    return PolicySync(
        Fetcher(
            sources,
            public_key=context.run.learner_public_key,
            run_id=context.run.run_id,
            metrics=context.transfer_metrics,
            random=random.random,
        ),
        held,
        watch=sources.announcements,
        transfer_metrics=context.transfer_metrics,
        metrics=metrics,
        node_metrics=context.node_metrics,
        clock=context.clock,
    )


def _pipeline(
    link: CoordinatorLink,
    engine: Engine,
    engine_thread: EngineThread,
    policy: ServedPolicy,
    work_queue: WorkQueue,
    *,
    metrics: SamplerMetrics,
) -> GroupPipeline:
    context, client = link.context, SamplerRolloutClient(link.dial(Purpose.ROLLOUTS))
    return GroupPipeline(
        engine,
        engine_thread,
        run_id=context.run.run_id,
        policy=policy,
        leasing=Leasing(
            client,
            policy,
            work_queue=work_queue,
            node_metrics=context.node_metrics,
            random=random.random,
            monotonic=context.clock.monotonic,
        ),
        submitter=GroupSubmitter(client.submit, random=random.random),
        metrics=metrics,
        clock=context.clock,
    )


def _membership(
    link: CoordinatorLink,
    engine: Engine,
    pipeline: GroupPipeline,
    policy_sync: PolicySync,
    policy: ServedPolicy,
    held: HeldVersion,
    *,
    figures: Callable[[], SamplerFigures],
) -> MembershipClient:
    context = link.context
    model_dir = context.config.section(SamplerConfig).model_dir
    return link.membership(
        Member(
            context.run.run_id,
            Role.SAMPLER,
            layout_digest=engine.layout.digest,
            layout_summary=engine.layout.summary,
        ).reading(model_dir),
        reports=PeerReports(
            held=lambda: policy.served,
            waits_for=lambda: _waits_for(context.node_metrics, pipeline.leasing, policy_sync),
            sampler=figures,
            running_leases=lambda: pipeline.leasing.work_queue.lease_ids,
            base=lambda: held.base_model,
        ),
        notices=Notices(
            verdict=pipeline.judged,
            lost_leases=pipeline.lost,
            task_changed=pipeline.task_changed.set,
            must_repair=policy_sync.doubt,
        ),
    )


def _waits_for(node_metrics: NodeMetrics, leasing: Leasing, policy_sync: PolicySync) -> str:
    if leasing.is_too_old and leasing.bound_versions is not None:
        return f"{TOO_OLD}: {policy_sync.distance(bound_versions=leasing.bound_versions)}"
    return leasing.held_back_by or node_metrics.waits_for  # a fetch goes on beside generating


def load_configured_engine(config: SamplerConfig) -> Engine:
    """Load the engine that a sampler's configuration names, in the process it names.

    Raises:
        ConfigError, StartupError: see ``load_engine``.
    """
    if config.engine_process == "own":
        return load_in_own_process(config.engine, config, step_limit_s=config.engine_step_limit_s)
    return load_engine(config.engine, config)
