"""The table as pictures."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no display

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from bench.staleness_lab.methods import DEFAULT
from bench.staleness_lab.plan import NAMED, Plan
from bench.staleness_lab.statistics import Estimate, Table, mean_measure

_COLOURS: Final = dict(
    zip(
        NAMED,
        ("tab:red", "tab:blue", "tab:orange", "tab:cyan", "tab:green", "tab:purple", "tab:brown", "black"),
        strict=False,
    )
)
"""Methods with a colour; the others are grey."""

_Panel = Callable[[Axes, Plan, Table, str, Sequence[str]], None]


def draw(out: Path, plan: Plan, table: Table, methods: Sequence[str]) -> list[tuple[str, str]]:
    """Save the pictures as PNG; returns (file name, title) of each."""
    out.mkdir(parents=True, exist_ok=True)
    # Grey first, the default last: what matters is drawn on top.
    ordered = sorted(methods, key=lambda method: (method in _COLOURS, method == DEFAULT))
    pictures = []
    panels: tuple[tuple[str, str, Sequence[str], _Panel], ...] = (
        ("staleness_scores.png", "score at the end, by staleness", tuple(plan.report), _scores),
        ("staleness_curves.png", "learning at the largest staleness", tuple(plan.report), _curves),
        ("staleness_kl.png", "KL(behaviour || learner), by staleness", tuple(plan.report), _divergence),
        ("staleness_lengths.png", "score at the end, by completion length (design)", plan.lengths, _scores),
    )
    for name, title, tasks, panel in panels:
        figure, axes = plt.subplots(
            1, len(tasks), figsize=(6 * len(tasks), 4.5), layout="constrained", squeeze=False
        )
        for axis, task in zip(axes[0], tasks, strict=True):
            panel(axis, plan, table, task, ordered)
            axis.set_title(task)
        drawn = [axis.get_legend_handles_labels() for axis in axes[0]]
        by_label = {label: handle for each in drawn for handle, label in zip(*each, strict=True)}
        figure.legend(
            by_label.values(), by_label, loc="outside lower center", ncols=8, fontsize=8, frameon=False
        )
        figure.suptitle(title)
        figure.savefig(out / name, dpi=110)
        plt.close(figure)
        pictures.append((name, title))
    return pictures


def _scores(axis: Axes, plan: Plan, table: Table, task: str, methods: Sequence[str]) -> None:
    for method in methods:
        points = [
            (s, Estimate.of(cell.ends))
            for s in plan.staleness
            if (cell := table.fixed(task, method, s)) is not None
        ]
        ages, ends = [s for s, _ in points], [end for _, end in points]
        axis.errorbar(ages, [e.mean for e in ends], [e.error for e in ends], marker=".", **_style(method))
    _over_staleness(axis, plan)
    axis.set_ylabel("score, mean of the seeds")


def _curves(axis: Axes, plan: Plan, table: Table, task: str, methods: Sequence[str]) -> None:
    largest = plan.staleness[-1]
    for method in methods:
        cell = table.fixed(task, method, largest)
        if cell is not None:
            curve = np.mean(cell.scores, axis=0)
            axis.plot(np.linspace(0, cell.cell.versions, len(curve)), curve, **_style(method))
    axis.set(xlabel=f"version, every group {largest} versions old", ylabel="score")


def _divergence(axis: Axes, plan: Plan, table: Table, task: str, methods: Sequence[str]) -> None:
    for method in methods:
        points = [
            (s, kl)
            for s in plan.staleness
            if s > 0
            and (cell := table.fixed(task, method, s)) is not None
            and (kl := mean_measure(cell, "kl")) > 0
        ]
        if points:
            axis.plot([s for s, _ in points], [kl for _, kl in points], marker=".", **_style(method))
    _over_staleness(axis, plan)
    if axis.lines:  # a logarithmic axis of nothing cannot be drawn
        axis.set_yscale("log")
    axis.set_ylabel("nats a token, mean over the run")


def _style(method: str) -> dict[str, Any]:
    if method not in _COLOURS:
        return {"color": "lightgrey", "linewidth": 0.8}
    return {"color": _COLOURS[method], "label": method, "linewidth": 2.5 if method == DEFAULT else 1.5}


def _over_staleness(axis: Axes, plan: Plan) -> None:
    axis.set_xscale("symlog", linthresh=8)
    axis.set_xticks(plan.staleness, [str(s) for s in plan.staleness])
    axis.set_xlabel("staleness, versions")
