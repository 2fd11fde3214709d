"""Where a payload is in an object, and which addresses of a bucket a peer believes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from heterorl.v1 import policy_pb2
from node.policy import ArtifactKey
from node.telemetry.transfer_metrics import TransferMetrics
from node.weights.format.manifest import Manifest, verify_signed
from node.weights.transfer.bucket import key_of, object_name
from node.weights.transfer.bucket_reader import BucketReader, _offsets, _runs
from node.weights.transfer.payload_order import fetch_order
from node.weights.transfer.ranges import LyingSourceError
from support.weights import Learner, manifest_of_sizes


class Hub:
    """Gives one address for everything."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def LocateArtifact(  # noqa: N802
        self, request: policy_pb2.LocateArtifactRequest, **options: Any
    ) -> policy_pb2.LocateArtifactResponse:
        return policy_pb2.LocateArtifactResponse(url=self.url, valid_s=3600.0)


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
    hub: Any = Hub(url)
    reader = BucketReader(hub, takes_http=False, metrics=TransferMetrics(CollectorRegistry()))
    request = policy_pb2.FetchFramesRequest(frames=[0])
    with pytest.raises(LyingSourceError, match="allowed: https"):
        await anext(reader.chunks(request, manifest_of_sizes([10])))


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
