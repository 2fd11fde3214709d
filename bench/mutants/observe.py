"""``python -m bench.mutants.observe OUT FILES``: which functions each test calls, and how long it takes."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from bench.mutants.worker import OPTIONS, preload


class Observer:
    """A plugin of pytest that notes every function of the repository that a test calls, in any thread."""

    def __init__(self, root: Path, packages: tuple[str, ...]) -> None:
        self._prefixes = tuple(f"{root}/{package}/" for package in packages)
        self._root = len(str(root)) + 1
        self._called: set[CodeType] = set()
        self.tests: dict[str, Any] = {}

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        self._called.add(frame.f_code)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._called = set()
        entry = self.tests[item.nodeid] = {"passed": True, "seconds": 0.0, "functions": []}
        began_s = time.monotonic()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            entry["seconds"] = round(time.monotonic() - began_s, 3)
            entry["functions"] = sorted(
                {
                    (code.co_filename[self._root :], code.co_qualname.replace(".<locals>", ""))
                    for code in self._called
                    if code.co_filename.startswith(self._prefixes)
                }
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.tests[report.nodeid]["passed"] = False


def main() -> None:
    out, *files = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = "1"
    preload()
    observer = Observer(Path.cwd(), ("node", "learner", "sampler"))
    options = [option for option in OPTIONS if option != "-x"]
    pytest.main([*options, *files], plugins=[observer])
    Path(out).write_text(json.dumps(observer.tests))


if __name__ == "__main__":
    main()
