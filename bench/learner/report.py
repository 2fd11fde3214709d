"""The figures of ``bench.learner`` as tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.shared.markdown import table

Line = dict[str, Any]


def write_report(lines: Sequence[Line], directory: Path) -> None:
    """Write learner.jsonl and learner.md into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "learner.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "learner.md").write_text(report(lines))


def report(lines: Sequence[Line]) -> str:
    """Return the tables in Markdown."""
    parts = [
        "# The learner's step\n",
        f"Written by `python -m bench.learner`, on {lines[0]['threads']} thread(s). What each step does: "
        "bench/learner/steps.py and trl_steps.py. Ratios are medians over rounds of the ratio within "
        "a round, with the quartiles; what `bare, again` says of itself is noise.\n",
        *(_step_table(kind, lines) for kind in dict.fromkeys(line["kind"] for line in lines)),
    ]
    return "\n".join(parts) + "\n"


def _step_table(kind: str, steps: Sequence[Line]) -> str:
    lines = [line for line in steps if line["kind"] == kind]
    remarks = [
        f"\nThe gradients of `ours, grpo` and `{line['step']}` are {line['gradient_apart']:.1e} of their "
        "length apart."
        for line in lines
        if line["gradient_apart"] is not None
    ]
    head = [
        *("step", "ms", "time over bare", "CPU time over bare", "CPU time over `ours, grpo`", "peak, MiB"),
        *("tokens/s", "tokens/s of a core", "positions read / distinct", "gradient norm"),
    ]
    return "\n".join([f"## {kind}\n", table(head, map(_step_row, lines)), *remarks, ""])


def _step_row(line: Line) -> tuple[Any, ...]:
    return (
        line["step"],
        f"{1e3 * line['seconds']:.1f}",
        _with_quartiles(line, "over_bare"),
        _with_quartiles(line, "cpu_over_bare"),
        f"{line['cpu_over_ours']:.2f}",
        _mebibytes(line["peak_bytes"]),
        line["tokens_per_second"],
        line["tokens_per_core_s"],
        f"{line['positions_over_distinct']:.2f}",
        f"{line['gradient_norm']:.6f}",
    )


def _with_quartiles(line: Line, field: str) -> str:
    if field not in line:
        return "-"
    low, high = line[f"{field}_quartiles"]
    return f"{line[field]:.3f} ({low:.3f}-{high:.3f})"


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"
