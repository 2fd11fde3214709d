"""``python -m bench.cheat_lab.stalling_node``: a sampler whose groups are slow to check.

It is honest otherwise: it draws plus signs more often than its weights say, with their true logprobs, so that
the learner finds nothing; and it knows the rewards without a grader. The environment variable HETERORL_STALL
has the plus sign's token as JSON, with the part of its decode steps that are slow.
"""

import importlib
import json
import os
import random
import sys
from collections.abc import Sequence
from typing import Any, Final

from node.commands.cli import main
from sampler.tasks.addition import AdditionTask

STALL: Final = "HETERORL_STALL"

PLUS_PART: Final = 0.8
"""Part of the tokens of a slow decode step that are plus signs."""


def stall(plus: int, *, part: float) -> None:
    """Make every torch engine and grader pool of this process stall verifiers."""
    engines: Any = importlib.import_module("sampler.engines.torch.torch_engine")
    pools: Any = importlib.import_module("sampler.tasks.processes.grader_pool")
    honest, task, drawing = engines.by_noise, AdditionTask(), random.Random(os.getpid())

    def by_noise(logprob: Any, generator: Any) -> Any:
        tokens = honest(logprob, generator)
        if drawing.random() < part:
            forced = [drawing.random() < PLUS_PART for _ in range(len(tokens))]
            tokens[tokens.new_tensor(forced, dtype=bool)] = plus
        return tokens

    async def grade(self: Any, prompt: Any, completions: Sequence[Any]) -> Any:
        return pools.Grades(rewards=[task.grade(prompt.index, None, one) for one in completions])

    engines.by_noise = by_noise
    pools.GraderPool.grade = grade


def run() -> Any:
    """Run a node that stalls verifiers."""
    # As in node.commands.cli, before grpc is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    stall(**json.loads(os.environ.pop(STALL)))
    return main()


if __name__ == "__main__":
    sys.exit(run())
