"""The outcome of a real run, and its promises; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from rich.table import Table

from deploy.real.real_plan import Plan
from deploy.runs.contributions import Contributions, parameters_of
from deploy.runs.promises import (
    FIRST_BATCHES,
    LAST_BATCHES,
    Check,
    promises_of_any_run,
    reward_at_first,
    reward_at_last,
    staleness_of,
)
from deploy.runs.records import LedgerRecord, Step
from node.values.evaluation import REWARD, Evaluation, best_of, comparable

SHOWN_DIFFERENCES: Final = 2
"""Share of equal greedy texts."""


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """The exported version and what it answers."""

    version: int
    root: str
    """Root of the words written, hex."""
    greedy_texts: Mapping[str, Sequence[str]]
    """Answers to the held-out prompts, by reader; the first reader's are compared with."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The records of a run."""

    plan: Plan
    run_id: str
    elapsed_s: float
    steps: Sequence[Step]
    ledger: LedgerRecord
    exit_codes: Mapping[str, int]
    evaluations: Sequence[Evaluation]
    """The finished ones, oldest version first."""
    export: ExportedModel | None
    """None: no step was made."""
    contributions: Mapping[str, Contributions] = field(default_factory=dict)
    """By contributor."""

    @property
    def checks(self) -> tuple[Check, ...]:
        """Every promise."""
        versions = self.plan.versions or len(self.steps)
        return (
            self._reward_rose(),
            self._held_out_rose(),
            self._every_engine_took_part(),
            *([self._every_contributor_took_part()] if self.contributions else []),
            *promises_of_any_run(
                versions=versions, steps=self.steps, ledger=self.ledger, exit_codes=self.exit_codes
            ),
            self._export_is_signed(),
            self._texts_agree(),
        )

    @property
    def is_success(self) -> bool:
        return all(check.is_kept for check in self.checks)

    def _reward_rose(self) -> Check:
        first, last = reward_at_first(self.steps), reward_at_last(self.steps)
        return Check(
            f"the reward rises by {self.plan.gain:g}",
            last - first >= self.plan.gain,
            f"{first:.3f} over the first {FIRST_BATCHES} batches, {last:.3f} over the last {LAST_BATCHES}",
        )

    def _held_out_rose(self) -> Check:
        promise = f"the reward on held-out prompts rises by {self.plan.gain:g}"
        best = best_of(self.evaluations, REWARD)
        if best is None or best.reward_mean is None:
            return Check(promise, False, "no version has a score")
        base = comparable(self.evaluations)[0]
        return Check(
            promise,
            base.version == 0 and best.reward_mean - (base.reward_mean or 0.0) >= self.plan.gain,
            f"{base.score_text} (version {base.version}) to {best.score_text} (version {best.version}) on "
            f"{best.counted_prompts} prompts, most likely token each time; "
            f"{len(self.evaluations)} evaluations",
        )

    def _every_engine_took_part(self) -> Check:
        groups = {name: staleness_of(name, self.steps) for name in self.plan.samplers}
        return Check(
            "every sampler's groups were trained on",
            all(count for count, _ in groups.values()),
            ", ".join(
                f"{name} ({self.plan.samplers[name]}) {count} groups, {stale:.1f} versions stale"
                for name, (count, stale) in groups.items()
            ),
        )

    def _every_contributor_took_part(self) -> Check:
        parameters, told = parameters_of(self.plan.model), self.contributions.items()
        return Check(
            "every contributor's steps were merged",
            all(one.rounds for _, one in told),
            ", ".join(
                f"{name} {one.steps} steps, {one.payload_bytes / 1e6:.1f} MB, "
                f"{one.times_fewer(parameters):.0f} times fewer than float32 changes of each step"
                for name, one in told
            ),
        )

    def _export_is_signed(self) -> Check:
        promise = "the export is, word for word, the version that the learner signed"
        if self.export is None:
            return Check(promise, False, "nothing was exported")
        signed = self.ledger.roots.get(self.export.version, "not seen")
        return Check(
            promise,
            signed == self.export.root,
            f"version {self.export.version}: exported {self.export.root}, signed {signed}",
        )

    def _texts_agree(self) -> Check:
        promise = "the export writes the same greedy text whatever reads it"
        if self.export is None:
            return Check(promise, False, "nothing was exported")
        (first, expected), *others = self.export.greedy_texts.items()
        differing = [
            f"; {text!r:.60} by {first}, {other!r:.60} by {name}"
            for name, texts in others
            for text, other in zip(expected, texts, strict=True)
            if text != other
        ]
        return Check(
            promise,
            bool(expected and others) and not differing,
            f"{len(expected)} prompts, {', '.join(self.export.greedy_texts)}; {len(differing)} texts differ"
            + "".join(differing[:SHOWN_DIFFERENCES]),
        )


def render(outcome: Outcome) -> Table:
    """Return the promises as a table."""
    table = Table("promised", "seen", "kept", title=outcome.run_id, title_justify="left")
    for check in outcome.checks:
        table.add_row(check.promise, check.figures, "[green]yes" if check.is_kept else "[bold red]NO")
    return table


def to_document(outcome: Outcome) -> dict[str, object]:
    """Return every figure as JSON values."""
    plan = outcome.plan
    return {
        "run_id": outcome.run_id,
        "is_success": outcome.is_success,
        "seed": plan.seed,
        "task_file": plan.task_file.name,
        "samplers": plan.samplers,
        "contributions": {name: asdict(one) for name, one in outcome.contributions.items()},
        "elapsed_s": round(outcome.elapsed_s, 1),
        "versions": len(outcome.steps),
        "reward_by_version": [round(step.reward_mean, 4) for step in outcome.steps],
        "step_s_by_version": [round(step.step_s, 2) for step in outcome.steps],
        "evaluations": [asdict(one) for one in outcome.evaluations],
        "checks": [asdict(check) for check in outcome.checks],
        "greedy_texts": {} if outcome.export is None else dict(outcome.export.greedy_texts),
    }
