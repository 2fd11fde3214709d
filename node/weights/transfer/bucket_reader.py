"""Reads frames from a hub's bucket over HTTP: the same chunks as the hub's own FetchFrames sends.

    LocateArtifact, once --> signed address --> GET with a Range for each run of adjacent payloads --> chunks

The reader has no credentials and follows no redirect. It uses plain http only where the hub is on loopback,
so that a hub cannot send its peers to some service inside their own network. The bytes are checked where all
payloads are.
"""

import ssl
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from heterorl.v1 import policy_pb2, policy_pb2_grpc
from node.errors import RefusedError
from node.rpc.call_ends import ConnectionLost, call
from node.rpc.proxy import follows_proxy
from node.telemetry.transfer_metrics import TransferMetrics
from node.values.policy import ArtifactKey
from node.weights.format.manifest import Manifest
from node.weights.transfer.payload_order import fetch_order
from node.weights.transfer.ranges import LyingSourceError
from node.wire.mapping import to_wire

if TYPE_CHECKING:
    import httpx

CONNECTIONS: Final = 8
"""As to a hub; each carries several ranges."""

LOCATE_TIMEOUT_S: Final = 20.0
CONNECT_S: Final = 10.0
_MOST_CONNECTIONS: Final = 32

_MARGIN_S: Final = 60.0
"""An address is used until so long before its end: a range begun then takes less."""

_MOST_KNOWN: Final = 16
"""Artifacts whose addresses and layout are remembered."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Payloads that are adjacent in an object."""

    frames: Sequence[int]
    start: int
    """Offset of the bytes in the object; within the first frame's payload where the rest of it is here."""
    end: int


@dataclass(frozen=True, slots=True)
class _Object:
    manifest: Manifest
    offsets: NDArray[np.int64]
    """Offset of each frame's payload in the object."""
    url: str
    ends_s: float


