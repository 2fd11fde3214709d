"""The coordinator over the learner's membership: what it joins with, what its heartbeats say and bring."""

import random
from dataclasses import replace

from grpc.aio import Channel

from learner.config import LearnerConfig
from learner.operator_orders import recent_changes
from learner.restored_learner import RestoredLearner
from learner.training.evidence import Evidence
from node.clients.membership.heartbeats import Notices, PeerReports
from node.clients.membership.join_call import Member
from node.clients.membership.membership_client import MembershipClient, Uplink
from node.enrolment.move_notice import MovedCoordinator
from node.identity.revocation import RevocationCopy
from node.process.role_context import RoleContext
from node.system.backoff import Backoff
from node.system.clock import Clock
from node.text.text_rules import TextRules
from node.text.tokenizer import chat_template_digest, tokenizer_digest
from node.values.evaluation import EvaluationNotice
from node.values.policy import PolicyVersion
from node.values.run import Role
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
    context: RoleContext,
    moved: MovedCoordinator,
    control: Channel,
    config: LearnerConfig,
    restored: RestoredLearner,
    evidence: Evidence,
    revoked: RevocationCopy | None = None,
) -> JoinedCoordinator:
    """Prepare to join; the coordinator's ``membership`` does, once it is run.

    Args:
        revoked: of a learner that serves contributors: who is shut out, as the coordinator says.
    """
    policy, state, clock = restored.policy, restored.state, context.clock
    rules = TextRules.of(config.model_dir)
    member = Member(
        context.run.run_id,
        Role.LEARNER,
        layout_digest=policy.layout.digest,
        layout_summary=policy.layout.summary,
        tokenizer_digest=tokenizer_digest(config.model_dir),
        chat_template_digest=chat_template_digest(config.model_dir),
        text_digest=rules.digest,
        text_summary=rules.summary,
        learner_epoch=restored.signer.learner_epoch,
        vocabulary_size=policy.vocabulary_size,
        context_tokens=policy.scorer.context_tokens,
    )
    reports = PeerReports(
        held=lambda: PolicyVersion(state.version),
        waits_for=lambda: context.node_metrics.waits_for or state.completion,
        machine=context.machine_figures,
        step_report=lambda: evidence.report_of(state.progress.step),
        teaching=lambda: evidence.teaching,
        base=lambda: restored.base.model,
        best_version=lambda: state.best_version,
        changes=lambda: recent_changes(state.progress, now=clock.now()),
        version_groups=lambda: state.version_groups,
        revocations=lambda: None if revoked is None else revoked.saved,
    )
    notices = Notices(moved=moved.learn)
    if revoked is not None:
        notices = replace(notices, revocations=revoked.learn)
    membership = MembershipClient(
        control,
        member,
        Uplink(clock, Backoff(random.random), context.node_metrics.waiting, context.identity, moved.hub),
        reports=reports,
        notices=notices,
    )
    return JoinedCoordinator(membership, member, control, clock)
