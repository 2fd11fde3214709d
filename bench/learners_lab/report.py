"""The report: every arm beside one learner on the same groups, as Markdown."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from bench.learners_lab.arms import LEARNERS, ONE_LEARNER, TASKS, Outcome
from bench.learners_lab.exchange import FLOAT32_BYTES
from bench.learners_lab.simulation import EVALUATIONS
from bench.shared.markdown import table
from bench.staleness_lab.report import interval_text
from bench.staleness_lab.statistics import CONFIDENCE, Interval, simultaneous

_ABOUT: Final = """\
# Several learners

One learner, and two or four whose changes are merged by the formulas of `learner/merging`. Every arm of a
task consumes the same groups: prompts and draws of a group follow from seed and place alone. Groups are
drawn by the newest merged version; each learner has the default objective and an Adam of its own. Its
rate is the task's times the number of learners, over what a version takes over of a change in the end
(outer rate / (1 - momentum)): otherwise rates and momenta would be compared by the size of their steps.
On *sorting* it is half of that where changes come a round late, but for *parablock*, which loses 5 to 7
points by it. This was chosen on seeds that are not here: of x 1, x 2 and x 4, times the number of
learners was nearest to one learner for four in step, which at x 1 need four times the groups on *safes*;
of x 1, x 1/2 and x 1/4 of that, half was best for four eager ones on *sorting* (53, 57 and 52 points). On
*safes*, half of it costs 3 points, on the seeds that are here. A run ends at the mean of its last three
of {evaluations} evaluations of the merged version. Tasks are those of the staleness laboratory: *safes*,
a table of logits with a sparse reward, {safes} groups; *sorting*, a two-layer language model, {sorting}
groups. Both are tiny beside a real model: methods are compared, not predicted. Of *decoupled* the overlap
and the code are simulated: nobody is late, and changes weigh alike. *Dilocox as published* has a round of
delay without a correction. At the end of *safes* nothing is left to learn; the plan of *sorting* was
chosen on seeds 0 to 2 so that its end is on the way. A round that comes late costs groups while learning
is steep, and nothing where it is over: *groups* is how many it took to {part:.0%} of one learner's end,
over one learner's, medians of seeds.

Differences are to one learner, in points of score, on the same {seeds} seeds; the intervals of one table hold
together with a confidence of {confidence:.0%}. *Alarm*: seeds in which norms grew as in divergence.

*Sent* is what one learner hands in during the run, in bytes for each entry of the model; *fewer* compares it
with steps in step at float32. How long it takes over slow lines is measured in learner_lines.md.
"""

_STEEP: Final = 0.8
"""Part of one learner's end at which groups are counted: learning is not over there."""


def write_report(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write what the finished cells show."""
    about = _ABOUT.format(
        evaluations=EVALUATIONS,
        seeds=len(outcomes[0].seeds) if outcomes else 0,
        confidence=CONFIDENCE,
        part=_STEEP,
        **{task: plan.groups for task, plan in TASKS.items()},
    )
    parts = [about]
    for task in TASKS:
        here = [outcome for outcome in outcomes if outcome.task == task]
        one = next((outcome for outcome in here if outcome.name == ONE_LEARNER.name), None)
        if one is not None:
            parts += [_methods_table(task, one, here), _rates_table(task, one, here)]
    path.write_text("\n\n".join(parts) + "\n")


def _methods_table(task: str, one: Outcome, outcomes: Sequence[Outcome]) -> str:
    named = [outcome for outcome in outcomes if outcome.learners > 1 and ", H " not in outcome.name]
    rows = [[ONE_LEARNER.name, f"{100 * one.ends.mean():.1f}", "-", "1.00", *["-"] * 3]]
    for outcome, difference in zip(named, _differences(one, named), strict=True):
        sent = outcome.sent_bytes / outcome.entries
        in_step = FLOAT32_BYTES * outcome.rounds * outcome.settings["local_steps"]
        rows.append(
            [
                f"{outcome.name}, {outcome.learners} learners",
                f"{100 * outcome.ends.mean():.1f}",
                interval_text(difference),
                _groups(one, outcome),
                f"{sent:.3g}",
                f"{in_step / sent:.0f} x" if sent else "-",
                str(outcome.alarms),
            ]
        )
    head = ["arm", "end", "to one learner", "groups", "sent", "fewer", "alarm"]
    return f"## {task}: methods\n\n{table(head, rows)}"


def _rates_table(task: str, one: Outcome, outcomes: Sequence[Outcome]) -> str:
    plain = [outcome for outcome in outcomes if ", H " in outcome.name]
    found = {}
    for outcome, difference in zip(plain, _differences(one, plain), strict=True):
        overlap, _, rates = outcome.name.split(", ")
        alarm = f" ({outcome.alarms} alarms)" if outcome.alarms else ""
        place = (outcome.learners, outcome.settings["local_steps"])
        found[rates, overlap, place] = f"{interval_text(difference)}, {_groups(one, outcome)}{alarm}"
    places = [(learners, steps) for learners in LEARNERS for steps in TASKS[task].local_steps]
    lines = dict.fromkeys((rates, overlap) for rates, overlap, _ in found)
    rows = [
        [f"{rates}, {overlap}", *(found.get((rates, overlap, place), "-") for place in places)]
        for rates, overlap in sorted(lines, reverse=True)
    ]
    head = ["rate / momentum, overlap", *(f"{learners} learners, H {steps}" for learners, steps in places)]
    what = "Score at the end to one learner's, and groups."
    return f"## {task}: overlap, local steps and outer rates\n\n{what}\n\n{table(head, rows)}"


def _groups(one: Outcome, outcome: Outcome) -> str:
    score = _STEEP * float(one.ends.mean())
    return f"{np.median(outcome.groups_to(score)) / np.median(one.groups_to(score)):.2f}"


def _differences(one: Outcome, others: Sequence[Outcome]) -> list[Interval]:
    return simultaneous(np.array([other.ends - one.ends for other in others])) if others else []
