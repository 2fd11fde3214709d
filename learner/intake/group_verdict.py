"""The verdict on a delivered group: dropped as malformed, foreign, suspect, trained on or too old; pure.

The coordinator has checked the sender and the shape of the message. What only the learner knows is decided
here: whether the group is of this model, whether its staleness is within the bound now, and whether its
numbers can be trusted with a gradient. A refusal names the rule and the values.

Order: malformed, foreign, suspect, duplicate, stale; the first rule broken gives the verdict.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from learner.objective.formulas.truncation import least_kept_mass, untruncated_logprob
from node.errors import RefusedError
from node.values.groups.rollout import Completion, RolloutGroup
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.groups.well_formed import check_group

LEAST_LOGPROB: Final = -30.0
"""No sampler draws a token at e^-30: of a vocabulary of 150 000 the tail below holds 1.5e-8. A group full of
such claims would otherwise get weights beyond float32."""

ROUNDED_MASS: Final = 0.99
"""Share of a kept mass that rounding to narrow floats may leave."""

LEAST_TEMPERATURE: Final = 0.01
LARGEST_TEMPERATURE: Final = 100.0
"""Logits divided by less overflow; divided by more, they are all the same."""


@dataclass(frozen=True, slots=True)
class GroupRules:
    """The run's and the model's side of the comparison; fixed for the life of the process."""

    run_id: str
    layout_digest: bytes
    tokenizer_digest: bytes
    vocabulary_size: int
    context_tokens: int
    """Longest prompt and completion together that the model takes."""
    group_size: int
    max_staleness_versions: int
    objection: Callable[[RolloutGroup], str | None] = lambda _: None
    """Returns why no policy of the run's kind can have made a group."""
    was_skipped: Callable[[int], bool] = lambda _: False
    """Whether a version that the learner has made was never published."""


def judge(
    group: RolloutGroup,
    rules: GroupRules,
    *,
    version: int,
    trained_group_ids: Container[str],
    since_version: int = 0,
) -> GroupVerdict:
    """Judge a delivered group, whose arrays may hold anything, at a version of the learner's parameters.

    Args:
        since_version: see ``stale``.
    Returns:
        ACCEPTED, STALE, DUPLICATE, FOREIGN, MALFORMED or SUSPECT.
    """
    # One after the other: a later rule may only read what an earlier one has checked.
    if what := _malformed(group, rules):
        return GroupVerdict(group.group_id, Verdict.MALFORMED, what)
    if what := _foreign(group, rules, version):
        return GroupVerdict(group.group_id, Verdict.FOREIGN, what)
    if what := _suspect(group, rules.vocabulary_size):
        return GroupVerdict(group.group_id, Verdict.SUSPECT, what)
    if group.group_id in trained_group_ids:
        return trained_before(group)
    bound = rules.max_staleness_versions
    too_old = stale(group, version=version, max_staleness_versions=bound, since_version=since_version)
    return too_old or GroupVerdict(group.group_id, Verdict.ACCEPTED)


def trained_before(group: RolloutGroup) -> GroupVerdict:
    what = f"slot of group {group.group_id} was trained on before"
    return GroupVerdict(group.group_id, Verdict.DUPLICATE, what)


def stale(
    group: RolloutGroup, *, version: int, max_staleness_versions: int, since_version: int = 0
) -> GroupVerdict | None:
    """Judge staleness alone: STALE, or None while the group may still be trained on.

    Args:
        since_version: made by a rollback. Policies from before are further away than their age says, which
            would make samplers that drew from them look dishonest.
    """
    if group.oldest_version < since_version:
        what = f"sampled from {group.oldest_version}, before the rollback that made version {since_version}"
        return GroupVerdict(group.group_id, Verdict.STALE, what)
    staleness = version - group.oldest_version
    if staleness <= max_staleness_versions:
        return None
    what = (
        f"staleness is {staleness} versions (sampled from {group.oldest_version}, learner at {version}), "
        f"the bound is {max_staleness_versions}"
    )
    return GroupVerdict(group.group_id, Verdict.STALE, what)


def _malformed(group: RolloutGroup, rules: GroupRules) -> str | None:
    try:
        check_group(group, vocabulary_size=rules.vocabulary_size)
    except RefusedError as refused:
        return str(refused)
    if len(group.completions) != rules.group_size:
        return f"the group has {len(group.completions)} completions, the run's groups have {rules.group_size}"
    longest = len(group.prompt_token_ids) + max(len(c.token_ids) for c in group.completions)
    if longest > rules.context_tokens:
        return f"prompt and completion have {longest} tokens, the model takes {rules.context_tokens}"
    temperature = group.sampling.temperature
    if not LEAST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE:
        return f"temperature {temperature:g} is outside [{LEAST_TEMPERATURE:g}, {LARGEST_TEMPERATURE:g}]"
    return rules.objection(group)


def _foreign(group: RolloutGroup, rules: GroupRules, version: int) -> str | None:
    if group.run_id != rules.run_id:
        return f"the group is of run {group.run_id!r}, this is {rules.run_id!r}"
    if group.layout_digest != rules.layout_digest:
        return f"layout digest {group.layout_digest.hex()} is not the learner's {rules.layout_digest.hex()}"
    if group.tokenizer_digest != rules.tokenizer_digest:
        theirs, ours = group.tokenizer_digest.hex(), rules.tokenizer_digest.hex()
        return f"tokenizer digest {theirs} is not the learner's {ours}"
    if group.newest_version > version:
        return f"version {group.newest_version} does not exist yet, the learner is at {version}"
    skipped = [
        version for version in (group.oldest_version, group.newest_version) if rules.was_skipped(version)
    ]
    if skipped:
        return f"version {skipped[0]} was never published"
    if group.is_renormalised and any(c.kept_mass is None for c in group.completions):
        return (
            f"{group.sampling.truncation}, and the group does not say what mass was kept: every weight would "
            "be off by it; send kept_masses, or sample without truncation"
        )
    return None


def _suspect(group: RolloutGroup, vocabulary_size: int) -> str | None:
    sampling = group.sampling
    possible = least_kept_mass(
        min_p=sampling.min_p,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        vocabulary_size=vocabulary_size,
    )
    masses = (float(c.kept_mass.min()) for c in group.completions if c.kept_mass is not None)
    kept = min(masses, default=possible)
    if kept < ROUNDED_MASS * possible:
        return (
            f"{sampling.truncation} are claimed to have kept {kept:g} of the softmax; "
            f"they keep {possible:g} at least"
        )
    least = min(float(logprob.min()) for logprob in full_logprobs(group))
    if least < LEAST_LOGPROB:
        return f"a token is claimed to have been drawn at {least:g} nats, below {LEAST_LOGPROB:g}"
    return None


def full_logprobs(group: RolloutGroup) -> list[NDArray[np.float32]]:
    """Return the behaviour logprobs of each completion's drawn tokens under the whole softmax.

    Raises:
        ValueError: they are renormalised, and the kept masses that would undo this are missing.
    """
    if not group.is_renormalised:
        return [completion.of_drawn(completion.behaviour_logprob) for completion in group.completions]
    return [completion.of_drawn(_untruncated(completion)) for completion in group.completions]


def _untruncated(completion: Completion) -> NDArray[np.float32]:
    if completion.kept_mass is None:
        raise ValueError("logprobs are renormalised over the tokens kept, and there are no kept masses")
    columns = (torch.from_numpy(c.copy()) for c in (completion.behaviour_logprob, completion.kept_mass))
    logprob: NDArray[np.float32] = untruncated_logprob(*columns).numpy()
    return logprob
