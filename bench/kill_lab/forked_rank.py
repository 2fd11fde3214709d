"""A rank of a learner, forked from a process that has imported torch, as if torchrun had started it.

A rank that imports for itself takes eight seconds of a core.
"""

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

IMPORTED: Final = (
    "transformers.models.opt.modeling_opt",
    "learner.ranks.follower",
    "learner.export",
    "node.checks.start_checks",
)
"""Imported before the fork. None of it imports grpc, which does not survive one."""


def become_rank(arguments: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
    """Run ``python -m learner.ranks``, in a session of its own, in place of the process that calls."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for output in (1, 2):
        os.dup2(descriptor, output)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["learner.ranks", *arguments]
    runpy.run_module("learner.ranks", run_name="__main__")
