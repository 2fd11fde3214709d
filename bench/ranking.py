"""``python -m bench.ranking``: a policy that ranks learns through the real daemon, and at any staleness.

    baselines   coordinator, learner and two samplers over TLS, one behind 2.5 s each way, for each baseline
                and seed: nDCG in training, and of the exported model on held-out rows; a run ends early
                once it is learned
    staleness   the default objective on groups 64 versions old and on fresh ones, production's step and
                engine in one process: what old groups cost

Rows are generated (``deploy.real.topics``); a seed is one of the base model, of the order of prompts and of
what is drawn. Prints two tables, writes --out, and exits with 1 if a promise was not kept.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.measure import CORES
from bench.ranking_lab.baselines import LEAVE_ONE_OUT, OBJECTIVES
from bench.ranking_lab.daemon_run import FAR, NEAR, Outcome, Plan, daemon_run
from bench.ranking_lab.staleness import STALENESS, VERSIONS, Cell, Curve, simulate
from deploy.real.topics import encoder_directory, write_topics
from deploy.runs.processes import ChildError

SEEDS: Final = 3
RUN_VERSIONS: Final = 480
HELD_OUT: Final = 100
LEARNING_RATE: Final = 1e-3
"""The recipe's."""

AT_ONCE: Final = 3
"""Daemon runs beside each other: much of a run is waiting, for starts and for the long line."""

BEGINS_BELOW: Final = 0.6
REACHES: Final = 0.9
LOST_POINTS: Final = 2.0
"""Largest loss of the default objective at the largest staleness, in hundredths of nDCG."""

_OUT: Final = Path(__file__).parent / "results" / "ranking.json"


def main() -> int:
    """Run, print, write and return the exit code."""
    arguments = _arguments()
    console = Console(stderr=True, highlight=False)
    root = (arguments.dir / f"ranking-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    data = root / "topics.jsonl"
    write_topics(data)
    seeds = range(arguments.seeds)
    models = [encoder_directory(root / f"model-{seed}", seed=seed) for seed in seeds]
    began_s = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            plans = [
                Plan(baseline, seed, arguments.versions, models[seed], data, HELD_OUT)
                for baseline in OBJECTIVES
                for seed in seeds
            ]
            outcomes = asyncio.run(_runs(plans, root, progress, at_once=arguments.at_once))
            cells = [
                Cell(seed, staleness, arguments.lab_versions, models[seed], data, HELD_OUT, LEARNING_RATE)
                for seed in seeds
                for staleness in STALENESS
            ]
            curves = sorted(_simulated(cells, progress), key=lambda one: (one.seed, one.staleness))
    except ChildError as error:
        console.print(f"a process failed: {error}\nits files: {root}", markup=False)
        return 1
    broken = violations(outcomes, curves)
    result = {
        "cores": CORES,
        "load_before": arguments.load,
        "elapsed_s": round(time.monotonic() - began_s, 1),
        "versions": arguments.versions,
        "violations": broken,
        "baselines": [asdict(one) for one in outcomes],
        "staleness": [asdict(one) | {"end": round(one.end, 4)} for one in curves],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for table in (_baselines(outcomes), _staleness(curves)):
        Console().print(table)
    console.print("\n".join(broken) or f"every promise was kept; {arguments.out}", markup=False)
    return 1 if broken else 0


def violations(outcomes: Sequence[Outcome], curves: Sequence[Curve]) -> list[str]:
    """Return what was promised and not kept."""
    found = [f"{one.baseline}, seed {one.seed}: {what}" for one in outcomes for what in one.broken]
    for one in outcomes:
        named = f"{one.baseline}, seed {one.seed}"
        if any(groups == 0 for groups, _ in one.staleness_versions.values()):
            found.append(f"{named}: a sampler's groups were not trained on: {one.staleness_versions}")
        if one.baseline != LEAVE_ONE_OUT:
            continue
        if one.first > BEGINS_BELOW or min(one.last, one.held_out) < REACHES:
            found.append(
                f"{named}: nDCG {one.first} to {one.last}, held out {one.held_out_base} to {one.held_out}; "
                f"promised are at most {BEGINS_BELOW} and at least {REACHES}"
            )
    if (lost := lost_points(curves)) > LOST_POINTS:
        found.append(f"staleness {STALENESS[-1]} costs {lost:.2f} points, promised are {LOST_POINTS:g}")
    return found


def lost_points(curves: Sequence[Curve]) -> float:
    """Return what the largest staleness costs, mean over seeds, in hundredths of nDCG."""
    ends = {(one.seed, one.staleness): one.end for one in curves}
    seeds = {one.seed for one in curves}
    return 100 * fmean(ends[seed, STALENESS[0]] - ends[seed, STALENESS[-1]] for seed in seeds)


async def _runs(plans: Sequence[Plan], root: Path, progress: Progress, *, at_once: int) -> list[Outcome]:
    turns = asyncio.Semaphore(at_once)

    async def run(plan: Plan) -> Outcome:
        async with turns:
            bar = progress.add_task(f"{plan.baseline}, seed {plan.seed}", total=plan.versions)
            name = f"run-{plan.baseline.replace(' ', '-')}-{plan.seed}"
            return await daemon_run(
                plan, root / name, lambda seen: progress.update(bar, completed=seen.version)
            )

    return await asyncio.gather(*map(run, plans))


def _simulated(cells: Sequence[Cell], progress: Progress) -> Iterator[Curve]:
    bar = progress.add_task("staleness", total=len(cells))
    with ProcessPoolExecutor(CORES, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(simulate, cell) for cell in cells]):
            yield done.result()
            progress.advance(bar)


def _baselines(outcomes: Sequence[Outcome]) -> Table:
    table = Table(
        *("baseline", "seed", "versions", "drawn", "held out"),
        *("staleness near", "far", "far groups", "s"),
        title="nDCG",
    )
    for one in outcomes:
        (_, near), (groups, far) = (one.staleness_versions[name] for name in (NEAR, FAR))
        table.add_row(
            *(one.baseline, str(one.seed), str(one.versions), f"{one.first:.3f} -> {one.last:.3f}"),
            *(f"{one.held_out_base:.3f} -> {one.held_out:.3f}", f"{near:.1f}", f"{far:.1f}", str(groups)),
            f"{one.elapsed_s:.0f}",
        )
    return table


def _staleness(curves: Sequence[Curve]) -> Table:
    lost = lost_points(curves)
    table = Table("seed", "staleness", "base", "end", title=f"{curves[0].objective}: {lost:.2f} points lost")
    for one in curves:
        table.add_row(str(one.seed), str(one.staleness), f"{one.held_out[0]:.3f}", f"{one.end:.3f}")
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.ranking", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many; default: %(default)s")
    parser.add_argument(
        "--versions", type=int, default=RUN_VERSIONS, help="most of a daemon's run; default: %(default)s"
    )
    parser.add_argument(
        "--lab-versions", type=int, default=VERSIONS, help="of each simulated run; default: %(default)s"
    )
    parser.add_argument(
        "--at-once", type=int, default=AT_ONCE, help="daemon runs beside each other; default: %(default)s"
    )
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="where runs go; default: %(default)s")
    parser.add_argument("--out", type=Path, default=_OUT, help="the result; default: %(default)s")
    arguments = parser.parse_args()
    arguments.load = round(os.getloadavg()[0], 1)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
