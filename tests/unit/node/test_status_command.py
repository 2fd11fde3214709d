"""Output of ``heterorl-node status``, and how it fails."""

import argparse
import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from node.commands.status import status_command
from node.commands.status.status_view import render
from node.enrolment.init_run import init_run
from node.exit_code import ExitCode
from node.values.bottleneck import Bottleneck
from node.values.evaluation import Evaluation, EvaluationStatus
from node.values.groups.failure import BadPrompt, Failure
from node.values.peer_figures import MachineFigures, SamplerFigures
from node.values.policy import PolicyVersion
from node.values.roles import Role
from node.values.run import (
    Headline,
    PeerCount,
    PeerQuery,
    PeerStatus,
    RecommendedStaleness,
    RunStatus,
    StatusLine,
    StepReport,
    Teaching,
    Unusual,
)
from support.refusals import cannot_start

PEER = PeerStatus(
    node_id="far-away",
    role=Role.SAMPLER,
    state="live",
    held=PolicyVersion(40, b"r" * 16),
    version_lag_versions=2,
    lag_s=12.34,
    last_seen_s=0.5,
    clock_offset_s=0.0,
    waits_for="prompt lease",
    verdicts={"trained": 70, "stale": 3},
    staleness_mean_versions=1.25,
    joins=1,
    refused_twins=0,
    refused_twin_s=0.0,
    leases=9,
    lease_allowance=12,
    standing="established",
)
STEP = StepReport(
    42, 0.75, 1.5, 4, 0.0123, 0.8, 0.1, 1.0, 2.5, 0.9, RecommendedStaleness(70, "token weights")
)
RUN = RunStatus(
    run_id="example",
    head=PolicyVersion(42, b"r" * 16),
    learner_epoch=3,
    peers=(PEER,),
    slots={"leased": 4, "trained": 70, "abandoned": 0},
    verdicts={"trained": 70, "stale": 3},
    step=STEP,
    capacity_groups=5,
    capacity_bound="staleness",
    now_s=0.0,
    max_staleness_versions=8,
)


def rendered(run: RunStatus, *, width: int = 140) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(render(run))
    return output.getvalue()


def having(**changes: Any) -> RunStatus:
    """Return a run whose peer is other than ``PEER``."""
    return replace(RUN, peers=(replace(PEER, **changes),))


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    status_command.add_arguments(parser)
    return parser.parse_args(argv)


def test_the_table_has_a_row_for_each_peer_and_the_run_above_it() -> None:
    text = rendered(RUN)
    (row,) = [line for line in text.splitlines() if line.startswith("far-away")]
    assert row.split() == [
        "far-away", "sampler", "live", "40", "2", "12.3", "0.5", "1.25", "9/12", "70", "3", "stale", "prompt",
        "lease",
    ]  # fmt: skip
    assert "reward 0.750, KL 0.0123, effective sample size 0.80, staleness 1.5 mean, 4 max" in text
    assert "5 groups, bound by staleness" in text
    assert "4 leased, 70 trained" in text
    assert "abandoned" not in text


@pytest.mark.parametrize(
    ("recommended", "said"),
    [
        (
            RecommendedStaleness(70, "token weights"),
            "beyond lag 70 the effective sample size of token weights",
        ),
        (
            RecommendedStaleness(None, "", "unmeasured\x1b[2J"),
            "no recommendation yet: unmeasured[2J (bound is 8",
        ),
    ],
)
def test_the_lag_at_which_groups_are_worth_half_is_said_in_a_line(
    recommended: RecommendedStaleness, said: str
) -> None:
    assert f"staleness {said}" in rendered(
        replace(RUN, step=replace(STEP, recommended_staleness=recommended))
    )
    assert "staleness no recommendation yet: no step was taken" in rendered(replace(RUN, step=None))


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        (
            {"spooled": 10, "accepted": 15},
            "1 sampler idles at the bound, 25 finished groups wait: a bound of 3 would cost no step and make "
            "groups 5 versions fresher",
        ),
        (
            {"accepted": 7},
            "1 sampler idles at the bound, 7 finished groups wait: a lower bound would make steps wait",
        ),
    ],
)
def test_what_a_lower_bound_would_cost_is_said_where_samplers_idle_at_it(
    slots: dict[str, int], said: str
) -> None:
    """Six batches of four wait for the learner, of which it needs one."""
    idle = replace(PEER, waits_for="prompt lease: staleness")
    assert said in rendered(replace(RUN, peers=(idle,), slots=slots, batch_groups=4), width=200)
    assert "idle" not in rendered(replace(RUN, slots=slots, batch_groups=4))


