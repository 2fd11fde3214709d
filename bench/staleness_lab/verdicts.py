"""The questions the laboratory was built for, answered from its cells; nothing here is typed by hand."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bench.staleness_lab.methods import DEFAULT
from bench.staleness_lab.plan import Plan
from bench.staleness_lab.statistics import Condition, Estimate, Interval, Table, simultaneous

RIVAL: Final = "grpo"
FAR_VERSIONS: Final = 32
"""Staleness from which on the default is asked to be tied with the best."""

KEPT: Final = 0.95
"""Share of the best end of a cell, or of an on-policy score, that counts as keeping up."""

CROWDED: Final = 20 / 37
"""A cell in which at least this share of the methods keeps up does not separate them."""

STALLED_BELOW: Final = 0.05
"""A method that gains less than this on policy has learned nothing that staleness could take."""

CEILING: Final = 0.98
WIDE: Final = 0.05
"""An interval with a larger half-width cannot tell a useful difference from none."""

Place = tuple[str, Condition]
"""Task and condition."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A question, whether the data say yes (None: they say nothing), and the numbers."""

    question: str
    holds: bool | None
    details: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Duel:
    """The default against a rival in one cell."""

    place: Place
    rival: str
    interval: Interval


def verdicts(table: Table, plan: Plan) -> list[Verdict]:
    """Answer every question the finished cells allow."""
    conditions = plan.conditions()
    stale = [c for c in conditions if c[1] >= FAR_VERSIONS and c[2] == "none"]
    mismatched = [c for c in conditions if c[2] != "none"]
    return [
        _ties(
            f"Is `{DEFAULT}` tied with or better than every method at {FAR_VERSIONS} versions and more?",
            duels(table, [(task, c) for task in plan.report for c in stale]),
        ),
        _ties(
            f"Is `{DEFAULT}` tied with or better than every method where the sampler's logprobs are off?",
            duels(table, [(task, c) for task in plan.report for c in mismatched]),
        ),
        _ties(
            f"Is `{DEFAULT}` never worse than `{RIVAL}` on policy?",
            duels(table, [(task, ("fixed", 0, "none")) for task in plan.report], rivals=(RIVAL,)),
        ),
        _lengths(table, plan),
        _separates(table, [(task, c) for task in plan.report for c in conditions]),
        _on_policy(table, plan),
    ]


def duels(table: Table, places: Iterable[Place], *, rivals: Sequence[str] | None = None) -> list[Duel]:
    """Compare the default with every method, or with ``rivals``, in all places as one family."""
    pairs, differences = [], []
    for place in places:
        here = table.methods(*place)
        if DEFAULT not in here:
            continue
        for rival, outcome in here.items():
            if rival != DEFAULT and (rivals is None or rival in rivals):
                pairs.append((place, rival))
                differences.append(here[DEFAULT].ends - outcome.ends)
    intervals = simultaneous(np.array(differences)) if differences else []
    return [Duel(place, rival, each) for (place, rival), each in zip(pairs, intervals, strict=True)]


def _ties(question: str, found: list[Duel]) -> Verdict:
    by_place: dict[Place, list[Duel]] = {}
    for duel in found:
        by_place.setdefault(duel.place, []).append(duel)
    details = [f"{len(found)} comparisons, corrected together; points of score"] if found else []
    for place, here in by_place.items():
        worst = min(here, key=lambda duel: duel.interval.mean)
        count = {word: sum(d.interval.verdict == word for d in here) for word in ("better", "tied", "worse")}
        is_wide = worst.interval.high - worst.interval.low > 2 * WIDE
        details.append(
            f"{described(place)}: better than {count['better']}, tied with {count['tied']}, worse than "
            f"{count['worse']}; against the best, `{worst.rival}`: {_points(worst.interval)}"
            + (", **too wide to say**" if is_wide and worst.interval.verdict == "tied" else "")
        )
    holds = all(duel.interval.verdict != "worse" for duel in found) if found else None
    return Verdict(question, holds, tuple(details))


def _lengths(table: Table, plan: Plan) -> Verdict:
    """Share of the on-policy score kept at the largest staleness, by completion length."""
    oldest, details, holds = plan.staleness[-1], [], []
    for task in plan.lengths:
        kept = {}
        for method in table.methods(task, ("fixed", oldest, "none")):
            late, fresh = table.fixed(task, method, oldest), table.fixed(task, method, 0)
            if late is not None and fresh is not None and not has_stalled(table, task, method):
                kept[method] = Estimate.of(late.ends / fresh.ends)
        if DEFAULT not in kept:
            continue
        best = max(kept, key=lambda method: kept[method].mean)
        holds.append(kept[DEFAULT].mean >= KEPT)
        details.append(
            f"{task}: {percent(kept[DEFAULT])}, `{RIVAL}` {percent(kept.get(RIVAL))}, the most `{best}` "
            f"{percent(kept[best])}"
        )
    question = (
        f"Does `{DEFAULT}` keep {KEPT:.0%} of its on-policy score at {oldest} versions, whatever the length "
        "(design tasks)?"
    )
    return Verdict(question, all(holds) if holds else None, tuple(details))


def _separates(table: Table, places: Sequence[Place]) -> Verdict:
    details, crowded = [], 0
    for place in places:
        ends = [float(outcome.ends.mean()) for outcome in table.methods(*place).values()]
        if not ends:
            continue
        keeping = sum(end >= KEPT * max(ends) for end in ends)
        if keeping >= CROWDED * len(ends):
            crowded += 1
            details.append(
                f"{described(place)}: {keeping} of {len(ends)} methods reach {KEPT:.0%} of the best"
            )
    if details:
        details.insert(0, f"{crowded} cells do not; a tie there says little")
    asked = any(table.methods(*place) for place in places)
    return Verdict("Does every cell separate the methods?", not crowded if asked else None, tuple(details))


def _on_policy(table: Table, plan: Plan) -> Verdict:
    details, asked = [], False
    for task in plan.report:
        here = table.methods(task, ("fixed", 0, "none"))
        asked = asked or bool(here)
        stalled = [method for method in here if has_stalled(table, task, method)]
        top = [method for method, outcome in here.items() if outcome.ends.mean() >= CEILING]
        if stalled:
            details.append(f"{task}: {', '.join(stalled)} gain less than {100 * STALLED_BELOW:.0f} points")
        if top:
            details.append(f"{task}: {', '.join(top)} are at the ceiling ({CEILING:.0%} or more)")
    question = "On policy, does every method learn, and none reach the ceiling?"
    return Verdict(question, not details if asked else None, tuple(details))


def has_stalled(table: Table, task: str, method: str) -> bool:
    """Return whether a method has run on policy and learned nothing there."""
    fresh = table.fixed(task, method, 0)
    return fresh is not None and fresh.ends.mean() - np.mean(fresh.scores, axis=0)[0] < STALLED_BELOW


def described(place: Place) -> str:
    """Name a task and a condition."""
    task, (delay, staleness, mismatch) = place
    return f"{task}, {delay} {staleness}" + ("" if mismatch == "none" else f", {mismatch}")


def percent(estimate: Estimate | None) -> str:
    """Write a share as a percentage with its error; a dash for none."""
    return "-" if estimate is None else f"{100 * estimate.mean:.1f} ± {100 * estimate.error:.1f} %"


def _points(interval: Interval) -> str:
    low, high = 100 * interval.low, 100 * interval.high
    return f"{100 * interval.mean:+.1f} [{low:+.1f}, {high:+.1f}], p = {interval.p:.3f}: {interval.verdict}"
