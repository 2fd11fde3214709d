"""Builds a verifier from its section of the configuration: a tokenizer and graders, no engine and no GPU."""

import asyncio
import os
import random

from node.clients.membership.heartbeats import Notices, PeerReports
from node.clients.membership.join_call import Member
from node.clients.rollouts.check_stream import RewardCheckClient
from node.errors import StartupError
from node.process.coordinator_link import CoordinatorLink
from node.process.role_context import RoleContext
from node.process.service import Service, StopsAfter
from node.rpc.channel import Purpose
from node.system.backoff import Backoff
from node.values.roles import Role
from sampler.config import VerifierConfig
from sampler.engines.text.model_tokenizer import tokenizer_of
from sampler.metrics import VerifierMetrics
from sampler.process_tree import cpu_seconds
from sampler.rollouts.verification import Verification


async def build(context: RoleContext) -> list[Service]:
    """Load the tokenizer, in a thread, and return the verifier's services.

    Raises:
        StartupError: the tokenizer cannot be used, or the coordinator's address is missing.
    """
    config = context.config.section(VerifierConfig)
    link = CoordinatorLink.of(context)
    try:
        decoder = await asyncio.to_thread(tokenizer_of, config.model_dir)
    except (OSError, ValueError) as error:
        raise StartupError(
            f"the tokenizer of {config.model_dir} cannot be loaded: {error}",
            fix="Copy the model directory of the samplers; the weights are not needed.",
        ) from error
    task_changed = asyncio.Event()
    membership = link.membership(
        Member(context.run.run_id, Role.VERIFIER).reading(config.model_dir),
        reports=PeerReports(held=lambda: None, waits_for=lambda: context.node_metrics.waits_for),
        notices=Notices(task_changed=task_changed.set),
    )
    metrics = VerifierMetrics(context.registry)
    metrics.watch(cpu_seconds=lambda: cpu_seconds(os.getpid()))
    verification = Verification(
        RewardCheckClient(link.dial(Purpose.ROLLOUTS)),
        membership=membership,
        task_changed=task_changed,
        decoder=decoder,
        config=config,
        backoff=Backoff(random.random),
        metrics=metrics,
        node_metrics=context.node_metrics,
    )
    verifying = StopsAfter(verification)
    return [StopsAfter(membership, other=verifying), verifying]
