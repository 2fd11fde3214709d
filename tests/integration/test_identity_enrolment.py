"""A stranger with a token becomes a member; anyone else does not."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from heterorl.v1 import membership_pb2, membership_pb2_grpc
from node.enrolment.authority import LEAF_LIFETIME_S, signing_request
from node.enrolment.enrolment_client import obtain_identity
from node.enrolment.enrolment_ledger import EnrolmentLedger
from node.enrolment.enrolment_servicer import EnrolmentServicer
from node.enrolment.tokens import issue_token, write_token_file
from node.errors import Reason, RefusedError
from node.identity.certificates import new_key
from node.identity.identity_store import Identity, load_identity
from node.identity.peer import server_name
from node.identity.revocation import RevocationList
from node.rpc.call_ends import call, classified
from node.rpc.calls.server import Audience
from node.rpc.channel import Purpose, dial, dial_as_stranger
from node.values.limits import SIGNING_REQUEST_BYTES
from node.values.roles import Role
from support.clock import ManualClock
from support.identity import MadeRun, make_run
from support.refusals import cannot_start
from support.rpc import Serving, every_service, invoke, serving
from support.waiting import until


@contextlib.asynccontextmanager
async def enrolment_port(
    made: MadeRun, clock: ManualClock | None = None, *, listen: str = "127.0.0.1:0"
) -> AsyncIterator[Serving]:
    clock, revoked = clock or ManualClock(made.made_at_s), set[str]()
    authority_dir = made.directory / "coordinator" / "authority"
    with contextlib.closing(EnrolmentLedger(authority_dir / "enrolments.sqlite")) as ledger:
        servicer = EnrolmentServicer(
            authority=authority_dir,
            lifetime_s=LEAF_LIFETIME_S,
            ledger=ledger,
            revocations=RevocationList(lambda: revoked),
            clock=clock,
        )
        add = partial(membership_pb2_grpc.add_EnrolmentServiceServicer_to_server, servicer)
        serves = serving(made, add, audience=Audience.STRANGERS, clock=clock, listen=listen, revoked=revoked)
        async with serves as hub:
            yield hub


def token_for(made: MadeRun, hub: Serving, role: Role = Role.SAMPLER, node_id: str | None = None) -> str:
    return issue_token(made.authority, role=role, node_id=node_id, address=hub.address, now=made.made_at_s)


async def enrol_sampler(
    made: MadeRun,
    token: str | None,
    directory: Path,
    node_id: str | None = "new",
    *,
    patience_s: float = 0.0,
) -> Identity:
    directory.parent.mkdir(parents=True, exist_ok=True)
    token_file = None
    if token is not None:
        token_file = directory.with_suffix(".token")
        write_token_file(token_file, token)
    return await obtain_identity(
        directory,
        run=made.run,
        role=Role.SAMPLER,
        node_id=node_id,
        token_file=token_file,
        now=made.made_at_s,
        warn=pytest.fail,
        patience_s=patience_s,
    )


async def refusal(made: MadeRun, hub: Serving, token: str, *, csr: bytes, node_id: str) -> Reason:
    """Send a request as it is, without the client's own checks."""
    request = membership_pb2.EnrolRequest(token=token, signing_request_der=csr, node_id=node_id)
    ca_pem = made.run.ca_certificate_pem
    async with dial_as_stranger(hub.address, run_id=made.run_id, ca_pem=ca_pem) as channel:
        with pytest.raises(RefusedError) as refused:
            await call(membership_pb2_grpc.EnrolmentServiceStub(channel).Enrol, request, timeout_s=10)
    return refused.value.reason


async def test_a_token_makes_a_member_whose_identity_is_kept_and_lets_it_in(
    made: MadeRun, tmp_path: Path
) -> None:
    directory = tmp_path / "sampler" / "identity"
    async with enrolment_port(made) as port:
        identity = await enrol_sampler(made, token_for(made, port), directory)
    assert (identity.run_id, identity.role, identity.node_id) == (made.run_id, Role.SAMPLER, "new")
    # Later starts need neither token nor coordinator.
    assert await enrol_sampler(made, None, directory) == load_identity(directory) == identity
    async with (
        serving(made, every_service) as hub,
        dial(hub.address, identity, purpose=Purpose.CONTROL, now=time.time()) as channel,
    ):
        assert await invoke(channel, "/heterorl.v1.MembershipService/Join") == [b""]


