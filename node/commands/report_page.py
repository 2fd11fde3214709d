"""The page that ``heterorl-node report`` writes: what the run was, its curves, its groups; pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from node.clock import moment
from node.commands.run_records import Records
from node.commands.terminal import duration
from node.evaluation import REWARD, best_of
from node.svg_chart import STYLE as CHART_STYLE
from node.svg_chart import Points, Series, chart, running_mean
from node.verdict import Verdict
from node.web_page import table, text, web_page

_MEAN_OF: Final = 10

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
"""Settings that say what the run was; all others are listed at the end."""

_STYLE: Final = f"""\
{CHART_STYLE}table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: .1em 1em .1em 0; overflow-wrap: anywhere; }}
"""


def report_page(records: Records) -> bytes:
    """Return the page of a run with these records."""
    title = f"Run {records.run_id}" if records.run_id else "A run"
    body = f"<h1>{text(title)}</h1>\n" + "".join(
        f"<h2>{text(heading)}</h2>\n{content}" for heading, content in _sections(records) if content
    )
    return web_page(title, body, style=_STYLE)


def _sections(records: Records) -> Iterator[tuple[str, str]]:
    curves, marks = records.curves, records.events
    yield "What it was", _summary(records)
    reward = curves.get("reward_mean", [])
    scores = ((one.version, one.reward_mean) for one in records.evaluations)
    evaluated = [(float(version), score) for version, score in scores if score is not None]
    rewards = [
        Series("batch", reward),
        Series(f"mean of {_MEAN_OF}", running_mean(reward, of=_MEAN_OF)),
        Series("held-out prompts", evaluated, is_dotted=True),
    ]
    yield "Reward", _of_versions(rewards, marks)
    for heading, name, label in (
        ("KL(behaviour || learner)", "kl_nats", "nats per token"),
        ("Effective sample size", "ess_ratio", "share of the batch"),
    ):
        yield heading, _of_versions([Series(label, curves.get(name, []))], marks)
    staleness = [
        Series("mean of the batch", curves.get("staleness_mean_versions", [])),
        Series("oldest group", curves.get("staleness_max_versions", [])),
    ]
    yield "Staleness, versions", _of_versions(staleness, marks)
    lag = [
        Series("from a step to its announcement", records.announcement_lag_s),
        Series("wait for groups before a step", curves.get("groups_wait_s", [])),
        Series("the step itself", curves.get("step_s", [])),
    ]
    yield "Lag, seconds", _of_versions(lag, marks)
    yield "Learning rate", _of_versions([Series("rate of the step", curves.get("learning_rate", []))], marks)
    yield "What graders measured", "".join(_metrics(records))
    yield "Held-out prompts", _evaluations(records)
    yield "Groups by verdict", _groups(records)
    yield "Changes and rollbacks", table(("version", "what"), records.events)
    yield "All settings, at the last start", _settings(records)


def _of_versions(series: Sequence[Series], marks: Sequence[tuple[float, str]]) -> str:
    return chart(series, x_label="policy version", marks=marks)


def _summary(records: Records) -> str:
    rows: list[tuple[str, object]] = [
        (name, records.settings[name]) for name in _TOLD_SETTINGS if name in records.settings
    ]
    if records.first_s is not None and records.last_s is not None:
        lasted = duration(records.last_s - records.first_s)
        rows.append(
            ("steps", f"{records.steps}, {moment(records.first_s)} to {moment(records.last_s)}, {lasted}")
        )
        groups, samplers = records.trained.total(), len(records.trained)
        rows.append(
            ("trained on", f"{groups} groups of {samplers} samplers, {records.tokens} completion tokens")
        )
        rows.append(("reward", _first_and_last(records.curves.get("reward_mean", []))))
    if records.slots:
        rows.append(("slots", ", ".join(f"{n} {state}" for state, n in sorted(records.slots.items()))))
    by = records.evaluations[-1].best_by if records.evaluations else REWARD
    if (best := best_of(records.evaluations, by)) is not None:
        rows.append(("best on held-out prompts", f"version {best.version}: {best.score_by(by)}"))
    return table(("", ""), rows)


def _first_and_last(points: Points) -> str:
    values = [value for _, value in points]
    if not values:
        return "none yet"
    first, last = (sum(part) / len(part) for part in (values[:_MEAN_OF], values[-_MEAN_OF:]))
    return f"{first:.3f} over the first {_MEAN_OF} steps, {last:.3f} over the last {_MEAN_OF}"


def _metrics(records: Records) -> Iterator[str]:
    for name, points in sorted(records.grader_metrics.items()):
        yield _of_versions([Series(name, running_mean(points, of=_MEAN_OF))], records.events)


def _evaluations(records: Records) -> str:
    rows = (
        (
            one.version,
            one.score_text,
            ", ".join(f"{name} {mean:.4g}" for name, mean in one.metric_means.items()),
            f"{one.counted_prompts} of {one.prompts}",
            f"{one.answers} of {one.samplers}",
            "-" if one.cut_ratio is None else f"{one.cut_ratio:.1%}",
            "-" if one.tokens_mean is None else f"{one.tokens_mean:.1f}",
            moment(one.finished_at_s) if one.finished_at_s else "under way",
        )
        for one in records.evaluations
    )
    names = ("version", "reward", "graders measured", "prompts answered", "answers of samplers")
    return table((*names, "cut", "tokens", "finished"), rows)


def _groups(records: Records) -> str:
    """Return a row a sampler: what became of its groups, and how stale those were that were trained on."""
    found = {verdict for counts in records.verdicts.values() for verdict in counts}
    columns = [verdict.value for verdict in Verdict if verdict.value in found]
    names = sorted(records.verdicts.keys() | records.trained.keys())
    rows = []
    for name in names:
        counts, trained = records.verdicts.get(name, {}), records.trained[name]
        stale = f"{records.staleness[name] / trained:.2f}" if trained else "-"
        rows.append((name, *(counts.get(one, 0) for one in columns), stale))
    sums = (sum(counts.get(one, 0) for counts in records.verdicts.values()) for one in columns)
    if len(rows) > 1:
        rows.append(("all", *sums, ""))
    return table(("sampler", *columns, "mean staleness"), rows)


def _settings(records: Records) -> str:
    rows = sorted((key, value) for key, value in records.settings.items() if value is not None)
    return (
        f"<details><summary>{len(rows)}</summary>\n{table(('key', 'value'), rows)}</details>\n"
        if rows
        else ""
    )
