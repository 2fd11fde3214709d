"""The run's demands on its samplers, as configured; values only."""

from dataclasses import dataclass

from node.coordinator.work.capacity import Bounds
from node.coordinator.work.evaluation_settings import NO_EVALUATION, EvaluationSettings
from node.coordinator.work.group_check import Work


@dataclass(frozen=True, slots=True)
class RunTerms:
    """The run's demands on its samplers, as configured."""

    work: Work
    bounds: Bounds
    prompts: int
    """The task's size, held-out prompts included."""
    prompt_seed: int
    lease_ttl_s: float
    lease_max_s: float
    """Age beyond which no heartbeat keeps a lease."""
    prompt_retry_s: float
    evaluation: EvaluationSettings = NO_EVALUATION
    check_secret: bytes = b""
    """By which groups are drawn whose rewards are checked; a new one for each process."""
    require_verifier: bool = False
    newcomers_part: float = 1.0
    """Part of a batch that newcomers may fill; see ``newcomers``."""

    @property
    def training_prompts(self) -> int:
        """How many of the task's prompts may be trained on."""
        return self.prompts - self.evaluation.held_out_prompts