def test_the_first_line_says_what_bounds_the_pace_and_the_second_what_to_do() -> None:
    headline = Headline("training at version 42", "", 3.0)
    slow = Bottleneck("samplers", "the learner waited \x1b[2J", "Add samplers.")
    first, second, *_ = rendered(replace(RUN, headline=headline, bottleneck=slow)).splitlines()
    assert first.rstrip() == (
        "Training at version 42; that version is 3 s old. Bound by the samplers: the learner waited [2J."
    )
    assert second.rstrip() == "-> Add samplers."
    assert "Bound by" not in rendered(replace(RUN, headline=headline))


def test_a_run_in_which_nothing_teaches_does_not_look_healthy() -> None:
    some = replace(RUN, teaching=Teaching(512, 192, 0.4, 0.0))
    assert "teaching  38% of the newest 512 groups teach nothing\n" in rendered(some).replace(" \n", "\n")
    none = rendered(replace(RUN, teaching=Teaching(512, 512, 0.0, 420.0)), width=400)
    assert "100% of the newest 512 groups teach nothing; no step for 7 min" in none
    assert "too easy or too hard" in none


def test_a_second_process_of_a_name_is_shown_while_it_tries() -> None:
    twin = replace(PEER, refused_twins=7, refused_twin_s=3.2)
    assert rendered(replace(RUN, peers=(twin,))).splitlines()[-1] == (
        "far-away: another process of this name was refused 7 times, last 3 s ago; stop one of the two"
    )
    for quiet in (PEER, replace(twin, refused_twin_s=1000.0)):
        assert "another process" not in rendered(replace(RUN, peers=(quiet,)))


def test_bad_prompts_are_named_with_reason_detail_and_when_they_are_tried_again() -> None:
    bad = BadPrompt(17, Failure.PROMPT_TOO_LONG, "300 tokens\x1b[2J", 2, 40, 100.0, ("s1", "s2"), 1300.0)
    several = tuple(
        replace(bad, prompt_index=n, detail="", retry_at_s=0.0, said_by=("s1",)) for n in range(5)
    )
    run = replace(RUN, prompts=100, bad_prompts=(bad, *several), bad_prompts_total=9, now_s=200.0)
    text = rendered(run)
    assert "9 of 100 prompts could not be answered" in text
    assert (
        "prompt 17: prompt_too_long, set aside 2 times, failed by s1, s2, tried again in 1100 s: 300 tok"
        in text
    )
    assert "prompt 3: prompt_too_long, withheld from s1, due to be tried again\n" in "\n".join(
        line.rstrip() for line in text.splitlines()
    )
    assert "and 4 more" in text
    assert json.loads(status_command.to_json(run))["bad_prompts"][0]["reason"] == "prompt_too_long"
    assert "could not be answered" not in rendered(RUN)


FIRST = Evaluation(
    *(0, 936, 64, 1, 0.0, 32, 0.0, 9.0),
    counted_prompts=64,
    answers=128,
    samplers=2,
    reward_mean=0.125,
    reward_standard_error=0.01,
    cut_ratio=0.5,
    tokens_mean=30.25,
)


def test_held_out_prompts_are_shown_with_the_trend_the_best_and_what_is_under_way() -> None:
    assert "held out" not in rendered(RUN)
    one = rendered(replace(RUN, evaluation=EvaluationStatus(newest=FIRST, first=FIRST, best=FIRST)))
    assert (
        "held out  version 0: reward 0.125 +- 0.010, 30 tokens, 50% cut, 64 of 64 prompts, 128 answers of 2 "
        "samplers\n" in one
    )
    best = replace(FIRST, version=20, reward_mean=0.5, reward_standard_error=0.02)
    newest = replace(FIRST, version=40, reward_mean=0.4, counted_prompts=60)
    under_way = Evaluation(60, 936, 64, 1, 0.0, 32, 20.0, counted_prompts=5, answers=6, samplers=1)
    run = replace(RUN, evaluation=EvaluationStatus(newest, FIRST, best, under_way), exportable_best=20)
    lines = [line.strip() for line in rendered(run).splitlines()]
    (at,) = [number for number, line in enumerate(lines) if line.startswith("held out")]
    assert lines[at : at + 3] == [
        "held out  version 40: reward 0.400 +- 0.010 (+0.275 since version 0), 30 tokens, 50% cut, "
        "60 of 64 prompts, 128 answers of 2 samplers",
        "best is version 20: reward 0.500 +- 0.020; `export --best` takes it",
        "version 60 under way: 5 of 64 prompts, 6 answers of 1 sampler",
    ]
    assert json.loads(status_command.to_json(run))["evaluation"]["best"]["reward_mean"] == 0.5


