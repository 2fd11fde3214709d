"""The questions the table was made for, answered from its cells; nothing here is typed by hand."""

import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np

from bench.staleness_lab.methods import DEFAULT
from bench.staleness_lab.plan import Floats, Plan, last_scores
from bench.staleness_lab.statistics import (
    Comparison,
    Estimate,
    Table,
    comparison,
    gaps,
    mean_measure,
    rank_correlation,
)

RETAINED: Final = {128: 0.99, 256: 0.97}
"""Staleness -> share of the on-policy score that the default promises to retain."""

_RIVAL: Final = "grpo"
_KL_EDGES: Final = (0.0, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, np.inf)

_SPREADS: Final = {"variance": "variance", "cv2": "squared coefficient of variation (Adam sees no scale)"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A question, whether the data say yes (None: they say nothing), and the numbers."""

    question: str
    holds: bool | None
    details: tuple[str, ...]


def verdicts(table: Table, plan: Plan) -> list[Verdict]:
    """Answer every question the finished cells allow."""
    return [
        _retention(table, plan),
        _on_policy(table, plan),
        _gap(table, plan),
        _kl_grows(table, plan),
        _variance_follows(table, plan),
        *(_variance_crosses(table, plan, measure, name) for measure, name in _SPREADS.items()),
    ]


def _retention(table: Table, plan: Plan) -> Verdict:
    details: list[str] = []
    holds: list[bool | None] = []
    for task, (staleness, promised) in itertools.product(plan.tasks, RETAINED.items()):
        best = table.best_method(task, 0)
        own = table.retained(task, DEFAULT, staleness, of=DEFAULT)
        if own is None or best is None:
            holds.append(None)
            continue
        is_kept = own.mean >= promised
        holds.append(is_kept)
        of_best = table.retained(task, DEFAULT, staleness, of=best)
        measured = {m: table.retained(task, m, staleness, of=m) for m in plan.methods}
        kept = [share.mean >= promised for share in measured.values() if share is not None]
        details.append(
            f"{task}, {staleness} versions: {percent(own)} of its own on-policy score (promised "
            f"{promised:.0%}: {'kept' if is_kept else 'not kept'}), {percent(of_best)} of the best on-policy "
            f"score there is ({best}); {sum(kept)} of {len(kept)} methods keep this promise"
        )
    question = f"Does `{DEFAULT}` retain {_promises()} versions of its on-policy score?"
    return Verdict(question, _all(holds), tuple(details))


def _all(answers: list[bool | None]) -> bool | None:
    """No if one is no; otherwise not known if one is not known, or there is none."""
    if False in answers:
        return False
    return True if answers and None not in answers else None


def _on_policy(table: Table, plan: Plan) -> Verdict:
    found = _compared(table, plan)
    worse = [at for at, each in found.items() if each.is_significant and each.difference.mean < 0]
    details = [
        f"{task}, {age} versions: {each.difference.mean:+.4f} ± {each.difference.error:.4f}, p = {each.p:.3f}"
        for (task, age), each in found.items()
    ]
    at_zero = [at for at in found if at[1] == 0]
    holds = not any(at in worse for at in at_zero) if at_zero else None
    return Verdict(
        f"Is `{DEFAULT}` never significantly worse than `{_RIVAL}` on policy (staleness 0)?",
        holds,
        tuple(details),
    )


def _compared(table: Table, plan: Plan) -> dict[tuple[str, int], Comparison]:
    """The default's end minus the rival's, by task and staleness."""
    found = {}
    for task in plan.tasks:
        for staleness in plan.staleness:
            ours, theirs = table.get(task, DEFAULT, staleness), table.get(task, _RIVAL, staleness)
            if ours is not None and theirs is not None:
                found[task, staleness] = comparison(last_scores(ours.scores), last_scores(theirs.scores))
    return found


def _gap(table: Table, plan: Plan) -> Verdict:
    details, holds = [], []
    for task in plan.tasks:
        for staleness in plan.staleness:
            by_method = {m: gaps(o) for m, o in table.methods(task, staleness).items()}
            if DEFAULT not in by_method:
                continue
            means = {method: float(each.mean()) for method, each in by_method.items()}
            least = min(means, key=means.__getitem__)
            against = comparison(by_method[DEFAULT], by_method[least])
            is_tied = not against.is_significant
            holds.append(is_tied)
            ours = Estimate.of(by_method[DEFAULT])
            details.append(
                f"{task}, {staleness} versions: {ours.mean:.4f} ± {ours.error:.4f}; smallest "
                f"{means[least]:.4f} ({least}), p = {against.p:.3f}: "
                f"{'tied' if is_tied else 'larger'}"
            )
    question = f"Has `{DEFAULT}` the smallest best-to-last gap, or one tied with it?"
    return Verdict(question, all(holds) if holds else None, tuple(details))


def _kl_grows(table: Table, plan: Plan) -> Verdict:
    details, coefficients = [], []
    for task in plan.tasks:
        for method in plan.methods:
            cells = [(s, o) for s in plan.staleness if (o := table.get(task, method, s)) is not None]
            kl = [mean_measure(outcome, "kl") for _, outcome in cells]
            coefficient = rank_correlation([s for s, _ in cells], kl)
            if np.isfinite(coefficient):
                coefficients.append(coefficient)
            if method in (DEFAULT, "gepo", _RIVAL):
                by_lag = ", ".join(
                    f"{s}: {max(value, 0.0):.3g}" for (s, _), value in zip(cells, kl, strict=True)
                )
                details.append(f"{task}, {method}, nats a token by staleness: {by_lag}")
    if coefficients:
        rising = float(np.mean([c > 0 for c in coefficients]))
        strictly = float(np.mean([c == 1 for c in coefficients]))
        details.append(
            f"rank correlation above 0 in {rising:.0%} of methods and tasks, exactly 1 in {strictly:.0%}"
        )
    return Verdict(
        "Does KL(behaviour || learner) grow with the lag?",
        bool(np.median(coefficients) > 0.8) if coefficients else None,
        tuple(details),
    )


def _variance_follows(table: Table, plan: Plan) -> Verdict:
    details, coefficients = [], []
    for task in plan.tasks:
        kl, variance = _points(table, task, "kl", "variance_gspo")
        coefficient = rank_correlation(kl, variance)
        if np.isfinite(coefficient):
            coefficients.append(coefficient)
            details.append(f"{task}: rank correlation {coefficient:.3f} over {len(kl)} tenths of runs")
    return Verdict(
        "Does the variance of the importance weights follow KL?",
        all(c > 0.8 for c in coefficients) if coefficients else None,
        tuple(details),
    )


def _variance_crosses(table: Table, plan: Plan, measure: str, name: str) -> Verdict:
    """The same completions weighed by GEPO and by GSPO, by KL."""
    details, holds = [], []
    for task in plan.tasks:
        kl, gspo, gepo = _points(table, task, "kl", f"{measure}_gspo", f"{measure}_gepo")
        by_kl = _shares(kl, gspo, gepo)
        if len(by_kl) > 1:
            lower = [share for share, _, _ in by_kl.values()]
            holds.append(lower[0] < 0.5 < lower[-1])
        details += [
            f"{task}, KL {a:g} to {b:g}: GEPO's lower in {share:.0%} of {count}, median ratio {ratio:.3g}"
            for (a, b), (share, count, ratio) in by_kl.items()
        ]
    question = f"Is the {name} of GEPO's weights above that of GSPO's at the lowest KL, below at the highest?"
    return Verdict(question, all(holds) if holds else None, tuple(details))


def _shares(kl: Floats, gspo: Floats, gepo: Floats) -> dict[tuple[float, float], tuple[float, int, float]]:
    """By KL interval: how often GEPO's is lower, of how many, and the median of GEPO's over GSPO's."""
    shares = {}
    for a, b in itertools.pairwise(_KL_EDGES):
        inside = (kl > max(a, 1e-6)) & (kl <= b) & (gspo > 0)
        if inside.sum() >= 5:
            ratio = gepo[inside] / gspo[inside]
            shares[a, b] = (float((ratio < 1).mean()), int(inside.sum()), float(np.median(ratio)))
    return shares


def _points(table: Table, task: str, *names: str) -> list[Floats]:
    """Measures of every tenth of every fixed-delay cell of a task where all of them are finite."""
    rows = [
        [np.nan if value is None else value for value in values]
        for outcome in table.fixed(task)
        for values in zip(*(outcome.measures[name] for name in names), strict=True)
    ]
    points = np.array(rows, dtype=np.float64).reshape(-1, len(names))
    return list(points[np.isfinite(points).all(axis=1)].T)


def percent(estimate: Estimate | None) -> str:
    """Write a share as a percentage with its error; a dash for none."""
    return "-" if estimate is None else f"{100 * estimate.mean:.1f} ± {100 * estimate.error:.1f} %"


def _promises() -> str:
    return " and ".join(f"{share:.0%} at {staleness}" for staleness, share in RETAINED.items())
