"""Experiment trackers: the numbers of each step, under the names of their gauges, for TensorBoard and W&B.

Both libraries are extras, imported only where they are configured; the checks before a start have found them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from learner.step_log import StepLine
from node.values.groups.rollout import RolloutGroup


class TensorBoardWriter:
    """A step writer that appends to an event file of its own in a directory."""

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        """Make the directory and the file.

        Raises:
            OSError: the directory cannot be made.
        """
        module = import_module("torch.utils.tensorboard")
        self._events = module.SummaryWriter(str(directory))

    def write_of(self, line: StepLine | None, batch: Sequence[RolloutGroup]) -> Callable[[], None] | None:
        """Return the write of the step's numbers at its version."""
        return partial(self._write, line) if line and line.is_step else None

    def _write(self, line: StepLine) -> None:
        for name, value in _numbers(line).items():
            self._events.add_scalar(name, value, global_step=line.version, walltime=line.at_s)
        self._events.flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        self._events.close()


class WandbWriter:
    """A step writer that logs to one run of Weights & Biases, which a restart goes on with.

    Environment variables of wandb apply: WANDB_API_KEY, WANDB_MODE=offline, WANDB_ENTITY.
    """

    name = "wandb"

    def __init__(
        self, project: str, *, run_id: str, directory: Path, configuration: Mapping[str, Any]
    ) -> None:
        """Prepare; the run is begun with the first step, in the writer's thread, since that takes a server.

        Args:
            run_id: id and name of the W&B run too.
            directory: where wandb keeps its own files.
            configuration: shown beside the run.
        """
        self._wandb = import_module("wandb")
        self._begin = {
            "project": project,
            "id": run_id,
            "name": run_id,
            "resume": "allow",
            "dir": str(directory),
            "config": dict(configuration),
        }
        self._run: Any = None

    def write_of(self, line: StepLine | None, batch: Sequence[RolloutGroup]) -> Callable[[], None] | None:
        """Return the write of the step's numbers at its version.

        It raises wandb.Error where nobody is logged in, or the server refuses.
        """
        return partial(self._write, line) if line and line.is_step else None

    def _write(self, line: StepLine) -> None:
        if self._run is None:
            # Standard output, the machine's load and the source code are none of its business.
            quiet = self._wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
            )
            self._run = self._wandb.init(**self._begin, settings=quiet)
        self._run.log(_numbers(line), step=line.version)

    def close(self) -> None:
        """Send or store what is left."""
        if self._run is not None:
            self._run.finish()


def _numbers(line: StepLine) -> dict[str, float]:
    return {f"heterorl_learner_{name}": value for name, value in line.gauges().items()}
