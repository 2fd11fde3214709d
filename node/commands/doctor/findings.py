"""Shows what checks found: a line each, and another for what mends it; or one JSON object a line."""

import json
from collections.abc import Iterable

from node.checks.check import Finding, Grade
from node.commands.terminal import printable
from node.errors import ConfigError, StartupError

_LAYER_CHARACTERS = 16


def show(findings: Iterable[Finding], *, as_json: bool = False) -> list[Finding]:
    """Print findings as they come; return those that failed."""
    failed = []
    for finding in findings:
        if finding.grade is Grade.FAIL:
            failed.append(finding)
        print(_json_of(finding) if as_json else "\n".join(_lines_of(finding)), flush=True)
    return failed


def faults_of(findings: Iterable[Finding]) -> list[StartupError | ConfigError]:
    """Return the errors that end a start for these findings."""
    return [finding.fault for finding in findings if finding.fault is not None]


def _json_of(finding: Finding) -> str:
    return json.dumps(
        {"layer": finding.layer, "grade": finding.grade, "what": finding.what, "fix": finding.fix}
    )


def _lines_of(finding: Finding) -> list[str]:
    line = f"{finding.grade:5} {finding.layer:{_LAYER_CHARACTERS}} {printable(finding.what)}"
    if not finding.fix:
        return [line]
    return [line, f"{'':{_LAYER_CHARACTERS + 7}}-> {printable(finding.fix)}"]
