"""A learner as its state directory has it: key, store, ranks, model, and the state of training."""

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from learner.config import LearnerConfig
from learner.journal.entry_rows import Origin
from learner.masters.master_words import keep_base
from learner.metrics import LearnerMetrics
from learner.model.model import Policy
from learner.operator_orders import check_no_older_orders
from learner.publishing.kept_versions import PUBLISHED
from learner.publishing.signer import Signer
from learner.ranks.starting import ranks_of
from learner.step.trainer import load_models
from learner.step_log import StepLog
from learner.training.training_state import TrainingState
from node.process.role_context import RoleContext
from node.weights.assembly.public_base import PublicBase
from node.weights.store.artifact_store import ArtifactStore

if TYPE_CHECKING:
    from learner.ranks.launching import Fleet

logger = logging.getLogger(__name__)

RETAINED_KEYFRAMES: Final = 2
"""In the learner's own store, for a coordinator that lost its disk."""


@dataclass(frozen=True, slots=True)
class RestoredLearner:
    """The learner as its state directory has it."""

    signer: Signer
    store: ArtifactStore
    state: TrainingState
    step_log: StepLog
    base: PublicBase
    fleet: "Fleet | None"
    """The other ranks; None: there are none."""

    @property
    def policy(self) -> Policy:
        return self.state.policy


async def restore(context: RoleContext, config: LearnerConfig) -> RestoredLearner:
    """Start the ranks, load the model, and go back to where the learner stopped. In threads.

    Raises:
        StartupError: key, model, checkpoint, journal or store cannot be used.
        OSError: a file cannot be read or written.
    """
    directory = context.state_dir
    signer = Signer.load(directory, context.run)
    fleet, ranks = await ranks_of(config)
    policy, load = await asyncio.to_thread(load_models, config, device=config.device, ranks=ranks)
    reference = await asyncio.to_thread(load) if config.reference_kl_coefficient else None
    base = await asyncio.to_thread(keep_base, directory / "base.words", policy.master_words)
    store = await asyncio.to_thread(
        ArtifactStore,
        directory / PUBLISHED,
        public_key=context.run.learner_public_key,
        run_id=context.run.run_id,
        retained_keyframes=RETAINED_KEYFRAMES,
    )
    state = await asyncio.to_thread(
        TrainingState,
        config,
        policy,
        directory=directory,
        origin=Origin(context.run.run_id, policy.layout.digest.hex(), base.model.root.hex()),
        clock=context.clock,
        published=store.head,
        reference=reference,
    )
    step_log = StepLog(directory / "steps.jsonl")
    await asyncio.to_thread(step_log.catch_up, state.progress.step)
    check_no_older_orders(directory, state.progress)
    return RestoredLearner(signer, store, state, step_log, base, fleet)


def show_restart(state: TrainingState, metrics: LearnerMetrics) -> None:
    """Show and log how the learner got back to its version."""
    again = state.restart
    metrics.checkpoint_version.set(again.checkpoint_version)
    metrics.journal_bytes.set(state.history.journal_bytes)
    metrics.replay_seconds.set(again.took_s)
    if again.version == 0:
        return
    metrics.replays.labels(again.outcome).inc()
    fields = {
        "version": again.version,
        "checkpoint_version": again.checkpoint_version,
        "published_version": again.published_version,
        "words": again.outcome,
        "took_s": round(again.took_s, 3),
    }
    logger.info("restored", extra=fields)
    if again.replayed_steps and again.changed:
        logger.warning("steps were taken again with other settings", extra={"changed": list(again.changed)})
    if again.is_exact is False:
        logger.warning(
            "the steps taken again made other words than those published, which stay: the next version is a "
            "delta from them",
            extra={"version": again.published_version},
        )
