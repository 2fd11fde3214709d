"""Wires the services of a contributor: a member of the run, a mirror of its versions, and what trains.

    coordinator --settings--> membership         learner <--contributions-- contributor <--groups-- learner
    hubs --versions--> mirror --> store ------------------------------------^

They stop in the order in which work flows: the contributor hands in what it has, then the mirror stops, then
it leaves the run.
"""

import asyncio
import random
from pathlib import Path
from typing import Final

import torch

from learner.contributor.config import ContributorConfig
from learner.contributor.contributor import Contributor
from learner.contributor.held_words import HeldWords
from learner.contributor.local_trainer import LocalTrainer
from learner.contributor.metrics import ContributorMetrics
from learner.model.model import Policy, ScoringModel, load_policy, load_reference
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
from node.text.text_rules import TextRules
from node.text.tokenizer import chat_template_digest, tokenizer_digest
from node.values.roles import Role
from node.weights.assembly.public_base import PublicBase
from node.weights.assembly.stored import StoredVersions

RETAINED_KEYFRAMES: Final = 1
"""A contributor needs what leads from its version, or from the base model, to the head."""


async def build(context: RoleContext) -> list[Service]:
    """Load the model, in a thread, and return the contributor's services.

    Raises:
        StartupError: the model or the store cannot be used, or the coordinator's address is missing.
    """
    config = context.config.section(ContributorConfig)
    link, now = CoordinatorLink.of(context), context.clock.now()
    learner = dial(config.learner, link.caller, purpose=Purpose.CONTRIBUTIONS, now=now, server=Role.LEARNER)
    policy, base = await asyncio.to_thread(_load, config, context.state_dir / "base.words")
    store = await asyncio.to_thread(open_store, context, retained_keyframes=RETAINED_KEYFRAMES)
    words = HeldWords(StoredVersions(store, policy.layout, base.words), base.version)

    def reference() -> ScoringModel:
        dtype = _compute_dtype(config)
        return load_reference(config.model_dir, device=config.device, compute_dtype=dtype)

    trainer = LocalTrainer(policy, words, load_reference=reference)
    membership = link.membership(
        _member(context, config, policy),
        reports=PeerReports(
            held=lambda: words.version,
            waits_for=lambda: context.node_metrics.waits_for or trainer.notice,
            base=lambda: base.model,
        ),
        notices=Notices(),
    )
    contributor = Contributor(
        learner,
        trainer,
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
    return [StopsAfter(membership, other=contributing), mirroring, contributing]


def _member(context: RoleContext, config: ContributorConfig, policy: Policy) -> Member:
    rules = TextRules.of(config.model_dir)
    return Member(
        context.run.run_id,
        Role.CONTRIBUTOR,
        layout_digest=policy.layout.digest,
        layout_summary=policy.layout.summary,
        tokenizer_digest=tokenizer_digest(config.model_dir),
        chat_template_digest=chat_template_digest(config.model_dir),
        text_digest=rules.digest,
        text_summary=rules.summary,
    )


def _load(config: ContributorConfig, base_words: Path) -> tuple[Policy, PublicBase]:
    if config.threads:
        torch.set_num_threads(config.threads)
    policy = load_policy(
        config.model_dir,
        device=config.device,
        compute_dtype=_compute_dtype(config),
        rematerialise=config.rematerialise,
    )
    if not (kind := kind_of_class(type(policy.model).__name__)).can_be_shared:
        raise StartupError(
            f"a policy of the kind {kind.name} has buffers that follow its steps, which are not merged",
            fix="Train it on the learner alone, without learner.merge.",
        )
    words = policy.master_words
    base = PublicBase.keep(base_words, words.digests(), words.copy_frames, layout=words.layout)
    return policy, base


def _compute_dtype(config: ContributorConfig) -> torch.dtype | None:
    return torch.bfloat16 if config.compute_dtype == "bfloat16" else None
