"""ModelService at a coordinator: lists and reads the files of a directory that the operator named."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from heterorl.v1 import model_pb2, model_pb2_grpc
from node.errors import Reason, RefusedError
from node.rpc.calls.caller import Context
from node.telemetry.transfer_metrics import TransferMetrics
from node.values.limits import CHUNK_BYTES
from node.weights.format.model_listing import ModelFile, listing_of


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Hands out a model directory; None: there is none to hand out.

    The directory is read once, when the first peer asks. A file that changes afterwards fails its digests.
    """

    def __init__(self, model_dir: Path | None, *, metrics: TransferMetrics) -> None:
        self._model_dir = model_dir
        self._metrics = metrics
        self._listing: asyncio.Task[dict[str, ModelFile]] | None = None

    async def ListModel(  # noqa: N802 - the rpc's name
        self, request: model_pb2.ListModelRequest, context: Context
    ) -> model_pb2.ListModelResponse:
        files = (await self._files()).values()
        listed = [
            model_pb2.ModelFile(name=file.name, size_bytes=file.size_bytes, digests=file.digests)
            for file in files
        ]
        return model_pb2.ListModelResponse(files=listed)

    async def FetchBlock(  # noqa: N802 - the rpc's name
        self, request: model_pb2.FetchBlockRequest, context: Context
    ) -> AsyncIterator[model_pb2.FetchBlockResponse]:
        file = (await self._files()).get(request.name)
        if self._model_dir is None or file is None or request.block >= file.blocks:
            raise RefusedError(
                Reason.MALFORMED, f"block {request.block} of {request.name[:100]!r} is not listed"
            )
        start, size = file.extent(request.block)
        for offset in range(start, start + size, CHUNK_BYTES):
            # A chunk at a time: what a caller does not take does not pile up.
            chunk = min(CHUNK_BYTES, start + size - offset)
            read = partial(_read, self._model_dir / file.name, offset, chunk)
            try:
                data = await asyncio.to_thread(read)
            except OSError as error:
                raise _unreadable(error) from error
            self._metrics.count_model(len(data))
            yield model_pb2.FetchBlockResponse(data=data)

    async def _files(self) -> dict[str, ModelFile]:
        if self._model_dir is None:
            return {}
        if self._listing is None:
            self._listing = asyncio.create_task(asyncio.to_thread(_listed, self._model_dir))
        try:
            # A caller that gives up leaves the reading to those that ask after it.
            return await asyncio.shield(self._listing)
        except OSError as error:
            self._listing = None
            raise _unreadable(error) from error


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(size)


def _listed(model_dir: Path) -> dict[str, ModelFile]:
    return {file.name: file for file in listing_of(model_dir)}


def _unreadable(error: OSError) -> RefusedError:
    what = f"the model's files cannot be read: {error.strerror}"
    return RefusedError(Reason.DISK, what, fix="check coordinator.model_dir on the coordinator's host")
