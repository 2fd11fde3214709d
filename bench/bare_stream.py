"""A bare stream of grpc.aio with TLS that puts messages on disk: what a hub's ingest is compared with.

    python -m bench.bare_stream RUN_DIRECTORY     serve, as the run's coordinator

It appends all messages that wait to a file, with one fdatasync, and answers each group with a byte.
"""

import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from bench.shared.measured_process import MeasuredProcess, started
from node.identity.identity_store import Identity, load_identity
from node.process.memory import keep_freed_memory
from node.rpc.channel import Purpose, dial
from node.values.limits import JOINED_GROUPS_BYTES, ROLLOUT_MESSAGE_BYTES
from sampler.rollouts.group_submitter import SUBMISSIONS_IN_FLIGHT

SYNC_MESSAGES: Final = 128
SYNC_BYTES: Final = 16 << 20
"""In one sync, as in one commit of the coordinator."""


@asynccontextmanager
async def bare_stream(run_directory: Path, log: Path) -> AsyncIterator[tuple[MeasuredProcess, str]]:
    """Serve until the body ends; yield the process and its address."""
    async with started(("-m", "bench.bare_stream", str(run_directory)), log) as server:
        yield server, (await server.said("listen"))["listen"]


async def submitted(address: str, identity: Identity, groups: Sequence[bytes], *, most: int = 1) -> None:
    """Send groups, as many at once as a sampler; ``most``: how many that wait may share a message."""
    async with dial(address, identity, purpose=Purpose.ROLLOUTS, now=time.time()) as channel:
        submit: Any = channel.stream_stream("/bare/single" if most == 1 else "/bare/joined")
        call, places, left = submit(), asyncio.Semaphore(SUBMISSIONS_IN_FLIGHT), deque(groups)

        async def answered() -> None:
            answers = 0
            while answers < len(groups):
                answers += (now := len(await call.read()))
                for _ in range(now):
                    places.release()

        answering = asyncio.create_task(answered())
        while left:
            await places.acquire()
            message, size_bytes = [left.popleft()], 0
            while left and len(message) < most and not places.locked():
                size_bytes += len(message[-1])
                if size_bytes + len(left[0]) > JOINED_GROUPS_BYTES:
                    break
                await places.acquire()
                message.append(left.popleft())
            await call.write(message[0] if most == 1 else b"".join((bytes([len(message)]), *message)))
        await answering
        call.cancel()


async def serve(run_directory: Path) -> None:
    keep_freed_memory()
    identity = load_identity(run_directory / "coordinator" / "identity")
    assert identity is not None
    file = os.open(run_directory / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    arrived: asyncio.Queue[tuple[bytes, asyncio.Future[None]]] = asyncio.Queue(SYNC_MESSAGES)

    def written(messages: list[bytes]) -> None:
        os.writev(file, messages)
        os.fdatasync(file)

    async def write() -> None:
        while True:
            batch = [await arrived.get()]
            while not arrived.empty() and sum(len(message) for message, _ in batch) < SYNC_BYTES:
                batch.append(arrived.get_nowait())
            await asyncio.to_thread(written, [message for message, _ in batch])
            for _, is_on_disk in batch:
                is_on_disk.set_result(None)

    async def submit(
        requests: AsyncIterator[bytes], _: object, *, groups_in: Callable[[bytes], int]
    ) -> AsyncIterator[bytes]:
        pending: asyncio.Queue[tuple[int, asyncio.Future[None]]] = asyncio.Queue()

        async def read() -> None:
            async for request in requests:
                is_on_disk: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                await arrived.put((request, is_on_disk))
                pending.put_nowait((groups_in(request), is_on_disk))

        reader = asyncio.create_task(read())
        try:
            while True:
                groups, is_on_disk = await pending.get()
                await is_on_disk
                yield b"1" * groups
        finally:
            reader.cancel()

    handlers: dict[str, Any] = {
        name: grpc.stream_stream_rpc_method_handler(partial(submit, groups_in=groups_in))
        for name, groups_in in (("single", lambda _: 1), ("joined", lambda message: message[0]))
    }
    options = ("grpc.max_receive_message_length", "grpc.max_send_message_length")
    sizes = [(option, ROLLOUT_MESSAGE_BYTES) for option in options]
    server = grpc.aio.server(options=sizes)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bare", handlers)])
    certificates = [(identity.key_pem, identity.certificate_pem)]
    credentials = grpc.ssl_server_credentials(certificates, identity.ca_pem, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    print(json.dumps({"listen": f"127.0.0.1:{port}"}), flush=True)
    await write()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
