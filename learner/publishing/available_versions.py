"""The versions that can be had from a learner's state directory, by number; needs no torch.

what its store of published versions leads to | masters of checkpoints
"""

from collections.abc import Sequence
from pathlib import Path

from learner.journal.checkpoint_index import CHECKPOINTS, versions_in
from learner.publishing.kept_versions import published_versions
from node.errors import StartupError


def available_versions(state: Path) -> list[int]:
    """Return every version whose words or masters are there, ascending. Raises StartupError: none is."""
    there = sorted({*published_versions(state), *versions_in(state / CHECKPOINTS)})
    if not there:
        raise StartupError(
            f"there is no version in {state}",
            fix="--state-dir is the learner's node.state_dir; versions come with steps.",
        )
    return there


def check_available(state: Path, version: int) -> None:
    """Check that a version's words or masters are there.

    Raises StartupError: they are not; it lists all that are.
    """
    if version not in (there := available_versions(state)):
        raise StartupError(
            f"version {version} is not there; there are {listed(there)}",
            fix="Set learner.keep_spaced_versions or learner.keep_every_versions to keep more of them.",
        )


def listed(versions: Sequence[int]) -> str:
    """Return ascending numbers in one line, three and more in a row as ``first-last``."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and version == runs[-1][-1] + 1:
            runs[-1].append(version)
        else:
            runs.append([version])
    parts = (f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return ", ".join(parts)
