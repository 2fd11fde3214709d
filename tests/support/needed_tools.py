"""Leaves out the tests whose ``needs`` mark names something that this machine lacks, and says so.

Before the first test: what is missing, the remedy, and which files have tests of it. At the end: how many
were left out. In CI (CI is set) the session fails instead, before its first test. deploy/needs.py lists what
can be named.
"""

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Final

import pytest

from deploy import needs

_LEFT_OUT: Final = "left out, since this machine lacks "
_MARK: Final = re.compile(r"mark\.needs\(([^)]*)\)")
_NAME: Final = re.compile('"([^"]+)"')


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say what is missing; workers of pytest-xdist leave it to the process that started them."""
    if hasattr(session.config, "workerinput"):
        return
    lines = lines_for_people(session.config.rootpath / "tests")
    if lines and needs.leaves_nothing_out():
        pytest.exit("\n".join(["CI must not leave tests out:", *lines]), returncode=1)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    for line in lines:
        if reporter is not None:
            reporter.write_line(line)


def lines_for_people(tests: Path) -> list[str]:
    """Return a line for each thing that this machine lacks and tests below ``tests`` need."""
    files = defaultdict(list)
    for file in sorted(tests.rglob("test_*.py")):
        for name in sorted(set(_NAME.findall(" ".join(_MARK.findall(file.read_text()))))):
            files[name].append(str(file.relative_to(tests)))
    return [
        f"{needs.sentence(name)}. Tests of these files are left out: {', '.join(files[name])}"
        for name in needs.missing(files)
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run here."""
    for item in items:
        names = sorted({name for mark in item.iter_markers("needs") for name in mark.args})
        if missing := needs.missing(names):
            item.add_marker(pytest.mark.skip(reason=_LEFT_OUT + ", ".join(missing)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the tests that were left out."""
    reasons = [str(report.longrepr[2]) for report in terminalreporter.getreports("skipped")]
    counts = Counter(reason.partition(_LEFT_OUT)[2] for reason in reasons if _LEFT_OUT in reason)
    for names, count in sorted(counts.items()):
        terminalreporter.write_line(f"{count} tests were {_LEFT_OUT}{names}", yellow=True)
