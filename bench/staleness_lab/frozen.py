"""The settings that the report runs with, in a file that must be committed before the report may run.

    tune -> results/staleness_tuning.jsonl -> results/staleness_frozen.json -> git commit -> report

The file holds a digest of the tuning outcomes. The report refuses a file that does not follow from the tuning
outcomes beside it, or that the repository does not hold as it is.
"""

import hashlib
import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.staleness_lab.plan import Plan
from bench.staleness_lab.results import Results
from bench.staleness_lab.trials import Setting
from bench.staleness_lab.tuning import screened, tuned


class RefusedError(Exception):
    """The report must not run; says why and what to do."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """Settings of the report, and a digest of the outcomes they follow from."""

    digest: str
    """Digest of the tuning outcomes."""
    settings: Mapping[str, Setting]
    """Setting of each method of the report."""

    @classmethod
    def of(cls, plan: Plan, results: Results) -> "Frozen":
        """Return what follows from finished tuning.

        Raises:
            UnfinishedError: a tuning cell is missing.
        """
        found = tuned(plan, results)
        lines = sorted(f"{o.cell.key} {json.dumps(o.scores)}" for o in results.of(plan.tuning_cells()))
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return cls(digest, {method: found[method].setting for method in screened(plan, found)})

    def write(self, path: Path) -> None:
        """Write the file, in the same bytes for the same settings."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Frozen":
        """Read what ``write`` wrote.

        Raises:
            RefusedError: there is no such file, or it is not what ``write`` writes.
        """
        try:
            fields: dict[str, Any] = json.loads(path.read_text())
            return cls(fields["digest"], {name: Setting(**each) for name, each in fields["settings"].items()})
        except FileNotFoundError as error:
            raise RefusedError(
                f"{path} does not exist; run `python -m bench.staleness tune` first"
            ) from error
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise RefusedError(
                f"{path} cannot be read: {error!r}; run `python -m bench.staleness tune`"
            ) from error


def checked(path: Path, plan: Plan, results: Results, *, is_committed: bool) -> Frozen:
    """Return the frozen settings of ``path`` if the report may run with them.

    Args:
        path: of the file.
        plan: of the laboratory.
        results: the tuning outcomes.
        is_committed: whether the repository must hold the file as it is.

    Raises:
        RefusedError: it may not.
        UnfinishedError: the tuning outcomes are not whole.
    """
    frozen, follows = Frozen.read(path), Frozen.of(plan, results)
    if frozen.digest != follows.digest:
        raise RefusedError(
            f"{path} was frozen from other tuning outcomes ({frozen.digest[:12]}) than those beside it "
            f"({follows.digest[:12]}); run `python -m bench.staleness tune` and commit what it writes"
        )
    differ = sorted(
        name
        for name in {*frozen.settings, *follows.settings}
        if frozen.settings.get(name) != follows.settings.get(name)
    )
    if differ:
        raise RefusedError(
            f"{path} has settings that the tuning outcomes do not choose, of {', '.join(differ)}; "
            "run `python -m bench.staleness tune` and commit what it writes"
        )
    if is_committed and not _is_committed(path):
        raise RefusedError(f"{path} is not committed as it is; commit it before any report task runs")
    return frozen


def _is_committed(path: Path) -> bool:
    """Return whether HEAD holds the file with these bytes; without a repository it does not."""
    shown = subprocess.run(
        ["git", "show", f"HEAD:./{path.name}"], cwd=path.resolve().parent, capture_output=True, check=False
    )
    return shown.returncode == 0 and shown.stdout == path.read_bytes()
