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


def rendered(run: RunStatus) -> str:
    """Return the view on a wide screen, without the blanks that fill its lines."""
    output = io.StringIO()
    Console(file=output, width=400).print(render(run))
    return "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())


def having(*, number: int = 1, **changes: Any) -> RunStatus:
    """Return a run of peers that are other than ``PEER``."""
    return replace(RUN, peers=(replace(PEER, **changes),) * number)


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    status_command.add_arguments(parser)
    return parser.parse_args(argv)


def test_the_table_has_a_row_for_each_peer_and_the_run_above_it() -> None:
    text = rendered(replace(RUN, unusual=(Unusual("relay silent", 1, ("r1",)),)))
    (row,) = [line for line in text.splitlines() if line.startswith("far-away")]
    assert row.split() == [
        "far-away", "sampler", "live", "40", "2", "12.3", "0.5", "1.25", "9/12", "70", "3", "stale", "prompt",
        "lease",
    ]  # fmt: skip
    assert "reward 0.750, KL 0.0123, effective sample size 0.80, staleness 1.5 mean, 4 max" in text
    assert "staleness beyond lag 70 the effective sample size of token weights" in text
    assert "5 groups, bound by staleness" in text
    assert "4 leased, 70 trained" in text
    assert text.index("relay silent") < text.index("far-away")


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


def test_json_has_every_field_and_digests_in_hexadecimal() -> None:
    parsed = json.loads(status_command.to_json(RUN))
    assert parsed["head"] == {"number": 42, "root": "72" * 16}
    assert parsed["peers"][0]["verdicts"] == {"trained": 70, "stale": 3}
    assert parsed["step"]["ess_ratio"] == 0.8
    recommended = {"versions": 70, "sample": "token weights", "unknown_because": ""}
    assert parsed["step"]["recommended_staleness"] == recommended
    assert parsed["max_staleness_versions"] == 8
    assert json.loads(status_command.to_json(BAD_RUN))["bad_prompts"][0]["reason"] == "prompt_too_long"


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


def test_the_command_line_asks_for_a_page_of_some_peers_in_an_order() -> None:
    always = ("--state-dir", "d", "--coordinator", "127.0.0.1:7700")
    assert status_command.query_of(arguments(*always)) == PeerQuery(limit=50)
    some = "--state silent left --role sampler --standing hoards --name x --waits-for y --sort lag --reverse"
    asked = status_command.query_of(arguments(*always, *some.split(), "--limit", "20", "--page", "3"))
    assert asked == PeerQuery(("silent", "left"), ("sampler",), ("hoards",), "x", "y", "lag", True, 40, 20)
    with pytest.raises(SystemExit):
        arguments(*always, "--limit", "0")


