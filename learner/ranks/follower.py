"""A rank other than the first: it does what the first one tells it, until that one ends. Signals that drain a
learner reach all ranks, and only the first one heeds them.

training    steps, checks, copies for a checkpoint: this thread, in the first rank's order
publishing  its words of the frames that the first rank asks for
saving      its shards of the newest copy
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from learner.config import LearnerConfig
from learner.ranks.errors import MEMORY_FIX, OUT_OF_MEMORY, RankLostError, is_out_of_memory
from learner.ranks.launching import coding_threads, config_of, join_ranks, neighbours
from learner.ranks.orders import Order, OrderStream, StepOrder
from learner.ranks.rank_group import RankGroup
from learner.training.checkpoint import begin_anew, load_into, parts_of
from learner.training.model import Policy, load_policy, load_reference
from learner.training.optimizer import adopt_settings, make_optimizer
from learner.training.tensor_files import save_tensors
from learner.training.train_step import train_step
from node.errors import HeteroRLError
from node.process.daemon import SIGNALS

logger = logging.getLogger(__name__)


class Follower:
    """A rank's model, optimizer and newest copy."""

    def __init__(self, config: LearnerConfig, group: RankGroup) -> None:
        """Load this rank's part of the model.

        Raises:
            StartupError: as ``load_policy``.
        """
        self._config = config
        self._group = group
        compute_dtype = torch.bfloat16 if config.compute_dtype == "bfloat16" else None
        device = rank_device(config.device)
        self.policy: Policy = load_policy(
            config.model_dir,
            device=device,
            compute_dtype=compute_dtype,
            rematerialise=config.rematerialise,
            ranks=group,
        )
        self._reference = None
        if config.reference_kl_coefficient:
            self._reference = load_reference(
                config.model_dir, device=device, compute_dtype=compute_dtype, ranks=group
            )
        self._optimizer = make_optimizer(self.policy, config)
        group.follow_writes(self._optimizer)
        self._copy: Mapping[str, Mapping[str, Tensor]] = {}
        self._copies = 0
        """How many were made. An order to save names its copy, and may come before that is made."""
        self._copied = threading.Condition()

    def obey(self, order: Order) -> None:
        """Do what the first rank does now."""
        if order.name == "step":
            self._step(StepOrder.of(order, self._config))
        elif order.name == "check":
            self.policy.is_finite()
        elif order.name == "copy":
            copy = parts_of(self.policy, self._optimizer)
            with self._copied:
                self._copy, self._copies = copy, order.values["number"]
                self._copied.notify_all()
        elif order.name == "restore":
            load_into(self.policy, self._optimizer, Path(order.values["path"]))
        elif order.name == "begin anew":
            begin_anew(self.policy, self._optimizer, Path(order.values["masters"]))
        else:
            raise ValueError(f"the first rank of another version of this program orders {order.name!r}")

    def save(self) -> None:
        """Save shards of the newest copy, whenever the first rank does."""
        while (order := self._group.saves.receive()).name == "save":
            self._await_copy(order.values["copy"])
            try:
                save_tensors(
                    Path(order.values["directory"]),
                    self._copy[order.values["part"]],
                    group=self._group.saves.exchanges,
                )
            except (OSError, ValueError) as error:
                # The first rank hears of it too, and tries again once there is room.
                logger.warning("shards not saved", extra={"error": str(error)})

    def _await_copy(self, number: int) -> None:
        """Wait until the training thread has made a copy: it hears of it by another stream than this one.

        Raises:
            RankLostError: it has not, within the limit.
        """
        limit_s = self._config.rank_timeout_s
        with self._copied:
            if not self._copied.wait_for(lambda: self._copies == number, limit_s):
                raise RankLostError(
                    f"copy {number} is to be saved, and {self._copies} was the last one made, {limit_s:g} s "
                    "later: a step does not end, see the logs of the first rank and of this one"
                )

    def _step(self, step: StepOrder) -> None:
        adopt_settings(self._optimizer, step.settings)
        train_step(
            self.policy,
            self._optimizer,
            step.groups,
            version=step.version,
            settings=step.settings,
            expected_kl_nats=step.expected_kl_nats,
            reference=self._reference if step.has_reference else None,
        )


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
    orders = OrderStream()
    neighbours()
    config = config_of(orders.receive())
    if config.threads:
        torch.set_num_threads(config.threads)
    group = RankGroup(
        config.mesh,
        device_type=config.device.partition(":")[0],
        orders=orders,
        coding_threads=coding_threads(config),
        offloads=config.offload,
        limit_s=config.rank_timeout_s,
    )
    follower = Follower(config, group)
    for work in (follower.policy.master_words.follow, follower.save):  # type: ignore[attr-defined]
        threading.Thread(target=_or_end, args=(work,), daemon=True).start()
    while (order := orders.receive()).name != "end":
        follower.obey(order)
