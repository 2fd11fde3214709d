"""The sections of a run's page, from whatever is known of the run; pure.

coordinator, live   --status, newest steps, evaluations--+
learner, live       --samples----------------------------+--> RunView --> sections, in one order
files of both       --everything but the status----------+
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Final

from node.page.samples_file import CompletionSample, GroupSample
from node.page.section import Block, Curve, Grid, Items, Points, Quotation, Section, Series, Tone
from node.page.step_curves import StepCurves
from node.system.clock import moment
from node.text.wording import duration
from node.values.evaluation import Evaluation, EvaluationStatus
from node.values.groups.verdict import Verdict
from node.values.roles import VERSIONED_ROLES
from node.values.run import PeerStatus, RunStatus

_MEAN_OF: Final = 10
"""Steps of a running mean."""

SHOWN_GROUPS: Final = 20
"""Groups whose completions are shown, the newest first."""

_NONE_YET: Final = "None yet."

_SCORES: Final = "held_out_reward"

_FIGURES: Final[Mapping[str, Mapping[str, str]]] = {
    "reward": {
        "reward_mean": "batch", "running_reward": f"mean of {_MEAN_OF}", _SCORES: "held-out prompts",
    },
    "KL(behaviour || learner), nats per token": {"kl_nats": ""},
    "staleness, versions": {
        "staleness_mean_versions": "mean of the batch", "staleness_max_versions": "oldest group",
    },
    "effective sample size, share of the batch": {"ess_ratio": ""},
    "time, seconds": {
        "step_s": "the step itself",
        "groups_wait_s": "wait for groups before it",
        "announcement_lag_s": "from the step to its announcement",
    },
    "learning rate": {"learning_rate": ""},
    "norm of the merged change": {"merged_norm": ""},
    "cosine of a contribution with its merge": {"merged_cosine_min": "least of the merge"},
}  # fmt: skip
"""Title with unit -> number of a step -> its label."""

_TOLD_SETTINGS: Final = (
    "learner.model_dir",
    "learner.objective",
    "learner.learning_rate",
    "learner.lr_schedule",
    "coordinator.task",
    "coordinator.batch_groups",
    "coordinator.group_size",
    "coordinator.max_staleness_versions",
    "coordinator.max_new_tokens",
    "coordinator.temperature",
)
"""Settings that say what the run is; all others are listed at the end."""


@dataclass(frozen=True, slots=True)
class RunView:
    """Facts known of a run; one that is None or empty is not known and has no section."""

    run_id: str = ""
    status: RunStatus | None = None
    steps: StepCurves | None = None
    evaluations: Sequence[Evaluation] | None = None
    remarks: Mapping[int, str] = field(default_factory=dict)
    """By version: "best", "first", "in doubt"."""
    announced_at_s: Mapping[int, float] = field(default_factory=dict)
    """Unix seconds by version, on the coordinator's clock."""
    verdicts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Groups by sampler and verdict, as the ledger has them."""
    slots: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings of coordinator and learner at their last starts, but for secrets."""
    samples: Sequence[GroupSample] | None = None
    """The newest ``SHOWN_GROUPS``, newest first."""

    @classmethod
    def live(cls, status: RunStatus, steps: StepCurves) -> "RunView":
        """Return the view of a coordinator that serves."""
        found = _worth_a_look(status.evaluation)
        evaluations = {one.version: one for one in found.values()}
        remarks = {version: _remark(found, version) for version in evaluations}
        return cls(status.run_id, status, steps, tuple(evaluations.values()), remarks)


