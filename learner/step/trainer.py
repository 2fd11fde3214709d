"""One rank's part of the policy in training, and its optimizer: what every rank does, in the same order.

    first rank   decides what comes next --instruction--> its Trainer does it
                                            |
    other ranks  wait for instructions      '-----------> their Trainers do the same

One process is a first rank that has nobody to tell. What else differs is outside of here: the first rank
chooses groups and settings, keeps journal and progress, and publishes.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from learner.config import RanksConfig
from learner.journal.checkpoint import ShardCopy, begin_anew, load_into
from learner.masters.master_words import MasterWords
from learner.merging.changes.word_changes import WordsBefore
from learner.merging.outer_optimizer import Merged, MergeInputs, OuterOptimizer
from learner.model.model import Policy, ScoringModel, load_policy, load_reference
from learner.model.rank_exchanges import Instruction, Ranks
from learner.step.optimizer import adopt_settings, make_optimizer
from learner.step.step_inputs import StepInputs
from learner.step.train_step import StepOutcome, train_step
from learner.step_settings import StepSettings


def load_models(
    config: RanksConfig, *, device: str, ranks: Ranks
) -> tuple[Policy, Callable[[], ScoringModel]]:
    """Load this rank's part of the model; return it, and what loads that of the base model.

    Raises:
        StartupError: as ``load_policy``.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    compute_dtype = torch.bfloat16 if config.compute_dtype == "bfloat16" else None
    policy = load_policy(
        config.model_dir,
        device=device,
        compute_dtype=compute_dtype,
        rematerialise=config.rematerialise,
        ranks=ranks,
    )
    return policy, partial(
        load_reference, config.model_dir, device=device, compute_dtype=compute_dtype, ranks=ranks
    )


class Trainer:
    """A shard of the policy and its optimizer. Each method tells the other ranks first. Blocking."""

    def __init__(
        self,
        policy: Policy,
        settings: StepSettings | None,
        reference: ScoringModel | None = None,
        *,
        load_reference: Callable[[], ScoringModel] | None = None,
        before_writing: Callable[[], None] | None = None,
        merges: bool = False,
    ) -> None:
        """Begin with an optimizer that has taken no step.

        Args:
            settings: those to begin with; None: the first step's.
            merges: whether ``merge`` is called, by one rank alone, rather than ``step``.
            reference: the base model, for the penalty towards it; None: no such penalty, unless
                ``load_reference`` loads it at the first step that has one.
            before_writing: waits for those that read the parameters; called before each write to them.
        """
        self.policy = policy
        self.reference = reference
        self._load_reference = load_reference
        self.optimizer = OuterOptimizer(policy.parameters) if merges else make_optimizer(policy, settings)
        if before_writing is not None:
            self.optimizer.register_step_pre_hook(lambda *_: before_writing())
        self._before_writing = before_writing or (lambda: None)
        policy.ranks.follow_writes(self.optimizer)
        self._copies = 0

    def step(self, step: StepInputs) -> StepOutcome:
        """Take a step, with its own settings, whatever those of the step before were.

        Raises:
            StartupError: the objective cannot be loaded, or the base model.
        """
        with self.policy.ranks.failures_named():
            self._tell(lambda: step.instruction)
            adopt_settings(self.optimizer, step.settings)
            has_penalty = step.settings.reference_kl_coefficient > 0
            if has_penalty and self.reference is None and self._load_reference is not None:
                self.reference = self._load_reference()
            return train_step(
                self.policy,
                self.optimizer,
                step.groups,
                version=step.version,
                settings=step.settings,
                reference=self.reference if has_penalty else None,
            )

    @property
    def merges(self) -> bool:
        """Whether its versions are merged of contributions."""
        return isinstance(self.optimizer, OuterOptimizer)

    def merge(self, inputs: MergeInputs) -> Merged:
        """Move the parameters by the mean of some contributions; return its figures.

        Raises:
            ValueError: a payload is broken; nothing has changed.
        """
        assert isinstance(self.optimizer, OuterOptimizer)
        return self.optimizer.merge(inputs, self.words_before)

    @property
    def words_before(self) -> WordsBefore:
        """The words of the version that the parameters are of, for changes that are coded against them."""
        words = self.policy.master_words
        assert isinstance(words, MasterWords)
        return WordsBefore(words.layout, words.frame)

    def is_finite(self) -> bool:
        """Whether every parameter and buffer is a number, on every rank."""
        self._tell(partial(Instruction, "check", {}))
        return self.policy.is_finite()

    def copy(self) -> ShardCopy:
        """Copy everything that the next step changes."""
        self._tell(partial(Instruction, "copy", {}))
        self._copies += 1
        return ShardCopy.of(self.policy, self.optimizer, number=self._copies)

    def restore(self, checkpoint: Path) -> None:
        """Load masters and moments. Raises OSError, ValueError: as ``load_into``."""
        self._tell(partial(Instruction, "restore", {"path": str(checkpoint.absolute())}))
        load_into(self.policy, self.optimizer, checkpoint)
        kept = {key for moments in self.optimizer.state.values() for key in moments}
        if kept and self.merges != ("momentum" in kept):
            self.optimizer.state.clear()  # of the other optimizer: this one begins as at a run's first step

    def begin_anew(self, masters: Path) -> None:
        """Load masters, and forget all that the optimizer has learned. Raises OSError, ValueError."""
        self._before_writing()
        self._tell(partial(Instruction, "begin anew", {"path": str(masters.absolute())}))
        begin_anew(self.policy, self.optimizer, masters)

    def _tell(self, instruction: Callable[[], Instruction]) -> None:
        self.policy.ranks.tell(instruction)