def test_the_best_version_is_shown_as_exportable_only_once_the_learner_has_written_it_down() -> None:
    best = replace(FIRST, version=20)
    run = replace(RUN, evaluation=EvaluationStatus(best, FIRST, best))
    for exportable in (None, 10):
        text = rendered(replace(run, exportable_best=exportable))
        assert "best is version 20: reward 0.125 +- 0.010; the learner has not written that down yet" in text


@pytest.mark.parametrize("counted", [0, 57])
def test_an_evaluation_of_which_too_few_prompts_were_answered_has_no_score(counted: int) -> None:
    none = replace(FIRST, version=20, counted_prompts=counted, reward_mean=None, tokens_mean=None)
    run = replace(RUN, evaluation=EvaluationStatus(none, FIRST, FIRST))
    text = rendered(run)
    assert f"version 20 has no score: {counted} of 64 prompts" in text
    assert "best is version 0: reward 0.125" in text
    assert "reward 0.000" not in text
    assert json.loads(status_command.to_json(run))["evaluation"]["newest"]["reward_mean"] is None


def test_what_decides_on_the_best_is_shown_and_that_nobody_measures_it() -> None:
    newest = replace(FIRST, metrics='{"exact": 0.25, "words": 3.0}')
    run = replace(RUN, evaluation=EvaluationStatus(newest, FIRST, newest, best_by="exact"), exportable_best=0)
    assert "best is version 0: exact 0.250, reward 0.125 +- 0.010; the base model" in rendered(run)
    run = replace(RUN, evaluation=EvaluationStatus(newest, FIRST, None, best_by="exakt"))
    assert "evaluation.best_by = 'exakt', and measured are reward, exact, words" in rendered(run)


def test_a_run_that_has_just_begun_can_be_rendered() -> None:
    newborn = replace(RUN, head=None, step=None, peers=(), slots={}, verdicts={})
    assert "version -" in rendered(newborn)


def test_nothing_a_peer_says_of_itself_can_move_the_cursor_or_set_a_style() -> None:
    text = rendered(replace(RUN, peers=(replace(PEER, waits_for="\x1b[2J[red]x[/red]\r\n"),)))
    assert "\x1b" not in text
    assert "[2J[red]x[/red]" in text


@pytest.mark.parametrize(
    ("name", "run", "said"),
    [
        ("ledger", replace(RUN, ledger_gap="it lacks steps"), "ledger    behind: it lacks steps"),
        (
            "hoards",
            having(standing="hoards", standing_detail="holds 9 leases\x1b[2J"),
            "far-away: hoards, holds 9 leases[2J",
        ),
    ],
)
def test_what_an_operator_should_know_has_a_line_of_its_own(name: str, run: RunStatus, said: str) -> None:
    assert said in rendered(run)
    assert name not in rendered(RUN)


def test_json_has_every_field_and_digests_in_hexadecimal() -> None:
    parsed = json.loads(status_command.to_json(RUN))
    assert parsed["head"] == {"number": 42, "root": "72" * 16}
    assert parsed["peers"][0]["verdicts"] == {"trained": 70, "stale": 3}
    assert parsed["step"]["ess_ratio"] == 0.8
    recommended = {"versions": 70, "sample": "token weights", "unknown_because": ""}
    assert parsed["step"]["recommended_staleness"] == recommended
    assert parsed["max_staleness_versions"] == 8


def test_a_coordinator_that_cannot_be_reached_is_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init_run(tmp_path, run_id="example", hosts=["localhost"], now=time.time())
    parsed = arguments("--state-dir", str(tmp_path), "--coordinator", "127.0.0.1:1")
    assert status_command.run(parsed) == ExitCode.FAILED
    assert "no status from 127.0.0.1:1" in capsys.readouterr().err


def test_a_directory_without_an_operators_identity_is_named(tmp_path: Path) -> None:
    init_run(tmp_path / "run", run_id="example", hosts=["localhost"], now=0)
    parsed = arguments(
        "--state-dir", str(tmp_path), "--run-file", str(tmp_path / "run" / "run.json"), "--coordinator", "h:1"
    )
    with cannot_start("--state-dir"):
        status_command.run(parsed)


def test_software_is_named_where_it_is_not_the_same_everywhere() -> None:
    peers = tuple(replace(PEER, node_id=f"s{n}", software_version="0.2.0", protocol=1) for n in range(6))
    assert "software" not in rendered(replace(RUN, peers=peers))
    text = rendered(replace(RUN, peers=(*peers, replace(PEER, software_version="0.3.0", protocol=2))))
    assert "software  0.2.0, protocol 1: s0, s1, s2, s3, s4, ..." in text
    assert "          0.3.0, protocol 2: far-away" in text


