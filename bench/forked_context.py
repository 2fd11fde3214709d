"""Processes forked from one that has imported torch and the learner: imports take longer than the work.

That one is multiprocessing's forkserver. A process has one for all uses, which imports nothing more once
it runs: so it imports what all of them need, whichever comes first.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext
from typing import Final

_IMPORTED: Final = (
    "learner.ranks.launching",
    "learner.model.sliced_loading",
    "transformers.models.qwen3.modeling_qwen3",
)
"""None of it calls torch: no thread of torch's is missing in a fork."""

_also: Final[list[str]] = []


def forked_context(*modules: str) -> ForkServerContext:
    """Return what starts such processes; ``modules`` are imported too, if none was started before."""
    _also.extend(module for module in modules if module not in _also)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, *_also])
    return context
