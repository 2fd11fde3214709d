"""Run the tests that failed once more, each in a process of its own.

    make test REPORT=FOLDER/first.xml || python .ci/failed_again.py FOLDER

A test that passes the second time is printed as `flaky: NAME` with the output of both runs. Exits 0 if all
are flaky, and 1 if one failed twice, if more than ``MOST`` failed, or if the first run wrote no report.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

MOST: Final = 10
"""Tests that are run again; where more fail, the fault is not one test's."""

LIMIT_S: Final = 600


def main(folder: Path) -> int:
    """Return the exit code."""
    first = folder / "first.xml"
    if not first.is_file():
        print("failed: the tests did not run to their end, so there is no report of them")
        return 1
    failed = dict(failures(first))
    if not 0 < len(failed) <= MOST or None in failed:
        print(f"failed: {len(failed)} tests; at most {MOST} of known names are run again")
        return 1
    twice = [name for name, output in failed.items() if not passes_alone(str(name), output)]
    for name in twice:
        print(f"failed twice: {name}")
    return 1 if twice else 0


def failures(report: Path) -> Iterator[tuple[str | None, str]]:
    """Yield name and output of each test that failed; no name where it is not that of a test."""
    for case in ElementTree.parse(report).iter("testcase"):
        outputs = [one.text or "" for kind in ("failure", "error") for one in case.iter(kind)]
        if outputs:
            yield node_id(case.get("classname", ""), case.get("name", "")), "\n".join(outputs)


def node_id(classname: str, name: str) -> str | None:
    """Return a test's name as pytest takes it: ``tests/unit/test_x.py::TestY::test_z``."""
    parts = classname.split(".")
    for length in range(len(parts), 0, -1):
        file = "/".join(parts[:length]) + ".py"
        if Path(file).is_file():
            return "::".join([file, *parts[length:], name])
    return None


def passes_alone(name: str, output: str) -> bool:
    """Run one test; print both outputs where it passes now."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", name]
    try:
        again = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as late:
        print(f"{name}: not done after {LIMIT_S} s: {late.stdout!r:.2000}")
        return False
    if again.returncode != 0:
        print(again.stdout + again.stderr)
        return False
    print(f"flaky: {name}\n--- failed beside the others:\n{output}\n--- passed alone:\n{again.stdout}")
    return True


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
