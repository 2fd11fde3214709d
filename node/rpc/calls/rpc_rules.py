"""The rule of each rpc: which roles may call it, and how often one peer may."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from heterorl.v1 import common_pb2
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.rpc.calls.call_rates import Rate
from node.values.limits import GROUPS_PER_REQUEST
from node.values.roles import MEMBER_ROLES, Role

_RATE: Final = Rate(per_s=200, burst=4000, refused=20)
"""Several times what any peer does by itself: plans of long chains fetch a manifest for each version."""

_STATUS_RATE: Final = Rate(per_s=40, burst=200)
"""Each takes .6 ms of the event loop with a few peers: 416 a second slowed a run by a fifth."""

_JOIN_RATE: Final = Rate(per_s=5, burst=50)

_LEASE_RATE: Final = Rate(per_s=100, burst=1000)
"""One request leases up to 256 prompts, and one that got none waits 50 ms or more."""

_SUBMISSION_RATE: Final = Rate(per_s=512, burst=16_384, refused=31)
"""Groups that are taken in are bounded by leases. Refused ones slowed a run by a third at 233 a second, each
synced to disk: 16 a second are allowed, and 512 at once, since all of a sampler's may be stale together."""

_HEARTBEAT_RATE: Final = Rate(per_s=50, burst=200)
"""The shortest interval is 50 ms; answers to heartbeats bring some forward."""

_CONTRIBUTION_RATE: Final = Rate(per_s=2000, burst=4000)
"""Parts of a payload have up to 1 MiB: a line of 10 Gbit/s carries 1 200 a second."""


def _none(_: Any) -> int:
    return 0


def _one(_: Any) -> int:
    return 1


def _groups_in(request: Any) -> int:
    return 1 if isinstance(request, RefusedError) else 1 + len(request.further)


def _not_taken_in(response: Any) -> int:
    return sum(answer.verdict != common_pb2.VERDICT_SPOOLED for answer in response.answers)


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of an rpc."""

    roles: frozenset[Role] | None
    """Roles that may call; None: anyone, certificate or not."""
    is_endless: bool = False
    """A stream that ends only with the caller or the hub: a drain does not wait for it."""
    rate: Rate = _RATE
    """How often one peer may call it."""
    message_rate: Rate | None = None
    """How often one peer may send a message on its streams; more are read later. None: no limit."""
    weight: Callable[[Any], int] = _one
    """How many messages one that came counts as, by ``message_rate``; it may be a RefusedError, see below."""
    refusals: Callable[[Any], int] = _none
    """How many messages a response of a stream refuses: each takes what ``message_rate`` says on top."""
    most_fields: int | None = None
    """Most fields that a request may have, not counting those of its parts. Counted before it is parsed: an
    empty part takes two bytes on the wire and a hundred in memory. None: no limit but its size."""
    is_answered_each: bool = False
    """Whether each message has an answer of its own: the servicer then gets those that cannot be read as
    the RefusedError that says why."""


_MEMBERS: Final = frozenset(MEMBER_ROLES)
_LEARNER: Final = frozenset({Role.LEARNER})
_SAMPLER: Final = frozenset({Role.SAMPLER})

SUBMIT_ROLLOUTS: Final = "/heterorl.v1.RolloutService/SubmitRollouts"

RULES: Final[dict[str, Rule]] = {
    "/heterorl.v1.EnrolmentService/Enrol": Rule(None),
    "/heterorl.v1.MembershipService/Join": Rule(_MEMBERS, rate=_JOIN_RATE),
    "/heterorl.v1.MembershipService/Heartbeat": Rule(
        _MEMBERS, is_endless=True, rate=_JOIN_RATE, message_rate=_HEARTBEAT_RATE
    ),
    "/heterorl.v1.MembershipService/GetStatus": Rule(frozenset(Role), rate=_STATUS_RATE),
    "/heterorl.v1.ModelService/ListModel": Rule(_MEMBERS, rate=_JOIN_RATE),
    "/heterorl.v1.ModelService/FetchBlock": Rule(_MEMBERS),
    "/heterorl.v1.PolicyService/WatchVersions": Rule(_MEMBERS, is_endless=True),
    "/heterorl.v1.PolicyService/GetManifest": Rule(_MEMBERS),
    "/heterorl.v1.PolicyService/FetchFrames": Rule(_MEMBERS),
    "/heterorl.v1.PolicyService/LocateArtifact": Rule(_MEMBERS),
    "/heterorl.v1.PolicyService/AwaitArtifact": Rule(_MEMBERS, is_endless=True),
    "/heterorl.v1.PolicyService/OfferArtifact": Rule(_LEARNER),
    "/heterorl.v1.PolicyService/UploadFrames": Rule(_LEARNER),
    "/heterorl.v1.RolloutService/LeasePrompts": Rule(_SAMPLER, rate=_LEASE_RATE),
    "/heterorl.v1.RolloutService/ReleaseLeases": Rule(_SAMPLER, rate=_LEASE_RATE),
    SUBMIT_ROLLOUTS: Rule(
        _SAMPLER,
        is_endless=True,
        rate=_JOIN_RATE,
        message_rate=_SUBMISSION_RATE,
        weight=_groups_in,
        refusals=_not_taken_in,
        most_fields=2 * GROUPS_PER_REQUEST,  # a later release may add some
        is_answered_each=True,
    ),
    "/heterorl.v1.RolloutService/DrainRollouts": Rule(_LEARNER, is_endless=True),
    "/heterorl.v1.MergeService/Contribute": Rule(
        frozenset({Role.CONTRIBUTOR}), is_endless=True, rate=_JOIN_RATE, message_rate=_CONTRIBUTION_RATE
    ),
    "/heterorl.v1.RolloutService/CheckRewards": Rule(frozenset({Role.VERIFIER}), is_endless=True),
}
"""Every rpc; one that is missing here cannot be called."""

GONE: Final[dict[str, RefusedError]] = {
    "/heterorl.v1.RelayService/Carry": RefusedError(
        Reason.PROTOCOL_MISMATCH,
        "relays carry no samplers since 0.4: they pass samplers' connections on",
        fix="upgrade this relay; its samplers stay as they are",
    ),
}
"""Rpcs of the release before that are no more, with what their callers are told."""


def service_of(method: str) -> str:
    """Return ``PolicyService`` for ``/heterorl.v1.PolicyService/FetchFrames``."""
    return method.split("/")[1].rsplit(".", 1)[-1]


def check_role(peer: Peer, rule: Rule, method: str) -> None:
    """Check that a peer may call an rpc. Raises RefusedError: WRONG_ROLE."""
    if rule.roles is not None and peer.role not in rule.roles:
        allowed = ", ".join(sorted(rule.roles))
        raise RefusedError(
            Reason.WRONG_ROLE, f"{method} is for {allowed}, and {peer.node_id} is a {peer.role}"
        )
