"""The coordinator over the learner's membership: what it joins with, what its heartbeats say and bring."""

import random

from grpc.aio import Channel

from learner.config import LearnerConfig
from learner.operator_orders import recent_changes
from learner.restored_learner import RestoredLearner
from learner.training.evidence import Evidence
from node.clients.membership.heartbeats import Notices, PeerReports
from node.clients.membership.join_call import Member
from node.clients.membership.membership_client import MembershipClient
from node.identity.revocation import RevocationCopy
from node.process.coordinator_link import CoordinatorLink
from node.serving.merge_servicer import MergeServicer
from node.system.clock import Clock
from node.values.evaluation import EvaluationNotice
from node.values.policy import PolicyVersion
from node.values.roles import Role
from node.weights.transfer.sources import watch_versions


class JoinedCoordinator:
    """The coordinator as the training loop asks it, over the membership stream."""

    def __init__(self, membership: MembershipClient, member: Member, control: Channel, clock: Clock) -> None:
        self.membership = membership
        self.run_id, self.tokenizer_digest = member.run_id, member.tokenizer_digest
        self.settings, self.next_answer = membership.settings, membership.heartbeats.next_answer
        self._control = control
        self._clock = clock

    async def announced(self, version: int) -> None:
        """Wait until ``version``, or a newer one, is announced."""
        async for announcement in watch_versions(self._control, random=random.random):
            if announcement.head.number >= version:
                return

    @property
    def evaluations(self) -> EvaluationNotice:
        """Evaluations, as the last answer told them."""
        return self.membership.heartbeats.evaluations

    @property
    def task_digest(self) -> bytes | None:
        """Digest of the options by which the run's groups are graded now; None: not told."""
        return self.membership.task_digest

    def now(self) -> float:
        """Return Unix seconds on the coordinator's clock."""
        return self._clock.now() + self.membership.heartbeats.clock_offset_s


def join(
    link: CoordinatorLink,
    config: LearnerConfig,
    restored: RestoredLearner,
    evidence: Evidence,
    revoked: RevocationCopy | None = None,
    contributors: MergeServicer | None = None,
) -> JoinedCoordinator:
    """Prepare to join; the coordinator's ``membership`` does, once it is run.

    Args:
        revoked: of a learner that serves contributors: who is shut out, as the coordinator says.
        contributors: those that it merges.
    """
    context, policy, state = link.context, restored.policy, restored.state
    member = Member(
        context.run.run_id,
        Role.LEARNER,
        layout_digest=policy.layout.digest,
        layout_summary=policy.layout.summary,
        learner_epoch=restored.signer.learner_epoch,
        vocabulary_size=policy.vocabulary_size,
        context_tokens=policy.scorer.context_tokens,
    ).reading(config.model_dir)
    reports = PeerReports(
        held=lambda: PolicyVersion(state.version),
        waits_for=lambda: context.node_metrics.waits_for or state.completion,
        step_report=lambda: evidence.report_of(state.progress.step),
        teaching=lambda: evidence.teaching,
        base=lambda: restored.base.model,
        best_version=lambda: state.best_version,
        changes=lambda: recent_changes(state.progress, now=context.clock.now()),
        revocations=lambda: None if revoked is None else revoked.saved,
        version_groups=lambda: 0 if contributors is None else contributors.version_groups,
    )
    notices = Notices() if revoked is None else Notices(revocations=revoked.learn)
    membership = link.membership(member, reports=reports, notices=notices)
    return JoinedCoordinator(membership, member, link.control, context.clock)
