"""``python -m bench.mutants --faults N``: plant faults in copies of the code; say which no test catches.

    copy the repository twice --> observe which functions each test calls --> for each fault drawn: the tests
    that call its function, narrow files first, until one fails --> share caught, survivors with their diffs

A process that dies or does not end counts as caught. What only an integration test caught is tried twice:
these run on real time. ``known.toml`` has the survivors that were looked at: those that change nothing count
for nothing, the others as not caught; neither is run again. Exits with 1 below ``--least``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from bench.mutants.faults import Fault, faults
from bench.mutants.plan import Coverage, Known, ObservedTest, drawn, known
from bench.mutants.targets import modules

ROOT: Final = Path(__file__).parents[2]
KNOWN: Final = Path(__file__).with_name("known.toml")
OBSERVED: Final = ("tests/unit", "tests/property", "tests/fuzz", "tests/integration")
UNRELATED: Final = ("tests/unit/bench", "tests/unit/demo", "tests/unit/deploy")
GRACE_S: Final = 20.0
TIMES: Final = 6.0
"""A fault may make its tests this much slower, on a machine that is busy, and ``GRACE_S`` more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one fault."""

    fault: Fault
    caught_by: str | None
    seconds: float

    def line(self) -> str:
        """Return it as a line of JSON."""
        names = dict(zip(("module", "function", "before", "after"), self.fault.name, strict=True))
        return json.dumps(
            names | {"line": self.fault.line, "caught_by": self.caught_by, "seconds": self.seconds}
        )


class Copy:
    """A copy of the repository and the process that runs tests in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        kernels = [str(path.relative_to(ROOT)) for path in ROOT.glob("node/**/*.so")]
        for name in (*listed.stdout.splitlines(), *kernels):
            if (ROOT / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, directory / name)
        compiled = ("node", "learner", "sampler", "proto", "bench", "deploy", "tests/support")
        self.run("compileall", "-q", *compiled, environ={"PYTHONDONTWRITEBYTECODE": ""}).wait()

    def run(self, module: str, *arguments: str, environ: dict[str, str] | None = None, **pipes: Any) -> Any:
        """Start ``python -m module`` in the copy."""
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(
            command, cwd=self.directory, text=True, env=os.environ | (environ or {}), **pipes
        )


