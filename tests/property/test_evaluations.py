"""Whatever happens, each sampler answers a held-out prompt at most once and training does not notice."""

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import pytest

from node.coordinator.ledger.ledger_check import examine, read_evaluations
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Transaction
from node.coordinator.work.capacity import Bounds
from node.coordinator.work.checks.verifier_places import VerifierPlaces
from node.coordinator.work.decisions import findings, trust
from node.coordinator.work.decisions.decision import Decision
from node.coordinator.work.decisions.findings import GroupFinding
from node.coordinator.work.slots.slot import SlotKind, SlotState, group_id
from node.coordinator.work.terms.run_terms import EvaluationSettings
from node.values.evaluation import Evaluation
from node.values.groups.failure import FAULTS
from node.values.groups.reward_finding import RewardCheck, RewardFinding
from node.values.groups.rollout import LeasePurpose
from node.values.groups.verdict import Verdict
from support.coordinator import LEARNER, TTL_S, Desk, make_accounts
from support.groups import SAMPLING, make_completion

SAMPLERS = ("s1", "s2", "s3")
PROMPTS = 40
SETTINGS = EvaluationSettings(
    every_versions=2,
    prompts=6,
    completions=2,
    temperature=0.5,
    sampling=replace(SAMPLING, temperature=0.5),
    held_out_prompts=6,
)
BOUNDS = Bounds(
    concurrency_groups=9, buffer_groups=9, batch_groups=2, max_staleness_versions=2, buffer_bytes=1 << 20
)
SEEDS = 6
ACTIONS = 400

Answer: TypeAlias = tuple[int, int, str]
"""Version, held-out prompt, sampler."""


class RestartedDesk(Desk):
    """A coordinator that is killed after every transaction, where a test says so."""

    def __init__(self, accounts: Accounts) -> None:
        super().__init__(accounts)
        self.settled: Callable[[], None] = lambda: None

    def settle(self, decision: Decision[Any]) -> Any:
        answer = super().settle(decision)
        self.settled()
        return answer


