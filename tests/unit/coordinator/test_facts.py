"""Facts as they are written: what every release after this one must read."""

import json

import pytest

from node.coordinator.ledger.fact_rows import KINDS, Owner
from node.coordinator.work.balance import FACTS, Balance, Transaction
from node.coordinator.work.samplers.sampler_standing import Standing
from node.coordinator.work.samplers.tallies import Tally
from node.coordinator.work.slots.slot_generations import Generation
from node.coordinator.work.terms.group_check import NotedOptions
from node.coordinator.work.terms.model_check import Learner
from node.coordinator.work.terms.run_data import DataSeen
from node.values.evaluation import Evaluation
from node.values.fact import VALUE_CHARACTERS, Fact, MalformedFactError
from node.values.groups.failure import BadPrompt, Failure
from node.values.groups.verdict import Verdict
from node.values.operator_order import Order
from node.values.run import StatusLine
from support.coordinator import NOW_S, make_accounts

WRITTEN: list[tuple[Fact, str, str]] = [
    (Owner("a run"), "", '{"run_id":"a run"}'),
    (
        Learner("l", 3, b"\x01", b"\xfe", 100, 7),
        "",
        '{"node_id":"l","epoch":3,"layout_digest":"01","tokenizer_digest":"fe","vocabulary_size":100,"version":7}',
    ),
    (DataSeen(b"\xab", 10, 2), "", '{"digest":"ab","rows":10,"evaluation_rows":2}'),
    (NotedOptions(b"\xcd"), "", '{"digest":"cd"}'),
    (
        Generation(2, 100, 7, 5.0, range(3, 6)),
        "2",
        '{"number":2,"first_slot":100,"lost_from_slot":7,"begun_at_s":5.0,"lost_versions":[3,6]}',
    ),
    (Standing("s1"), "s1", '{"sampler_id":"s1"}'),
    (
        Standing("s1", allowance=8, stake=1.5, quarantine='it says "no"'),
        "s1",
        r"""{"sampler_id":"s1","allowance":8,"stake":1.5,"quarantine":"it says \"no\""}""",
    ),
    (
        BadPrompt(3, Failure.EXPIRED, "", 1, 4, 5.0, ("a", "b")),
        "3",
        '{"prompt_index":3,"reason":"expired","detail":"","times":1,"slot":4,"at_s":5.0,"said_by":["a","b"]}',
    ),
    (
        Evaluation(10, 48, 8, 2, 1.0, 16, 5.0, 6.5, counted_prompts=8, reward_mean=0.25),
        "10",
        '{"version":10,"first_prompt":48,"prompts":8,"completions":2,"temperature":1.0,"max_new_tokens":16,'
        '"started_at_s":5.0,"finished_at_s":6.5,"counted_prompts":8,"reward_mean":0.25}',
    ),
    (
        Order("drain", "s1", because="it moves", by="root", at_s=5.0, order_id="1f", is_carried_out=True),
        "drain s1",
        '{"verb":"drain","about":"s1","because":"it moves","by":"root","at_s":5.0,"order_id":"1f",'
        '"is_carried_out":true}',
    ),
    (
        Tally("s1", {Verdict.SPOOLED: 2}, staleness_versions=3),
        "s1",
        '{"sampler_id":"s1","verdicts":{"spooled":2},"staleness_versions":3}',
    ),
]


@pytest.mark.parametrize(("fact", "key", "written"), WRITTEN, ids=lambda one: getattr(one, "kind", ""))
def test_a_fact_is_written_as_every_release_reads_it(fact: Fact, key: str, written: str) -> None:
    assert (fact.key, json.loads(fact.encoded())) == (key, json.loads(written))
    assert KINDS[fact.kind].decoded(key, written) == fact
    assert json.loads(json.dumps(fact.fields())).items() >= json.loads(written).items()


def test_every_kind_is_written_in_one_form_here_and_has_a_name_of_its_own() -> None:
    assert {type(fact) for fact, _, _ in WRITTEN} == {Owner, *FACTS}
    names = "run learner data task_options generation standing bad_prompt evaluation order tally"
    assert list(dict.fromkeys(fact.kind for fact, _, _ in WRITTEN)) == names.split()
    assert len(KINDS) == len(FACTS) + 1


def test_a_fact_is_told_by_its_own_line_after_a_restart_too() -> None:
    accounts = make_accounts()
    assert accounts.single_facts.told(NOW_S) == ()
    data = DataSeen(b"\xab", 10, 2)
    accounts.apply(Transaction(facts=(data,)), now=NOW_S)
    lines = accounts.single_facts.told(NOW_S)
    assert lines == (StatusLine("data", "10 rows, 2 held out"),)
    accounts.go_back(Balance(facts=(data,)), now=NOW_S)
    assert accounts.single_facts.told(NOW_S) == lines
    headings = [kind.heading for kind in FACTS if kind.heading]
    assert len(set(headings)) == len(headings)
    assert max(map(len, headings)) <= 9


@pytest.mark.parametrize("fact", [fact for fact, _, _ in WRITTEN if not isinstance(fact, Owner)])
def test_every_kind_has_a_reducer(fact: Fact) -> None:
    accounts = make_accounts(Balance())
    accounts.apply(Transaction(facts=(fact,)), now=NOW_S)
    again = make_accounts(Balance(facts=(fact,)))
    for one in (accounts, again):
        one.apply(Transaction(facts=(fact,)), now=NOW_S)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("", "JSON"),
        ("[]", "object"),
        ("{}", "sampler_id"),
        ('{"sampler_id": "s1", "verdicts": {"praised": 1}}', "verdicts.praised"),
        ('{"sampler_id": "s1", "verdicts": {"spooled": "1"}}', "verdicts.spooled"),
        ('{"sampler_id": "s1", "verdicts": {"spooled": 1.5}}', "verdicts.spooled"),
        ('{"sampler_id": "s1", "weather": 1}', "weather"),
        ('{"sampler_id": "s2"}', "'s2'"),
        ('{"sampler_id": "s1"}'.ljust(VALUE_CHARACTERS + 1), str(VALUE_CHARACTERS + 1)),
    ],
)
def test_what_is_not_a_fact_of_its_kind_and_key_is_named(value: str, named: str) -> None:
    with pytest.raises(MalformedFactError) as error:
        Tally.decoded("s1", value)
    assert all(part in str(error.value) for part in ("'tally'", "'s1'", named))


@pytest.mark.parametrize("ends", ["[1]", "[1, 2, 3]", '["1", 2]', "3", '{"start": 1}'])
def test_lost_versions_are_two_numbers(ends: str) -> None:
    value = f'{{"number": 1, "first_slot": 0, "lost_from_slot": 0, "begun_at_s": 0, "lost_versions": {ends}}}'
    with pytest.raises(MalformedFactError, match="lost_versions"):
        Generation.decoded("1", value)
