"""Plots a run: reward, staleness by sampler, KL and ESS over versions."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no display

import matplotlib.pyplot as plt

from deploy.demo.checks import REWARD_AT_FIRST, REWARD_AT_LAST
from deploy.demo.plan import SAMPLERS
from deploy.demo.records import Step


def plot(steps: Sequence[Step], path: Path, *, title: str, marks: Sequence[tuple[int, str]]) -> None:
    """Save the curves of a run as PNG.

    Args:
        steps: oldest first, at least one.
        path: of the PNG.
        title: above the plot.
        marks: (version, text) of events during the run; a dotted line each.
    """
    versions = [step.version for step in steps]
    figure, axes = plt.subplots(4, sharex=True, figsize=(9, 10), layout="constrained")
    reward, staleness, divergence, sample_size = axes
    figure.suptitle(title)
    reward.plot(versions, [step.reward_mean for step in steps], alpha=0.4, label="batch")
    reward.plot(versions, _smooth([step.reward_mean for step in steps]), label="mean of 10")
    for promised in (REWARD_AT_FIRST, REWARD_AT_LAST):
        reward.axhline(promised, color="grey", linestyle=":")
    reward.set(ylabel="reward", ylim=(0, 1))
    for name in SAMPLERS:
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


def _smooth(values: Sequence[float], window: int = 10) -> list[float]:
    """Return the moving average over the last ``window`` values."""
    return [sum(values[max(0, end - window) : end]) / min(window, end) for end in range(1, len(values) + 1)]
