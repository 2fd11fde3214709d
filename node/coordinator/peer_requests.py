"""Requests of peers, checked in one order and decided by ``Peers`` and ``Spool``; without the wire.

join        the run's model and task --> whose process holds the name --> leases of another one end
heartbeat   no learner has taken over --> noted --> its leases renewed
lease       joined --> its model is the run's --> its grader code is --> leased
submit      its sampler is not shut out --> judged
"""

from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from node.clock import Clock
from node.coordinator.fleet.membership import KnownPeer
from node.coordinator.peers import HeartbeatAnswer, HeartbeatReport, Peers
from node.coordinator.spool import Spool
from node.coordinator.work.decisions import EMPTY_PAUSE_S
from node.coordinator.work.model_check import Learner, SamplerModel, VerifierModel
from node.coordinator.work.task_check import check_prompts
from node.coordinator.work.verdicts import Submitted
from node.errors import Reason, RefusedError
from node.failure import FailedLease
from node.identity.peer import Peer
from node.identity.revocation import RevocationList
from node.policy import PolicyVersion
from node.protocol import OURS, Spoken
from node.rollout import EncodedGroup, GroupHeader, LeaseGrant, RolloutGroup
from node.run import Role
from node.verdict import Verdict

Known = TypeVar("Known")

_GONE: Final = 64
"""Peers that are gone whose words are kept, so that a join need not look at all of them."""


@dataclass(frozen=True, slots=True)
class Joining:
    """A request to join."""

    held: PolicyVersion | None
    model: Learner | SamplerModel | VerifierModel | None = None
    """None: a relay has none."""
    instance: str = ""
    prompts: int = 0
    """Prompts that a sampler found in the run's task; 0: it does not know yet, or the coordinator has the
    rows."""
    completes: bool = False
    grader_digest: bytes = b""
    speaks: Spoken = OURS


@dataclass(slots=True)
class PeerRequests:
    """Decides what peers ask."""

    peers: Peers
    spool: Spool
    revocations: RevocationList
    clock: Clock
    _unchecked: dict[Peer, SamplerModel | VerifierModel] = field(default_factory=dict, init=False)
    """Models of peers that joined before the learner said what the run's is."""
    _said_base: dict[Peer, str] = field(default_factory=dict, init=False)
    """Samplers that said which base model they have -> the instance that did."""

    async def join(self, peer: Peer, joining: Joining) -> KnownPeer:
        """Admit a peer that has the run's model. Raises RefusedError: why not."""
        if isinstance(joining.model, Learner):
            await self.spool.admit_learner(joining.model)
        is_checked = isinstance(joining.model, Learner | None) or self._is_checked(joining.model)
        if joining.prompts:
            terms = self.spool.accounts.terms
            check_prompts(joining.prompts, runs=terms.prompts, task=terms.work.task, sampler_id=peer.node_id)
        before = self.peers.instance(peer)
        member = self.peers.join(
            peer,
            joining.held,
            now=self.clock.now(),
            instance=joining.instance,
            completes=joining.completes,
            grader_digest=joining.grader_digest,
            speaks=joining.speaks,
        )
        # Only now: a process that is refused its name must not replace what the one that has it said.
        if is_checked:
            self._unchecked.pop(peer, None)
        elif isinstance(joining.model, SamplerModel | VerifierModel):
            self._note(self._unchecked, peer, joining.model)
        if isinstance(joining.model, SamplerModel) and joining.model.base.root:
            self._note(self._said_base, peer, joining.instance)
        if peer.role is Role.SAMPLER and before not in ("", member.instance):
            await self.spool.end_leases(peer.node_id)
        return member

    def check_model(self, peer: Peer) -> None:
        """Check a peer that joined before the learner. Raises RefusedError: in what its model differs."""
        if (model := self._unchecked.get(peer)) is not None and self._is_checked(model):
            del self._unchecked[peer]

    def _is_checked(self, model: SamplerModel | VerifierModel) -> bool:
        """Check a model as far as the run's is known; return whether all of that is."""
        learner = self.spool.accounts.learner
        if learner is None:
            return False
        model.check(learner)
        return bool(learner.text_digest)

    def _note(self, known: dict[Peer, Known], peer: Peer, value: Known) -> None:
        """Keep what a joining peer said, and little of what peers that are gone have said."""
        if len(known) > len(self.peers) + _GONE:
            for gone in [one for one in known if one not in self.peers]:
                del known[gone]
        known[peer] = value

    def heartbeat(
        self,
        peer: Peer,
        report: HeartbeatReport,
        lease_ids: tuple[str, ...],
    ) -> tuple[HeartbeatAnswer, tuple[str, ...]]:
        """Note a heartbeat and renew leases; return the answer, and those leases whose work is in vain.

        Raises RefusedError: NOT_JOINED; NAME_IN_USE; FENCED.
        """
        learner = self.spool.accounts.learner
        if peer.role is Role.LEARNER and learner is not None and learner.node_id != peer.node_id:
            raise RefusedError(
                Reason.FENCED,
                f"learner {learner.node_id} has taken over with epoch {learner.epoch}",
                fix="stop one of them; a run has one learner",
            )
        answer = self.peers.heartbeat(peer, report, now=self.clock.now())
        return answer, self.spool.renew(peer.node_id, lease_ids) if lease_ids else ()

    async def lease(self, peer: Peer, wanted: int, held: PolicyVersion | None, *, stays: bool) -> LeaseGrant:
        """Lease prompts, to samplers that have said which base model they have, where the run's is known.

        Raises RefusedError: NOT_JOINED; see ``Spool.lease``.
        """
        self.peers.check_present(peer)
        self.check_model(peer)
        learner = self.spool.accounts.learner
        has_said = self._said_base.get(peer) == self.peers.instance(peer)
        if learner is not None and learner.base_root and not has_said:
            grant = LeaseGrant((), EMPTY_PAUSE_S, "base model")
        elif self.peers.objection_to_grader(peer):
            grant = LeaseGrant((), EMPTY_PAUSE_S, "grader")
        else:
            grant = await self.spool.lease(peer.node_id, wanted, held, stays=stays)
        if grant.leases:
            return grant
        return replace(grant, retry_after_s=self.peers.lease_pause_s(grant.retry_after_s))

    async def release(self, peer: Peer, lease_ids: tuple[str, ...], failed: tuple[FailedLease, ...]) -> int:
        """Take leases back, and count those that failed; return how many the sampler held."""
        return await self.spool.release(peer.node_id, lease_ids, failed)

    async def submit(
        self, encoded: EncodedGroup, read: GroupHeader | RolloutGroup | RefusedError
    ) -> Submitted:
        """Take in a group, whose sampler is proved; see ``Spool.submit``."""
        if self.revocations.is_revoked(encoded.sampler_id):  # since its stream began
            return Submitted(Verdict.FOREIGN, f"{encoded.sampler_id} was revoked")
        return await self.spool.submit(encoded, read)
