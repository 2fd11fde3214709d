"""Names by which vLLM's processes find what they share: gone as soon as all of them have it.

    /dev/shm/psm_*             message queues, up to 240 MB each
    /dev/shm/vllm_dist_*       reductions on a CPU, 4 MB and more for each worker
    $TMPDIR/vllm_dist_*        where the workers met
    $VLLM_RPC_BASE_PATH/*      sockets
    $HETERORL_WEIGHTS_DIR/*    frames

vLLM leaves most of them even where it ends in order, and all of them where it is killed. What has no name
ends with the last process that has it.
"""

import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final

import torch
from vllm import envs
from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

from sampler.engines.words.frame_memory import DIRECTORY_VARIABLE

_SHARED_MEMORY: Final = Path("/dev/shm")

_SOCKETS: Final = "VLLM_RPC_BASE_PATH"
"""Names vLLM's directory for sockets."""

_queues: Final["weakref.WeakSet[Any]"] = weakref.WeakSet()
"""The memory of the message queues that this process made."""


def note_queues() -> None:
    """Remember the message queues that this process makes from now on."""
    make = ShmRingBuffer.__init__

    @wraps(make)
    def make_and_note(queue: Any, *args: Any, **kwargs: Any) -> None:
        make(queue, *args, **kwargs)
        if queue.is_creator:
            _queues.add(queue)

    ShmRingBuffer.__init__ = make_and_note


@contextmanager
def named_here() -> Iterator[Path]:
    """Point vLLM's sockets and the workers' frames to a directory that is removed at the end."""
    # A socket's path has 107 characters at most.
    place = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="vllm-", dir=place) as directory:
        before = {name: os.environ.get(name) for name in (_SOCKETS, DIRECTORY_VARIABLE)}
        os.environ.update(dict.fromkeys(before, directory))
        envs.disable_envs_cache()  # another engine in this process may have begun it
        try:
            yield Path(directory)
        finally:
            # Other processes that are started from here would look for the directory.
            for name, value in before.items():
                del os.environ[name]
                if value is not None:
                    os.environ[name] = value


def remove_queue_names() -> None:
    """Remove the names of the message queues that this process made; all others have them by now."""
    while _queues:
        queue = _queues.pop()
        queue.shared_memory.unlink()
        queue.is_creator = False


def remove_meeting(url: str) -> None:
    """Remove the place where the workers met, and the names of what they share since."""
    if not url.startswith("file://"):
        return
    file = Path(url.removeprefix("file://"))
    for memory in _SHARED_MEMORY.glob(f"{file.name}-*"):
        memory.unlink(missing_ok=True)
    # NCCL meets there at the first use of a group; Gloo when it is made.
    if torch.distributed.get_backend() == "gloo":
        file.unlink(missing_ok=True)
