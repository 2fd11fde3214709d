"""Plots a run: reward, staleness by sampler, KL and ESS over versions; divergence and ESS by lag."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no display

import matplotlib.pyplot as plt

from deploy.runs.observation import Metrics
from deploy.runs.records import Step

MEASURED: Final = "measured, ± 2 standard errors"


def plot(
    steps: Sequence[Step],
    path: Path,
    *,
    title: str,
    samplers: Sequence[str],
    promised: Sequence[float] = (),
    scores: Sequence[tuple[int, float]] = (),
    marks: Sequence[tuple[int, str]] = (),
) -> None:
    """Save the curves of a run as PNG.

    Args:
        steps: oldest first, at least one.
        path: of the PNG.
        title: above the plot.
        samplers: whose staleness is shown.
        promised: rewards to be reached; a dotted line each.
        scores: (version, mean reward) on held-out prompts.
        marks: (version, text) of events during the run; a dotted line each.
    """
    versions = [step.version for step in steps]
    figure, axes = plt.subplots(4, sharex=True, figsize=(9, 10), layout="constrained")
    reward, staleness, divergence, sample_size = axes
    figure.suptitle(title)
    reward.plot(versions, [step.reward_mean for step in steps], alpha=0.4, label="batch")
    reward.plot(versions, _smooth([step.reward_mean for step in steps]), label="mean of 10")
    if scores:
        reward.plot(*zip(*scores, strict=True), "o-", label="held-out prompts")
    for level in promised:
        reward.axhline(level, color="grey", linestyle=":")
    reward.set(ylabel="reward", ylim=(0, 1))
    for name in samplers:
        points = [
            (step.version, group.staleness_versions)
            for step in steps
            for group in step.groups
            if group.sampler_id == name
        ]
        staleness.scatter(*zip(*points, strict=True) if points else ([], []), s=6, alpha=0.4, label=name)
    staleness.set(ylabel="staleness, versions")
    divergence.plot(versions, [step.kl_nats for step in steps])
    divergence.set(ylabel="KL(behaviour || learner),\nnats per token", yscale="log", ylim=(1e-5, None))
    sample_size.plot(versions, [step.ess_ratio for step in steps])
    sample_size.set(ylabel="ESS / batch", ylim=(0, 1), xlabel="policy version")
    for axis in axes:
        for version, _ in marks:
            axis.axvline(version, color="red", linestyle=":")
    for version, text in marks:
        reward.annotate(text, (version, 0.02), color="red", rotation=90, fontsize=8)
    reward.legend(loc="lower right")
    staleness.legend(loc="upper right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_by_lag(learner: Metrics, steps: Sequence[Step], path: Path) -> None:
    """Save divergence and effective sample size by lag as PNG; nothing if no lag was measured.

    Args:
        learner: the last scrape of the learner.
        steps: of the run.
        path: of the PNG.
    """

    def curve(name: str) -> dict[int, float]:
        of_age = learner.by_label(f"heterorl_learner_{name}", "age_versions")
        return {int(age): value for age, value in of_age.items()}

    drift, errors = curve("drift_nats"), curve("drift_error_nats")
    if not drift:
        return
    share = curve("expected_ess_ratio")
    figure, (divergence, sample_size) = plt.subplots(2, sharex=True, figsize=(9, 7), layout="constrained")
    bars = [2 * errors[age] for age in drift]
    divergence.errorbar(*zip(*drift.items(), strict=True), yerr=bars, fmt="o", capsize=3, label=MEASURED)
    divergence.set(ylabel="divergence from the learner,\nnats per token")
    sample_size.scatter(
        [step.staleness_mean_versions for step in steps],
        [step.ess_ratio for step in steps],
        s=6,
        alpha=0.4,
        label="batches, at their mean lag",
    )
    sample_size.plot([0, *share], [1, *share.values()], color="C1", label="expected of that divergence")
    sample_size.axhline(0.5, color="grey", linestyle=":")
    sample_size.set(ylabel="effective sample size / sample size", ylim=(0, 1.02))
    sample_size.set(xlabel="lag, versions", xlim=(0, 1.5 * max(drift)))
    divergence.set(ylim=(0, 1.1 * max(nats + 2 * errors[age] for age, nats in drift.items())))
    divergence.legend(loc="upper left")
    sample_size.legend(loc="lower left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _smooth(values: Sequence[float], window: int = 10) -> list[float]:
    """Return the moving average over the last ``window`` values."""
    return [sum(values[max(0, end - window) : end]) / min(window, end) for end in range(1, len(values) + 1)]
