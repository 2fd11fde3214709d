"""The verdict on a delivered group; pure.

The hub has checked the sender and the shape of the message. What only the learner knows is
decided here: whether the group is about this model, whether its staleness is within the bound
now, and whether its numbers can be trusted with a gradient. A refusal says rule and values.

Order: malformed, foreign, suspect, duplicate, stale; the first rule broken gives the verdict.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from learner.intake.full_logprobs import full_logprobs
from learner.objective.truncation import least_kept_mass
from node.errors import RefusedError
from node.rollout import RolloutGroup, Verdict, check_group

LEAST_LOGPROB: Final = -30.0
"""Nobody draws a token at e^-30: the tail below it holds 1.5e-8 of a vocabulary of 150 000.
A group full of such claims would otherwise get weights beyond float32."""

ROUNDED_MASS: Final = 0.99
"""What narrow arithmetic may leave of a kept mass."""

LARGEST_REWARD: Final = 1e4
"""Times the largest weight (e^30), squared in a gradient norm, it stays within float32."""

LEAST_TEMPERATURE: Final = 0.01
LARGEST_TEMPERATURE: Final = 100.0
"""Logits divided by anything smaller overflow; by anything larger, they say nothing."""


@dataclass(frozen=True, slots=True)
class GroupRules:
    """What a group must agree with."""

    run_id: str
    layout_digest: bytes
    tokenizer_digest: bytes
    vocabulary_size: int
    context_tokens: int
    """Longest prompt and completion together that the model takes."""
    group_size: int
    max_staleness_versions: int


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict with its reason, one line for people; empty for ACCEPTED."""

    verdict: Verdict
    detail: str = ""


def judge(
    group: RolloutGroup, rules: GroupRules, *, version: int, trained_group_ids: Container[str]
) -> Judged:
    """Judge a group against the rules and the learner's current version.

    Args:
        group: As delivered; arrays may hold anything.
        rules: Fixed for the life of the process.
        version: The version the learner's parameters have now.
        trained_group_ids: Groups already consumed by a step.

    Returns:
        ACCEPTED, STALE, DUPLICATE, FOREIGN, MALFORMED or SUSPECT.
    """
    try:
        check_group(group, vocabulary_size=rules.vocabulary_size)
    except RefusedError as refused:
        return Judged(Verdict.MALFORMED, str(refused))
    return (
        _malformed(group, rules)
        or _foreign(group, rules, version)
        or _suspect(group, rules.vocabulary_size)
        or _duplicate(group, trained_group_ids)
        or stale(group, version=version, max_staleness_versions=rules.max_staleness_versions)
        or Judged(Verdict.ACCEPTED)
    )


def stale(group: RolloutGroup, *, version: int, max_staleness_versions: int) -> Judged | None:
    """Judge staleness alone: STALE, or None while the group may still be trained on."""
    staleness = version - group.oldest_version
    if staleness <= max_staleness_versions:
        return None
    return Judged(
        Verdict.STALE,
        f"staleness is {staleness} versions (sampled from {group.oldest_version}, learner at {version}), "
        f"the bound is {max_staleness_versions}",
    )


def _malformed(group: RolloutGroup, rules: GroupRules) -> Judged | None:
    if len(group.completions) != rules.group_size:
        return Judged(
            Verdict.MALFORMED,
            f"the group has {len(group.completions)} completions, the run's groups have {rules.group_size}",
        )
    longest = len(group.prompt_token_ids) + max(len(c.token_ids) for c in group.completions)
    if longest > rules.context_tokens:
        return Judged(
            Verdict.MALFORMED,
            f"prompt and completion have {longest} tokens, the model takes {rules.context_tokens}",
        )
    temperature = group.sampling.temperature
    if not LEAST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE:
        return Judged(
            Verdict.MALFORMED,
            f"temperature {temperature:g} is outside [{LEAST_TEMPERATURE:g}, {LARGEST_TEMPERATURE:g}]",
        )
    reward = max((c.reward for c in group.completions), key=abs)
    if abs(reward) > LARGEST_REWARD:
        return Judged(Verdict.MALFORMED, f"a reward of {reward:g} is beyond {LARGEST_REWARD:g}")
    return None


def _foreign(group: RolloutGroup, rules: GroupRules, version: int) -> Judged | None:
    if group.run_id != rules.run_id:
        return Judged(Verdict.FOREIGN, f"the group is of run {group.run_id!r}, this is {rules.run_id!r}")
    if group.layout_digest != rules.layout_digest:
        return Judged(
            Verdict.FOREIGN,
            f"layout digest {group.layout_digest.hex()} is not the learner's {rules.layout_digest.hex()}",
        )
    if group.tokenizer_digest != rules.tokenizer_digest:
        return Judged(
            Verdict.FOREIGN,
            f"tokenizer digest {group.tokenizer_digest.hex()} is not the learner's "
            f"{rules.tokenizer_digest.hex()}",
        )
    if group.newest_version > version:
        return Judged(
            Verdict.FOREIGN, f"version {group.newest_version} does not exist yet, the learner is at {version}"
        )
    if group.is_renormalised and any(c.kept_mass is None for c in group.completions):
        return Judged(
            Verdict.FOREIGN,
            f"top_p={group.sampling.top_p} top_k={group.sampling.top_k}, and the group does not say what "
            "mass was kept: every weight would be off by it; send kept_masses, or logprobs of mode FULL, "
            "or sample with top_p=1 and top_k=0",
        )
    return None


def _suspect(group: RolloutGroup, vocabulary_size: int) -> Judged | None:
    sampling, masses = group.sampling, [c.kept_mass for c in group.completions if c.kept_mass is not None]
    kept = min((float(mass.min()) for mass in masses), default=1.0)
    possible = least_kept_mass(top_p=sampling.top_p, top_k=sampling.top_k, vocabulary_size=vocabulary_size)
    if masses and kept < ROUNDED_MASS * possible:
        return Judged(
            Verdict.SUSPECT,
            f"top_p={sampling.top_p} top_k={sampling.top_k} are claimed to have kept {kept:g} of the "
            f"softmax; they keep {possible:g} at least",
        )
    least = min(float(logprob.min()) for logprob in full_logprobs(group))
    if least < LEAST_LOGPROB:
        return Judged(
            Verdict.SUSPECT,
            f"a token is claimed to have been drawn at {least:g} nats, below {LEAST_LOGPROB:g}",
        )
    return None


def _duplicate(group: RolloutGroup, trained_group_ids: Container[str]) -> Judged | None:
    if group.group_id in trained_group_ids:
        return Judged(Verdict.DUPLICATE, f"group {group.group_id} was trained on before")
    return None
