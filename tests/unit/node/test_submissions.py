"""Admission of submissions before they are read."""

import pytest

from heterorl.v1 import rollout_pb2
from node.errors import Reason, RefusedError
from node.identity.group_proof import GroupVerifier
from node.identity.peer import Peer
from node.rollout import EncodedGroup
from node.run import Role
from node.serving import submissions
from node.serving.submissions import SubmissionDoor
from support.hub import signed
from support.identity import NOW_S, MadeRun, make_run

SAMPLER, RELAY = Peer("example", Role.SAMPLER, "sampler-1"), Peer("example", Role.RELAY, "relay-1")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return make_run(tmp_path_factory.mktemp("run"), now=NOW_S)


@pytest.fixture
def door(made: MadeRun) -> SubmissionDoor:
    return SubmissionDoor(GroupVerifier(made.coordinator.ca_pem, run_id=made.run_id))


def refusal(
    door: SubmissionDoor, request: rollout_pb2.SubmitRolloutsRequest, caller: Peer = SAMPLER
) -> Reason:
    with (
        pytest.raises(RefusedError) as refused,
        door.admitted(request, caller, group_bytes=100, now=NOW_S),
    ):
        pytest.fail("it was admitted")
    return refused.value.reason


def test_a_group_counts_for_the_sampler_that_signed_it_whoever_hands_it_in(
    made: MadeRun, door: SubmissionDoor
) -> None:
    request = signed(EncodedGroup(b"", b"group"), made.sampler, group_id="0.1")
    with door.admitted(request, SAMPLER, group_bytes=100, now=NOW_S) as submission:
        assert submission == ("sampler-1", "0.1", (b"", b"group"))
    request.sampler_id = "sampler-1"
    with door.admitted(request, RELAY, group_bytes=100, now=NOW_S) as submission:
        assert submission == ("sampler-1", "0.1", (b"", b"group"))
    request.sampler_id = "sampler-2"
    assert refusal(door, request, RELAY) is Reason.BAD_SIGNATURE


def test_a_forgery_is_logged_with_the_name_of_who_handed_it_in(
    made: MadeRun, door: SubmissionDoor, caplog: pytest.LogCaptureFixture
) -> None:
    request = signed(EncodedGroup(b"", b"group"), made.other_sampler, group_id="0.1", sampler_id="sampler-1")
    assert refusal(door, request, RELAY) is Reason.BAD_SIGNATURE
    (record,) = caplog.records
    assert (record.message, vars(record)["from_node"]) == ("group not proved", "relay-1")


def test_a_hub_holds_only_so_many_bytes_that_wait_for_its_disk_and_always_one_group(
    made: MadeRun, door: SubmissionDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions, "IN_FLIGHT_BYTES", 60)
    request = signed(EncodedGroup(b"x", b"x" * 49), made.sampler, group_id="0.1")
    with door.admitted(request, SAMPLER, group_bytes=50, now=NOW_S):
        with pytest.raises(RefusedError) as busy, door.admitted(request, SAMPLER, group_bytes=50, now=NOW_S):
            pytest.fail("it was admitted")
        assert busy.value.reason is Reason.BUSY
    largest = signed(EncodedGroup(b"x", b"x" * 99), made.sampler, group_id="0.1")
    with door.admitted(largest, SAMPLER, group_bytes=100, now=NOW_S):
        pass
    assert (
        refusal(door, signed(EncodedGroup(b"x", b"x" * 100), made.sampler, group_id="0.1"))
        is Reason.OVER_LIMIT
    )


def test_without_tls_nobody_has_a_key_and_names_are_believed() -> None:
    request = rollout_pb2.SubmitRolloutsRequest(columns=b"group", group_id="0.1")
    with SubmissionDoor(None).admitted(request, SAMPLER, group_bytes=100, now=NOW_S) as submission:
        assert submission == ("sampler-1", "0.1", (b"", b"group"))
