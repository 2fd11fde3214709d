"""Which bytes of an object a peer reads, over which connections, and what it makes of the answers."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from heterorl.v1 import policy_pb2
from node.rpc.call_ends import ConnectionLost
from node.telemetry.transfer_metrics import TransferMetrics
from node.values.policy import ArtifactKey
from node.weights.format.manifest import Manifest, verify_signed
from node.weights.transfer.bucket import key_of, object_name
from node.weights.transfer.bucket_reader import BucketReader, _offsets, _runs
from node.weights.transfer.payload_order import fetch_order
from node.weights.transfer.ranges import LyingSourceError
from support.http_server import served
from support.weights import Learner, manifest_of_sizes

OBJECT = bytes(range(100))
MANIFEST = manifest_of_sizes([len(OBJECT)])


class Hub:
    """Gives one address for everything."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked = 0

    async def LocateArtifact(  # noqa: N802
        self, request: policy_pb2.LocateArtifactRequest, **options: Any
    ) -> policy_pb2.LocateArtifactResponse:
        self.asked += 1
        return policy_pb2.LocateArtifactResponse(url=self.url, valid_s=3600.0)


@asynccontextmanager
async def reading(url: str, *, takes_http: bool = True) -> AsyncIterator[tuple[BucketReader, Any]]:
    hub: Any = Hub(url)
    reader = BucketReader(hub, takes_http=takes_http, metrics=TransferMetrics(CollectorRegistry()))
    try:
        yield reader, hub
    finally:
        await reader.close()


async def read(reader: BucketReader, start: int = 0, end: int = 0) -> bytes:
    """Return a part of the only frame; stop at the last byte, as a lane does."""
    request, got = (
        policy_pb2.FetchFramesRequest(frames=[0], first_offset_bytes=start, end_offset_bytes=end),
        b"",
    )
    async with aclosing(reader.chunks(request, MANIFEST)) as chunks:
        while len(got) < (end or len(OBJECT)) - start:
            got += (await anext(chunks)).data
    return got


@contextmanager
def bucket(answer: Callable[[BaseHTTPRequestHandler, int, int], None]) -> Iterator[tuple[str, list[Any]]]:
    """Serve over HTTP/1.1, and list the connections; ``answer`` takes a request and its range."""
    connections: list[Any] = []

    def get(request: BaseHTTPRequestHandler, sent: bytes) -> None:
        if request.connection not in connections:
            connections.append(request.connection)
        first, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
        answer(request, int(first), int(last))

    with served("GET", get, version="HTTP/1.1") as url:
        yield url, connections


def send(
    request: BaseHTTPRequestHandler, status: int, body: bytes, *, size: int | None = None, **headers: str
) -> None:
    """Answer with a body that is said to have ``size`` bytes, by default its own."""
    request.send_response(status)
    request.send_header("Content-Length", str(len(body) if size is None else size))
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    request.wfile.write(body)


