"""The page of a run: what its sections say, and that no text of a stranger becomes markup."""

import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from node.page.chart import MOST_POINTS, chart
from node.page.html import rendered
from node.page.run_sections import RunView, run_sections, running_mean
from node.page.section import Block, Curve, Grid, Items, Quotation, Section, Series, Tone
from node.page.step_curves import StepCurves
from node.values.bottleneck import Bottleneck
from node.values.evaluation import Evaluation, EvaluationStatus
from node.values.run import RunStatus, StepReport, Wait

HOSTILE = "<script>alert(1)</script>\x1b[2J"
SHOWN = "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J"
STEP = StepReport(3, 0.5, 1.5, 4, 0.01, 0.8, 0.1, 1.0, 2.5, 0.9)
RUN = RunStatus("first", None, 1, (), {}, {}, STEP, 5, "staleness", 0.0)


def page_of(view: RunView) -> str:
    return rendered("first", "now", run_sections(view)).decode()


@pytest.mark.parametrize(
    "block",
    [
        HOSTILE,
        Items((HOSTILE,)),
        Grid((HOSTILE,), ((HOSTILE,),)),
        Quotation(HOSTILE, HOSTILE, Tone.LEVEL),
        Curve(HOSTILE, (Series(HOSTILE, [(1, 2.0), (2, 3.0)]),), [(1, HOSTILE)]),
    ],
)
def test_texts_of_strangers_are_shown_and_never_obeyed(block: Block) -> None:
    page = rendered(HOSTILE, HOSTILE, [Section(HOSTILE, (block,), is_folded=True)]).decode()
    assert not re.search(r"<script|<link|<img|<iframe|\bon\w+=|https?://|url\(|\x1b", page)
    assert "default-src 'none'" in page
    assert page.count(SHOWN) >= 4, "title, heading, note and section, and the block"


def test_a_live_page_says_first_who_waits_for_whom() -> None:
    waiting = replace(RUN, waits=(Wait("the run", "the learner", 7.0, "Start it."),))
    page = page_of(RunView.live(waiting, StepCurves()))
    assert "<li>the run waits for the learner, for 7 s. Start it.</li>" in page
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == ["Who waits for whom", "Steps", "Held-out prompts", "Fleet", "Peers (0 of 0)"]


def test_a_live_page_says_what_bounds_the_pace_and_what_to_do() -> None:
    slow = Bottleneck("setting", "the learner waited", "Raise it.", "coordinator.buffer_groups")
    page = page_of(RunView.live(replace(RUN, bottleneck=slow), StepCurves()))
    assert "<p>Its pace is bound by coordinator.buffer_groups: the learner waited. Raise it.</p>" in page


def test_an_evaluation_is_one_row_that_says_what_it_is() -> None:
    first = Evaluation(2, 0, 8, 1, 0.0, 32, 1.0, 2.0, counted_prompts=8, reward_mean=0.5)
    both = replace(first, version=7, reward_mean=0.75)
    status = replace(RUN, evaluation=EvaluationStatus(newest=both, first=first, best=both))
    page = page_of(RunView.live(status, StepCurves()))
    rows = re.findall(r"<tr><td>(\d)</td>.*<td>([^<]*)</td></tr>", page)
    assert rows == [("2", "first"), ("7", "best, newest")]


def test_curves_have_both_axes_and_leave_out_what_is_no_number() -> None:
    steps = [replace(STEP, version=v, reward_mean=r) for v, r in ((1, 0.0), (2, math.nan), (5, 1.0))]
    page = page_of(RunView.live(RUN, StepCurves.of_reports(steps)))
    (reward,) = re.findall(r"<figcaption>reward: .*?</figure>", page, re.DOTALL)
    line, _ = re.findall(r'<polyline points="([^"]*)"', reward)
    assert len(line.split()) == 2
    assert {">0<", ">1<", ">0.4<", ">5<", ">policy version<"} <= set(re.findall(r">[^<>]+<", reward))
    assert all(unit in page for unit in ("nats per token: ", "versions: ", "seconds: "))


def test_a_long_line_is_drawn_by_means_and_a_flat_or_lonely_one_at_all() -> None:
    drawn = chart(Curve("long", (Series("", [(n, math.sin(n)) for n in range(100_000)]),)))
    assert len(re.findall(r"[\d.]+,[\d.]+", drawn)) <= MOST_POINTS
    for points in ([(3.0, 0.0)], [(1.0, 5.0), (2.0, 5.0)], [(1.0, -1e-9), (2.0, 1e9)]):
        ElementTree.fromstring(chart(Curve("few", (Series("few", points),))))
    assert chart(Curve("none", (Series("none", [(1.0, math.nan)]),))) == ""


def test_a_running_mean_is_of_the_newest_points() -> None:
    assert running_mean([(1, 2.0), (2, 4.0), (3, 9.0)], of=2) == [(1, 2.0), (2, 3.0), (3, 6.5)]