IDLE = replace(having(waits_for="prompt lease: staleness"), batch_groups=4)
BAD = BadPrompt(17, Failure.PROMPT_TOO_LONG, "300 tokens\x1b[2J", 2, 40, 100.0, ("s1", "s2"), 1300.0)
BAD_RUN = replace(
    RUN,
    prompts=100,
    bad_prompts=(
        BAD,
        *(replace(BAD, prompt_index=n, detail="", retry_at_s=0.0, said_by=("s1",)) for n in range(5)),
    ),
    bad_prompts_total=9,
    now_s=200.0,
)
OLD = tuple(replace(PEER, node_id=f"s{n}", software_version="0.2.0", protocol=1) for n in range(6))
NEW = replace(PEER, software_version="0.3.0", protocol=2)
OTHER_GRADER = replace(
    having(grader_digest=b"b" * 16), grader_digest=b"a" * 16, grader_said_by="2 of 3 samplers"
)
FULL_DISK = MachineFigures(disk_free_ratio=0.05)
BEST = replace(FIRST, version=20)
UNSCORED = replace(BEST, counted_prompts=57, reward_mean=None, tokens_mean=None)
MEASURED = replace(FIRST, metrics='{"exact": 0.25, "words": 3.0}')
SAID: dict[str, tuple[RunStatus, tuple[str, ...]]] = {
    "a run that has just begun": (
        replace(RUN, head=None, step=None, peers=(), slots={}, verdicts={}),
        ("version -", "staleness no recommendation yet: no step was taken"),
    ),
    "nothing to recommend a bound by": (
        replace(
            RUN, step=replace(STEP, recommended_staleness=RecommendedStaleness(None, "", "unmeasured\x1b[2J"))
        ),
        ("staleness no recommendation yet: unmeasured[2J (bound is 8",),
    ),
    "a bound that could be lower: six batches wait for the learner, of which it needs one": (
        replace(IDLE, slots={"spooled": 10, "accepted": 15}),
        (
            "1 sampler idles at the bound, 25 finished groups wait: a bound of 3 would cost no step and make "
            "groups 5 versions fresher",
        ),
    ),
    "a bound that could not be lower": (
        replace(IDLE, slots={"accepted": 7}),
        ("1 sampler idles at the bound, 7 finished groups wait: a lower bound would make steps wait",),
    ),
    "some groups teach nothing": (
        replace(RUN, teaching=Teaching(512, 192, 0.4, 0.0)),
        ("teaching  38% of the newest 512 groups teach nothing\n",),
    ),
    "no group teaches anything": (
        replace(RUN, teaching=Teaching(512, 512, 0.0, 420.0)),
        ("100% of the newest 512 groups teach nothing; no step for 7 min", "too easy or too hard"),
    ),
    "a second process of a name": (
        having(refused_twins=7, refused_twin_s=3.2),
        ("far-away: another process of this name was refused 7 times, last 3 s ago; stop one of the two",),
    ),
    "bad prompts": (
        BAD_RUN,
        (
            "9 of 100 prompts could not be answered",
            "17: prompt_too_long, set aside 2 times, failed by s1, s2, tried again in 1100 s: 300 tokens[2J",
            "prompt 3: prompt_too_long, withheld from s1, due to be tried again\n",
            "and 4 more",
        ),
    ),
    "a ledger behind": (replace(RUN, ledger_gap="it lacks steps"), ("ledger    behind: it lacks steps",)),
    "a standing": (
        having(standing="hoards", standing_detail="holds 9 leases\x1b[2J"),
        ("far-away: hoards, holds 9 leases[2J",),
    ),
    "what a peer says of itself": (having(waits_for="\x1b[2J[red]x[/red]\r\n"), ("[2J[red]x[/red]",)),
    "two releases": (
        replace(RUN, peers=(*OLD, NEW)),
        ("software  0.2.0, protocol 1: s0, s1, s2, s3, s4, ...", "          0.3.0, protocol 2: far-away"),
    ),
    "another grader": (
        OTHER_GRADER,
        (
            f"the run's code is {'61' * 16}, as 2 of 3 samplers said",
            f"far-away has {'62' * 16} and is leased nothing",
        ),
    ),
    "a verifier with another grader": (
        replace(OTHER_GRADER, peers=(replace(OTHER_GRADER.peers[0], role=Role.VERIFIER),)),
        (f"has {'62' * 16} and checks nothing",),
    ),
    "what is unusual": (
        replace(RUN, unusual=(Unusual("sampler in standing hoards", 700, ("a", "b\x1b[2J")),)),
        ("unusual   700 sampler in standing hoards: a, b[2J, ...",),
    ),
    "lines of features": (
        replace(RUN, lines=(StatusLine("data", "10 rows, 2 held out"), StatusLine("x\x1b[2J", "y\x1b[2J"))),
        ("\ndata      10 rows, 2 held out\n", "\nx[2J      y[2J\n"),
    ),
    "a page of peers": (
        replace(RUN, matching_peers=9999),
        ("1 of 9999 peers; --page, --sort, --state and --name",),
    ),
    "a peer's numbers": (
        having(machine=FULL_DISK, sampler=SamplerFigures(tokens_per_s=41.0)),
        ("far-away: 5.0% of its disk free, 41 tokens/s\n",),
    ),
    "only what is wrong in a large fleet": (
        having(number=17, machine=FULL_DISK, sampler=SamplerFigures(tokens_per_s=41.0)),
        ("far-away: 5.0% of its disk free\n",),
    ),
    "a best version that the learner has not written down": (
        replace(RUN, evaluation=EvaluationStatus(BEST, FIRST, BEST), exportable_best=10),
        ("best is version 20: reward 0.125 +- 0.010; the learner has not written that down yet",),
    ),
    "too few answers for a score": (
        replace(RUN, evaluation=EvaluationStatus(UNSCORED, FIRST, FIRST)),
        ("version 20 has no score: 57 of 64 prompts", "best is version 0: reward 0.125"),
    ),
    "what decides on the best": (
        replace(
            RUN, evaluation=EvaluationStatus(MEASURED, FIRST, MEASURED, best_by="exact"), exportable_best=0
        ),
        ("best is version 0: exact 0.250, reward 0.125 +- 0.010; the base model",),
    ),
    "a best by what nobody measures": (
        replace(RUN, evaluation=EvaluationStatus(MEASURED, FIRST, None, best_by="exakt")),
        ("evaluation.best_by = 'exakt', and measured are reward, exact, words",),
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_what_an_operator_should_know_is_said_where_it_is_so_and_sends_no_escapes(name: str) -> None:
    run, said = SAID[name]
    text, usual = rendered(run), rendered(RUN)
    assert [line for line in said if line not in text] == []
    assert [line for line in said if line in usual] == []
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("run", "unsaid"),
    [
        (replace(RUN, slots={"accepted": 7}, batch_groups=4), "idle"),
        (having(refused_twins=7, refused_twin_s=1000.0), "another process"),
        (replace(RUN, peers=OLD), "software"),
        (replace(OTHER_GRADER, grader_digest=b"b" * 16), "graders"),
        (replace(RUN, matching_peers=1), "of 1 peers"),
        (having(state="silent", sampler=SamplerFigures(tokens_per_s=41.0)), "tokens/s"),
        (replace(RUN, evaluation=EvaluationStatus(UNSCORED, FIRST, FIRST)), "reward 0.000"),
        (replace(RUN, headline=Headline("training", "", 3.0)), "Bound by"),
        (replace(RUN, slots={"abandoned": 0}), "abandoned"),
    ],
)
def test_what_is_as_it_should_be_is_not_worth_a_line(run: RunStatus, unsaid: str) -> None:
    assert unsaid not in rendered(run)


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
def test_the_first_lines_say_what_the_run_does_what_bounds_its_pace_and_what_to_do(
    line: Headline, said: str
) -> None:
    counts = (PeerCount(Role.LEARNER, "silent", 1), PeerCount(Role.SAMPLER, "live", 9999))
    run = replace(RUN, headline=line, peer_counts=counts)
    assert rendered(run).splitlines()[:2] == [said, "1 learner silent, 9999 samplers live"]
    slow = Bottleneck("samplers", "the learner waited \x1b[2J", "Add samplers.")
    assert rendered(replace(run, bottleneck=slow)).splitlines()[:2] == [
        f"{said} Bound by the samplers: the learner waited [2J.",
        "-> Add samplers.",
    ]
