"""TCP connections that are passed on: accepted as far as there are places, each served in a task of its own.

    caller --TCP--> place --task--> hello, limits: a gate or a splice --both ways--> a server

A newcomer for whom there is no place, and a caller who loses his own to a newcomer, is closed without a word
and counted as ``busy``.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeAlias

from node.errors import CountRefusal, Reason, RefusedError
from node.rpc.address import join_address, listening_socket
from node.rpc.strangers.places import NoPlaceError, Places, origin
from node.system.waits import put_away

logger = logging.getLogger(__name__)

ACCEPT_AGAIN_S: Final = 0.5
"""Pause after a connection could not be accepted: descriptors have run out."""

Serve: TypeAlias = Callable[[socket.socket, str], Awaitable[None]]
"""Serves a caller's connection, given with its address as ``host:port``, which is closed afterwards.

Raises RefusedError, which is counted and logged; TimeoutError, which counts as ``busy``; OSError: an end is
gone.
"""


class Entrance:
    """Accepts connections at one port; used on the event loop's thread."""

    def __init__(
        self, service: str, places: "Places[asyncio.Task[None]]", *, count_refusal: CountRefusal
    ) -> None:
        """Count refusals as ``service``'s."""
        self._service = service
        self._places = places
        self._count_refusal = count_refusal

    @contextlib.asynccontextmanager
    async def open(self, listen: str, serve: Serve) -> AsyncIterator[str]:
        """Serve connections while the body runs; yield the address with its port.

        Raises OSError: the address cannot be bound.
        """
        tasks: set[asyncio.Task[None]] = set()
        with listening_socket(listen) as listener:
            listener.setblocking(False)
            accepting = asyncio.create_task(self._accept(listener, serve, tasks))
            try:
                yield join_address(*listener.getsockname()[:2])
            finally:
                await put_away(accepting, *tasks)

    def refuse(self, reason: Reason) -> None:
        """Count a refusal."""
        self._count_refusal(service=self._service, reason=reason)

    async def _accept(self, listener: socket.socket, serve: Serve, tasks: set[asyncio.Task[None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("connection not accepted", extra={"error": str(error)})
                self.refuse(Reason.BUSY)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            task = asyncio.create_task(self._serve(connection, address[0], address[1], serve))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _serve(self, connection: socket.socket, host: str, port: int, serve: Serve) -> None:
        task = asyncio.current_task()
        assert task is not None
        caller = join_address(host, port)
        try:
            displaced = self._places.enter(task, origin(host), now=asyncio.get_running_loop().time())
            if displaced is not None:
                displaced.cancel()
                self.refuse(Reason.BUSY)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await serve(connection, caller)
        except (NoPlaceError, TimeoutError):
            self.refuse(Reason.BUSY)
        except RefusedError as refused:
            level = logging.ERROR if refused.reason is Reason.INTERNAL else logging.DEBUG
            about = {"service": self._service, "caller": caller, "detail": str(refused)}
            logger.log(level, "connection refused", extra=about)
            self.refuse(refused.reason)
        except OSError:
            pass  # either end is gone
        finally:
            self._places.leave(task)
            connection.close()
