"""Lines of ``heterorl-node status`` on the run as a whole, each under a heading."""

from collections.abc import Iterable, Iterator
from typing import Final

from rich.text import Text

from node.commands.terminal import printable
from node.text.wording import counted
from node.values.evaluation import COVERAGE_PERCENT, REWARD, Evaluation, EvaluationStatus
from node.values.groups.verdict import Verdict
from node.values.policy import PolicyVersion
from node.values.roles import Role
from node.values.run import PeerStatus, RunStatus, StepReport, Teaching

_BAD_PROMPTS_SHOWN: Final = 5

_SOFTWARE_NAMED: Final = 5
"""Enough to see the cause; --json has more."""

WAITS_AT_BOUND: Final = "prompt lease: staleness"
"""Name of the wait of a sampler that the staleness bound holds back."""


def header(status: RunStatus) -> Text:
    """Return the lines on the run, each under its heading."""
    slots = ", ".join(f"{n} {state}" for state, n in status.slots.items() if n) or "none yet"
    lines: dict[str, Iterable[str]] = {
        "run": [f"{status.run_id}, learner epoch {status.learner_epoch}"],
        "head": [f"version {version_number(status.head)}"],
        "step": [_step(status.step)],
        "teaching": _teaching(status.teaching),
        "staleness": [*_staleness(status), *_idle_samplers(status)],
        "slots": [slots],
        "groups": [counts(status.verdicts, Verdict) or "none yet"],
        "ledger": [f"behind: {status.ledger_gap}"] if status.ledger_gap else [],
        "room": [f"{counted(status.capacity_groups, 'group')}, bound by {status.capacity_bound}"],
        "held out": _evaluations(status.evaluation, status.exportable_best),
        "graders": _graders(status),
        "software": _software(status.peers),
        "bad": _bad_prompts(status),
    }
    lines |= {line.heading: [line.text] for line in status.lines}
    alarms = {"ledger"} | ({"teaching"} if status.teaching and status.teaching.idle_s else set())
    header = Text()
    for name, values in lines.items():
        # Texts of peers are among them: control characters must not reach the terminal.
        value = f"\n{'':10}".join(map(printable, values))
        if value:
            header.append("\n" if header else "")
            header.append(f"{printable(name):10}", "bold").append(value, "bold red" if name in alarms else "")
    return header


def _software(peers: Iterable[PeerStatus]) -> Iterator[str]:
    """Yield which software runs where, unless it is the same everywhere."""
    names: dict[str, list[str]] = {}
    for peer in peers:
        if peer.state not in ("left", "revoked"):
            names.setdefault(f"{peer.software_version}, protocol {peer.protocol}", []).append(peer.node_id)
    if len(names) > 1:
        for software, found in sorted(names.items()):
            more = ", ..." if len(found) > _SOFTWARE_NAMED else ""
            yield f"{software}: {', '.join(found[:_SOFTWARE_NAMED])}{more}"


def _graders(status: RunStatus) -> Iterator[str]:
    """Yield who grades by other code than the run's."""
    others = [peer for peer in status.peers if peer.grader_digest not in (b"", status.grader_digest)]
    if others and status.grader_digest:
        yield f"the run's code is {status.grader_digest.hex()}, as {status.grader_said_by} said"
        for peer in others[:_BAD_PROMPTS_SHOWN]:
            what = "and checks nothing" if peer.role is Role.VERIFIER else "and is leased nothing"
            yield f"  {peer.node_id} has {peer.grader_digest.hex()} {what}"
        yield "  install the same grader everywhere, or set coordinator.grader_digest to the right one"


def _bad_prompts(status: RunStatus) -> Iterator[str]:
    """Yield a line on the prompts that no sampler could answer, and one on each of the newest."""
    if not status.bad_prompts:
        return
    of = f" of {status.prompts}" if status.prompts else ""
    reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(status.bad_prompt_reasons.items()))
    yield (
        f"{status.bad_prompts_total}{of} prompts could not be answered and are kept back for a while"
        f"{': ' if reasons else ''}{reasons}"
    )
    for bad in status.bad_prompts[:_BAD_PROMPTS_SHOWN]:
        retry_s, by = bad.retry_at_s - status.now_s, ", ".join(bad.said_by)
        again = f"tried again in {retry_s:.0f} s" if retry_s > 0 else "due to be tried again"
        times = "once" if bad.times == 1 else f"{bad.times} times"
        who = f"withheld from {by}" if len(bad.said_by) == 1 else f"set aside {times}, failed by {by}"
        detail = f": {bad.detail}" if bad.detail else ""
        yield f"  prompt {bad.prompt_index}: {bad.reason}, {who}, {again}{detail}"
    if status.bad_prompts_total > _BAD_PROMPTS_SHOWN:
        yield f"  and {status.bad_prompts_total - _BAD_PROMPTS_SHOWN} more; --json has the newest 50"


def _step(step: StepReport | None) -> str:
    if step is None:
        return "none yet"
    return (
        f"{step.version}: reward {step.reward_mean:.3f}, KL {step.kl_nats:.4f}, "
        f"effective sample size {step.ess_ratio:.2f}, staleness {step.staleness_mean_versions:.1f} mean, "
        f"{step.staleness_max_versions} max, {step.step_s:.2f} s"
    )


