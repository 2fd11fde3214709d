"""The summary of a run, figures and checks, as text and as ``summary.json``; pure."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.demo.chaos import Fault
from deploy.demo.plan import SAMPLERS, Plan
from deploy.runs.observation import Scrapes
from deploy.runs.promises import Check, reward_at_first, reward_at_last, staleness_of
from deploy.runs.records import LedgerRecord, Step
from deploy.runs.run_directory import COORDINATOR


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    plan: Plan
    run_id: str
    elapsed_s: float
    steps: Sequence[Step]
    ledger: LedgerRecord
    scrapes: Scrapes
    exit_codes: Mapping[str, int]
    faults: Sequence[Fault]
    checks: Sequence[Check]

    @property
    def is_success(self) -> bool:
        return all(check.is_kept for check in self.checks)


@dataclass(frozen=True, slots=True)
class SamplersPart:
    """One sampler's part in the run."""

    trained_groups: int
    staleness_mean_versions: float | None
    """None: no group was trained on."""
    staleness_max_versions: int
    received_bytes: Mapping[str, float]
    """Payload of policy versions by kind: delta, keyframe."""
    verdicts: Mapping[str, int]


def to_document(outcome: Outcome) -> dict[str, object]:
    """Return every figure as JSON values."""
    steps = outcome.steps
    return {
        "run_id": outcome.run_id,
        "is_success": outcome.is_success,
        "plan": dataclasses.asdict(outcome.plan),
        "elapsed_s": round(outcome.elapsed_s, 1),
        "versions": len(steps),
        "training_s": round(steps[-1].at_s - steps[0].at_s, 1) if steps else 0.0,
        "reward": {
            "at_first": reward_at_first(steps),
            "at_last": reward_at_last(steps),
            "by_version": [round(step.reward_mean, 4) for step in steps],
        },
        "kl_nats_max": max((step.kl_nats for step in steps), default=None),
        "ess_ratio_min": min((step.ess_ratio for step in steps), default=None),
        "samplers": {name: dataclasses.asdict(_figures_of(name, outcome)) for name in SAMPLERS},
        "sent_bytes": _transferred(COORDINATOR, "out", outcome.scrapes),
        "slots": dict(outcome.ledger.slots),
        "exit_codes": dict(outcome.exit_codes),
        "faults": [dataclasses.asdict(fault) for fault in outcome.faults],
        "checks": [dataclasses.asdict(check) for check in outcome.checks],
    }


def render(outcome: Outcome) -> RenderableType:
    """Return the summary as text and a table."""
    samplers = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("sampler", "groups trained on", "staleness mean", "max", "weights received"):
        samplers.add_column(heading, justify="left" if heading == "sampler" else "right")
    for name in SAMPLERS:
        figures = _figures_of(name, outcome)
        samplers.add_row(
            name,
            str(figures.trained_groups),
            f"{figures.staleness_mean_versions or 0:.2f} versions",
            str(figures.staleness_max_versions),
            f"{sum(figures.received_bytes.values()) / 1e6:.1f} MB",
        )
    checks = (
        Text.assemble(
            ("kept    ", "green") if check.is_kept else ("BROKEN  ", "bold red"),
            (check.promise, "bold"),
            f": {check.figures}",
        )
        for check in outcome.checks
    )
    return Group(samplers, Text(), *checks)


def _figures_of(name: str, outcome: Outcome) -> SamplersPart:
    groups, mean = staleness_of(name, outcome.steps)
    staleness = [g.staleness_versions for step in outcome.steps for g in step.groups if g.sampler_id == name]
    return SamplersPart(
        trained_groups=groups,
        staleness_mean_versions=mean if groups else None,
        staleness_max_versions=max(staleness, default=0),
        received_bytes=_transferred(name, "in", outcome.scrapes),
        verdicts=outcome.ledger.verdicts.get(name, {}),
    )


def _transferred(process: str, direction: str, scrapes: Scrapes) -> dict[str, float]:
    return {
        kind: scrapes.total(process, "heterorl_node_transfer_bytes_total", kind=kind, direction=direction)
        for kind in ("delta", "keyframe")
    }
