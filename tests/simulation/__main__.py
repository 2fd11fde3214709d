"""Simulates runs from seeds, and tells the shortest story of one that breaks a promise.

python -m simulation --seeds 10000      as many runs; exits with 1 where one breaks a promise
python -m simulation --seed 17          one run, told from its beginning
python -m simulation --planted          whether each fault planted in production code is found
"""

import argparse
import sys
import time
from collections import Counter

from simulation.faults import FaultKind, draw_plan
from simulation.outcome import Outcome
from simulation.planted import PLANTED, SEEDS, Planted
from simulation.shrinking import shrunk, told
from simulation.world import simulate

SHOWN = 5
"""Stories told at most."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000, help="runs to simulate")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=60.0, help="end after so long, whatever is left")
    parser.add_argument("--seed", type=int, help="tell one run from its beginning")
    parser.add_argument(
        "--planted", action="store_true", help="plant faults in production code and find them"
    )
    options = parser.parse_args()
    if options.seed is not None:
        outcome = simulate(draw_plan(options.seed))
        print(told(outcome, lines=1 << 20))
        return int(bool(outcome.violations))
    if options.planted:
        return int(not all([_finds(planted) for planted in PLANTED]))
    return _simulate_all(range(options.first, options.first + options.seeds), limit_s=60 * options.minutes)


def _simulate_all(seeds: range, *, limit_s: float) -> int:
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    reached: Counter[str] = Counter()
    broken: list[Outcome] = []
    steps, virtual_s, done = 0, 0.0, 0
    for seed in seeds:
        if time.monotonic() - began_s > limit_s:
            break
        outcome = simulate(draw_plan(seed))
        reached += outcome.reached
        steps, virtual_s, done = steps + outcome.steps, virtual_s + outcome.virtual_s, done + 1
        if outcome.violations:
            broken.append(outcome)
            print(f"seed {seed}: {outcome.violations[0]}", flush=True)
            if len(broken) <= SHOWN:
                print(told(shrunk(outcome)), flush=True)
        if done % 500 == 0:
            print(f"{done} runs, {len(broken)} broke a promise", flush=True)
    cpu_s = time.process_time() - began_cpu_s
    print(
        f"{done} runs of {virtual_s / 3600:.1f} hours and {steps} steps in {cpu_s:.0f} s of one core: "
        f"{len(broken)} broke a promise"
    )
    _show_reached(reached)
    return int(bool(broken))


def _show_reached(reached: Counter[str]) -> None:
    print("\nfaults, by how often they happened:")
    for kind in FaultKind:
        print(f"  {reached.pop(f'fault: {kind}', 0):7}  {kind}")
    print("\nwhat was answered, waited for and counted:")
    for what, n in sorted(reached.items()):
        print(f"  {n:7}  {what}")


def _finds(planted: Planted) -> bool:
    with planted.plant():
        for seed in range(SEEDS):
            outcome = simulate(draw_plan(seed))
            if outcome.violations:
                print(f"found    by seed {seed:3}: {planted.name}: {outcome.violations[0][:200]}", flush=True)
                return True
    print(f"MISSED   in {SEEDS} seeds: {planted.name}", flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main())