def _staleness(status: RunStatus) -> Iterator[str]:
    """Yield what the measured drift says of the staleness bound."""
    bound = f"(bound is {status.max_staleness_versions} versions)"
    if status.step is None:
        yield f"no recommendation yet: no step was taken {bound}"
    elif (recommended := status.step.recommended_staleness) is None:
        return
    elif recommended.versions is None:
        yield f"no recommendation yet: {recommended.unknown_because} {bound}"
    else:
        yield (
            f"beyond lag {recommended.versions} the effective sample size of {recommended.sample} "
            f"may halve {bound}"
        )


def _idle_samplers(status: RunStatus) -> Iterator[str]:
    """Yield what a lower bound would cost where samplers wait at it.

    At the bound there are as many groups on their way as it allows. All but one batch of those that wait for
    the learner only grow stale: the bound could be lower by so many batches, and no step would come later.
    """
    idle = sum(peer.role is Role.SAMPLER and peer.waits_for == WAITS_AT_BOUND for peer in status.peers)
    if not idle or not status.batch_groups:
        return
    bound = status.max_staleness_versions
    waiting = sum(status.slots.get(state, 0) for state in ("ungraded", "spooled", "accepted"))
    spare = min(waiting // status.batch_groups - 1, bound)
    listed = " listed" if status.matching_peers > len(status.peers) else ""
    idles = f"sampler{listed} idles" if idle == 1 else f"samplers{listed} idle"
    who = f"{idle} {idles} at the bound, {counted(waiting, 'finished group', 'waits/wait')}"
    if spare < 1:
        yield f"{who}: a lower bound would make steps wait"
    else:
        fresher = f"{counted(spare, 'version')} fresher"
        yield f"{who}: a bound of {bound - spare} would cost no step and make groups {fresher}"


def _teaching(teaching: Teaching | None) -> Iterator[str]:
    """Yield how much of what arrives teaches anything, and why no step is taken where nothing does."""
    if teaching is None:
        return
    share = teaching.uninformative_groups / teaching.groups if teaching.groups else 0.0
    said = f"{share:.0%} of the newest {teaching.groups} groups teach nothing"
    if teaching.idle_s:
        said += (
            f"; no step for {teaching.idle_s / 60:.0f} min, for no group of a batch has an advantage (mean "
            f"reward {teaching.reward_mean:.3g}). The task is too easy or too hard for the model, or its "
            "grader wrong: see `heterorl-node samples`, then change prompts, grader or model"
        )
    yield said


def _evaluations(status: EvaluationStatus, exportable_best: int | None) -> Iterator[str]:
    """Yield a line on the newest evaluation, on the best and on the one under way."""
    newest, first, under_way = status.newest, status.first, status.under_way
    if newest is not None:
        yield _newest(newest, first)
        yield _best(status, exportable_best)
    if under_way is not None:
        yield (
            f"version {under_way.version} under way: {under_way.counted_prompts} of {under_way.prompts} "
            f"prompts, {_answers(under_way)}"
        )


def _newest(newest: Evaluation, first: Evaluation | None) -> str:
    answered = f"{newest.counted_prompts} of {newest.prompts} prompts, {_answers(newest)}"
    if newest.reward_mean is None:
        return f"version {newest.version} has no score: {answered}; {COVERAGE_PERCENT} % have to be answered"
    since = ""
    if first is not None and first.reward_mean is not None and first.version != newest.version:
        since = f" ({newest.reward_mean - first.reward_mean:+.3f} since version {first.version})"
    return (
        f"version {newest.version}: reward {newest.score_text}{since}, {newest.tokens_mean:.0f} tokens, "
        f"{newest.cut_ratio:.0%} cut, {answered}"
    )


def _best(status: EvaluationStatus, exportable_best: int | None) -> str:
    """Say which version is the best, and whether ``export --best`` would take it now."""
    best, by = status.best, status.best_by
    if best is None and status.first is None:
        return "no version is the best yet: none has a score"
    if best is None:
        scored = status.newest if status.newest is not None and status.newest.has_score else status.first
        measured = ", ".join(["reward", *(scored.metric_means if scored else ())])
        return f"no version is the best yet: evaluation.best_by = {by!r}, and measured are {measured}"
    how = "the base model" if best.version == 0 else "`export --best` takes it"
    if exportable_best != best.version:
        how = "the learner has not written that down yet"
    score = best.score_by(by)
    return f"best is version {best.version}: {score if by != REWARD else f'reward {score}'}; {how}"


def _answers(evaluation: Evaluation) -> str:
    return f"{counted(evaluation.answers, 'answer')} of {counted(evaluation.samplers, 'sampler')}"


def counts(verdicts: dict[str, int], shown: Iterable[Verdict]) -> str:
    """Return how many groups had each of some verdicts; empty: none had."""
    return ", ".join(f"{verdicts[v]} {v}" for v in shown if verdicts.get(v))


def version_number(version: PolicyVersion | None) -> str:
    """Return the number of a version."""
    return "-" if version is None else str(version.number)
