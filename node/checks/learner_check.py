"""The check that a contributor reaches its learner and is let in there."""

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from heterorl.v1 import merge_pb2, merge_pb2_grpc
from node.checks.check import Check, Finding, Grade, Needs
from node.errors import Reason, RefusedError
from node.identity.identity_store import IDENTITY_DIRECTORY, Identity, load_identity
from node.rpc.call_ends import ConnectionLost, classified
from node.rpc.channel import Purpose, dial
from node.values.roles import Role

TIMEOUT_S: Final = 10.0

_FIX: Final = (
    "Start the learner with learner.merge.listen, open that port in its host's and provider's firewalls, and "
    "see contributor.learner and the learner's log."
)


def learner_check(learner: str, state_dir: Path) -> Check:
    """Return the check; ``state_dir`` is the contributor's."""
    return Check("learner", Needs.NETWORK, partial(_found, learner, state_dir))


def _found(learner: str, state_dir: Path) -> Iterator[Finding]:
    identity = load_identity(state_dir / IDENTITY_DIRECTORY)
    if identity is None:
        what = f"{learner} is not asked: there is no certificate before the first start"
        yield Finding("learner", Grade.WARN, what)
        return
    answer = asyncio.run(_answer(learner, identity))
    if isinstance(answer, RefusedError) and answer.reason is Reason.LAYOUT_MISMATCH:
        what = f"{learner} lets {identity.node_id} in; models are compared when it starts"
        yield Finding("learner", Grade.OK, what)
    else:
        said = "is not reached" if isinstance(answer, ConnectionLost) else "refuses"
        yield Finding("learner", Grade.FAIL, f"{learner} {said}: {answer}", _FIX)


async def _answer(learner: str, identity: Identity) -> RefusedError | ConnectionLost:
    """Return the end of a stream that names no model: refused, so that one that runs keeps its own."""
    channel = dial(learner, identity, purpose=Purpose.CONTRIBUTIONS, now=time.time(), server=Role.LEARNER)
    async with channel:
        hello = merge_pb2.ContributeRequest(hello=merge_pb2.ContributorHello())
        try:
            with classified():
                stub = merge_pb2_grpc.MergeServiceStub(channel)
                async for _ in stub.Contribute(iter([hello]), timeout=TIMEOUT_S):
                    break
        except (RefusedError, ConnectionLost) as error:
            return error
    return RefusedError(Reason.MALFORMED, "it takes a contributor without a model")
