"""A peer's first start turns its token into an identity; later starts need neither token nor coordinator."""

import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from heterorl.v1 import membership_pb2_grpc
from node.clock import SystemClock
from node.config.settings import NodeSection
from node.enrolment.enrolment_ledger import EnrolmentLedger
from node.enrolment.enrolment_servicer import EnrolmentServicer
from node.enrolment.tokens import issue_token
from node.identity.identity_store import Identity
from node.identity.revocation import RevocationList
from node.process.bootstrap import obtain_identity
from node.rpc.server import Audience
from node.run import Role
from support.identity import MadeRun
from support.rpc import serving


@contextlib.asynccontextmanager
async def token_file(made: MadeRun, path: Path, *, node_id: str | None) -> AsyncIterator[Path]:
    """Serve enrolment while a token for it lies in a file."""
    with contextlib.closing(EnrolmentLedger(path / "enrolments.sqlite")) as ledger:
        servicer = EnrolmentServicer(
            authority=made.authority,
            ledger=ledger,
            revocations=RevocationList(path / "revoked"),
            clock=SystemClock(),
        )
        add = partial(membership_pb2_grpc.add_EnrolmentServiceServicer_to_server, servicer)
        async with serving(made, add, audience=Audience.STRANGERS, clock=SystemClock()) as hub:
            token = issue_token(
                made.authority, role=Role.SAMPLER, node_id=node_id, address=hub.address, now=made.made_at_s
            )
            (path / "sampler.token").write_text(token + "\n")
            yield path / "sampler.token"


async def start(made: MadeRun, node: NodeSection) -> Identity:
    return await obtain_identity(node, role=Role.SAMPLER, run=made.run, now=time.time())


async def test_later_starts_need_neither_token_nor_coordinator(made: MadeRun, tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    async with token_file(made, tmp_path, node_id=None) as file:
        first = await start(made, NodeSection(state_dir=state_dir, token_file=file))
    assert await start(made, NodeSection(state_dir=state_dir)) == first


@pytest.mark.parametrize(
    ("configured", "in_token", "expected"),
    [("here", None, "here"), (None, "there", "there"), (None, None, "sampler-")],
)
async def test_a_new_peer_is_called_as_configured_else_as_its_token_says_else_at_random(
    made: MadeRun, tmp_path: Path, configured: str | None, in_token: str | None, expected: str
) -> None:
    async with token_file(made, tmp_path, node_id=in_token) as file:
        node = NodeSection(state_dir=tmp_path / "state", node_id=configured, token_file=file)
        identity = await start(made, node)
    assert identity.node_id.startswith(expected)
