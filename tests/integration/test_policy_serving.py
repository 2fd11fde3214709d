"""A hub serves, announces and takes in only what its store vouches for, whoever asks."""

import asyncio
from pathlib import Path

import pytest

from deploy.runs.run_directory import free_ports
from heterorl.v1 import policy_pb2, policy_pb2_grpc
from node.errors import Reason
from node.rpc.call_ends import classified
from node.rpc.channel import Purpose, dial
from node.rpc.hub import Hub
from node.values import limits
from node.values.policy import ArtifactKey
from node.weights.transfer.sources import dial_source, watch_versions
from node.wire.mapping import to_wire
from support.identity import MadeRun
from support.policy_hub import PolicyHub, Registry, make_sources, policy_hub, policy_hub_fixture
from support.refusals import refused
from support.weights import flip_bit, frames_file, keys, offsets

DELTA = ArtifactKey(1, 0)


hub = policy_hub_fixture()


async def test_a_request_for_frames_that_breaks_a_rule_is_refused(
    hub: PolicyHub, made: MadeRun, subtests: pytest.Subtests
) -> None:
    hub.learner.put(hub.store, (1, 0))
    stub = policy_pb2_grpc.PolicyServiceStub(await hub.dial(made.sampler))
    key = to_wire(policy_pb2.ArtifactKey, DELTA)
    for name, frames, offset_bytes in (
        ("no frame", [], 0),
        ("a frame twice", [1, 1], 0),
        ("no such frame", [5], 0),
        ("past its end", [0], 1 << 40),
        ("too many", range(limits.FRAMES_PER_FETCH + 1), 0),
    ):
        request = policy_pb2.FetchFramesRequest(key=key, frames=frames, first_offset_bytes=offset_bytes)
        with subtests.test(name), refused(Reason.MALFORMED), classified():
            await stub.FetchFrames(request).read()


async def test_a_frame_that_rots_on_the_hubs_disk_is_found_by_its_reader_and_had_again(
    hub: PolicyHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.learner.put(hub.store, (1, 0))
    payloads = hub.learner.encode(1, 0).payloads
    flip_bit(frames_file(tmp_path / "hub", DELTA), offsets(payloads)[1])
    registry = Registry()
    fetcher = await hub.fetcher(registry, attempts=2)
    manifest = await fetcher.manifest(DELTA)
    got: dict[int, bytes] = {}

    def put(frame: int, payload: bytes) -> None:
        manifest.check_payload(frame, payload)
        got[frame] = payload

    await fetcher.fetch(manifest, [0, 2], put)
    with monkeypatch.context() as patched:
        patched.setattr("node.serving.policy_servicer.RESUME_TIMEOUT_S", 0.1)
        with refused(Reason.DAMAGED):
            await fetcher.fetch(manifest, [1], put)
    assert registry.value("heterorl_node_frames_damaged_total") == 1
    assert hub.store.missing(DELTA) == (1,)
    assert got == {0: payloads[0], 2: payloads[2]}
    # What waits for the frame gets it once the learner has sent it again.
    waiting = asyncio.create_task((await hub.fetcher(Registry(), attempts=10_000)).fetch(manifest, [1], put))
    await asyncio.to_thread(hub.learner.put, hub.store, (1, 0))
    await waiting
    assert got[1] == payloads[1]


async def test_weights_come_from_the_next_coordinator_where_the_first_is_gone(
    hub: PolicyHub, made: MadeRun
) -> None:
    """A sampler that speaks through relays: nobody else moves the hub that it takes weights from."""
    async with asyncio.timeout(10):
        hub.learner.put(hub.store, (1, 0))
        coordinators = Hub(f"127.0.0.1:{free_ports(1)[0]},{hub.serving.address}")
        source = dial_source(coordinators, made.sampler, connections=1, now=made.made_at_s)
        for channel in (source.control, *source.bulk):
            await hub.own(channel)
        announcements = make_sources(Registry(), source).announcements()
        assert (await anext(announcements)).head.number == 1
        await announcements.aclose()


async def test_announcements_go_on_when_the_hub_comes_back(made: MadeRun, tmp_path: Path) -> None:
    async with asyncio.timeout(20):
        async with policy_hub(made, tmp_path / "hub") as first:
            first.learner.put(first.store, (1, 0))
            address, before = first.serving.address, first.store.announcement()
            control = dial(address, made.sampler, purpose=Purpose.CONTROL, now=made.made_at_s)
            watch = watch_versions(control, random=lambda: 0.0)
            assert await anext(watch) == before
        async with policy_hub(made, tmp_path / "hub", listen=address) as second:
            assert await anext(watch) == before
            await asyncio.to_thread(second.learner.put, second.store, (2, 1))
            assert keys(second.store) == [(1, 0), (2, 1)]
            assert await anext(watch) == second.store.announcement()
            await watch.aclose()
        await control.close()


async def upload_pieces(
    hub: PolicyHub, *pieces: tuple[ArtifactKey, int, int, bytes]
) -> policy_pb2.UploadFramesResponse:
    stub = policy_pb2_grpc.PolicyServiceStub(await hub.dial(hub.made.learner))
    requests = [
        policy_pb2.UploadFramesRequest(
            key=to_wire(policy_pb2.ArtifactKey, key), frame=frame, offset_bytes=offset, data=data
        )
        for key, frame, offset, data in pieces
    ]
    with classified():
        return await stub.UploadFrames(iter(requests), timeout=10)


async def test_an_upload_that_ends_within_a_frame_leaves_it_missing(hub: PolicyHub) -> None:
    signed, payloads = hub.learner.signed(1, 0)
    hub.store.offer_signed(signed)
    answer = await upload_pieces(
        hub, (DELTA, 3, 0, payloads[3]), (DELTA, 0, 0, payloads[0][:4]), (DELTA, 0, 4, payloads[0][4:9])
    )
    assert list(answer.missing_frames) == [0, 1, 2, 4]


async def test_an_upload_that_breaks_a_rule_is_refused(hub: PolicyHub, subtests: pytest.Subtests) -> None:
    signed, payloads = hub.learner.signed(1, 0)
    hub.store.offer_signed(signed)
    begun = (DELTA, 1, 0, b"a")
    for name, pieces in {
        "nothing": [],
        "starts late": [(DELTA, 1, 1, b"a")],
        "leaves a hole": [begun, (DELTA, 1, 5, b"a")],
        "leaves a frame": [begun, (DELTA, 2, 0, b"a")],
        "mixes two frames": [begun, (DELTA, 2, 1, b"a")],
        "changes the artifact": [begun, (ArtifactKey(2, 1), 1, 1, b"a")],
        "empty": [(DELTA, 1, 0, b"")],
        "longer than the frame": [(DELTA, 1, 0, b"a" * 5000)],
        "no such frame": [(DELTA, 5, 0, b"a")],
        "no artifact": [(ArtifactKey(1, 1), 0, 0, b"a")],
    }.items():
        with subtests.test(name), refused(Reason.MALFORMED):
            await upload_pieces(hub, *pieces)
    with refused(Reason.UNKNOWN_VERSION):
        await upload_pieces(hub, (ArtifactKey(2, 1), 0, 0, b"a"))
    with refused(Reason.DAMAGED):
        await upload_pieces(hub, (DELTA, 1, 0, bytes(len(payloads[1]))))
    assert hub.store.missing(DELTA) == (0, 1, 2, 3, 4)
    assert hub.store.announcement() is None