def run_sections(view: RunView) -> Iterator[Section]:
    """Yield the sections of a run's page, the urgent ones first."""
    if view.status is not None:
        yield from _waits(view.status)
    yield from _grid("What it is", ("", ""), tuple(_summary(view)))
    if view.steps is not None:
        yield Section("Steps", tuple(_curves(view, view.steps)) or (_NONE_YET,))
    if view.evaluations is not None:
        yield _held_out(view.evaluations, view.remarks)
    if view.status is not None:
        yield from _fleet(view.status)
    yield from _groups(view)
    if view.steps is not None:
        yield from _grid("Changes and rollbacks", ("version", "what"), tuple(view.steps.events))
    if view.samples is not None:
        samples = tuple(block for group in view.samples for block in _sample(group))
        yield Section("Samples", samples or ("No samples yet: see learner.samples_every_versions.",))
    settings = sorted((key, value) for key, value in view.settings.items() if value is not None)
    yield from _grid("All settings, at the last start", ("key", "value"), tuple(settings), is_folded=True)


def _grid(
    title: str, names: tuple[str, ...], rows: tuple[tuple[object, ...], ...], *, is_folded: bool = False
) -> Iterator[Section]:
    if rows:
        yield Section(title, (Grid(names, rows),), is_folded)


def _waits(status: RunStatus) -> Iterator[Section]:
    said = [] if status.headline is None else [status.headline.doing]
    if (pace := status.bottleneck) is not None:
        said.append(f"Its pace is {pace.text}. {pace.remedy}".strip())
    waits = tuple(
        f"{one.who} waits for {one.waits_for}, for {one.for_s:.0f} s. {one.remedy}" for one in status.waits
    )
    yield Section("Who waits for whom", (*said, Items(waits) if waits else "It moves."))
    if status.unusual:
        unusual = (f"{one.what}: {one.peers}, {', '.join(one.node_ids)}" for one in status.unusual)
        yield Section("Unusual", (Items(tuple(unusual)),))


def _summary(view: RunView) -> Iterator[tuple[str, object]]:
    yield from ((name, view.settings[name]) for name in _TOLD_SETTINGS if name in view.settings)
    if view.status is not None:
        yield from ((line.heading, line.text) for line in view.status.lines)
    steps = view.steps
    if steps is not None and steps.made_at_s:
        first_s, last_s = (list(steps.made_at_s.values())[end] for end in (0, -1))
        lasted = duration(last_s - first_s)
        yield "steps", f"{steps.steps}, {moment(first_s)} to {moment(last_s)}, {lasted}"
        groups, samplers = steps.trained.total(), len(steps.trained)
        yield "trained on", f"{groups} groups of {samplers} samplers, {steps.tokens} completion tokens"
        yield "reward", _first_and_last(steps.curves.get("reward_mean", []))
    if view.slots:
        yield "slots", ", ".join(f"{n} {state}" for state, n in sorted(view.slots.items()))


def _first_and_last(points: Points) -> str:
    values = [value for _, value in points]
    if not values:
        return "none yet"
    first, last = (sum(part) / len(part) for part in (values[:_MEAN_OF], values[-_MEAN_OF:]))
    return f"{first:.3f} over the first {_MEAN_OF} steps, {last:.3f} over the last {_MEAN_OF}"


def _curves(view: RunView, steps: StepCurves) -> Iterator[Curve]:
    """Yield the figures that have points."""
    made_at_s, rewards = steps.made_at_s, steps.curves.get("reward_mean", [])
    points: dict[str, Points] = {
        **steps.curves,
        "running_reward": running_mean(rewards, of=_MEAN_OF),
        _SCORES: [
            (one.version, one.reward_mean) for one in view.evaluations or () if one.reward_mean is not None
        ],
        "announcement_lag_s": [
            (version, at_s - made_at_s[version])
            for version, at_s in view.announced_at_s.items()
            if version in made_at_s
        ],
    }
    figures = [
        (title, tuple(Series(label, points.get(name, []), name == _SCORES) for name, label in drawn.items()))
        for title, drawn in _FIGURES.items()
    ]
    figures += [
        (f"{name}, by the grader", (Series("", running_mean(measured, of=_MEAN_OF)),))
        for name, measured in sorted(steps.grader_metrics.items())
    ]
    for title, series in figures:
        if any(one.points for one in series):
            yield Curve(title, series, steps.events)


