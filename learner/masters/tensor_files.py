"""Tensors by name, saved and loaded by torch.distributed.checkpoint, in safetensors files.

Each rank saves its own shards, and loads what its own layout needs from the files of all ranks; the header of
a file says which part of a tensor it holds. Nothing is pickled: torch's storage for Hugging Face has no
metadata file of its own.
"""

import io
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from learner.masters.uncached_files import UncachedFile

logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)  # two lines a tensor at DEBUG
# One process needs no process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

_FILE_BYTES: Final = 64 << 20
"""Size from which tensors go to another file: torch serialises one file at a time in memory."""


def save_tensors(
    directory: Path, tensors: Mapping[str, Tensor], *, group: ProcessGroup | None = None
) -> None:
    """Save tensors on the CPU into a directory that does not exist; files are synced on return.

    Args:
        group: of the ranks that save their shards together, each calling this; None: one process.
    Raises:
        OSError: the disk is full or failing.
    """
    file, size_bytes, files = 1, 0, dict[str, int]()
    for name, tensor in tensors.items():
        if size_bytes >= _FILE_BYTES:
            file, size_bytes = file + 1, 0
        files[name] = file
        size_bytes += tensor.numel() * tensor.element_size()
    with _cause_raised():
        writer = _OwnFiles(directory, files)
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


class _Uncached(FileSystem):
    """Writes files past the page cache."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Yield a new file; torch opens all of them to write bytes."""
        with UncachedFile(Path(path)) as file:
            yield file


class _OwnFiles(HuggingFaceStorageWriter):
    """Writes each rank's tensors to its own files: the first rank does not have those of other stages."""

    def __init__(self, directory: Path, files: Mapping[str, int]) -> None:
        """Write each tensor to the file of its number."""
        super().__init__(str(directory), fqn_to_index_mapping=dict(files), save_distributed=True)
        self.fs = _Uncached()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write by this rank's table of files; torch gives all ranks the first one's."""
        own = plan.storage_data | {"fqn_to_index_mapping": self.fqn_to_index_mapping}
        return super().write_data(replace(plan, storage_data=own), planner)


def load_tensors(directory: Path, into: Mapping[str, Tensor], *, group: ProcessGroup | None = None) -> None:
    """Fill tensors, whatever their layout, from files whose content is verified.

    Raises:
        OSError: a file cannot be read.
        ValueError: the files are not of these tensors.
    """
    with _cause_raised(), torch.no_grad():
        reader = HuggingFaceStorageReader(str(directory))
        load(dict(into), storage_reader=reader, process_group=group, no_dist=group is None)


def shapes_in(directory: Path) -> dict[str, torch.Size]:
    """Return the whole shape of every tensor, by name."""
    found = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {name: one.size for name, one in found.items() if isinstance(one, TensorStorageMetadata)}


@contextmanager
def _cause_raised() -> Iterator[None]:
    """Raise what a rank's part failed with, as an OSError or a ValueError."""
    try:
        yield
    except CheckpointException as error:
        causes = {rank: failure[0] for rank, failure in error.failures.items()}
        for rank, cause in causes.items():
            if isinstance(cause, OSError) and cause.errno is not None:
                what = f"{os.strerror(cause.errno)} (rank {rank})" if len(causes) > 1 else None
                raise OSError(cause.errno, what or os.strerror(cause.errno), cause.filename) from error
        raise ValueError("; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())) from error