@pytest.mark.parametrize(
    ("configured", "in_token", "expected"),
    [("here", None, "here"), (None, "there", "there"), (None, None, "sampler-")],
)
async def test_a_new_peer_is_called_as_configured_else_as_its_token_says_else_at_random(
    made: MadeRun, tmp_path: Path, configured: str | None, in_token: str | None, expected: str
) -> None:
    async with enrolment_port(made) as port:
        token = token_for(made, port, node_id=in_token)
        identity = await enrol_sampler(made, token, tmp_path / "identity", configured)
    assert identity.node_id.startswith(expected)


async def test_a_peer_whose_answer_was_lost_enrols_again_with_the_same_token(
    made: MadeRun, tmp_path: Path
) -> None:
    async with enrolment_port(made) as port:
        token = token_for(made, port)
        first = await enrol_sampler(made, token, tmp_path / "identity")
        (tmp_path / "identity" / "certificate.pem").unlink()
        second = await enrol_sampler(made, token, tmp_path / "identity")
    assert second.key_pem == first.key_pem
    assert second.peer == first.peer


async def test_a_revoked_node_id_cannot_enrol_again(made: MadeRun, tmp_path: Path) -> None:
    async with enrolment_port(made) as port:
        port.revoked.add("new")
        with cannot_start("new"):
            await enrol_sampler(made, token_for(made, port, node_id="new"), tmp_path / "identity")


async def test_a_token_works_once_and_nonsense_does_not_spend_it(made: MadeRun, tmp_path: Path) -> None:
    good = signing_request(new_key())
    async with enrolment_port(made) as port:
        token = token_for(made, port)
        for sent_token, csr, node_id, reason in (
            ("AAAA.AAAA.AAAA", good, "new", Reason.TOKEN_REFUSED),
            (token, b"\x30\x03\x02\x01\x00", "new", Reason.MALFORMED),
            (token, b"x" * (SIGNING_REQUEST_BYTES + 1), "new", Reason.OVER_LIMIT),
            (token, good, "Not A Name", Reason.MALFORMED),
            (token, good, "new\n", Reason.MALFORMED),
            (token, good, "../learner", Reason.MALFORMED),
        ):
            assert await refusal(made, port, sent_token, csr=csr, node_id=node_id) is reason
        await enrol_sampler(made, token, tmp_path / "a")
        with cannot_start():
            await enrol_sampler(made, token, tmp_path / "b", node_id="other")


async def test_a_stranger_cannot_make_the_port_read_a_large_message(made: MadeRun) -> None:
    options: list[tuple[str, Any]] = [
        ("grpc.ssl_target_name_override", server_name(made.run_id, Role.COORDINATOR))
    ]
    credentials = grpc.ssl_channel_credentials(made.run.ca_certificate_pem)
    async with (
        enrolment_port(made) as port,
        grpc.aio.secure_channel(port.address, credentials, options) as channel,
    ):
        with pytest.raises(RefusedError) as refused, classified():
            await invoke(channel, "/heterorl.v1.EnrolmentService/Enrol", bytes(1 << 20))
        assert refused.value.reason is Reason.OVER_LIMIT
        # gRPC refused it by its header: to the interceptor it is a call without a message.
        assert port.refusals["EnrolmentService", Reason.MALFORMED] == 1


async def test_an_enrolment_at_the_members_port_is_told_which_port_to_take(
    made: MadeRun, tmp_path: Path
) -> None:
    async with serving(made, every_service) as members:
        with cannot_start("coordinator.enrolment_listen", "7701"):
            await enrol_sampler(made, token_for(made, members), tmp_path / "identity")


async def test_a_token_is_not_shown_to_a_hub_of_another_run(made: MadeRun, tmp_path: Path) -> None:
    twin = make_run(tmp_path / "twin", now=time.time())
    async with enrolment_port(twin) as impostor:
        with cannot_start():
            await enrol_sampler(made, token_for(made, impostor), tmp_path / "identity")
        assert impostor.refusals == {}


async def test_a_coordinator_that_does_not_answer_is_named_and_waited_for_and_the_token_stays_good(
    made: MadeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with enrolment_port(made) as port:
        token = token_for(made, port)
    with cannot_start(port.address):
        await enrol_sampler(made, token, tmp_path / "identity")
    assert load_identity(tmp_path / "identity") is None
    async with asyncio.TaskGroup() as tasks:
        enrolling = tasks.create_task(enrol_sampler(made, token, tmp_path / "identity", patience_s=20))
        await until(lambda: any("trying again" in record.message for record in caplog.records))
        async with enrolment_port(made, listen=port.address):
            assert (await enrolling).node_id == "new"