def running_mean(points: Points, *, of: int) -> Points:
    """Return each point's mean with those before it, ``of`` points at most."""
    values = [y for _, y in points]
    return [
        (x, fsum(window) / len(window))
        for number, (x, _) in enumerate(points)
        if (window := values[max(0, number + 1 - of) : number + 1])
    ]


def _worth_a_look(status: EvaluationStatus) -> dict[str, Evaluation]:
    found = {
        "first": status.first, "best": status.best, "newest": status.newest, "under way": status.under_way,
    }  # fmt: skip
    return {word: one for word, one in found.items() if one is not None}


def _remark(found: Mapping[str, Evaluation], version: int) -> str:
    return ", ".join(word for word, one in found.items() if one.version == version)


def _held_out(evaluations: Sequence[Evaluation], remarks: Mapping[int, str]) -> Section:
    rows = tuple(
        (
            one.version,
            one.score_text,
            ", ".join(f"{name} {mean:.4g}" for name, mean in one.metric_means.items()),
            f"{one.counted_prompts} of {one.prompts}",
            f"{one.answers} of {one.samplers}",
            "-" if one.cut_ratio is None else f"{one.cut_ratio:.1%}",
            "-" if one.tokens_mean is None else f"{one.tokens_mean:.1f}",
            moment(one.finished_at_s) if one.finished_at_s else "under way",
            remarks.get(one.version, ""),
        )
        for one in evaluations
    )
    told = ("version", "reward", "graders measured", "prompts answered", "answers of samplers")
    names = (*told, "cut", "tokens", "finished", "")
    return Section("Held-out prompts", (Grid(names, rows) if rows else _NONE_YET,))


def _fleet(status: RunStatus) -> Iterator[Section]:
    counts = tuple((one.role, one.state, one.peers) for one in status.peer_counts)
    yield Section("Fleet", (Grid(("role", "state", "peers"), counts) if counts else _NONE_YET,))
    names = ("peer", "role", "state", "heard of", "versions behind", "waits for")
    peers: Block = Grid(names, tuple(map(_peer, status.peers))) if status.peers else _NONE_YET
    yield Section(f"Peers ({len(status.peers)} of {status.matching_peers})", (peers,))


def _peer(peer: PeerStatus) -> tuple[object, ...]:
    behind = peer.version_lag_versions if peer.role in VERSIONED_ROLES else "-"
    seen = f"{peer.last_seen_s:.0f} s ago"
    return peer.node_id, peer.role, peer.state, seen, behind, peer.waits_for


def _groups(view: RunView) -> Iterator[Section]:
    """Yield a row a sampler: what became of its groups, and how stale those were that were trained on."""
    trained = {} if view.steps is None else view.steps.trained
    found = {verdict for counts in view.verdicts.values() for verdict in counts}
    columns = [verdict.value for verdict in Verdict if verdict.value in found]
    rows: list[tuple[object, ...]] = []
    for name in sorted(view.verdicts.keys() | trained.keys()):
        counts = view.verdicts.get(name, {})
        stale = "-"
        if view.steps is not None and name in trained:
            stale = f"{view.steps.staleness[name] / trained[name]:.2f}"
        rows.append((name, *(counts.get(one, 0) for one in columns), stale))
    if len(rows) > 1:
        sums = (sum(counts.get(one, 0) for counts in view.verdicts.values()) for one in columns)
        rows.append(("all", *sums, ""))
    yield from _grid("Groups by verdict", ("sampler", *columns, "mean staleness"), tuple(rows))


def _sample(group: GroupSample) -> Iterator[Block]:
    yield Quotation(group.heading, group.prompt, Tone.PROMPT)
    for completion in group.completions:
        yield Quotation(completion.heading, completion.text, _tone(completion))


def _tone(completion: CompletionSample) -> Tone:
    if completion.advantage == 0:
        return Tone.LEVEL
    return Tone.ABOVE if completion.advantage > 0 else Tone.BELOW
