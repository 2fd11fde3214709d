"""The figures of ``bench.learner`` as a table and a plot."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

Line = dict[str, Any]


def write_report(lines: Sequence[Line], directory: Path) -> None:
    """Write learner.jsonl, learner.md and learner.png into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "learner.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "learner.md").write_text(report(lines))
    _plot(lines, directory / "learner.png")


def report(lines: Sequence[Line]) -> str:
    """Return the tables in Markdown."""
    steps = [line for line in lines if "step" in line]
    logprobs = [line for line in lines if "logprobs" in line]
    parts = [
        "# The learner's step\n",
        f"Written by `python -m bench.learner`, on {lines[0]['threads']} thread(s). What each step does: "
        "bench/learner/steps.py and trl_steps.py. Ratios are medians over rounds of the ratio within "
        "a round, with the quartiles; what `bare, again` says of itself is noise.\n",
        "![times and peaks](learner.png)\n",
        *(_step_table(kind, steps) for kind in dict.fromkeys(line["kind"] for line in steps)),
        "## Memory of logprobs\n",
        "Forward and backward, beyond the gradients themselves (which grow with the vocabulary, as the "
        "weights do).\n",
        "| vocabulary | tokens | logprobs | beyond gradients, MiB | one chunk, MiB | CPU s |",
        "| ---: | ---: | --- | ---: | ---: | ---: |",
        *map(_logprob_row, logprobs),
    ]
    return "\n".join(parts) + "\n"


def _step_table(kind: str, steps: Sequence[Line]) -> str:
    lines = [line for line in steps if line["kind"] == kind]
    measured = [line for line in lines if "skipped" not in line]
    remarks = [f"\n{line['step']}: {line['skipped']}" for line in lines if "skipped" in line]
    remarks += [
        f"\nThe gradients of `ours, grpo` and `{line['step']}` are {line['gradient_apart']:.1e} of their "
        "length apart."
        for line in measured
        if line["gradient_apart"] is not None
    ]
    return "\n".join(
        [
            f"## {kind}\n",
            "| step | ms | time over bare | CPU time over bare | CPU time over `ours, grpo` | peak, MiB | "
            "tokens/s | gradient norm |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
            *map(_step_row, measured),
            *remarks,
            "",
        ]
    )


def _step_row(line: Line) -> str:
    cells = (
        line["step"],
        f"{1e3 * line['seconds']:.1f}",
        _with_quartiles(line, "over_bare"),
        _with_quartiles(line, "cpu_over_bare"),
        f"{line['cpu_over_ours']:.2f}",
        _mebibytes(line["peak_bytes"]),
        line["tokens_per_second"],
        f"{line['gradient_norm']:.6f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def _with_quartiles(line: Line, field: str) -> str:
    low, high = line[f"{field}_quartiles"]
    return f"{line[field]:.3f} ({low:.3f}-{high:.3f})"


def _logprob_row(line: Line) -> str:
    if "skipped" in line:
        return f"| {line['vocabulary']} | {line['tokens']} | {line['logprobs']} | {line['skipped']} | | |"
    cells = (
        line["vocabulary"],
        line["tokens"],
        line["logprobs"],
        _mebibytes(line["logits_bytes"]),
        _mebibytes(line["chunk_bytes"]),
        f"{line['cpu_seconds']:.2f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"


def _plot(lines: Sequence[Line], path: Path) -> None:
    steps = [line for line in lines if "step" in line and "skipped" not in line]
    if not steps:
        return
    kinds = list(dict.fromkeys(line["kind"] for line in steps))
    names = list(dict.fromkeys(line["step"] for line in steps))
    bare = {line["kind"]: line for line in steps if line["step"] == "bare"}
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for number, name in enumerate(names):
        of_step = [line for line in steps if line["step"] == name]
        places = [kinds.index(line["kind"]) + 0.8 * number / len(names) for line in of_step]
        times = [line["cpu_over_bare"] for line in of_step]
        peaks = [_over(line["peak_bytes"], bare[line["kind"]]["peak_bytes"]) for line in of_step]
        for axis, heights in zip(axes, (times, peaks), strict=True):
            axis.bar(places, heights, width=0.8 / len(names), label=name)
    for axis, title in zip(axes, ("CPU time over bare", "peak over bare"), strict=True):
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks([place + 0.3 for place in range(len(kinds))], kinds, rotation=20, fontsize=8)
        axis.set_title(title)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _over(size: int | None, other: int | None) -> float:
    return size / other if size and other else 0.0
