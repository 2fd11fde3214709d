"""Held-out prompts: which version is asked them, of whom, what counts, and when it is over."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.coordinator.work.balance import Balance
from node.coordinator.work.capacity import Bounds
from node.coordinator.work.checks.verifier_places import VerifierPlaces
from node.coordinator.work.decisions import findings, leasing, trust
from node.coordinator.work.decisions.findings import Checked, GroupFinding
from node.coordinator.work.evaluation import evaluations
from node.coordinator.work.samplers import standings
from node.coordinator.work.samplers.sampler_standing import Standing
from node.coordinator.work.slots.slot import (
    FIRST_RETRY_S,
    HELD_OUT_PLACES,
    SAME_SAMPLER_S,
    SlotBalance,
    SlotKind,
    SlotState,
    group_id,
    held_out_number,
    kind_of,
    parse_group_id,
    parse_held_out_id,
    slot_and_attempt,
    version_and_place,
)
from node.coordinator.work.terms.run_terms import NO_EVALUATION, EvaluationSettings
from node.values.evaluation import Evaluation, EvaluationStatus
from node.values.groups.failure import Failure
from node.values.groups.reward_finding import RewardCheck, RewardFinding
from node.values.groups.rollout import Finish, LeasePurpose
from node.values.groups.sampling_parameters import SamplingParameters
from node.values.groups.verdict import Verdict
from node.values.policy import PolicyVersion
from support.coordinator import BOUNDS, LEARNER, NOW_S, TTL_S, WORK, Desk, make_accounts
from support.groups import SAMPLING, make_completion
from support.present import present

GREEDY = replace(SAMPLING, top_k=1, max_new_tokens=16, stop=("\n",))
SETTINGS = EvaluationSettings(
    every_versions=10, prompts=4, completions=1, temperature=0.0, sampling=GREEDY, held_out_prompts=4
)
ROOMY = replace(BOUNDS, buffer_groups=64)
"""So that answers which wait for a check leave their sampler room."""
TEN = replace(SETTINGS, prompts=10, held_out_prompts=10)

BEGUN = Evaluation(0, 46, 4, 1, 0.0, 16, NOW_S, sampling='{"stop": ["\\n"]}')


def make_desk(
    settings: EvaluationSettings = SETTINGS, balance: Balance | None = None, *, bounds: Bounds = BOUNDS
) -> Desk:
    desk = Desk(make_accounts(balance, evaluation=settings, bounds=bounds))
    desk.accounts.confirm()
    return desk


@pytest.fixture
def desk() -> Desk:
    """Where the base model is being evaluated."""
    desk = make_desk()
    begin(desk)
    return desk


def begin(desk: Desk, version: int = 0) -> None:
    """Let a sampler arrive at a version that is due."""
    desk.evaluate(version)
    desk.settle(leasing.evaluation_begins(desk.accounts, PolicyVersion(version), now=desk.now))
    assert status(desk).under_way is not None


def status(desk: Desk) -> EvaluationStatus:
    return desk.accounts.evaluations.status


def finished(desk: Desk, head: int | None = None) -> Evaluation:
    """Return the newest record, once the coordinator has looked at the time with this head."""
    if head is not None:
        desk.evaluate(head)
    newest = present(status(desk).newest)
    return newest


def best_of(desk: Desk) -> Evaluation:
    best = present(status(desk).best)
    return best


def lease(desk: Desk, sampler_id: str = "s1", *, held: int = 0) -> str:
    """Lease one held-out prompt."""
    (lease_id,) = desk.lease(sampler_id, held=held)
    assert desk.granted[lease_id].purpose is LeasePurpose.EVALUATION
    return lease_id


def answer(desk: Desk, *rewards: float, version: int = 0, sampler_id: str = "s1", **measured: float) -> None:
    """Answer held-out prompts one by one, each completion with one of ``rewards``."""
    for reward in rewards:
        lease_id = lease(desk, sampler_id, held=version)
        completions = (make_completion(version=version, reward=reward),)
        metrics = {name: np.array([value], np.float32) for name, value in measured.items()}
        group = desk.answer(lease_id, completions=completions, metrics=metrics)
        assert desk.submit(lease_id, sampler_id, group=group).verdict is Verdict.SPOOLED


def evaluate(desk: Desk, version: int, said: Mapping[str, Sequence[float]], **measured: float) -> Evaluation:
    """Answer all prompts of a version as its samplers, in order, and return the record."""
    desk.evaluate(version)
    for sampler_id in said:  # all are there from the beginning
        desk.ask(sampler_id, 0, held=version)
    for sampler_id, rewards in said.items():
        answer(desk, *rewards, version=version, sampler_id=sampler_id, **measured)
    desk.evaluate(version)
    newest = finished(desk)
    assert newest.version == version
    return newest


@given(version=st.integers(0, 1 << 38), place=st.integers(0, HELD_OUT_PLACES - 1), attempt=st.integers(1, 99))
def test_the_number_of_a_held_out_slot_says_its_version_and_place_and_its_groups_id_says_both(
    version: int, place: int, attempt: int
) -> None:
    number = held_out_number(version, place)
    name = group_id(number, attempt)
    assert (kind_of(number), version_and_place(number)) == (SlotKind.HELD_OUT, (version, place))
    assert name == f"e{version}-{place}.{attempt}"
    assert slot_and_attempt(name) == parse_held_out_id(name) == (number, attempt)
    assert (parse_group_id(name), parse_group_id(f"{number}.1")) == (None, None)
    assert number < 1 << 53, "tools that read numbers as floats have it exactly"


@pytest.mark.parametrize("name", ["e0-8192.1", "e0-0.0", "e00-0.1", "e-1-0.1", "0-0.1", "e0-0", "e0-0.1 "])
def test_what_is_no_id_of_a_held_out_prompts_group_is_none(name: str) -> None:
    assert parse_held_out_id(name) is None
    assert slot_and_attempt(name) == (-1, 0)


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
        desk.lease("s1", held=head)
        if (under_way := status(desk).under_way) is not None:
            begun.append(under_way.version)
            for lease_id in list(desk.granted):
                if lease_id.startswith(f"e{head}-"):
                    desk.submit(lease_id, group=desk.answer(lease_id, version=head))
            answer(desk, 0, 0, 0, version=head)
            desk.evaluate(head)
    assert begun == evaluated


def test_samplers_are_told_ahead_at_which_version_to_stop_and_then_which_one_it_is() -> None:
    desk = make_desk()
    desk.evaluate(0)
    assert desk.accounts.evaluations.from_version(0) == 0
    begin(desk)
    assert desk.accounts.evaluations.from_version(0) == 10  # it is under way: what comes after it
    evaluate(desk, 0, {"s1": [0, 0, 0, 0]})
    desk.evaluate(3)
    assert desk.accounts.evaluations.from_version(0) == 10
    assert desk.accounts.evaluations.awaited_version(3) is None
    assert desk.accounts.evaluations.awaited_version(10) == 10
    desk.evaluate(12)  # 10 and 11 were never published
    desk.lease("s1", held=12)
    assert desk.accounts.evaluations.from_version(11) == 12
    assert desk.accounts.evaluations.from_version(12) == 20
    assert desk.accounts.evaluations.from_version(13) == 20
    assert desk.accounts.evaluations.from_version(25) == 20  # overdue: the next version may be it


def test_a_version_that_was_never_published_is_not_evaluated_whatever_a_sampler_says() -> None:
    desk = make_desk()
    desk.evaluate(0)
    desk.lease("s1", held=7)
    assert status(desk).under_way is None


def test_an_evaluation_is_finished_before_the_next_begins_and_what_fell_due_is_passed_over(
    desk: Desk,
) -> None:
    answer(desk, 0, 0, 0)
    for head in (10, 25, 30):
        desk.evaluate(head)
        assert not any(lease_id.startswith("e") for lease_id in desk.lease("s2", held=head))
    assert status(desk).under_way is not None
    answer(desk, 0)
    newest = finished(desk, 30)
    assert (newest.version, newest.counted_prompts) == (0, 4)
    desk.lease("s2", held=30)
    assert present(status(desk).under_way).version == 30


def test_the_record_is_worked_out_by_hand(desk: Desk) -> None:
    answers = ((1.0, 4, Finish.END), (0.0, 16, Finish.LENGTH), (0.5, 6, Finish.STOP), (0.5, 6, Finish.END))
    for rewards, tokens, finish in answers:
        lease_id = lease(desk)
        completion = make_completion(tokens, reward=rewards, finish=finish)
        desk.submit(lease_id, group=desk.answer(lease_id, completions=(completion,)))
    evaluation = finished(desk, 0)
    assert evaluation.counted_prompts == 4
    assert (evaluation.answers, evaluation.samplers) == (4, 1)
    assert evaluation.reward_mean == 0.5
    # Squared distances 1/4, 1/4, 0, 0 over 3 * 4.
    assert evaluation.reward_standard_error == pytest.approx((0.5 / 12) ** 0.5)
    assert (evaluation.cut_ratio, evaluation.tokens_mean) == (0.25, 8.0)
    assert evaluation.finished_at_s == desk.now


def test_what_graders_measured_is_a_mean_over_prompts_that_have_it(desk: Desk) -> None:
    for words in (1.0, 4.0):
        answer(desk, 0, words=words)
    answer(desk, 0, 0)
    newest = finished(desk, 0)
    assert json.loads(newest.metrics) == {"words": 2.5}


def test_a_prompts_completions_are_one_sample() -> None:
    desk = make_desk(replace(SETTINGS, prompts=2, completions=2, temperature=0.5))
    begin(desk)
    for first, second in ((1.0, 0.0), (1.0, 1.0)):
        lease_id = lease(desk)
        completions = (
            make_completion(4, reward=first, finish=Finish.LENGTH),
            make_completion(8, reward=second, finish=Finish.END),
        )
        desk.submit(lease_id, group=desk.answer(lease_id, completions=completions))
    evaluation = finished(desk, 0)
    assert (evaluation.reward_mean, evaluation.cut_ratio, evaluation.tokens_mean) == (0.75, 0.5, 6.0)
    assert evaluation.reward_standard_error == pytest.approx(0.25)


@pytest.mark.parametrize("held", [10, 12])
def test_a_sampler_that_holds_another_version_trains_meanwhile(held: int) -> None:
    desk = make_desk(balance=Balance(facts=(replace(LEARNER, version=11),)))
    begin(desk, 11)
    assert desk.lease("s1", held=held) == ["0.1"]
    assert lease(desk, "s1", held=11) == "e11-0.1"
    assert desk.granted["e11-0.1"].policy_version == 11
    assert desk.granted["0.1"].policy_version is None


def test_a_sampler_that_stays_at_a_version_gets_held_out_prompts_when_it_is_too_old_for_training() -> None:
    desk = make_desk(balance=Balance(facts=(replace(LEARNER, version=40),)))
    begin(desk, 11)
    assert desk.lease("s1", 3, held=11) == ["e11-0.1"]


@pytest.mark.parametrize("versions", [[0, 11, 11], [11, 11, 12], [12, 12, 12]])
def test_a_token_of_another_version_does_not_count_and_the_prompt_is_asked_again(versions: list[int]) -> None:
    desk = make_desk()
    desk.publish(12)
    begin(desk, 11)
    lease_id = lease(desk, held=11)
    mixed = make_completion(version=11, policy_version=np.array(versions, np.int32))
    submitted = desk.submit(lease_id, group=desk.answer(lease_id, completions=(mixed,)))
    assert (submitted.verdict, "drew a token, evaluated is 11" in submitted.detail) == (Verdict.STALE, True)
    assert lease(desk, held=11) == "e11-0.2"


def test_a_sampler_that_may_be_asked_more_later_is_told_so() -> None:
    """Seen as 11 of 12 prompts dropped: the sampler went on before the hub had its last answer."""
    desk = make_desk(replace(SETTINGS, prompts=2))
    begin(desk)
    first = desk.ask("s1")
    while_it_is_away = desk.ask("s1", held=0)
    assert not any(one.purpose is LeasePurpose.EVALUATION for one in while_it_is_away.leases)
    assert while_it_is_away.is_held_out_left
    desk.submit(first.leases[0].lease_id, group=desk.answer(first.leases[0].lease_id))
    lease(desk)
    assert not desk.ask("s1").is_held_out_left  # the rest are others' to answer
    assert desk.ask("s2").is_held_out_left
    assert not desk.ask("s3", held=1).is_held_out_left


def test_held_out_prompts_go_only_to_samplers_that_stay_and_others_are_told_to() -> None:
    """Seen as 12 of 12 dropped: the request of a sampler that moved on meanwhile began the evaluation."""
    desk = make_desk(replace(SETTINGS, prompts=2))
    desk.evaluate(0)
    for other in ("s2", "s3"):  # before the evaluation begins, and while it is under way
        on_its_way = desk.ask("s1", stays=False)
        assert [one.purpose for one in on_its_way.leases] == [LeasePurpose.TRAINING]
        assert on_its_way.is_held_out_left
        assert desk.ask(other).leases[0].purpose is LeasePurpose.EVALUATION
    assert desk.ask("s1").leases[0].purpose is LeasePurpose.EVALUATION


def test_a_sampler_that_was_restarted_may_be_asked_again_what_its_last_process_took(desk: Desk) -> None:
    taken = desk.granted[lease(desk, "s1")].prompt_index
    desk.accounts.slots.cut_short("s1", now=desk.now)
    desk.expire(FIRST_RETRY_S)
    desk.now += FIRST_RETRY_S
    assert taken in {one.prompt_index for one in desk.ask("s1", 8).leases}


def test_evaluation_takes_at_most_half_of_a_samplers_leases(desk: Desk) -> None:
    desk.bounds = replace(desk.bounds, max_staleness_versions=9)
    desk.trust("s1")
    leases = [desk.granted[lease_id].purpose for lease_id in desk.lease("s1", 6)]
    assert leases == [LeasePurpose.EVALUATION] * 3 + [LeasePurpose.TRAINING] * 3
    assert desk.granted[desk.lease("s1")[0]].purpose is LeasePurpose.TRAINING
    assert desk.lease("s2", 1) == ["e0-3.1"]


def test_held_out_prompts_are_leased_where_the_run_has_no_room_for_training(desk: Desk) -> None:
    desk.trust("s1")
    desk.bounds = replace(desk.bounds, buffer_groups=0)
    assert desk.lease("s1", 8) == ["e0-0.1", "e0-1.1", "e0-2.1", "e0-3.1"]


def test_a_sampler_whose_allowance_has_shrunk_below_what_it_holds_is_asked_a_prompt_all_the_same(
    desk: Desk,
) -> None:
    desk.trust("s1")
    for lease_id in desk.lease("s1", 6)[:3]:
        assert desk.submit(lease_id, "s1", group=desk.answer(lease_id)).verdict is Verdict.SPOOLED
    desk.accounts.standings.apply(replace(desk.accounts.standings.of("s1"), allowance=1))
    assert desk.accounts.held("s1") == 3
    assert desk.lease("s1") == ["e0-3.1"]
    assert desk.lease("s1") == []


@pytest.mark.parametrize("changes", [{"run_id": "other"}, {"prompt_index": 0}, {"sampling": SAMPLING}])
def test_a_group_of_another_run_or_prompt_does_not_count(desk: Desk, changes: dict[str, Any]) -> None:
    lease_id = lease(desk)
    group = replace(desk.answer(lease_id), **changes)
    assert desk.submit(lease_id, group=group).verdict is Verdict.FOREIGN
    desk.evaluate(0)
    assert status(desk).under_way == BEGUN
    assert desk.accounts.tallies.of("s1").verdicts == {}


def test_a_sampler_has_no_more_leases_than_any_peer_may(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standings, "LEASES_PER_PEER", 3)
    assert desk.lease("s1", 5) == ["e0-0.1", "0.1", "1.1"]
    assert desk.lease("s1", 5) == []


@pytest.mark.parametrize("lease_id", ["e0-0.1", "e0-0.2", "e0-9.1", "e10-0.1", "e0-x", "e-0.1"])
def test_a_group_without_its_lease_does_not_count(desk: Desk, lease_id: str) -> None:
    group = desk.answer(lease(desk))
    assert desk.submit(lease_id, "s2", group=group).verdict in (Verdict.FOREIGN, Verdict.MALFORMED)
    assert status(desk).under_way == BEGUN


def test_an_expired_lease_does_not_win_for_a_sampler_that_has_answered_the_prompt_since(desk: Desk) -> None:
    late = lease(desk, "s1")
    desk.expire(TTL_S)
    assert lease(desk, "s2") == "e0-0.2"
    answer(desk, 0, 0, 0, 0)  # the last one to the same prompt, in its other slot
    assert desk.submit(late, "s1", group=desk.answer(late)).verdict is Verdict.DUPLICATE


def test_a_heartbeat_keeps_a_lease_while_its_evaluation_lasts(desk: Desk) -> None:
    lease_id = lease(desk)
    desk.now += TTL_S - 1
    assert desk.accounts.renew("s1", [lease_id, "e0-3.1", "e7-0.1"], now=desk.now) == ("e0-3.1", "e7-0.1")
    assert desk.expire(TTL_S - 1) == 0


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
    newest = present(status(again).newest)
    assert (newest.counted_prompts, newest.prompts, newest.has_score) == (0, 4, False)
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


def test_nothing_begins_before_the_learner_has_confirmed_the_ledger() -> None:
    desk = Desk(make_accounts(Balance(SlotBalance(next_slot=3), facts=(LEARNER,)), evaluation=SETTINGS))
    desk.evaluate(10)
    assert status(desk).under_way is None


@pytest.mark.parametrize(
    "standing", [Standing("s2", strikes=8), Standing("s2", quarantine="its loss is odd")]
)
def test_a_sampler_that_is_not_believed_holds_up_no_evaluation(desk: Desk, standing: Standing) -> None:
    lease_id = lease(desk, "s2")
    desk.accounts.standings.apply(standing)
    desk.now += TTL_S / 2
    assert desk.accounts.renew("s2", [lease_id], now=desk.now) == ()
    assert desk.expire(TTL_S / 2) == 1
    assert all(not one.startswith("e") for one in desk.lease("s2"))


def test_a_sampler_that_passed_the_version_by_is_not_waited_for(desk: Desk) -> None:
    desk.publish(3)
    desk.lease("s2", held=3)
    answer(desk, 1, 1, 1, 1)
    desk.evaluate(3)
    assert status(desk).newest is not None


def test_a_sampler_on_its_way_to_the_version_is_waited_for(desk: Desk) -> None:
    """Here the version is 11, and the second sampler is at 9."""
    evaluate(desk, 0, {"s1": [0] * 4})
    desk.publish(9)
    begin(desk, 11)
    desk.lease("s2", held=9)
    answer(desk, 1, 1, 1, 1, version=11)
    desk.evaluate(11)
    assert status(desk).under_way is not None
    answer(desk, 1, 1, 1, 1, version=11, sampler_id="s2")
    newest = finished(desk, 11)
    assert (newest.version, newest.samplers) == (11, 2)


def test_after_a_clock_was_set_back_an_evaluation_waits_no_longer_than_a_term(desk: Desk) -> None:
    desk.release("s1", lease(desk))
    desk.now -= 3600.0
    desk.accounts.note_time(desk.now)
    desk.evaluate(0)
    assert status(desk).under_way is not None
    desk.now += TTL_S + 1
    desk.evaluate(0)
    assert status(desk).under_way is None


# Who is asked, and what counts.


@pytest.mark.parametrize("is_required", [False, True])
def test_each_prompt_is_asked_once_where_verifiers_check(is_required: bool) -> None:
    desk = Desk(make_accounts(evaluation=SETTINGS, require_verifier=is_required, bounds=ROOMY))
    if not is_required:
        desk.accounts.reward_checks.open()
    begin(desk)
    answer(desk, 0, 0, 0, 0)
    assert not any(lease_id.startswith("e") for lease_id in desk.lease("s2"))


def test_a_sampler_that_comes_later_does_not_take_the_best_away_from_one_that_was_alone() -> None:
    """Seen as version 550 at .600, which a second sampler made 1350 at .400."""
    desk = make_desk()
    evaluate(desk, 0, {"s1": [0, 0, 0, 0]})
    evaluate(desk, 550, {"s1": [1, 1, 1, 0]})
    evaluate(desk, 1350, {"s1": [1, 1, 0, 0], "s2": [1, 1, 0, 0]})
    assert (best_of(desk).version, best_of(desk).reward_mean) == (550, 0.75)


@pytest.mark.parametrize(
    ("temperature", "value"),
    [(0.0, 1.0), (0.7, 50.5)],  # the lower one; the mean of two draws
)
def test_of_two_answers_to_a_prompt(temperature: float, value: float) -> None:
    desk = make_desk(replace(SETTINGS, prompts=1, held_out_prompts=1, temperature=temperature))
    record = evaluate(desk, 0, {"s1": [100.0], "s2": [1.0]}, words=2.0)
    assert (record.reward_mean, record.reward_standard_error, record.answers) == (value, None, 2)


@pytest.mark.parametrize(("answered", "has_score"), [(8, False), (9, True), (10, True)])
def test_a_version_has_a_score_where_nine_in_ten_of_its_prompts_were_answered(
    answered: int, has_score: bool
) -> None:
    desk = make_desk(TEN)
    begin(desk)
    for _ in range(10 - answered):
        desk.fail(lease(desk), fault=Failure.PROMPT_TOO_LONG)
    answer(desk, *[0.5] * answered)
    newest = finished(desk, 0)
    assert (newest.counted_prompts, newest.has_score) == (answered, has_score)
    assert newest.reward_mean == (0.5 if has_score else None)
    assert (status(desk).best is not None, status(desk).first is not None) == (has_score, has_score)


def test_a_sampler_that_cannot_answer_a_prompt_leaves_it_to_others_in_this_evaluation() -> None:
    desk = make_desk(TEN)
    begin(desk)
    for sampler_id in ("s1", "s2"):
        lost = lease(desk, sampler_id)
        assert desk.granted[lost].prompt_index == 40
        assert desk.fail(lost, sampler_id, fault=Failure.PROMPT_TOO_LONG) == 1
        desk.now += FIRST_RETRY_S
    answer(desk, *[1] * 9, sampler_id="s1")
    answer(desk, *[1] * 10, sampler_id="s3")
    desk.evaluate(0)
    newest = finished(desk)
    assert (newest.counted_prompts, newest.answers) == (10, 19)
    assert len(desk.accounts.bad_prompts) == 0
    begin(desk, 10)
    assert desk.granted[lease(desk, "s1", held=10)].prompt_index == 40


def test_a_sampler_whose_grader_failed_for_once_is_asked_again_after_a_while(desk: Desk) -> None:
    answer(desk, 1, 1, 1)
    desk.fail(lease(desk), fault=Failure.GRADING_FAILED)
    desk.evaluate(0)
    assert status(desk).under_way is not None
    desk.now += FIRST_RETRY_S + SAME_SAMPLER_S
    answer(desk, 1)
    assert finished(desk, 0).counted_prompts == 4


def test_a_sampler_that_asks_and_answers_nothing_is_waited_for_once(desk: Desk) -> None:
    desk.lease("s2", 0)
    answer(desk, 1, 1, 1, 1)
    for _ in range(2):
        desk.evaluate(0)
        assert status(desk).under_way is not None
        desk.lease("s2", 0)
        desk.now += TTL_S / 2
    desk.lease("s2", 0)
    assert finished(desk, 0).counted_prompts == 4


def test_the_best_goes_by_the_metric_that_is_named_and_a_version_without_it_is_never_the_best() -> None:
    desk = make_desk(replace(SETTINGS, best_by="exact"))
    for version, reward, measured in ((0, 0.9, {"exact": 0.1}), (10, 0.1, {"exact": 0.3}), (20, 1.0, {})):
        assert evaluate(desk, version, {"s1": [reward] * 4}, **measured).best_by == "exact"
    assert (best_of(desk).version, status(desk).best_by) == (10, "exact")


def test_scores_of_other_terms_are_not_compared_and_the_best_stays_until_one_is_told() -> None:
    before = evaluate(make_desk(), 0, {"s1": [1, 1, 1, 1]})
    balance = Balance(facts=(LEARNER, before))
    again = make_desk(replace(SETTINGS, prompts=2), balance)
    again.evaluate(9)
    again.lease("s1", held=9)
    assert status(again) == EvaluationStatus(newest=before, first=before, best=before)
    newest = evaluate(again, 10, {"s1": [0.5, 0.5]})
    assert status(again) == EvaluationStatus(newest=newest, first=newest, best=newest)


# What is taken back.


def revoke(desk: Desk, *names: str) -> None:
    desk.settle(trust.revocation(desk.accounts, names, now=desk.now))


def test_what_a_revoked_sampler_said_goes_from_every_score_and_the_best_follows() -> None:
    desk = make_desk()
    evaluate(desk, 0, {"s1": [1, 1, 0, 0], "s2": [1, 1, 0, 0]})
    desk.now += 2 * TTL_S  # alone now
    evaluate(desk, 10, {"liar": [100.0] * 4})
    assert best_of(desk).version == 10
    revoke(desk, "liar", "s2")
    best, newest = best_of(desk), finished(desk)
    assert (best.version, best.reward_mean, best.answers, best.samplers) == (0, 0.5, 4, 1)
    assert (newest.version, newest.counted_prompts, newest.has_score) == (10, 0, False)
    revoke(desk, "liar")
    assert not desk.transactions[-1].of(Evaluation)


def test_answers_kept_for_a_revocation_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "ANSWERS_KEPT", 8)
    desk = make_desk()
    for version in (0, 10, 20):
        evaluate(desk, version, {"s1": [0.5] * 4})
    assert sorted(desk.accounts.evaluations.slots) == [20]
    revoke(desk, "s1")
    assert [one.has_score for one in desk.accounts.evaluations.finished.values()] == [True, True, False]


# Answers that verifiers check.


def check(desk: Desk, sampler_id: str, outcome: RewardCheck, *, noise_ratio: float = 0.0) -> Checked:
    """Settle a finding about the next answer of a sampler that waits for a check."""
    checks, places = desk.accounts.reward_checks, VerifierPlaces(64)
    while (held := checks.next(places, desk.now)) is not None and held.sampler_id != sampler_id:
        pass
    assert held is not None
    checks.left(name for name in places.group_ids if name != held.group_id)
    checks.answered(held.group_id, desk.now)
    finding = RewardFinding(held.group_id, outcome, "completion 0 claims 1")
    checked: Checked = desk.settle(
        findings.found(desk.accounts, GroupFinding(held, finding, noise_ratio), now=desk.now)
    )
    checks.let_go(held)
    return checked


@pytest.fixture
def checked() -> Desk:
    """Where the base model is being evaluated while a verifier is there."""
    desk = make_desk(bounds=ROOMY)
    desk.accounts.reward_checks.open()
    begin(desk)
    return desk


@pytest.mark.parametrize("outcome", [RewardCheck.UNGRADABLE, RewardCheck.DISAGREED])
def test_an_answer_that_cannot_be_graded_again_does_not_count_and_its_prompt_is_asked_again(
    checked: Desk, outcome: RewardCheck
) -> None:
    answer(checked, 1, sampler_id="odd")
    told = check(checked, "odd", outcome, noise_ratio=0.02)
    assert [one.verdict for one in told.thrown_out] == [Verdict.SUSPECT]
    checked.evaluate(0)
    answer(checked, 0, 0, 0, 0)
    for _ in range(4):
        check(checked, "s1", RewardCheck.AGREED)
    newest = finished(checked, 0)
    assert (newest.counted_prompts, newest.samplers, newest.reward_mean) == (4, 1, 0.0)


def test_a_lie_takes_back_all_that_its_sampler_said(checked: Desk) -> None:
    answer(checked, 1, 1, sampler_id="liar")
    answer(checked, 0, 0)
    assert check(checked, "liar", RewardCheck.DISAGREED).proof
    assert checked.accounts.standings.of("liar").is_proven_liar
    answer(checked, 0, 0)
    for _ in range(4):
        check(checked, "s1", RewardCheck.AGREED)
    newest = finished(checked, 0)
    assert (newest.counted_prompts, newest.samplers, newest.reward_mean) == (4, 1, 0.0)


def test_answers_that_no_verifier_is_left_to_check_count_and_a_lie_found_later_goes_from_the_score(
    checked: Desk,
) -> None:
    answer(checked, 0, 0, 0)
    answer(checked, 1, sampler_id="liar")
    checked.accounts.reward_checks.close()
    before = finished(checked, 0)
    assert (before.counted_prompts, before.reward_mean) == (4, 0.25)
    checked.accounts.reward_checks.open()
    assert check(checked, "liar", RewardCheck.DISAGREED).proof
    after = finished(checked)
    assert (after.counted_prompts, after.has_score) == (3, False)
    assert after.finished_at_s == before.finished_at_s


def test_an_answer_that_cannot_be_graded_again_later_goes_from_the_score_alone(checked: Desk) -> None:
    answer(checked, 0, 0, 0)
    answer(checked, 1, sampler_id="odd")
    checked.accounts.reward_checks.close()
    finished(checked, 0)
    checked.accounts.reward_checks.open()
    assert check(checked, "odd", RewardCheck.UNGRADABLE).proof == ""
    assert (finished(checked).counted_prompts, finished(checked).has_score) == (3, False)
    slot = checked.accounts.evaluations.slots[0][held_out_number(0, 3)]
    assert (slot.state, slot.answer) == (SlotState.ABANDONED, None)


# Restarts.


def restarted(desk: Desk, settings: EvaluationSettings = SETTINGS) -> Desk:
    known = desk.accounts.evaluations
    assert known.under_way is not None
    slots = tuple(known.slots[known.under_way.version].values())
    balance = Balance(
        SlotBalance(
            tuple(desk.accounts.slots.open_slots.values()),
            next_held_out=held_out_number(known.under_way.version + 1, 0),
        ),
        facts=(LEARNER, known.under_way),
        held_out=slots,
    )
    again = make_desk(settings, balance)
    again.granted = desk.granted
    return again


def test_after_a_restart_samplers_have_a_term_to_ask_again_before_an_evaluation_ends(desk: Desk) -> None:
    lease_id = lease(desk)
    again = restarted(desk)
    assert status(again) == status(desk)
    again.release("s1", lease_id)
    again.evaluate(0)
    assert status(again).under_way is not None
    again.now += TTL_S
    again.evaluate(0)
    assert status(again).under_way is None