class Run:
    """A coordinator on a real ledger, samplers, a learner and a verifier that do what chance tells them."""

    def __init__(self, path: Path, seed: int, *, has_verifier: bool = False) -> None:
        self.path = path
        self.has_verifier = has_verifier
        self.draw = random.Random(seed)
        self.ledger = Ledger.open(path, run_id="run")
        self.ledger.record(Transaction(facts=(LEARNER,)))
        self.bounds = replace(BOUNDS, buffer_groups=64) if has_verifier else BOUNDS
        self.desk = RestartedDesk(make_accounts(prompts=PROMPTS, evaluation=SETTINGS, bounds=self.bounds))
        self.meet_verifier()
        self.version = 0
        self.spooled: dict[Answer, float] = {}
        """Answers that were taken in, and the mean reward that each says."""
        self.checked: set[Answer] = set()
        self.held = dict.fromkeys(SAMPLERS, 0)
        self.holders: dict[str, str] = {}

    def persist(self) -> None:
        for transaction in self.desk.transactions:
            self.ledger.record(transaction)
        self.desk.transactions.clear()

    def held_out(self) -> list[str]:
        return [
            lease_id
            for lease_id, lease in self.desk.granted.items()
            if lease.purpose is LeasePurpose.EVALUATION
        ]

    def act(self) -> None:
        actions = (
            *(self.lease, self.submit, self.submit, self.give_back, self.wait, self.train, self.restart),
            *(self.go_on, self.revoke, self.check),
        )
        self.draw.choices(actions, weights=(8, 8, 8, 2, 4, 4, 1, 3, 0.2, 16))[0]()
        self.desk.evaluate(self.version)
        self.persist()

    def lease(self) -> None:
        sampler = self.draw.choice(SAMPLERS)
        lease_ids = self.desk.lease(sampler, self.draw.randint(1, 6), held=self.held[sampler])
        assert not self.holders.keys() & set(lease_ids), "an id was granted twice"
        self.holders |= dict.fromkeys(lease_ids, sampler)

    def submit(self) -> None:
        """Answer any lease ever granted: early, late, or again."""
        if not (lease_ids := self.held_out()):
            return
        lease_id = self.draw.choice(lease_ids[-12:])
        under_way = self.desk.accounts.evaluations.under_way
        version = self.desk.granted[lease_id].policy_version or 0
        if self.draw.random() < 0.3:
            version = self.draw.randint(max(0, self.version - 2), self.version)
        completions = tuple(
            make_completion(self.draw.randint(1, 8), version=version, reward=self.draw.random())
            for _ in range(2)
        )
        group = self.desk.answer(lease_id, completions=completions)
        submitted = self.desk.submit(lease_id, self.holders[lease_id], group=group)
        if submitted.verdict is Verdict.SPOOLED:
            assert under_way is not None
            assert version == under_way.version
            answer = (under_way.version, group.prompt_index, self.holders[lease_id])
            assert answer not in self.spooled
            self.spooled[answer] = group.reward_mean
            assert (
                self.desk.submit(lease_id, self.holders[lease_id], group=group).verdict is Verdict.DUPLICATE
            )

    def give_back(self) -> None:
        if lease_ids := self.held_out():
            lease_id = self.draw.choice(lease_ids[-12:])
            if self.draw.random() < 0.7:
                self.desk.release(self.holders[lease_id], lease_id)
            else:
                fault = self.draw.choice(sorted(FAULTS))
                self.desk.fail(lease_id, self.holders[lease_id], fault=fault)

    def wait(self) -> None:
        """Let time pass; a random half of the leases is renewed."""
        self.desk.now += self.draw.uniform(0, TTL_S)
        for lease_id, holder in self.holders.items():
            if self.draw.random() < 0.5:
                self.desk.accounts.renew(holder, [lease_id], now=self.desk.now)
        self.desk.expire(0)

    def train(self) -> None:
        """Submit what is leased for training, and step."""
        slots = self.desk.accounts.slots.open_slots.values()
        leased = [slot for slot in slots if slot.lease is not None and slot.kind is SlotKind.TRAIN][:2]
        for slot in leased:
            assert slot.lease is not None
            name = group_id(slot.number, slot.lease.number)
            group = self.desk.answer(name)
            assert self.desk.submit(name, slot.lease.holder, group=group).verdict is Verdict.SPOOLED
        spooled = [slot for slot in self.desk.accounts.slots.open.untrained_slots()][:2]
        names = [group_id(slot.number, slot.winner) for slot in spooled]
        self.version += 1
        assert self.desk.train(self.version, *names).refusal is None

    def go_on(self) -> None:
        """Let a sampler take the newest version, or the one at which it is to stop."""
        sampler = self.draw.choice(SAMPLERS)
        stop = self.desk.accounts.evaluations.from_version(self.held[sampler])
        is_ahead = stop is not None and self.held[sampler] < stop <= self.version
        self.held[sampler] = stop if is_ahead and stop is not None else self.version

    def meet_verifier(self) -> None:
        self.places = VerifierPlaces(64)
        if self.has_verifier:
            self.desk.accounts.reward_checks.open()

    def check(self, *, share_good: float = 0.9) -> None:
        """Let the verifier, if there is one, answer for a group; other findings are that its grader fails."""
        checks = self.desk.accounts.reward_checks
        if not self.has_verifier or (held := checks.next(self.places, self.desk.now)) is None:
            return
        self.places.answer(held.group_id, self.desk.now, graded_s=0.1)
        checks.answered(held.group_id, self.desk.now)
        is_good = self.draw.random() < share_good
        finding = RewardFinding(held.group_id, RewardCheck.AGREED if is_good else RewardCheck.UNGRADABLE)
        accounts, now = self.desk.accounts, self.desk.now
        self.desk.settle(findings.found(accounts, GroupFinding(held, finding, 0.0), now=now))
        self.desk.accounts.reward_checks.let_go(held, is_checked=True)
        lease = self.desk.granted[held.group_id]
        if lease.purpose is LeasePurpose.EVALUATION:
            answer = (lease.policy_version or 0, lease.prompt_index, held.sampler_id)
            if is_good:
                self.checked.add(answer)
            else:  # the prompt may be asked of its sampler again
                del self.spooled[answer]

    def revoke(self) -> None:
        sampler = self.draw.choice(SAMPLERS)
        self.desk.settle(trust.revocation(self.desk.accounts, [sampler], now=self.desk.now))
        self.spooled = {answer: reward for answer, reward in self.spooled.items() if answer[2] != sampler}
        self.checked &= self.spooled.keys()

    def restart(self) -> None:
        """Kill the coordinator after its last transaction and start it again."""
        self.persist()
        before = self.desk.accounts
        self.ledger.close()
        self.ledger = Ledger.open(self.path, run_id="run")
        after = make_accounts(
            self.ledger.balance(), prompts=PROMPTS, now=self.desk.now, bounds=self.bounds, evaluation=SETTINGS
        )
        after.confirm()
        self.desk.accounts = after
        self.meet_verifier()
        assert after.evaluations.status == before.evaluations.status
        assert after.evaluations.slots == before.evaluations.slots
        assert after.evaluations.finished == before.evaluations.finished
        assert dict(after.slots.open_slots) == dict(before.slots.open_slots)
        assert after.slots.counts() == before.slots.counts()
        assert after.load() == before.load()


@contextmanager
def run_of(seed: int, *, has_verifier: bool = False) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as directory:
        run = Run(Path(directory) / "ledger.sqlite", seed, has_verifier=has_verifier)
        try:
            yield run
        finally:
            run.ledger.close()


def check(evaluation: Evaluation, run: Run) -> None:
    """Compare the record of an evaluation that has ended with what the samplers were answered."""
    rewards: dict[int, list[float]] = {}
    for answer, reward in run.spooled.items():
        if answer[0] == evaluation.version and (answer in run.checked or not run.has_verifier):
            rewards.setdefault(answer[1], []).append(reward)
    assert evaluation.answers == sum(map(len, rewards.values()))
    assert evaluation.counted_prompts == len(rewards)
    assert evaluation.has_score is evaluation.is_covered
    if evaluation.has_score:
        assert evaluation.reward_mean == pytest.approx(fmean(map(fmean, rewards.values())))


