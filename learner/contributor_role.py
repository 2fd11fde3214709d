"""Wires the services of a contributor: a member of the run, a mirror of its versions, and what trains.

    coordinator --settings--> membership         learner <--contributions-- contributor <--groups-- learner
    hubs --versions--> mirror --> store ------------------------------------^

They stop in the order in which work flows: the contributor hands in what it has, then the mirror stops, then
it leaves the run.
"""

import asyncio
import random
from typing import Final

from learner.contributor.config import ContributorConfig
from learner.contributor.contributor import Contributor
from learner.contributor.held_words import HeldWords
from learner.contributor.local_masters import LocalMasters
from learner.contributor.local_trainer import LocalTrainer
from learner.contributor.metrics import ContributorMetrics
from learner.masters.master_words import keep_base
from learner.model.rank_exchanges import Ranks
from learner.ranks.starting import ranks_of
from learner.step.trainer import Trainer, load_models
from node.clients.membership.heartbeats import Notices, PeerReports
from node.clients.membership.join_call import Member
from node.errors import StartupError
from node.kinds.registry import kind_of_class
from node.process.coordinator_link import CoordinatorLink
from node.process.role_context import RoleContext
from node.process.service import Service, StopsAfter
from node.rpc.channel import Purpose, dial
from node.serving.hub_setup import open_store
from node.serving.mirror_setup import make_mirror
from node.values.roles import Role
from node.weights.assembly.stored import StoredVersions

RETAINED_KEYFRAMES: Final = 1
"""A contributor needs what leads from its version, or from the base model, to the head."""


async def build(context: RoleContext) -> list[Service]:
    """Start the ranks and load the model, in threads, and return the contributor's services.

    Raises:
        StartupError: the model or the store cannot be used, or the coordinator's address is missing.
    """
    config = context.config.section(ContributorConfig)
    link, now = CoordinatorLink.of(context), context.clock.now()
    learner = dial(config.learner, link.caller, purpose=Purpose.CONTRIBUTIONS, now=now, server=Role.LEARNER)
    fleet, ranks = await ranks_of(config)
    trainer, masters = await asyncio.to_thread(_load, config, ranks)
    policy = trainer.policy
    base = await asyncio.to_thread(keep_base, context.state_dir / "base.words", policy.master_words)
    store = await asyncio.to_thread(open_store, context, retained_keyframes=RETAINED_KEYFRAMES)
    words = HeldWords(StoredVersions(store, policy.layout, base.words), base.version)
    local = LocalTrainer(trainer, masters, words)
    member = Member(
        context.run.run_id,
        Role.CONTRIBUTOR,
        layout_digest=policy.layout.digest,
        layout_summary=policy.layout.summary,
    )
    membership = link.membership(
        member.reading(config.model_dir),
        reports=PeerReports(
            held=lambda: words.version,
            waits_for=lambda: context.node_metrics.waits_for or local.notice,
            base=lambda: base.model,
        ),
        notices=Notices(),
    )
    contributor = Contributor(
        learner,
        local,
        words,
        store,
        layout_digest=policy.layout.digest,
        numbered_after=int(1000 * now),
        run_settings=membership.settings,
        clock=context.clock,
        random=random.random,
        metrics=ContributorMetrics(context.registry),
        node_metrics=context.node_metrics,
    )
    mirror = make_mirror(link, store, relays=config.relays)
    contributing = StopsAfter(contributor)
    mirroring = StopsAfter(mirror, other=contributing)
    ranked = [] if fleet is None else [StopsAfter(fleet, other=contributing)]
    return [*ranked, StopsAfter(membership, other=contributing), mirroring, contributing]


def _load(config: ContributorConfig, ranks: Ranks) -> tuple[Trainer, LocalMasters]:
    policy, load_reference = load_models(config, device=config.device, ranks=ranks)
    if not (kind := kind_of_class(type(policy.model).__name__)).can_be_shared:
        raise StartupError(
            f"a policy of the kind {kind.name} has buffers that follow its steps, which are not merged",
            fix="Train it on the learner alone, without learner.merge.",
        )
    return Trainer(policy, None, load_reference=load_reference), LocalMasters(policy)
