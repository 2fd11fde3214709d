"""The settings that the report runs with, in a file that must be committed before the report may run.

Settings of the menu's methods, of M2PO and of VCPO are the best of nine each on six older tasks at
staleness 0 and 128, four seeds (the laboratory's history has the tuning); DRPO and the forms of the default
have one setting each.
"""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from bench.staleness_lab.cells import Setting


class RefusedError(Exception):
    """The report must not run; says why and what to do."""


def read_settings(path: Path) -> Mapping[str, Setting]:
    """Return the setting of each method of the report.

    Raises:
        RefusedError: the file is not there or cannot be read.
    """
    try:
        return {name: Setting(**fields) for name, fields in json.loads(path.read_text()).items()}
    except (OSError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise RefusedError(f"{path} cannot be read: {error!r}") from error


def freezing_commit(path: Path) -> str:
    """Return the commit that froze the settings: the last that changed the file.

    Raises:
        RefusedError: the repository does not hold the file as it is.
    """
    folder = path.resolve().parent
    shown = _git(folder, "show", f"HEAD:./{path.name}")
    if shown.returncode or shown.stdout != path.read_bytes():
        raise RefusedError(f"{path} is not committed as it is; commit it before any report task runs")
    return _git(folder, "log", "-1", "--format=%H", "--", path.name).stdout.decode().strip()


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=False)