def test_samplers_with_another_grader_are_named_with_what_to_do() -> None:
    peers = tuple(replace(peer, grader_digest=b"b" * 16) for peer in RUN.peers[:1])
    status = replace(RUN, peers=peers, grader_digest=b"a" * 16, grader_said_by="2 of 3 samplers")
    text = rendered(status)
    assert f"the run's code is {'61' * 16}, as 2 of 3 samplers said" in text
    assert f"{peers[0].node_id} has {'62' * 16} and is leased nothing" in text
    assert "graders" not in rendered(replace(status, grader_digest=b"b" * 16))
    verifier = replace(peers[0], role=Role.VERIFIER)
    assert f"has {'62' * 16} and checks nothing" in rendered(replace(status, peers=(verifier,)))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            Headline("training at version 42, with 9 groups ready", "", 30.4),
            "Training at version 42, with 9 groups ready; that version is 30 s old.",
        ),
        (
            Headline("3 samplers go on with version 42", "the learner, which is not heard of", 7200.0),
            "3 samplers go on with version 42; it waits for the learner, which is not heard of, for 2.0 h.",
        ),
        (Headline("x\x1b[2J", "y", 600.0), "X[2J; it waits for y, for 10 min."),
    ],
)
def test_the_first_line_says_what_the_run_does_and_waits_for_and_since_when(
    line: Headline, said: str
) -> None:
    counts = (PeerCount(Role.LEARNER, "silent", 1), PeerCount(Role.SAMPLER, "live", 9999))
    first, second, *_ = rendered(replace(RUN, headline=line, peer_counts=counts)).splitlines()
    assert first == said
    assert second == "1 learner silent, 9999 samplers live"


def test_lines_that_features_tell_stand_under_their_headings_and_send_no_escapes() -> None:
    lines = (StatusLine("data", "10 rows, 2 held out"), StatusLine("x\x1b[2J", "y\x1b[2J"))
    *_, data, other = (
        line for line in rendered(replace(RUN, lines=lines)).splitlines() if "[2J" in line or "rows" in line
    )
    assert (data, other) == ("data      10 rows, 2 held out", "x[2J      y[2J")


def test_what_is_unusual_comes_before_the_peers_with_some_of_their_names() -> None:
    unusual = (
        Unusual("relay silent", 1, ("r1",)),
        Unusual("sampler in standing hoards", 700, ("a", "b\x1b[2J")),
    )
    text = rendered(replace(RUN, unusual=unusual))
    assert "unusual   1 relay silent: r1\n" in text.replace(" \n", "\n")
    assert "700 sampler in standing hoards: a, b[2J, ..." in text
    assert text.index("hoards") < text.index("far-away")


def test_a_page_says_how_many_peers_there_are() -> None:
    assert "1 of 9999 peers; --page, --sort, --state and --name" in rendered(
        replace(RUN, matching_peers=9999)
    )
    assert "of 1 peers" not in rendered(replace(RUN, matching_peers=1))


def test_the_command_line_asks_for_a_page_of_some_peers_in_an_order() -> None:
    always = ("--state-dir", "d", "--coordinator", "127.0.0.1:7700")
    assert status_command.query_of(arguments(*always)) == PeerQuery(limit=50)
    some = "--state silent left --role sampler --standing hoards --name x --waits-for y --sort lag --reverse"
    asked = status_command.query_of(arguments(*always, *some.split(), "--limit", "20", "--page", "3"))
    assert asked == PeerQuery(("silent", "left"), ("sampler",), ("hoards",), "x", "y", "lag", True, 40, 20)
    with pytest.raises(SystemExit):
        arguments(*always, "--limit", "0")


def test_a_peers_numbers_are_shown_and_in_a_large_fleet_only_what_is_wrong() -> None:
    peer = replace(
        PEER, machine=MachineFigures(disk_free_ratio=0.05), sampler=SamplerFigures(tokens_per_s=41.0)
    )
    assert f"{PEER.node_id}: 5.0% of its disk free, 41 tokens/s" in rendered(replace(RUN, peers=(peer,)))
    assert f"{PEER.node_id}: 5.0% of its disk free\n" in rendered(replace(RUN, peers=(peer,) * 17)) + "\n"
    assert "tokens/s" not in rendered(replace(RUN, peers=(replace(peer, state="silent"),)))
