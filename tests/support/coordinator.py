"""A coordinator's pure insides, small enough to follow by hand."""

from dataclasses import replace
from typing import Any

from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Balance, Transaction
from node.coordinator.work.capacity import Bounds
from node.coordinator.work.decisions import announcements, leasing, step_history, submitted_groups
from node.coordinator.work.decisions.decision import Decision
from node.coordinator.work.decisions.leasing import LeaseRequest, Released, ReturnedLeases, release
from node.coordinator.work.decisions.submitted_groups import Submission, Submitted
from node.coordinator.work.evaluation.held_out_score import answer_of
from node.coordinator.work.samplers.sampler_standing import Standing
from node.coordinator.work.slots.slot import is_held_out, parse_group_id
from node.coordinator.work.terms.model_check import Learner
from node.coordinator.work.terms.run_terms import NO_EVALUATION, EvaluationSettings, RunTerms, Work
from node.values.groups.failure import FailedLease, Failure
from node.values.groups.rollout import EncodedGroup, LeaseGrant, PromptLease, RolloutGroup
from node.values.policy import PolicyVersion
from node.values.run import StepRecord
from support.groups import SAMPLING, make_group

NOW_S = 1_800_000_000.0
TTL_S = 60.0
LEASE_MAX_S = 3600.0
RETRY_S = 600.0
WORK = Work("run", "addition", 2, SAMPLING, prompt_tokens=64)
BOUNDS = Bounds(
    concurrency_groups=8, buffer_groups=8, batch_groups=2, max_staleness_versions=2, buffer_bytes=1 << 20
)
LEARNER = Learner("learner", 1, b"l" * 16, b"t" * 16, vocabulary_size=100, version=0, context_tokens=63)


def make_accounts(
    balance: Balance | None = None,
    *,
    prompts: int = 50,
    now: float = NOW_S,
    bounds: Bounds = BOUNDS,
    evaluation: EvaluationSettings = NO_EVALUATION,
    require_verifier: bool = False,
    verifiers_grade: bool = False,
) -> Accounts:
    """Return the accounts of a run whose learner has joined."""
    terms = RunTerms(
        replace(WORK, verifiers_grade=verifiers_grade),
        replace(bounds, verifiers_grade=verifiers_grade),
        prompts,
        prompt_seed=1,
        lease_ttl_s=TTL_S,
        lease_max_s=LEASE_MAX_S,
        prompt_retry_s=RETRY_S,
        evaluation=evaluation,
        require_verifier=require_verifier,
    )
    return Accounts(balance or Balance(facts=(LEARNER,)), terms, now=now)


def make_answer(accounts: Accounts, lease_id: str, **changes: Any) -> RolloutGroup:
    """Return a good group for a lease."""
    number, _ = parse_group_id(lease_id) or (0, 0)
    return replace(
        make_group(lease_id, prompt_index=accounts.slots.open_slots[number].prompt_index), **changes
    )


class Desk:
    """Takes decisions and applies them, as ``RunLedger`` does, without a disk; keeps the transactions."""

    def __init__(self, accounts: Accounts | None = None, *, bounds: Bounds | None = None) -> None:
        self.accounts = accounts or make_accounts()
        self.bounds = bounds or self.accounts.terms.bounds
        self.now = NOW_S
        self.transactions: list[Transaction] = []
        self.granted: dict[str, PromptLease] = {}
        """Every lease ever granted."""

    @property
    def bounds(self) -> Bounds:
        return self.accounts.terms.bounds

    @bounds.setter
    def bounds(self, bounds: Bounds) -> None:
        self.accounts.terms = replace(self.accounts.terms, bounds=bounds)

    def trust(self, *sampler_ids: str) -> None:
        """Make samplers established: their shares bound nothing in so small a run."""
        for sampler_id in sampler_ids:
            self.accounts.standings.apply(Standing(sampler_id, allowance=100))

    def settle(self, decision: Decision[Any]) -> Any:
        self.transactions.append(decision.transaction)
        self.accounts.apply(decision.transaction, now=self.now)
        return decision.answer

    def lease(self, sampler_id: str = "s1", wanted: int = 1, *, held: int = 0) -> list[str]:
        return [lease.lease_id for lease in self.ask(sampler_id, wanted, held=held).leases]

    def ask(
        self, sampler_id: str = "s1", wanted: int = 1, *, held: int = 0, stays: bool = True
    ) -> LeaseGrant:
        if stays and self.accounts.evaluations.is_due(held):
            self.settle(leasing.evaluation_begins(self.accounts, PolicyVersion(held), now=self.now))
        request = LeaseRequest(sampler_id, wanted, PolicyVersion(held), stays)
        grant: LeaseGrant = self.settle(leasing.lease(self.accounts, request, now=self.now))
        self.granted |= {lease.lease_id: lease for lease in grant.leases}
        return grant

    def release(self, sampler_id: str, *lease_ids: str) -> int:
        released: Released = self.settle(
            release(self.accounts, ReturnedLeases(sampler_id, lease_ids), now=self.now)
        )
        return released.leases

    def fail(self, lease_id: str, sampler_id: str = "s1", *, fault: Failure, detail: str = "") -> int:
        failed = (FailedLease(lease_id, fault, detail),)
        released: Released = self.settle(
            release(self.accounts, ReturnedLeases(sampler_id, (), failed), now=self.now)
        )
        return released.leases

    def submit(
        self, lease_id: str, sampler_id: str = "s1", *, group: RolloutGroup | None = None
    ) -> Submitted:
        if group is None:
            number, _ = parse_group_id(lease_id) or (0, 0)
            slot = self.accounts.slots.open_slots.get(number)
            group = make_group(lease_id, prompt_index=0 if slot is None else slot.prompt_index)
        encoded = EncodedGroup(b"group ", lease_id.encode(), lease_id, sampler_id)
        answer = answer_of(group) if is_held_out(lease_id) else None
        request = Submission(encoded, group.header, answer)
        submitted: Submitted = self.settle(submitted_groups.submission(self.accounts, request, now=self.now))
        return submitted

    def evaluate(self, head: int) -> None:
        """Do what the coordinator does each second, with this newest announced version."""
        self.publish(head)
        self.settle(announcements.evaluation_turn(self.accounts, now=self.now))
        self.accounts.evaluations.plan(head)

    def publish(self, version: int) -> None:
        versions = (PolicyVersion(version, b"r" * 16),)
        self.settle(announcements.announced(self.accounts, versions, now=self.now))

    def answer(self, lease_id: str, *, version: int = 0, **changes: Any) -> RolloutGroup:
        """Return a good group for a lease that was granted, drawn by ``version``."""
        lease = self.granted[lease_id]
        group = make_group(lease_id, size=lease.group_size, version=version, sampling=lease.sampling)
        return replace(group, prompt_index=lease.prompt_index, **changes)

    def train(self, version: int, *group_ids: str, staleness: int = 0) -> step_history.Outcome:
        record = StepRecord(version, group_ids, (staleness,) * len(group_ids))
        outcome: step_history.Outcome = self.settle(step_history.step(self.accounts, record, now=self.now))
        return outcome

    def expire(self, after_s: float) -> int:
        self.now += after_s
        expired: leasing.Expired = self.settle(leasing.expiry(self.accounts, now=self.now))
        return expired.leases
