"""The blame on a source when a fetch from it fails."""

from typing import Any

import grpc
import grpc.aio
import pytest

from node.errors import Reason, RefusedError
from node.rpc.call_ends import REASON_KEY, ConnectionLost, classify
from node.system.backoff import Backoff
from node.values.policy import ArtifactKey
from node.weights.transfer.attempts import Attempts
from node.weights.transfer.ranges import LyingSourceError
from node.weights.transfer.source_turns import Fault


class FakeSources:
    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def __len__(self) -> int:
        return 2

    def candidates(self, key: ArtifactKey) -> tuple[str, ...]:
        return ("one", "two")

    def is_standing(self, name: str) -> bool:
        return True

    def fault(self, name: str, fault: Fault, what: str) -> None:
        self.faults.append(fault)


def refused_by_hub(reason: Reason) -> RefusedError | ConnectionLost:
    trailing = grpc.aio.Metadata((REASON_KEY, reason.value))
    status = grpc.StatusCode[reason.status]
    return classify(
        grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailing, details="sampler-1 was revoked")
    )


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (refused_by_hub(Reason.UNAUTHENTICATED), Fault.REFUSED),
        (refused_by_hub(Reason.FOREIGN_RUN), Fault.REFUSED),
        (refused_by_hub(Reason.BUSY), Fault.LOST),
        (RefusedError(Reason.BAD_SIGNATURE, "not signed by the run's learner"), Fault.LIED),
        (RefusedError(Reason.MALFORMED, "not a manifest"), Fault.LIED),
        (LyingSourceError("another frame than was asked for"), Fault.LIED),
        (ConnectionLost("cut"), Fault.LOST),
    ],
)
async def test_only_content_that_is_wrong_is_a_lie_and_a_refusal_of_this_peer_is_not(
    error: Any, fault: Fault
) -> None:
    sources: Any = FakeSources()
    attempts = Attempts(
        ArtifactKey(1),
        sources=sources,
        candidates=sources.candidates,
        per_source=8,
        backoff=Backoff(lambda: 0.0),
    )
    await attempts.wait_after("one", error)
    assert sources.faults == [fault]