class BucketReader:
    """The bucket of one hub. Used on the event loop's thread."""

    def __init__(
        self,
        hub: "policy_pb2_grpc.PolicyServiceAsyncStub",
        *,
        takes_http: bool,
        metrics: TransferMetrics,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask ``hub`` for addresses; connect to nothing yet.

        Args:
            takes_http: whether an address may be of plain http.
        """
        self._hub = hub
        self._schemes = ("https", "http") if takes_http else ("https",)
        self._metrics = metrics
        self._monotonic = monotonic
        self._objects: dict[ArtifactKey, _Object] = {}
        self._clients: dict[bool, httpx.AsyncClient] = {}
        """By whether they follow a proxy of the environment."""

    @staticmethod
    def is_possible() -> bool:
        """Whether the HTTP library is installed; without it, a peer fetches from hubs alone."""
        return find_spec("httpx") is not None

    async def chunks(
        self, request: policy_pb2.FetchFramesRequest, manifest: Manifest
    ) -> AsyncGenerator[policy_pb2.FetchFramesResponse, None]:
        """Yield what ``request`` asks for, of the artifact of ``manifest``.

        Raises ConnectionLost: it was cut, or the bucket cannot be read now: an object that is gone may be put
        again at any time. LyingSourceError: the object is not the artifact's.
        """
        stored = await self._located(manifest)
        for run in _runs(request, manifest, stored.offsets):
            at = run.start
            pieces = self._bytes(stored.url, run.start, run.end, size_bytes=manifest.size_bytes)
            try:
                async with aclosing(pieces):
                    async for data in pieces:
                        frame = run.frames[bisect_right(run.frames, at, key=stored.offsets.__getitem__) - 1]
                        start = int(stored.offsets[frame])
                        yield policy_pb2.FetchFramesResponse(frame=frame, offset_bytes=at - start, data=data)
                        at += len(data)
            except ConnectionLost:
                self._objects.pop(manifest.key, None)  # the address may have ended
                raise

    async def close(self) -> None:
        """Close the connections; they are opened again when they are needed."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()

    async def _located(self, manifest: Manifest) -> _Object:
        key, now = manifest.key, self._monotonic()
        known = self._objects.get(key)
        if known is not None and known.manifest == manifest and now < known.ends_s - _MARGIN_S:
            return known
        request = policy_pb2.LocateArtifactRequest(key=to_wire(policy_pb2.ArtifactKey, key))
        try:
            answer = await call(self._hub.LocateArtifact, request, timeout_s=LOCATE_TIMEOUT_S)
        except RefusedError as refused:
            raise ConnectionLost(f"no address of the bucket: {refused}") from refused
        scheme = answer.url.partition("://")[0].lower()
        if scheme not in self._schemes:
            allowed = " and ".join(self._schemes)
            raise LyingSourceError(f"a bucket's address begins with {answer.url[:20]!r}; allowed: {allowed}")
        stored = _Object(manifest, _offsets(manifest), answer.url, now + max(answer.valid_s, 2 * _MARGIN_S))
        self._objects.pop(key, None)
        self._objects[key] = stored
        while len(self._objects) > _MOST_KNOWN:
            del self._objects[next(iter(self._objects))]
        return stored

    async def _bytes(self, url: str, start: int, end: int, *, size_bytes: int) -> AsyncGenerator[bytes, None]:
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        left, last = end - start, b""
        with _classified():
            client = self._opened(follows_proxy=await follows_proxy(_host(url)))
            async with client.stream("GET", url, headers=headers) as response:
                _check(response, expected=f"bytes {start}-{end - 1}/{size_bytes}")
                async for data in response.aiter_raw():
                    left -= len(data)
                    self._metrics.count_bucket_bytes("in", len(data))
                    if left < 0:
                        raise LyingSourceError(f"the bucket sent {-left} bytes more than were asked for")
                    if left and data:
                        yield data
                    elif data:
                        last = data
        if left:
            raise ConnectionLost(f"the bucket's answer ended {left} bytes early")
        yield last  # only now: who has it stops reading, and a connection is kept only after an answer's end

    def _opened(self, *, follows_proxy: bool) -> "httpx.AsyncClient":
        if follows_proxy not in self._clients:
            import httpx

            self._clients[follows_proxy] = httpx.AsyncClient(
                trust_env=follows_proxy,
                verify=ssl.create_default_context(),  # the system's authorities, or those of SSL_CERT_FILE
                # A lane has a deadline of its own for each piece.
                timeout=httpx.Timeout(None, connect=CONNECT_S),
                limits=httpx.Limits(max_connections=_MOST_CONNECTIONS, keepalive_expiry=60.0),
            )
        return self._clients[follows_proxy]


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""  # httpx says what is wrong with it


def _check(response: "httpx.Response", *, expected: str) -> None:
    """Raise what an answer other than the bytes that were asked for means."""
    status = response.status_code
    if status not in (200, 206, 416):
        raise ConnectionLost(f"the bucket answered with status {status}")
    said = response.headers.get("Content-Range", "")
    if said != expected:  # an object that was cut short has another size, or no such range
        raise LyingSourceError(f"the bucket sent {said!r} (status {status}) where {expected!r} was due")


def _runs(
    request: policy_pb2.FetchFramesRequest, manifest: Manifest, offsets: NDArray[np.int64]
) -> Iterator[_Run]:
    """Yield the ranges of the object to read one after the other."""
    frames = list(request.frames)
    starts = [int(offsets[frame]) for frame in frames]
    ends = [start + manifest.frames[f].payload_bytes for start, f in zip(starts, frames, strict=True)]
    if request.end_offset_bytes:
        ends[-1] = starts[-1] + request.end_offset_bytes
    starts[0] += request.first_offset_bytes
    begin = 0
    for after in range(1, len(frames) + 1):
        if after == len(frames) or starts[after] != ends[after - 1]:
            yield _Run(frames[begin:after], starts[begin], ends[after - 1])
            begin = after


def _offsets(manifest: Manifest) -> NDArray[np.int64]:
    """Return where in an object each frame's payload begins."""
    order = np.array(fetch_order(manifest, range(len(manifest.frames))))
    sizes = np.fromiter((frame.payload_bytes for frame in manifest.frames), np.int64)[order]
    offsets = np.empty(len(order), np.int64)
    offsets[order] = np.cumsum(sizes) - sizes
    return offsets


@contextmanager
def _classified() -> Iterator[None]:
    import httpx

    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:  # a bad TLS record is an ssl.SSLError
        raise ConnectionLost(f"the bucket: {type(error).__name__}: {str(error)[:200]}") from error
