"""Fetches the base model's directory from the coordinator, in verified blocks, and goes on after any end.

list --> room on disk? --> blocks over several connections --> sync, rename --> model_dir
                              ^ verified, written; those there already are not fetched again
"""

import asyncio
import os
import random
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from heterorl.v1 import model_pb2, model_pb2_grpc
from node.errors import RefusedError, StartupError
from node.identity.files import cannot_make, make_private_directory
from node.identity.identity_store import Identity
from node.rpc.call_ends import ConnectionLost, call, classified
from node.rpc.channel import Purpose, dial
from node.rpc.hub import Hub
from node.system import durable
from node.system.backoff import Backoff
from node.system.waits import side_by_side
from node.weights.format.model_listing import ModelFile, check_listing

Answer = TypeVar("Answer")

CONNECTIONS: Final = 4
"""Enough for a long line that loses packets. Each has one block in memory."""

LIST_TIMEOUT_S: Final = 120.0
BLOCK_TIMEOUT_S: Final = 1800.0
"""16 MiB at 75 kbit/s."""

PATIENCE: Final = 8
"""Tries for a list or a block, with growing pauses; each may meet a hub that restarts."""

Progress = Callable[[int, int], None]
"""Called with the bytes that are there and those of the whole model."""


async def download_model(
    hub: Hub, identity: Identity, directory: Path, *, now: float, progress: Progress
) -> None:
    """Fetch the model that the coordinator at ``hub`` hands out into ``directory``, which appears whole.

    Raises:
        StartupError: the coordinator has none to give, the disk has no room, or a file stays damaged.
        RefusedError, ConnectionLost: the hub refuses, or is not reached.
    """
    async with AsyncExitStack() as channels:
        stubs = [
            model_pb2_grpc.ModelServiceStub(
                await channels.enter_async_context(dial(hub, identity, purpose=Purpose.BULK, now=now))
            )
            for _ in range(CONNECTIONS)
        ]
        files = await _listed(hub, stubs[0])
        staged = directory.with_name(f".{directory.name}.part")
        try:
            make_private_directory(staged)
            _drop_others(files, staged)
            _check_room(files, staged)
            blocks = _Blocks(hub, files, staged, progress)
            async with side_by_side() as tasks:
                for stub in stubs:
                    tasks.create_task(blocks.fetch(stub))
            await asyncio.to_thread(_finish, files, staged, directory)
        except OSError as error:
            raise cannot_make(directory, error, fix="Choose another --state-dir, or make room.") from error


async def _listed(hub: Hub, stub: "model_pb2_grpc.ModelServiceAsyncStub") -> tuple[ModelFile, ...]:
    async def ask() -> model_pb2.ListModelResponse:
        return await call(stub.ListModel, model_pb2.ListModelRequest(), timeout_s=LIST_TIMEOUT_S)

    response = await _patiently(hub, ask)
    files = tuple(ModelFile(file.name, file.size_bytes, file.digests) for file in response.files)
    check_listing(files)
    if not files:
        raise StartupError(
            "The coordinator hands out no model",
            fix="Set coordinator.model_dir there and restart it, or copy the model here and name it with "
            "--model-dir.",
        )
    return files


class _Blocks:
    """The blocks that are still missing, shared by all connections."""

    def __init__(self, hub: Hub, files: tuple[ModelFile, ...], staged: Path, progress: Progress) -> None:
        self._hub = hub
        self._staged = staged
        self._progress = progress
        self._here_bytes = 0
        self._all_bytes = sum(file.size_bytes for file in files)
        self._left: Iterator[tuple[ModelFile, int]] = (
            (file, block) for file in files for block in range(file.blocks)
        )

    async def fetch(self, stub: "model_pb2_grpc.ModelServiceAsyncStub") -> None:
        """Fetch missing blocks until none is left."""
        for file, block in self._left:
            path, (offset, size) = self._staged / file.name, file.extent(block)
            there = await asyncio.to_thread(_read, path, offset, size)
            if not file.is_block(block, there):
                content = await _patiently(self._hub, partial(_block, stub, file, block))
                await asyncio.to_thread(_write, path, offset, content)
            self._here_bytes += size
            self._progress(self._here_bytes, self._all_bytes)


async def _block(stub: "model_pb2_grpc.ModelServiceAsyncStub", file: ModelFile, block: int) -> bytes:
    request = model_pb2.FetchBlockRequest(name=file.name, block=block)
    content, (_, size) = bytearray(), file.extent(block)
    with classified():
        async for response in stub.FetchBlock(request, timeout=BLOCK_TIMEOUT_S):
            content += response.data
            if len(content) > size:
                break
    if not file.is_block(block, bytes(content)):
        raise StartupError(
            f"Block {block} of {file.name} is not what the coordinator listed",
            fix="If coordinator.model_dir was changed there, restart the coordinator; then try again.",
        )
    return bytes(content)


async def _patiently(hub: Hub, ask: Callable[[], Awaitable[Answer]]) -> Answer:
    backoff = Backoff(random.random, first_s=1.0)
    for _ in range(PATIENCE - 1):
        try:
            return await ask()
        except (ConnectionLost, RefusedError) as error:
            if isinstance(error, RefusedError) and not error.reason.is_retryable:
                raise
            hub.move_on_after(error)
            await backoff.wait()
    return await ask()


def _drop_others(files: tuple[ModelFile, ...], staged: Path) -> None:
    """Remove what an interrupted download of another model left."""
    listed = {file.name for file in files}
    for entry in tuple(staged.iterdir()):
        if entry.name not in listed:
            entry.unlink()


def _check_room(files: tuple[ModelFile, ...], staged: Path) -> None:
    there = sum(entry.stat().st_blocks * 512 for entry in staged.iterdir())
    needed = sum(file.size_bytes for file in files) - there
    free = shutil.disk_usage(staged).free
    if needed > free:
        raise StartupError(
            f"The model takes {needed / 1e9:.1f} GB more, and {staged.parent} has {free / 1e9:.1f} GB free",
            fix="Make room, or choose another --state-dir.",
        )


def _read(path: Path, offset: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except FileNotFoundError:
        return b""


def _write(path: Path, offset: int, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644), "wb") as file:
        file.seek(offset)
        file.write(content)


def _finish(files: tuple[ModelFile, ...], staged: Path, directory: Path) -> None:
    """Cut every file to its size, put all of them on disk, and the directory under its name."""
    for file in files:
        path = staged / file.name
        path.touch()
        os.truncate(path, file.size_bytes)
        durable.sync(path)
    durable.sync(staged)
    durable.rename(staged, directory)