def honest(request: BaseHTTPRequestHandler, first: int, last: int) -> None:
    send(request, 206, OBJECT[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(OBJECT)}")


async def test_ranges_are_read_one_after_the_other_over_one_connection() -> None:
    with bucket(honest) as (url, connections):
        async with reading(url) as (reader, hub):
            assert await read(reader, 0, 40) + await read(reader, 40, 41) + await read(reader, 41) == OBJECT
            assert len(connections) == 1
            assert hub.asked == 1


@pytest.mark.parametrize(
    ("status", "body", "said", "failure"),
    [
        (200, OBJECT, "", LyingSourceError),
        (206, OBJECT[:50], "bytes 0-49/50", LyingSourceError),
        (206, OBJECT, "bytes 0-99/200", LyingSourceError),
        (416, b"", "bytes */50", LyingSourceError),
        (206, OBJECT + b"more", "bytes 0-99/100", LyingSourceError),
        (302, b"", "", ConnectionLost),
        (403, b"<Error>expired</Error>", "", ConnectionLost),
        (404, b"", "", ConnectionLost),
        (503, b"", "", ConnectionLost),
    ],
)
async def test_an_answer_that_is_not_what_was_asked_for_is_a_fault_of_the_bucket(
    status: int, body: bytes, said: str, failure: type[Exception]
) -> None:
    paths = []

    def answer(request: BaseHTTPRequestHandler, first: int, last: int) -> None:
        paths.append(request.path)
        send(request, status, body, Content_Range=said, Location="/elsewhere")

    with bucket(answer) as (url, _):
        async with reading(url + "/object") as (reader, hub):
            for _ in range(2):
                with pytest.raises(ConnectionLost) as failed:
                    await read(reader)
                assert type(failed.value) is failure
            assert hub.asked == 2, "the address may have ended"
    assert paths == ["/object"] * 2, "no redirect is followed"


async def test_an_answer_that_ends_early_is_a_cut() -> None:
    def answer(request: BaseHTTPRequestHandler, first: int, last: int) -> None:
        send(request, 206, OBJECT[:10], size=100, Content_Range="bytes 0-99/100")
        request.close_connection = True

    with bucket(answer) as (url, _):
        async with reading(url) as (reader, _):
            with pytest.raises(ConnectionLost, match="the bucket"):
                await read(reader)


@given(st.data(), st.lists(st.integers(0, 3 << 20), min_size=1, max_size=12))
def test_the_ranges_of_an_object_are_the_bytes_that_were_asked_for(data: Any, sizes: list[int]) -> None:
    manifest = manifest_of_sizes(sizes)
    filled = [frame for frame, size in enumerate(sizes) if size]
    if not filled:
        return
    frames = data.draw(st.lists(st.sampled_from(filled), unique=True, min_size=1))
    start = data.draw(st.integers(0, sizes[frames[0]] - 1))
    end = data.draw(st.integers(start + 1, sizes[frames[0]])) if len(frames) == 1 else 0
    request = policy_pb2.FetchFramesRequest(frames=frames, first_offset_bytes=start, end_offset_bytes=end)
    # An object as (frame, place in its payload) of the first and last byte of each payload, by place.
    place, at = dict[tuple[int, int], int](), 0
    for frame in fetch_order(manifest, range(len(sizes))):
        place |= {(frame, 0): at, (frame, sizes[frame]): at + sizes[frame]}
        at += sizes[frame]
    runs = list(_runs(request, manifest, _offsets(manifest)))
    assert [frame for run in runs for frame in run.frames] == frames
    assert runs[0].start == place[frames[0], 0] + start
    assert sum(run.end - run.start for run in runs) == (end or sum(sizes[frame] for frame in frames)) - start
    for run in runs:
        assert run.end == (
            place[run.frames[0], 0] + end if end else place[run.frames[-1], sizes[run.frames[-1]]]
        )


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest", "file:///etc/passwd", "", "gopher://localhost", "//hub/x"]
)
async def test_an_address_that_is_not_https_is_a_lie(url: str) -> None:
    async with reading(url, takes_http=False) as (reader, _):
        with pytest.raises(LyingSourceError, match="allowed: https"):
            await read(reader)


def test_an_objects_name_says_which_artifact_it_is_and_differs_for_the_same_words_coded_anew() -> None:
    learner = Learner()
    first, again = (_signed(learner, epoch) for epoch in (1, 2))
    assert key_of(object_name(first)) == ArtifactKey(1, 0)
    assert object_name(first) != object_name(again)
    assert key_of(object_name(_signed(learner, 1, base=None))) == ArtifactKey(1)


@pytest.mark.parametrize(
    "name", ["", "1", "1-0", "1-0-xyz", "1-0-0123456789abcdef/x", "../1-0-0123456789abcdef"]
)
def test_a_name_that_is_not_ours_is_nobodys_artifact(name: str) -> None:
    assert key_of(name) is None


def _signed(learner: Learner, epoch: int, *, base: int | None = 0) -> Manifest:
    learner.epoch = epoch
    signed, _ = learner.signed(1, base)
    return verify_signed(signed, public_key=learner.key.public_key, run_id=learner.run_id)
