"""The finished evaluations of a run: which is the best, and what a revocation leaves of each; pure."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

from node.coordinator.work.evaluation.scores import PromptScore, by_prompt, decider, odd_answers, scored
from node.run import REWARD, Evaluation, EvaluationStatus

ANSWERS_KEPT: Final = 1 << 17
"""Answers in the record of finished evaluations, 30 MB of memory. Beyond that those of the oldest one go, but
for the best: what a sampler said there is then out of a revocation's reach."""


class Record:
    """Evaluations by version, and the answers that count in each."""

    def __init__(self, *, best_by: str) -> None:
        self.best_by = best_by
        self.measures = tuple(dict.fromkeys((REWARD, best_by)))
        """The numbers by which samplers' answers are compared."""
        self.finished: dict[int, Evaluation] = {}
        self.kept: dict[int, tuple[PromptScore, ...]] = {}

    def status(self, under_way: Evaluation | None) -> EvaluationStatus:
        """Return the evaluations worth a look."""
        finished = [self.finished[version] for version in sorted(self.finished)]
        newest = finished[-1] if finished else None
        alike = [one for one in finished if newest is not None and one.terms == newest.terms]
        # One sampler's word, as of the first to join, holds only until two have been asked.
        confirmed = min((one.version for one in alike if one.samplers > 1), default=0)
        by_score = [(score, one) for one in alike if (score := decider(one, self.best_by)) is not None]
        best = _highest((s, one) for s, one in by_score if one.is_sound and one.version >= confirmed)
        doubted = _highest((s, one) for s, one in by_score if one.is_measured)
        if (
            best is not None
            and doubted is not None
            and decider(best, self.best_by) == decider(doubted, self.best_by)
        ):
            doubted = None
        return EvaluationStatus(
            newest,
            first=next((one for one in alike if one.has_score), None),
            best=best,
            under_way=under_way,
            doubted=doubted,
            best_by=self.best_by,
        )

    def add(self, evaluation: Evaluation, answers: Iterable[PromptScore]) -> None:
        self.finished[evaluation.version] = evaluation
        if kept := tuple(answers):
            self.kept[evaluation.version] = kept

    def without(
        self, gone: Collection[str], *, answers: Collection[tuple[int, int]] = ()
    ) -> tuple[Evaluation, ...]:
        """Return the evaluations that are others without all of some samplers' answers, or without single
        ``answers``: (version, slot)."""
        recomputed = []
        for version, kept in self.kept.items():
            left = [
                score
                for score in kept
                if score.sampler_id not in gone and (version, score.slot) not in answers
            ]
            if len(left) < len(kept):
                before = self.finished[version]
                of_prompt = by_prompt(left, prompts=before.prompts)
                _, disputed = odd_answers(of_prompt, self.measures)
                record = scored(before, left, dropped=before.prompts - len(of_prompt))
                recomputed.append(replace(record, disputed_by=", ".join(disputed)))
        return tuple(recomputed)

    def change(
        self,
        recomputed: Iterable[Evaluation],
        *,
        without: Collection[str],
        answers: Collection[tuple[int, int]],
        forgotten: Iterable[int],
    ) -> None:
        """Take evaluations as they are without some answers, and forget those of other versions."""
        self.finished |= {evaluation.version: evaluation for evaluation in recomputed}
        if without or answers:
            self.kept = {
                version: tuple(
                    score
                    for score in kept
                    if score.sampler_id not in without and (version, score.slot) not in answers
                )
                for version, kept in self.kept.items()
            }
        for version in forgotten:
            self.kept.pop(version, None)

    def surplus(self, further: int) -> tuple[int, ...]:
        """Return the versions whose answers go when so many more are kept."""
        excess = further + sum(map(len, self.kept.values())) - ANSWERS_KEPT
        status = self.status(None)
        worth = {one.version for one in (status.best, status.doubted) if one is not None}
        forgotten = []
        for version in sorted(self.kept):
            if excess > 0 and version not in worth:
                forgotten.append(version)
                excess -= len(self.kept[version])
        return tuple(forgotten)


def _highest(scored: Iterable[tuple[float, Evaluation]]) -> Evaluation | None:
    """Return the evaluation with the highest score; of equals the oldest."""
    return max(scored, key=lambda pair: (pair[0], -pair[1].version), default=(0.0, None))[1]
