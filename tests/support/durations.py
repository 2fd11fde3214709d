"""`--slowest N`: lists the N tests that took longest, and the N that waited longest.

A test waits while neither it nor a process that it started and waited for computes: for a clock, a disk, or a
process that is still running when it ends. Waits are measured for the call alone, without fixtures.
"""

import resource
import time
from collections.abc import Iterator
from typing import Final

import pytest

_WAITED: Final = "waited_s"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--slowest", type=int, default=0, metavar="N", help="list the N slowest and idlest tests"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Measure how long a test waits."""
    began_s, computed_s = time.monotonic(), _computed_s()
    try:
        yield
    finally:
        waited_s = time.monotonic() - began_s - (_computed_s() - computed_s)
        item.user_properties.append((_WAITED, max(0.0, waited_s)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print both lists."""
    if not (most := config.getoption("--slowest")):
        return
    calls = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call"
    ]
    took = {report.nodeid: report.duration for report in calls}
    waited = {report.nodeid: dict(report.user_properties).get(_WAITED, 0.0) for report in calls}
    for title, seconds in (("slowest", took), ("waited longest", waited)):
        terminalreporter.section(title)
        for name in sorted(seconds, key=lambda name: -seconds[name])[:most]:
            terminalreporter.write_line(f"{seconds[name]:7.2f} s  {name}")


def _computed_s() -> float:
    own, children = (resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
