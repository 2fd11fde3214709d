"""The coordinator as training sees it, and the waits for it once the work is done."""

import asyncio
import logging
from typing import Final, Protocol

from node.clients.rollouts.rollout_drain import RolloutDrain
from node.telemetry.metrics import NodeMetrics
from node.values.evaluation import EvaluationNotice
from node.values.run import RunSettings

logger = logging.getLogger(__name__)

LAST_EVALUATION_LIMIT_S: Final = 900.0
"""Longest wait, at the end of the work, for an evaluation: samplers may be gone for good."""


class Coordinator(Protocol):
    """The coordinator, as training sees it."""

    run_id: str
    tokenizer_digest: bytes
    """As joined with."""

    async def settings(self) -> RunSettings:
        """Wait until the learner has joined; return the run's settings."""
        ...

    async def announced(self, version: int) -> None:
        """Wait until a version, or a newer one, is announced."""
        ...

    async def next_answer(self) -> None:
        """Wait for the next answer to a heartbeat."""
        ...

    @property
    def evaluations(self) -> EvaluationNotice:
        """Evaluations, as the last answer told them. Any thread."""
        ...

    @property
    def task_digest(self) -> bytes | None:
        """Digest of the options by which the run's groups are graded now; None: not told."""
        ...

    def now(self) -> float:
        """Return Unix seconds on the coordinator's clock, which stamps groups."""
        ...


async def hand_over(
    coordinator: Coordinator, drain: RolloutDrain, *, version: int, node_metrics: NodeMetrics
) -> None:
    """Wait until the coordinator has all of the work up to ``version``, and what is evaluated of it."""
    if version > 0:  # version 0 is everybody's base model, and is never announced
        with node_metrics.waiting("policy upload"):
            await coordinator.announced(version)
    with node_metrics.waiting("step acknowledgement"):
        await drain.acknowledged()
    try:
        with node_metrics.waiting("evaluation"):
            async with asyncio.timeout(LAST_EVALUATION_LIMIT_S):
                while not _is_evaluated(coordinator.evaluations, version):
                    await coordinator.next_answer()
    except TimeoutError:
        logger.warning(
            "an evaluation has not ended; `heterorl-node status` shows it",
            extra={"version": coordinator.evaluations.under_way, "waited_s": LAST_EVALUATION_LIMIT_S},
        )


def _is_evaluated(told: EvaluationNotice, version: int) -> bool:
    """Whether the coordinator has said since the last version that no evaluation is under way or due."""
    return told.announced >= version and told.under_way is None
