"""A service on a Unix socket, for commands on the same machine: who may open its file may call it.

    bound in a folder of its own, mode 700 --chmod 600--> renamed to its place: never open to others

A socket's path takes at most 107 bytes, and a state directory's may be longer. So both ends open the
directory and name the socket by that descriptor, below /proc/self/fd.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import grpc
import grpc.aio

from node.errors import Reason, RefusedError, StartupError
from node.identity.files import cannot_read
from node.rpc.call_ends import REASON_KEY, classify

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_MODE: Final = 0o600
_GRACE_S: Final = 1.0
"""How long calls under way may take once the service stops."""


class LocalServer:
    """Serves on a socket until stopped, as a service; then the socket is gone."""

    def __init__(self, name: str, path: Path, add_servicer: Callable[[grpc.aio.Server], None]) -> None:
        self._name = name
        self._path = path
        self._add_servicer = add_servicer

    @property
    def name(self) -> str:
        return self._name

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Serve until ``stopping``. Raises StartupError: there can be no socket."""
        server = grpc.aio.server()
        self._add_servicer(server)
        with contextlib.ExitStack() as opened:
            try:
                opened.enter_context(_bound(server, self._path))
            except (OSError, RuntimeError) as error:
                raise StartupError(
                    f"{self._name} cannot listen on {self._path}: {error}",
                    fix="Set node.state_dir to a directory on a file system that has Unix sockets.",
                ) from error
            await server.start()
            ready()
            await stopping.wait()
            await server.stop(_GRACE_S)


@contextlib.contextmanager
def _bound(server: grpc.aio.Server, path: Path) -> Iterator[None]:
    """Bind a server to a socket, which takes the place of one that a killed process left."""
    with contextlib.ExitStack() as bound:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as private:
            made = Path(private, path.name)
            directory = bound.enter_context(_descriptor(made.parent))
            server.add_insecure_port(f"unix:{directory}/{made.name}")
            made.chmod(_MODE)
            made.replace(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _descriptor(directory: Path) -> Iterator[str]:
    """Yield a short path to a directory, for this process."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def local_channel(path: Path) -> Iterator[grpc.Channel | None]:
    """Yield a channel to the service on a socket, or None where the socket does not exist.

    Raises StartupError: this user may not open it.
    """
    try:
        is_there = stat.S_ISSOCK(path.lstat().st_mode)
        if is_there and not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied", str(path))
    except FileNotFoundError:
        is_there = False
    except OSError as error:
        raise cannot_read(path, error, fix="Check path and owner.") from error
    if not is_there:
        yield None
        return
    with _descriptor(path.parent) as directory:
        channel = grpc.insecure_channel(
            f"unix:{directory}/{path.name}", (("grpc.use_local_subchannel_pool", 1),)
        )
        with channel:
            yield channel


def called(method: Callable[..., Answer], request: Any, *, timeout_s: float) -> Answer | None:
    """Call a service on a socket; return None where nobody listens on it any more.

    Raises:
        RefusedError: why the service refused.
    """
    try:
        return method(request, timeout=timeout_s)
    except grpc.RpcError as error:
        outcome = classify(cast(grpc.aio.AioRpcError, error))
        if isinstance(outcome, RefusedError):
            raise outcome from error
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return None
        raise RefusedError(Reason.BUSY, f"no answer: {outcome}", fix="try again", is_remote=True) from error


async def answered(context: "grpc.aio.ServicerContext[Any, Any]", answer: Awaitable[Answer]) -> Answer:
    """Return an answer; where it is a refusal, send that as every hub does."""
    try:
        return await answer
    except RefusedError as refused:
        refusal = refused
    except Exception as error:
        error_id = secrets.token_hex(4)
        logger.error("rpc failed", exc_info=error, extra={"error_id": error_id})
        refusal = RefusedError(
            Reason.INTERNAL, f"internal error {error_id}", fix="the coordinator's log has it"
        )
    await context.abort(
        grpc.StatusCode[refusal.reason.status], str(refusal)[:4000], ((REASON_KEY, refusal.reason.value),)
    )
    raise AssertionError("abort raises")