class Judge:
    """Asks the worker of one copy."""

    def __init__(self, copy: Copy) -> None:
        self._process = copy.run(
            "bench.mutants.worker", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._process.stdout.readline()

    def judge(self, fault: Fault, tests: Coverage) -> Outcome:
        """Run the tests against a fault until one fails."""
        began_s, caught_by = time.monotonic(), None
        for names, seconds in tests.against(fault):
            caught_by = self._failed(fault, names, seconds)
            if caught_by is not None and caught_by.startswith("tests/integration"):
                caught_by = self._failed(fault, names, seconds)
            if caught_by is not None:
                break
        return Outcome(fault, caught_by, round(time.monotonic() - began_s, 1))

    def _failed(self, fault: Fault, names: list[str], seconds: float) -> str | None:
        asked = {
            "path": fault.path,
            "source": fault.source,
            "tests": names,
            "timeout_s": GRACE_S + TIMES * seconds,
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return None if answer["code"] == 0 else str(answer["failed"] or f"pytest ended with {answer['code']}")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def observe(copies: list[Copy], kept: Path | None) -> Coverage:
    """Run every test once and return what each of them calls; those that fail are left out.

    Args:
        copies: one process in each.
        kept: what was observed by an earlier run, if the file is there; otherwise it is written.
    """
    observed = json.loads(kept.read_text()) if kept and kept.exists() else _observed(copies)
    if kept:
        kept.write_text(json.dumps(observed))
    failed = [name for name, test in observed.items() if not test["passed"]]
    _say(f"{len(observed)} tests observed; {len(failed)} failed or were skipped: {' '.join(failed[:20])}")
    return Coverage(
        ObservedTest(name, test["seconds"], frozenset(map(tuple, test["functions"])))
        for name, test in observed.items()
        if test["passed"]
    )


def _observed(copies: list[Copy]) -> dict[str, Any]:
    files = sorted(
        str(path.relative_to(ROOT))
        for folder in OBSERVED
        for path in (ROOT / folder).rglob("test_*.py")
        if not str(path.relative_to(ROOT)).startswith(UNRELATED)
    )
    running = []
    for number, copy in enumerate(copies):
        mine = files[number :: len(copies)]
        running.append(
            copy.run(
                "bench.mutants.observe",
                str(copy.directory / "observed.json"),
                *mine,
                stdout=subprocess.DEVNULL,
            )
        )
    observed: dict[str, Any] = {}
    for copy, process in zip(copies, running, strict=True):
        process.wait()
        observed |= json.loads((copy.directory / "observed.json").read_text())
    return observed


def judged(
    chosen: list[Fault], tests: Coverage, copies: list[Copy], *, until_s: float, out: IO[str]
) -> list[Outcome]:
    """Judge faults on all copies at once, in order, until the time is up; write each outcome to ``out``."""
    outcomes: list[Outcome] = []
    waiting, lock = iter(chosen), threading.Lock()

    def work(copy: Copy) -> None:
        judge = Judge(copy)
        while time.monotonic() < until_s:
            with lock:
                fault = next(waiting, None)
            if fault is None:
                break
            outcome = judge.judge(fault, tests)
            with lock:
                outcomes.append(outcome)
                out.write(outcome.line() + "\n")
                out.flush()
                if len(outcomes) % 50 == 0:
                    caught = sum(each.caught_by is not None for each in outcomes)
                    _say(f"{len(outcomes)} faults, {caught} caught")
        judge.close()

    with ThreadPoolExecutor(len(copies)) as pool:
        list(pool.map(work, copies))
    return outcomes


def report(outcomes: list[Outcome], looked_at: list[Known]) -> float:
    """Print what survived and the share caught; return the share."""
    survivors = [each for each in outcomes if each.caught_by is None]
    for each in sorted(survivors, key=lambda each: (each.fault.path, each.fault.line)):
        fault = each.fault
        print(f"{fault.path}:{fault.line} in {fault.function or 'the module'}")
        print(fault.diff((ROOT / fault.path).read_text()), end="\n\n")
    drawn_of, survived = (
        Counter(each.fault.path for each in outcomes),
        Counter(s.fault.path for s in survivors),
    )
    for path, count in sorted(drawn_of.items()):
        print(f"{count - survived[path]:5d} of {count:4d} caught in {path}")
    left = [each for each in looked_at if not each.is_equivalent]
    counted, caught = len(outcomes) + len(left), len(outcomes) - len(survivors)
    share = caught / counted if counted else 1.0
    print(
        f"{caught} of {counted} faults caught, {share:.1%}; {len(survivors)} new survivors, {len(left)} "
        f"known and left, {len(looked_at) - len(left)} known to change nothing"
    )
    return share


def main() -> int:
    """Run, print, and return the exit code."""
    arguments = _arguments()
    began_s = time.monotonic()
    everything = {path: faults(path, (ROOT / path).read_text()) for path in modules(ROOT)}
    if arguments.only:
        everything = {path: found for path, found in everything.items() if path.startswith(arguments.only)}
    chosen = drawn(everything, seed=arguments.seed)[: arguments.faults]
    names = known(KNOWN.read_text())
    looked_at = [names[fault.name] for fault in chosen if fault.name in names]
    chosen = [fault for fault in chosen if fault.name not in names]
    _say(f"{sum(map(len, everything.values()))} faults in {len(everything)} files, {len(chosen)} drawn")
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copies = [Copy(Path(directory) / str(number)) for number in range(arguments.workers)]
        tests = observe(copies, arguments.observed)
        with arguments.out.open("w") as out:
            outcomes = judged(chosen, tests, copies, until_s=began_s + 60 * arguments.minutes, out=out)
    share = report(outcomes, looked_at)
    print(
        f"{(time.monotonic() - began_s) / 60:.0f} minutes on {arguments.workers} cores, seed {arguments.seed}"
    )
    return 0 if share >= arguments.least else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=800, help="how many; default: %(default)s")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the faults that are drawn; default: %(default)s"
    )
    parser.add_argument("--workers", type=int, default=2, help="how many copies; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=55, help="then it ends; default: %(default)s")
    parser.add_argument("--only", default="", help="files whose paths begin so; default: all")
    parser.add_argument("--least", type=float, default=0.95, help="share to be caught; default: %(default)s")
    parser.add_argument("--observed", type=Path, help="where to keep what each test calls, for the next run")
    parser.add_argument(
        "--out", type=Path, default=Path(os.devnull), help="also write every outcome there, as it is known"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