@pytest.mark.parametrize("has_verifier", [False, True])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_sampler_answers_a_held_out_prompt_at_most_once_and_none_reaches_the_learner(
    seed: int, has_verifier: bool
) -> None:
    with run_of(seed, has_verifier=has_verifier) as run:
        for _ in range(ACTIONS):
            run.act()
            for slot in run.desk.accounts.slots.open_slots.values():
                is_trained_on = slot.prompt_index < PROMPTS - SETTINGS.prompts
                assert is_trained_on is (slot.kind is SlotKind.TRAIN)
                assert slot.state is not SlotState.EVALUATED
            assert all(slot.kind is SlotKind.TRAIN for slot in run.desk.accounts.slots.open.untrained_slots())
        record = read_evaluations(run.path)
        assert len(record) >= 2, "too little happened"
        assert all(prompt >= PROMPTS - SETTINGS.prompts for _, prompt, _ in run.spooled)
        for evaluation in record:
            if evaluation.finished_at_s:
                check(evaluation, run)
        assert [one.version for one in record if not one.finished_at_s] in ([], [record[-1].version])
        assert examine(run.path).problems == ()


@pytest.mark.parametrize("has_verifier", [False, True])
def test_a_restart_between_any_two_transactions_changes_no_score_and_asks_no_prompt_twice(
    has_verifier: bool,
) -> None:
    def score(*, is_restarted: bool) -> tuple[Evaluation, list[str]]:
        with run_of(0, has_verifier=has_verifier) as run:
            if is_restarted:
                run.desk.settled = run.restart
            run.desk.evaluate(0)
            for sampler in ("s1", "s2") * (2 * SETTINGS.prompts):
                for lease_id in run.desk.lease(sampler, 2, held=0):
                    if run.desk.granted[lease_id].purpose is LeasePurpose.TRAINING:
                        run.desk.release(sampler, lease_id)
                        continue
                    prompt = run.desk.granted[lease_id].prompt_index
                    rewards = (float(prompt % 3), float(sampler == "s1"))
                    group = run.desk.answer(
                        lease_id, completions=tuple(make_completion(reward=reward) for reward in rewards)
                    )
                    assert run.desk.submit(lease_id, sampler, group=group).verdict is Verdict.SPOOLED
                run.check(share_good=1.0)
                run.desk.evaluate(0)
            run.persist()
            return read_evaluations(run.path)[0], run.held_out()

    record, asked = score(is_restarted=True)
    assert (record, asked) == score(is_restarted=False)
    assert record.has_score
    assert record.answers == len(asked) == SETTINGS.prompts * (1 if has_verifier else 2)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_training_gets_the_slots_it_would_get_without_evaluation_in_the_same_order(seed: int) -> None:
    """Beside a run whose task lacks the held-out prompts: the same slots, prompts and attempts."""
    draw = random.Random(seed)
    plain = Desk(make_accounts(prompts=PROMPTS - SETTINGS.prompts), bounds=BOUNDS)
    evaluated = Desk(make_accounts(prompts=PROMPTS, evaluation=SETTINGS), bounds=BOUNDS)
    for version in range(1, 60):
        plain.trust(*SAMPLERS)  # what a sampler earns with held-out prompts is its own
        evaluated.trust(*SAMPLERS)
        evaluated.evaluate(version - 1)
        sampler, wanted = draw.choice(SAMPLERS), draw.randint(1, 6)
        lease_ids = evaluated.lease(sampler, wanted, held=version - 1)
        training = [i for i in lease_ids if evaluated.granted[i].purpose is LeasePurpose.TRAINING]
        held_out = [i for i in lease_ids if i not in training]
        assert plain.lease(sampler, len(training), held=version - 1) == training if training else True
        for lease_id in training:
            lease = evaluated.granted[lease_id]
            assert lease == plain.granted[lease_id]
        for lease_id in held_out:
            if draw.random() < 0.7:
                group = evaluated.answer(lease_id, version=evaluated.granted[lease_id].policy_version or 0)
                assert evaluated.submit(lease_id, sampler, group=group).verdict is Verdict.SPOOLED
        done = training if draw.random() < 0.7 else []
        for desk in (plain, evaluated):
            for lease_id in done:
                assert desk.submit(lease_id, sampler).verdict is Verdict.SPOOLED
            desk.train(version, *done)
            desk.expire(TTL_S * draw.random() if desk is plain else plain.now - desk.now)
        slots = evaluated.accounts.slots.open_slots.values()
        of_training = {slot.number: slot for slot in slots if slot.kind is SlotKind.TRAIN}
        assert dict(plain.accounts.slots.open_slots) == of_training
        assert plain.accounts.slots.counts() == evaluated.accounts.slots.counts()
        assert plain.accounts.load() == evaluated.accounts.load()
        assert plain.accounts.tallies.total() == evaluated.accounts.tallies.total()
