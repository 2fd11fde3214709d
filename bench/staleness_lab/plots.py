"""The table as pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no display

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.staleness_lab.methods import DEFAULT
from bench.staleness_lab.plan import Plan, last_scores
from bench.staleness_lab.statistics import Estimate, Table, mean_measure

_SHOWN: Final = {
    "version_aware_kl": "tab:red",
    "version_aware": "tab:pink",
    "gepo": "tab:orange",
    "grpo": "tab:blue",
    "gspo": "tab:cyan",
    "decoupled_ppo": "tab:green",
    "dg": "tab:purple",
    "importance_sampling": "tab:brown",
}
"""Methods with a colour; the others are grey."""


def draw(out: Path, plan: Plan, table: Table) -> list[tuple[str, str]]:
    """Save the pictures as PNG; gives (file name, title) of each."""
    out.mkdir(parents=True, exist_ok=True)
    pictures = []
    for name, title, panel in (
        ("staleness_scores.png", "1 - score at the end, by staleness (lower is better)", _errors),
        ("staleness_kl.png", "KL(behaviour || learner), by staleness", _divergence),
        ("staleness_curves.png", "learning at the largest staleness", _curves),
        ("staleness_variance.png", "variance of the weights of the same completions, by KL", _variances),
    ):
        figure, axes = plt.subplots(
            1, len(plan.tasks), figsize=(6 * len(plan.tasks), 4.5), layout="constrained", squeeze=False
        )
        for axis, task in zip(axes[0], plan.tasks, strict=True):
            panel(axis, plan, table, task)
            axis.set_title(task)
        drawn = [axis.get_legend_handles_labels() for axis in axes[0]]
        by_label = {label: handle for each in drawn for handle, label in zip(*each, strict=True)}
        figure.legend(
            by_label.values(), by_label, loc="outside lower center", ncols=8, fontsize=8, frameon=False
        )
        figure.suptitle(title)
        _save(figure, out / name)
        pictures.append((name, title))
    return pictures


def _errors(axis: Axes, plan: Plan, table: Table, task: str) -> None:
    for method in _back_to_front(plan.methods):
        points = [
            (s, Estimate.of(last_scores(cell.scores)))
            for s in plan.staleness
            if (cell := table.get(task, method, s)) is not None
        ]
        ages, ends = [s for s, _ in points], [end for _, end in points]
        axis.errorbar(ages, [1 - e.mean for e in ends], [e.error for e in ends], marker=".", **_style(method))
    _over_staleness(axis, plan)
    axis.set(yscale="log", ylabel="1 - score, mean of the seeds")


def _divergence(axis: Axes, plan: Plan, table: Table, task: str) -> None:
    for method in _back_to_front(plan.methods):
        points = [
            (s, mean_measure(cell, "kl"))
            for s in plan.staleness
            if s > 0 and (cell := table.get(task, method, s)) is not None
        ]
        axis.plot([s for s, _ in points], [kl for _, kl in points], marker=".", **_style(method))
    _over_staleness(axis, plan)
    axis.set_xlim(left=0.9 * min((s for s in plan.staleness if s > 0), default=1))
    axis.set(yscale="log", ylabel="nats a token, mean over the run")


def _curves(axis: Axes, plan: Plan, table: Table, task: str) -> None:
    largest = max(plan.staleness)
    for method in _back_to_front(plan.methods):
        cell = table.get(task, method, largest)
        if cell is not None:
            curve = np.mean(cell.scores, axis=0)
            axis.plot(np.linspace(0, cell.cell.versions, len(curve)), curve, **_style(method))
    axis.set(xlabel=f"version, every group {largest} versions old", ylabel="score")


def _variances(axis: Axes, _: Plan, table: Table, task: str) -> None:
    for weight, colour in (("gspo", "tab:cyan"), ("gepo", "tab:orange")):
        points = [
            (kl, variance)
            for outcome in table.fixed(task)
            for kl, variance in zip(
                outcome.measures["kl"], outcome.measures[f"variance_{weight}"], strict=True
            )
            if kl is not None and variance is not None and kl > 1e-6 and variance > 0
        ]
        kl, variances = [kl for kl, _ in points], [variance for _, variance in points]
        axis.scatter(kl, variances, s=3, alpha=0.3, color=colour, label=weight)
    axis.set(xscale="log", yscale="log", xlabel="KL(behaviour || learner), nats a token")
    axis.set_ylabel("variance within a group")


def _back_to_front(methods: Sequence[str]) -> list[str]:
    """Grey first, the default last: what matters is drawn on top."""
    return sorted(methods, key=lambda method: (method in _SHOWN, method == DEFAULT))


def _style(method: str) -> dict[str, Any]:
    if method not in _SHOWN:
        return {"color": "lightgrey", "linewidth": 0.8}
    return {"color": _SHOWN[method], "label": method, "linewidth": 2.5 if method == DEFAULT else 1.5}


def _over_staleness(axis: Axes, plan: Plan) -> None:
    axis.set_xscale("symlog", linthresh=8)
    axis.set_xticks(plan.staleness, [str(s) for s in plan.staleness])
    axis.set_xlabel("staleness, versions")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)
