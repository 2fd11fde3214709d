"""A rank other than the first: it does what the first one tells it, until that one ends. Signals that drain a
learner reach all ranks, and only the first one heeds them.

training    steps, checks, copies for a checkpoint, or a contributor's changes: this thread, in the first
            rank's order
publishing  its words of the frames that the first rank asks for
saving      its shards of the newest copy
"""

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from learner.config import LearnerConfig, RanksConfig
from learner.contributor.local_masters import LocalMasters
from learner.journal.checkpoint import ShardCopy
from learner.masters.tensor_files import save_tensors
from learner.model.rank_exchanges import Instruction
from learner.ranks.errors import MEMORY_FIX, OUT_OF_MEMORY, RankLostError, is_out_of_memory
from learner.ranks.fates import neighbours
from learner.ranks.instruction_stream import InstructionStream
from learner.ranks.meeting import coding_threads, config_of, join_ranks
from learner.ranks.rank_group import RankGroup
from learner.step.step_inputs import StepInputs
from learner.step.trainer import Trainer, load_models
from node.errors import HeteroRLError
from node.process.daemon import SIGNALS

logger = logging.getLogger(__name__)


class Follower:
    """A rank's trainer and its newest copy."""

    def __init__(self, config: RanksConfig, group: RankGroup, *, device: str) -> None:
        """Load this rank's part of the model.

        Raises:
            StartupError: as ``load_policy``.
        """
        self._config = config
        self._group = group
        policy, load = load_models(config, device=device, ranks=group)
        self._masters: LocalMasters | None = None
        self._objective = ""
        if isinstance(config, LearnerConfig):
            reference = load() if config.reference_kl_coefficient else None
            self.trainer, self._objective = Trainer(policy, config, reference), config.objective
        else:
            self.trainer, self._masters = Trainer(policy, None, load_reference=load), LocalMasters(policy)
        self._copy: ShardCopy | None = None
        """The newest. An instruction to save names its copy, and may come before that is made."""
        self._copied = threading.Condition()

    def obey(self, instruction: Instruction) -> None:
        """Do what the first rank does now."""
        match instruction.name:
            case "step":
                self.trainer.step(StepInputs.of(instruction, objective=self._objective))
            case "check":
                self.trainer.is_finite()
            case "copy":
                copy = self.trainer.copy()
                with self._copied:
                    self._copy = copy
                    self._copied.notify_all()
            case "restore":
                self.trainer.restore(Path(instruction.values["path"]))
            case "begin anew":
                self.trainer.begin_anew(Path(instruction.values["path"]))
            case _ if self._masters is not None:
                self._masters.obey(instruction)
            case unknown:
                raise ValueError(f"the first rank of another version of this program says {unknown!r}")

    def save(self) -> None:
        """Save shards of the newest copy, whenever the first rank does."""
        while (instruction := self._group.saves.receive()).name == "save":
            copy = self._wait_for_copy(instruction.values["copy"])
            try:
                save_tensors(
                    Path(instruction.values["directory"]),
                    copy.parts[instruction.values["part"]],
                    group=self._group.saves.exchanges,
                )
            except (OSError, ValueError) as error:
                # The first rank hears of it too, and tries again once there is room.
                logger.warning("shards not saved", extra={"error": str(error)})

    def _wait_for_copy(self, number: int) -> ShardCopy:
        """Wait until the training thread has made a copy: it hears of it by another stream than this one.

        Raises:
            RankLostError: it has not, within the limit.
        """
        limit_s = self._config.rank_timeout_s

        def made() -> ShardCopy | None:
            return self._copy if self._copy is not None and self._copy.number == number else None

        with self._copied:
            copy = self._copied.wait_for(made, limit_s)
        if copy is None:
            raise RankLostError(
                f"copy {number} is to be saved, and was not made within {limit_s:g} s: a step does not end, "
                "see the logs of the first rank and of this one"
            )
        return copy


def rank_device(device: str) -> str:
    """Return this rank's own device: with CUDA, the one of its number on its host."""
    if not device.startswith("cuda"):
        return device
    number = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(number)
    return f"cuda:{number}"


def main() -> int:
    """Meet the other ranks, follow the first one, and return the exit code."""
    try:
        _follow()
    except Exception as error:  # of any kind: it is told, and the first rank told by the code
        return _code_of(error)
    return 0


def _code_of(error: Exception) -> int:
    """Log why this rank ends, and return its exit code."""
    if is_out_of_memory(error):
        logger.error("this rank is out of memory", extra={"error": str(error), "fix": MEMORY_FIX})
        return OUT_OF_MEMORY
    explains_itself = isinstance(error, HeteroRLError)
    logger.error("this rank ends", extra={"error": str(error)}, exc_info=None if explains_itself else error)
    return 1


def _or_end(work: Callable[[], None]) -> None:
    """Do a thread's work; if that fails, end the process: the first rank would wait for it for ever."""
    try:
        work()
    except Exception as error:
        code = _code_of(error)
        logging.shutdown()
        os._exit(code)


def _leave_drain_to_the_first() -> None:
    """Ignore the signals that have the first rank drain: it ends this rank once that is done.

    Where the first rank is gone, its connections are closed, and that ends this one.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _follow() -> None:
    join_ranks()
    _leave_drain_to_the_first()
    instructions = InstructionStream()
    neighbours()
    config = config_of(instructions.receive())
    device = rank_device(config.device)  # from here on the group's, too
    group = RankGroup(
        config.mesh,
        device_type=config.device.partition(":")[0],
        instructions=instructions,
        coding_threads=coding_threads(config),
        offloads=config.offload,
        limit_s=config.rank_timeout_s,
    )
    follower = Follower(config, group, device=device)
    for work in (follower.trainer.policy.master_words.follow, follower.save):  # type: ignore[attr-defined]
        threading.Thread(target=_or_end, args=(work,), daemon=True).start()
    while (instruction := instructions.receive()).name != "end":
        follower.obey(instruction)
