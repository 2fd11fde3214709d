"""Held-out prompts: which version is asked them, what counts, and what is left of it in the accounts."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from node.coordinator.work import standing
from node.coordinator.work.accounts import Balance
from node.coordinator.work.evaluation.evaluations import NO_EVALUATION, EvaluationBalance, EvaluationSettings
from node.coordinator.work.lease_returns import Released, release
from node.coordinator.work.retries import FIRST_RETRY_S
from node.coordinator.work.slots import SlotState
from node.failure import FailedLease, Failure
from node.rollout import Finish, LeasePurpose, SamplingParameters, Verdict
from node.run import Evaluation, EvaluationStatus
from support.coordinator import LEARNER, NOW_S, TTL_S, WORK, Desk, make_accounts
from support.groups import SAMPLING, make_completion

GREEDY = replace(SAMPLING, top_k=1, max_new_tokens=16, stop=("\n",))
SETTINGS = EvaluationSettings(
    every_versions=10, prompts=4, completions=1, temperature=0.0, sampling=GREEDY, held_out_prompts=4
)

BEGUN = Evaluation(0, 46, 4, 1, 0.0, 16, NOW_S, sampling='{"stop": ["\\n"]}')


def make_desk(settings: EvaluationSettings = SETTINGS, balance: Balance | None = None) -> Desk:
    desk = Desk(make_accounts(balance, evaluation=settings))
    desk.accounts.confirm()
    return desk


@pytest.fixture
def desk() -> Desk:
    """Where the base model is being evaluated."""
    desk = make_desk()
    desk.evaluate(0)
    return desk


def status(desk: Desk) -> EvaluationStatus:
    return desk.accounts.evaluations.status


def lease(desk: Desk, sampler_id: str = "s1", *, held: int = 0) -> str:
    """Lease one held-out prompt."""
    (lease_id,) = desk.lease(sampler_id, held=held)
    assert desk.granted[lease_id].purpose is LeasePurpose.EVALUATION
    return lease_id


def answer(desk: Desk, *rewards: float, version: int = 0, sampler_id: str = "s1") -> None:
    """Answer held-out prompts one by one, each completion with one of ``rewards``."""
    for reward in rewards:
        lease_id = lease(desk, sampler_id, held=version)
        group = desk.answer(lease_id, completions=(make_completion(version=version, reward=reward),))
        assert desk.submit(lease_id, sampler_id, group=group).verdict is Verdict.SPOOLED


def test_without_settings_nothing_is_evaluated_and_every_prompt_is_trained_on() -> None:
    desk = make_desk(NO_EVALUATION)
    desk.evaluate(10)
    assert status(desk) == EvaluationStatus()
    assert desk.accounts.slots.prompts == 50
    assert desk.lease() == ["0.1"]


def test_the_base_model_comes_first_and_the_last_prompts_are_held_out(desk: Desk) -> None:
    assert status(desk).under_way == BEGUN
    assert desk.accounts.slots.prompts == 46
    leases = [desk.granted[lease(desk, f"s{n}")] for n in range(4)]
    assert [one.prompt_index for one in leases] == [46, 47, 48, 49]
    assert {(one.task, one.group_size, one.sampling, one.ttl_s) for one in leases} == {
        (WORK.task, 1, GREEDY, TTL_S)
    }
    assert desk.granted[desk.lease()[0]].purpose is LeasePurpose.TRAINING


def test_held_out_rows_come_after_those_of_training() -> None:
    desk = make_desk(replace(SETTINGS, held_out_prompts=0))
    desk.evaluate(0)
    assert desk.accounts.slots.prompts == 50
    assert desk.granted[lease(desk)].prompt_index == 50


@pytest.mark.parametrize(
    ("heads", "evaluated"),
    [([0, 3, 9], [0]), ([0, 3, 10], [0, 10]), ([0, 12, 19, 20], [0, 12, 20]), ([57, 59, 61], [57, 61])],
)
def test_a_version_is_due_once_the_head_has_reached_the_next_multiple(
    heads: list[int], evaluated: list[int]
) -> None:
    desk, begun = make_desk(), []
    for head in heads:
        desk.evaluate(head)
        if (under_way := status(desk).under_way) is not None:
            begun.append(under_way.version)
            answer(desk, 0, 0, 0, 0, version=head)
    assert begun == evaluated


def test_an_evaluation_is_finished_before_the_next_begins_and_what_fell_due_is_passed_over(
    desk: Desk,
) -> None:
    answer(desk, 0, 0, 0)
    for head in (10, 25, 30):
        desk.evaluate(head)
    assert status(desk).under_way is not None
    answer(desk, 0, version=25)
    newest = status(desk).newest
    assert newest is not None
    assert (newest.version, newest.oldest_version, newest.newest_version) == (0, 0, 25)
    desk.evaluate(30)
    under_way = status(desk).under_way
    assert under_way is not None
    assert under_way.version == 30


def test_the_record_is_worked_out_by_hand(desk: Desk) -> None:
    desk.published |= {1, 2}
    answers = (
        (0, 1.0, 4, Finish.END),
        (1, 0.0, 16, Finish.LENGTH),
        (2, 0.5, 6, Finish.STOP),
        (2, 0.5, 6, Finish.END),
    )
    for version, rewards, tokens, finish in answers:
        lease_id = lease(desk)
        completion = make_completion(tokens, version=version, reward=rewards, finish=finish)
        desk.submit(lease_id, group=desk.answer(lease_id, completions=(completion,)))
    evaluation = status(desk).newest
    assert evaluation is not None
    assert (evaluation.counted_prompts, evaluation.dropped_prompts) == (4, 0)
    assert evaluation.reward_mean == 0.5
    # Squared distances 1/4, 1/4, 0, 0 over 3 * 4.
    assert evaluation.reward_standard_error == pytest.approx((0.5 / 12) ** 0.5)
    assert (evaluation.cut_ratio, evaluation.tokens_mean) == (0.25, 8.0)
    assert (evaluation.oldest_version, evaluation.newest_version) == (0, 2)
    assert evaluation.finished_at_s == desk.now


def test_what_graders_measured_is_a_mean_over_prompts_that_have_it(desk: Desk) -> None:
    for words in (1.0, 4.0, None):
        lease_id = lease(desk)
        metrics = {} if words is None else {"words": np.array([words], np.float32)}
        group = desk.answer(lease_id, completions=(make_completion(),), metrics=metrics)
        assert desk.submit(lease_id, group=group).verdict is Verdict.SPOOLED
    under_way = status(desk).under_way
    assert under_way is not None
    assert json.loads(under_way.metrics) == {"words": 2.5}


def test_a_prompts_completions_are_one_sample() -> None:
    desk = make_desk(replace(SETTINGS, prompts=2, completions=2, temperature=0.5))
    desk.evaluate(0)
    for first, second in ((1.0, 0.0), (1.0, 1.0)):
        lease_id = lease(desk)
        completions = (
            make_completion(4, reward=first, finish=Finish.LENGTH),
            make_completion(8, reward=second, finish=Finish.END),
        )
        desk.submit(lease_id, group=desk.answer(lease_id, completions=completions))
    evaluation = status(desk).newest
    assert evaluation is not None
    assert (evaluation.reward_mean, evaluation.cut_ratio, evaluation.tokens_mean) == (0.75, 0.5, 6.0)
    assert evaluation.reward_standard_error == pytest.approx(0.25)


def test_the_best_is_the_highest_mean_and_of_equals_the_older(desk: Desk) -> None:
    for version, reward in ((0, 0.25), (10, 0.75), (20, 0.75), (30, 0.5)):
        desk.evaluate(version)
        answer(desk, *[reward] * 4, version=version)
    first, best, newest = status(desk).first, status(desk).best, status(desk).newest
    assert first is not None
    assert best is not None
    assert newest is not None
    assert [one.version for one in (first, best, newest)] == [0, 10, 30]


def test_groups_reach_neither_spool_nor_learner_and_the_verdicts_of_training_do_not_count_them(
    desk: Desk,
) -> None:
    answer(desk, 0, 0, 0, 0)
    assert desk.accounts.slots.untrained() == []
    assert desk.accounts.verdicts() == {}
    assert sum(desk.accounts.slots.counts().values()) == 0
    assert all(transaction.stored is None for transaction in desk.transactions)


def test_a_sampler_that_holds_an_older_version_trains_meanwhile() -> None:
    desk = make_desk(balance=Balance(learner=replace(LEARNER, version=11)))
    desk.evaluate(11)
    assert desk.lease("s1", held=10) == ["0.1"]
    assert lease(desk, "s1", held=11) == "e11-0.1"


def test_a_token_of_an_older_version_does_not_count_and_the_prompt_is_asked_again() -> None:
    desk = make_desk()
    desk.evaluate(11)
    lease_id = lease(desk, held=11)
    mixed = make_completion(version=11, policy_version=np.array([0, 11, 11], np.int32))
    submitted = desk.submit(lease_id, group=desk.answer(lease_id, completions=(mixed,)))
    assert (submitted.verdict, "version 0 drew a token" in submitted.detail) == (Verdict.STALE, True)
    assert lease(desk, held=11) == "e11-0.2"


def test_evaluation_takes_at_most_a_quarter_of_a_samplers_leases(desk: Desk) -> None:
    desk.bounds = replace(desk.bounds, max_staleness_versions=9)
    desk.trust("s1")
    leases = [desk.granted[lease_id].purpose for lease_id in desk.lease("s1", 8)]
    assert leases.count(LeasePurpose.EVALUATION) == 2
    assert leases[:2] == [LeasePurpose.EVALUATION] * 2
    assert desk.granted[desk.lease("s1")[0]].purpose is LeasePurpose.TRAINING
    assert desk.lease("s2", 1) == ["e0-2.1"]


def test_a_group_counts_once_however_often_it_is_sent(desk: Desk) -> None:
    lease_id = lease(desk)
    group = desk.answer(lease_id)
    verdicts = [desk.submit(lease_id, group=group).verdict for _ in range(3)]
    assert verdicts == [Verdict.SPOOLED, Verdict.DUPLICATE, Verdict.DUPLICATE]
    answer(desk, 0, 0, 0)
    assert status(desk).under_way is None
    assert desk.submit(lease_id, group=group).verdict is Verdict.DUPLICATE


def test_a_group_of_another_run_or_prompt_does_not_count(desk: Desk) -> None:
    for changes in ({"run_id": "other"}, {"prompt_index": 0}, {"sampling": SAMPLING}):
        lease_id = lease(desk)
        group = replace(desk.answer(lease_id), **changes)
        assert desk.submit(lease_id, group=group).verdict is Verdict.FOREIGN
    assert status(desk).under_way == BEGUN


def test_a_sampler_has_no_more_leases_than_any_peer_may(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "LEASES_PER_PEER", 3)
    assert desk.lease("s1", 5) == ["e0-0.1", "0.1", "1.1"]
    assert desk.lease("s1", 5) == []


@pytest.mark.parametrize("lease_id", ["e", "e-1-0.1", "e0", "e10-0.1"])
def test_what_is_no_lease_of_this_run_is_foreign_after_an_evaluation_too(desk: Desk, lease_id: str) -> None:
    group = desk.answer(lease(desk))
    desk.submit(group.group_id, group=group)
    answer(desk, 0, 0, 0)
    assert status(desk).under_way is None
    assert desk.submit(lease_id, group=group).verdict is Verdict.FOREIGN


@pytest.mark.parametrize("lease_id", ["e0-0.1", "e0-0.2", "e0-9.1", "e10-0.1", "e0-x", "e-0.1"])
def test_a_group_without_its_lease_does_not_count(desk: Desk, lease_id: str) -> None:
    group = desk.answer(lease(desk))
    assert desk.submit(lease_id, "s2", group=group).verdict in (Verdict.FOREIGN, Verdict.MALFORMED)
    assert status(desk).under_way == BEGUN


def test_a_lease_that_ends_goes_to_another_and_the_first_answer_wins(desk: Desk) -> None:
    first = lease(desk, "s1")
    assert desk.expire(TTL_S) == 1
    second = lease(desk, "s2")
    assert (first, second) == ("e0-0.1", "e0-0.2")
    assert desk.submit(first, "s1", group=desk.answer(first)).verdict is Verdict.SPOOLED
    assert desk.accounts.renew("s2", [second], now=desk.now) == (second,)
    assert desk.submit(second, "s2", group=desk.answer(second)).verdict is Verdict.DUPLICATE


def test_a_heartbeat_keeps_a_lease_while_its_evaluation_lasts(desk: Desk) -> None:
    lease_id = lease(desk)
    desk.now += TTL_S - 1
    assert desk.accounts.renew("s1", [lease_id, "e0-3.1", "e7-0.1"], now=desk.now) == ("e0-3.1", "e7-0.1")
    assert desk.expire(TTL_S - 1) == 0


def drop(desk: Desk, *, held: int = 0) -> None:
    """Have two samplers fail one held-out prompt."""
    for sampler_id in ("s1", "s2"):
        desk.fail(lease(desk, sampler_id, held=held), sampler_id, fault=Failure.PROMPT_TOO_LONG)
        desk.now += FIRST_RETRY_S


def test_a_lease_given_back_unbegun_costs_no_attempt(desk: Desk) -> None:
    lease_id = lease(desk)
    assert desk.release("s2", lease_id) == 0
    assert desk.release("s1", lease_id) == 1
    assert lease(desk, "s2") == "e0-0.2"


def test_a_prompt_that_cannot_be_answered_is_dropped_from_this_evaluation_and_counted(desk: Desk) -> None:
    drop(desk)
    answer(desk, 1, 1, 1)
    newest = status(desk).newest
    assert newest is not None
    assert (newest.counted_prompts, newest.dropped_prompts, newest.reward_mean) == (3, 1, 1.0)
    assert len(desk.accounts.bad_prompts) == 0
    desk.evaluate(10)
    assert desk.granted[lease(desk, held=10)].prompt_index == 46


def test_only_where_more_than_half_of_the_prompts_count_a_version_may_be_the_best(desk: Desk) -> None:
    for _ in range(2):
        drop(desk)
    answer(desk, 1, 1)
    desk.evaluate(10)
    drop(desk, held=10)
    answer(desk, 0.5, 0.5, 0.5, version=10)
    best = status(desk).best
    assert best is not None
    assert (best.version, best.counted_prompts) == (10, 3)


def test_faults_are_reported_once_and_a_lease_given_back_twice_is_taken_once(desk: Desk) -> None:
    lease_id = lease(desk)
    failed = (FailedLease(lease_id, Failure.GRADING_FAILED), FailedLease("e9-0.1", Failure.GRADING_FAILED))
    released = release(desk.accounts, sampler_id="s1", lease_ids=(), failed=failed, now=desk.now).answer
    assert released == Released(1, (Failure.GRADING_FAILED,))
    decision = release(desk.accounts, sampler_id="s1", lease_ids=(lease_id,), failed=failed, now=desk.now)
    assert decision.answer == Released(1)
    desk.settle(decision)
    assert lease(desk) == "e0-0.2"  # at once: it was given back unbegun


def test_an_evaluation_without_an_answer_is_finished_and_never_the_best(desk: Desk) -> None:
    for _ in range(4):
        drop(desk)
    newest = status(desk).newest
    assert newest is not None
    assert (newest.counted_prompts, newest.dropped_prompts) == (0, 4)
    assert status(desk).best is None


def restarted(desk: Desk, settings: EvaluationSettings) -> Desk:
    evaluations = desk.accounts.evaluations
    under_way = status(desk).under_way
    assert under_way is not None
    balance = Balance(
        learner=LEARNER,
        evaluations=EvaluationBalance((under_way,), tuple(evaluations._leases.open_slots.values())),
    )
    again = make_desk(settings, balance)
    again.granted = desk.granted
    return again


@pytest.mark.parametrize(
    "settings",
    [
        NO_EVALUATION,
        replace(SETTINGS, prompts=5),
        replace(SETTINGS, held_out_prompts=5),
        replace(SETTINGS, completions=2, temperature=1.0),
        replace(SETTINGS, sampling=replace(SETTINGS.sampling, stop=("###",))),
        replace(SETTINGS, task_options="5e11"),
    ],
)
def test_what_is_configured_otherwise_ends_an_evaluation_as_it_stands(
    desk: Desk, settings: EvaluationSettings
) -> None:
    lease_id = lease(desk)
    again = restarted(desk, settings)
    if settings.terms(46) != SETTINGS.terms(46):
        assert not any(lease_id.startswith("e") for lease_id in again.lease("s2", 4))
    again.evaluate(0)
    assert not any(lease_id.startswith("e") for lease_id in again.lease("s2", 4))
    newest = status(again).newest
    assert newest is not None
    assert (newest.counted_prompts, newest.dropped_prompts, newest.prompts) == (0, 4, 4)
    assert again.submit(lease_id, group=desk.answer(lease_id)).verdict is Verdict.DUPLICATE
    assert again.accounts.renew("s1", [lease_id], now=again.now) == (lease_id,)


@pytest.mark.parametrize("changes", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5}, {"stop": ("###",)}])
def test_everything_that_shapes_a_draw_is_part_of_the_terms(changes: dict[str, Any]) -> None:
    plain = SamplingParameters(temperature=0.5, top_p=1.0, top_k=0, max_new_tokens=16)
    before = replace(SETTINGS, temperature=0.5, sampling=plain)
    after = replace(before, sampling=replace(plain, **changes))
    assert before.begun(0, first_prompt=46, now=0.0).sampling == ""
    assert json.loads(after.begun(0, first_prompt=46, now=0.0).sampling) == {
        name: list(value) if name == "stop" else value for name, value in changes.items()
    }
    assert before.terms(46) != after.terms(46)
    greedy = replace(SETTINGS, sampling=replace(SETTINGS.sampling, **changes))
    assert (greedy.terms(46) == SETTINGS.terms(46)) is ("stop" not in changes)


@pytest.mark.parametrize("named", [{"task": "jsonl"}, {"task_options": "5e11"}])
def test_the_task_and_its_options_are_part_of_the_terms(named: dict[str, str]) -> None:
    other = replace(SETTINGS, **named)  # type: ignore[arg-type]
    assert other.terms(46) != SETTINGS.terms(46)
    begun = other.begun(0, first_prompt=46, now=0.0)
    assert json.loads(begun.sampling) == {"stop": ["\n"], **named}
    assert replace(begun, sampling=BEGUN.sampling).terms == SETTINGS.terms(46)


def test_scores_of_other_terms_are_not_compared(desk: Desk) -> None:
    answer(desk, 1, 1, 1, 1)
    finished = status(desk).newest
    assert finished is not None
    balance = Balance(learner=LEARNER, evaluations=EvaluationBalance((finished,)))
    again = make_desk(replace(SETTINGS, prompts=2), balance)
    again.evaluate(9)
    assert status(again).under_way is None
    again.evaluate(10)
    answer(again, 0.5, 0.5, version=10)
    newest = status(again).newest
    assert newest is not None
    assert (newest.version, newest.reward_mean) == (10, 0.5)
    assert status(again) == EvaluationStatus(newest=newest, first=newest, best=newest)


def test_nothing_begins_before_the_learner_has_confirmed_the_ledger_or_the_task_is_known() -> None:
    for accounts in (
        make_accounts(Balance(learner=LEARNER, next_slot=3), evaluation=SETTINGS),
        make_accounts(prompts=None, evaluation=SETTINGS),
    ):
        desk = Desk(accounts)
        desk.evaluate(10)
        assert status(desk).under_way is None


def test_the_slots_of_held_out_prompts_are_no_slots_of_training(desk: Desk) -> None:
    answer(desk, 0, 0)
    desk.fail(lease(desk), fault=Failure.PROMPT_TOO_LONG)
    assert set(desk.accounts.slots.counts().values()) == {0}
    assert desk.accounts.load().running_groups == 0
    assert desk.accounts.evaluations._leases.counts()[SlotState.EVALUATED] == 2
