"""Report of the measurements: a table of bars held or missed, then every figure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from bench.sync_lab.lab import Facts


@dataclass(frozen=True, slots=True)
class Bar:
    """Bound on one figure of some measurements."""

    claim: str
    scenario: str
    where: Facts
    """Which measurements: those with these facts."""
    figure: str
    bound: Literal[">=", "<="]
    limit: float


STEP: Final = {"what": "step"}
WARM: Final = {"what": "keyframe, warm connections"}
LOSSY: Final = {"connections": 8, "congestion_control": "cubic"}
BEHIND_RELAY: Final = {"receivers": 32, "has_relay": True}

BARS: Final = (
    Bar("a 1 % step against the file over HTTP, times", "step", STEP, "times_faster_than_http", ">=", 100),
    Bar("a keyframe over bytes / bandwidth", "keyframe", {}, "over_bytes_by_bandwidth", "<=", 1.15),
    Bar("0.5 % loss: 8 connections over one", "loss", LOSSY, "times_one_connection", ">=", 4),
    Bar("cut at 90 %: sent again, headers included", "cut", {}, "sent_again_share", "<=", 0.12),
    Bar("32 behind a relay: copies from the hub", "fanout", BEHIND_RELAY, "hub_egress_copies", "<=", 1.1),
    Bar("1 Gbit/s: steady, of plain TCP", "gigabit", WARM, "steady_share_of_tcp", ">=", 0.85),
    Bar("1 Gbit/s: 512 MB, of the line", "gigabit", WARM, "share_of_line", ">=", 0.80),
    Bar("1 Gbit/s: payload received twice", "gigabit", WARM, "repeated_share", "<=", 0.03),
    Bar("1 Gbit/s: control calls' p99, seconds", "gigabit", WARM, "control_p99_s", "<=", 0.33),
    *(
        Bar(
            f"three relays deep over one hop, at {rate_mbit} Mbit/s",
            "chain",
            {"relays": 3, "rate_mbit": rate_mbit},
            "times_one_hop",
            "<=", 1.15,
        )
        for rate_mbit in (50, 100, 1000)
    ),
)  # fmt: skip


def read(out: Path) -> list[Facts]:
    """Return what was measured before; nothing, if there is nothing."""
    path = out / "sync.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(out: Path, measured: Sequence[Facts]) -> None:
    """Write sync.jsonl and sync.md."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "sync.jsonl").write_text("".join(json.dumps(facts) + "\n" for facts in measured))
    (out / "sync.md").write_text("\n".join(_lines(measured)) + "\n")


def verdicts(measured: Sequence[Facts]) -> list[tuple[Bar, float, bool]]:
    """Return each bar that was measured, its worst figure, and whether that holds."""
    judged = []
    for bar in BARS:
        where = {"scenario": bar.scenario, **bar.where}
        those = [facts for facts in measured if where.items() <= facts.items() and bar.figure in facts]
        figures = [facts[bar.figure] for facts in those]
        if figures:
            is_floor = bar.bound == ">="
            worst = min(figures) if is_floor else max(figures)
            judged.append((bar, worst, worst >= bar.limit if is_floor else worst <= bar.limit))
    return judged


def _lines(measured: Sequence[Facts]) -> list[str]:
    lines = [
        "# Syncing policy versions over emulated lines",
        "",
        "Made by `python -m bench.sync`; every figure is in sync.jsonl. Time runs from the",
        "announcement by the hub to the last verified word.",
        "",
        "| what | bar | measured | |",
        "| --- | --- | --- | --- |",
    ]
    for bar, figure, holds in verdicts(measured):
        lines.append(
            f"| {bar.claim} | {bar.bound} {bar.limit:g} | {figure:.3g} | {'held' if holds else 'MISSED'} |"
        )
    lines.append("")
    for scenario in dict.fromkeys(facts["scenario"] for facts in measured):
        lines += [f"## {scenario}", ""]
        for facts in measured:
            if facts["scenario"] == scenario:
                figures = (
                    f"{key} {_short(value)}"
                    for key, value in facts.items()
                    if key not in ("scenario", "what")
                )
                lines.append(f"- **{facts['what']}**: " + ", ".join(figures))
        lines.append("")
    return lines[:-1]


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
