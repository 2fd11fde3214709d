"""Takes a contributor's steps, on the first rank, and makes contributions. Blocking; one call at a time.

groups --step--> a LocalStep; or a batch that taught nothing, or that was not finite
steps, change of the masters --hand in--> header and payload
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from learner.contributor.held_words import HeldWords
from learner.contributor.local_masters import LocalMasters
from learner.contributor.terms import Terms
from learner.merging.changes.coder import ChangeEncoder
from learner.merging.changes.word_changes import WordsBefore
from learner.merging.contribution import ContributionReport, LocalStep
from learner.merging.formulas.fragments import Fragments
from learner.step.step_inputs import StepInputs
from learner.step.step_loss import StepLoss
from learner.step.train_step import StepOutcome
from learner.step.trainer import Trainer
from learner.step_log import TrainedGroup
from learner.training.completion import TrainingError
from node.errors import StartupError
from node.values.contribution import Contribution
from node.values.groups.rollout import EncodedGroup
from node.wire.rollouts import group_from_wire

SCHEDULE_ENDED: Final = "nothing: its steps change nothing, the learning rate is 0"
"""The wait that a contributor names once the schedule of the learning rate has ended."""


@dataclass(frozen=True, slots=True, eq=False)
class _Method:
    """How changes are made by the learner's terms."""

    terms: Terms
    encoder: ChangeEncoder
    fragments: Fragments

    def due(self, version: int) -> tuple[str, ...]:
        """Return the names of the tensors that a change measured from ``version`` has."""
        return self.fragments.due_names(version)


@dataclass(slots=True)
class _Batches:
    """Outcomes of the batches since the last contribution."""

    steps: list[LocalStep] = field(default_factory=list)
    uninformative: list[TrainedGroup] = field(default_factory=list)
    not_finite: list[TrainedGroup] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OwnContribution:
    """A contribution, with what its contributor says of it to its own people."""

    contribution: Contribution
    steps: int
    norm: float
    """Euclidean norm of what has changed, without what earlier changes left over; 0: no step was taken."""


class LocalTrainer:
    """Moves a policy's masters by the terms of a learner."""

    def __init__(self, trainer: Trainer, masters: LocalMasters, words: HeldWords) -> None:
        """Begin at the version of ``words``, which the masters of the trainer's policy round to."""
        self._trainer = trainer
        self._words = words
        self._masters = masters
        self._batches = _Batches()
        self._method: _Method | None = None
        self.notice = ""
        """For people, of the newest step; empty: nothing."""

    def take(self, terms: Terms) -> None:
        """Go by other terms from now on.

        Raises:
            StartupError: the objective cannot be loaded, or stages of a pipeline cannot train by these terms.
        """
        StepLoss.of(terms.step)
        if terms.merge.trains_a_fragment and self._trainer.policy.is_pipelined:
            raise StartupError(
                "the learner's terms have trains_a_fragment, which may leave nothing to train for a stage of "
                "pp",
                fix="Set pp = 1, and dp_shard or tp to make up for it.",
            )
        before = self._method
        if before is not None and before.terms.merge == terms.merge:
            self._method = replace(before, terms=terms)
            return
        shapes = self._masters.shapes
        self._masters.train_only(shapes)
        sizes = {name: shape.numel() for name, shape in shapes.items()}
        fragments = Fragments.of(sizes, count=terms.merge.fragments)
        self._method = _Method(terms, ChangeEncoder(terms.merge, shapes), fragments)

    def step(self, batch: Sequence[EncodedGroup], *, version: int) -> StepOutcome:
        """Take a step on a batch that was dealt, if it teaches something.

        Raises:
            RefusedError: MALFORMED: a group is not what the learner admitted.
            TrainingError: the step made masters that are not finite.
        """
        method = self._known_method
        groups = [group_from_wire(group).without_abstained() for group in batch]
        if method.terms.merge.trains_a_fragment:
            # Those of the change that is handed in next.
            self._masters.train_only(method.due(version + self._masters.are_sent))
        # A group may be of a version that is on its way here.
        at = max(version, *(group.newest_version for group in groups))
        outcome = self._trainer.step(StepInputs(groups, at, method.terms.step))
        trained = tuple(TrainedGroup(one.group_id, one.sampler_id, at - one.oldest_version) for one in groups)
        if not outcome.is_finite:
            self._batches.not_finite += trained
        elif not outcome.is_applied:
            self._batches.uninformative += trained
        elif not self._trainer.is_finite():
            raise TrainingError(
                f"a step from version {version} made masters that are not finite. "
                "Lower learner.learning_rate, then start the contributor again"
            )
        else:
            self._batches.steps.append(LocalStep(outcome.numbers, trained, outcome.kl_nats_of_groups))
            self.notice = "" if outcome.numbers.learning_rate else SCHEDULE_ENDED
        return outcome

    def hand_in(self, number: int, *, version: int) -> OwnContribution:
        """Make a contribution of the batches since the last one, measured from ``version``."""
        method = self._known_method
        batches, self._batches = self._batches, _Batches()
        report = ContributionReport(
            tuple(batches.steps), tuple(batches.uninformative), tuple(batches.not_finite)
        )
        payload, norm = b"", 0.0
        if report.steps:
            names, merge = method.due(version), method.terms.merge
            payload = method.encoder.encode(
                self._masters.changes(names, is_exact=merge.compression == "full"),
                keep=self._masters.keep,
                words_before=WordsBefore(self._trainer.policy.layout, self._words.frame),
            )
            norm = self._masters.hand_in(names, overlap=merge.overlap)
        contribution = Contribution.of(number, version, report.to_json(), payload)
        return OwnContribution(contribution, len(report.steps), norm)

    def adopt(self, version: int, *, is_refused: bool) -> None:
        """Go over to a version that is stored.

        Raises:
            RefusedError: it cannot be made of what is stored; nothing has changed.
        """
        overlap = self._known_method.terms.merge.overlap
        self._words.move_to(version)
        self._masters.adopt(self._words.tensor, overlap=overlap, is_refused=is_refused)

    @property
    def _known_method(self) -> _Method:
        if self._method is None:
            raise ValueError("the learner's terms are not known")
        return self._method
