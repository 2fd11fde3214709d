"""The learner's steps as curves over versions and sums by sampler; pure.

A line is one of ``steps.jsonl``, or a ``StepReport`` as a dictionary, which has fewer fields.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from node.values.run import StepReport

DRAWN: Final = (
    "reward_mean",
    "kl_nats",
    "ess_ratio",
    "staleness_mean_versions",
    "staleness_max_versions",
    "learning_rate",
    "step_s",
    "groups_wait_s",
    "merged_norm",
    "merged_cosine_min",
)
"""Numbers of a step's line that are drawn."""


@dataclass(slots=True)
class StepCurves:
    """The steps of a run, as far as they are known."""

    steps: int = 0
    tokens: int = 0
    made_at_s: dict[int, float] = field(default_factory=dict)
    """Unix seconds by version, on the learner's clock; of a version that was made twice, the later."""
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By name in ``DRAWN``: (version, value)."""
    grader_metrics: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    events: list[tuple[int, str]] = field(default_factory=list)
    """(version, rollback or change of settings)."""
    trained: Counter[str] = field(default_factory=Counter)
    """Groups trained on, by sampler; and the versions they were stale together."""
    staleness: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of_log(cls, lines: Iterable[Mapping[str, Any]]) -> Self:
        """Return the curves of lines of ``steps.jsonl``, in their order."""
        curves = cls()
        for line in lines:
            curves._add(line)
        return curves

    @classmethod
    def of_reports(cls, reports: Iterable[StepReport]) -> Self:
        """Return the curves of what heartbeats told."""
        return cls.of_log(map(dataclasses.asdict, reports))

    def _add(self, line: Mapping[str, Any]) -> None:
        version = line["version"]
        if (at_s := line.get("at_s")) is not None:
            self.made_at_s[version] = at_s
        self.events += ((version, what) for what in _events(line))
        if line.get("restored_version") is not None:
            return
        self.steps += 1
        self.tokens += line.get("tokens", 0)
        for name in DRAWN:
            if (value := line.get(name)) is not None:
                self.curves.setdefault(name, []).append((version, value))
        for name, value in line.get("grader_metrics", {}).items():
            self.grader_metrics.setdefault(name, []).append((version, value))
        for group in line.get("groups", ()):
            self.trained[group["sampler_id"]] += 1
            self.staleness[group["sampler_id"]] += group["staleness_versions"]


def _events(line: Mapping[str, Any]) -> Iterator[str]:
    if (restored := line.get("restored_version")) is not None:
        yield f"rollback to version {restored}"
    for key, (was, is_now) in line.get("changed_settings", {}).items():
        yield f"{key} {was} -> {is_now}"
