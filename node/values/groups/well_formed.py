"""The rules that any group must meet, whatever run it is of: shapes, ranges, finiteness.

Coordinator and learner decide whether a group is wanted (lease, version, staleness, vocabulary of the run).
"""

import math
import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from node.errors import Reason, RefusedError
from node.values import limits
from node.values.groups.rollout import Completion, Finish, GroupHeader, RolloutGroup


def check_header(header: GroupHeader, *, is_graded: bool = True) -> None:
    """Refuse a group that no honest sampler could have sent, by its header alone.

    Args:
        is_graded: Whether it has to have rewards; otherwise it may have none.
    Raises:
        RefusedError: MALFORMED for shapes and ranges, NON_FINITE for NaN and infinity, OVER_LIMIT for sizes.
    """
    if not 1 <= header.completions <= limits.GROUP_COMPLETIONS:
        raise RefusedError(
            Reason.MALFORMED,
            f"group {header.group_id!r} has {header.completions} completions, "
            f"allowed are 1 to {limits.GROUP_COMPLETIONS}",
        )
    if not 1 <= header.prompt_tokens <= limits.PROMPT_TOKENS:
        raise RefusedError(Reason.MALFORMED, f"the prompt has {header.prompt_tokens} tokens")
    if header.tokens > limits.GROUP_TOKENS:
        raise RefusedError(
            Reason.OVER_LIMIT, f"the group has {header.tokens} tokens, allowed are {limits.GROUP_TOKENS}"
        )
    bounds = (header.least_reward, header.largest_reward)
    if not is_graded and not all(map(math.isnan, bounds)):
        raise RefusedError(
            Reason.MALFORMED,
            f"the group has rewards from {bounds[0]:g} to {bounds[1]:g}, and verifiers grade this run's "
            "groups",
            fix="leave rewards out: run the coordinator's version of heterorl-node",
        )
    for reward in bounds if is_graded else ():
        if not math.isfinite(reward):
            raise RefusedError(Reason.NON_FINITE, f"the group has reward {reward}")
        if abs(reward) > limits.REWARD:
            raise RefusedError(
                Reason.OVER_LIMIT, f"the group has reward {reward:g}, beyond {limits.REWARD:g} in magnitude"
            )
    stamps = (header.sampling_started_at_s, header.sampling_finished_at_s, header.graded_at_s)
    if not all(math.isfinite(stamp) for stamp in stamps):
        raise RefusedError(Reason.NON_FINITE, f"timestamps {stamps} are not all finite")
    if not 0 <= stamps[0] <= stamps[1] <= stamps[2] <= limits.STAMP_S:
        raise RefusedError(
            Reason.MALFORMED,
            f"timestamps {stamps} are not those of sampling begun, then finished, then graded",
            fix="set the sampler's clock",
        )


def check_group(group: RolloutGroup, *, vocabulary_size: int | None = None, is_graded: bool = True) -> None:
    """Refuse a group that no honest sampler could have sent.

    Args:
        group: As decoded: its columns agree in length, and hold anything.
        vocabulary_size: Ids must be below it; None where the caller does not know it.
        is_graded: As for ``check_header``.
    Raises:
        RefusedError: As ``check_header``; names the completion and the value.
    """
    check_header(group.header, is_graded=is_graded)
    if group.metrics and not is_graded:
        raise RefusedError(Reason.MALFORMED, "the group has metrics of a grader, and no rewards")
    _check_ids(group.prompt_token_ids, vocabulary_size, where="the prompt")
    check_metrics(group.metrics)
    with_mass = sum(completion.kept_mass is not None for completion in group.completions)
    if with_mass not in (0, len(group.completions) if group.sampling.is_truncated else 0):
        raise RefusedError(
            Reason.MALFORMED,
            f"{with_mass} of {len(group.completions)} completions have kept masses, "
            f"sampled with {group.sampling.truncation}",
        )
    for number, completion in enumerate(group.completions):
        _check_completion(completion, vocabulary_size, where=f"completion {number}")
        if completion.finish is Finish.STOP and not group.sampling.stop:
            raise RefusedError(
                Reason.MALFORMED, f"completion {number} ended at a stop string, and the run has none"
            )


def check_metrics(metrics: Mapping[str, NDArray[np.float32]]) -> None:
    """Check what a grader measured. Raises RefusedError: OVER_LIMIT, MALFORMED, NON_FINITE."""
    if len(metrics) > limits.GROUP_METRICS:
        raise RefusedError(
            Reason.OVER_LIMIT,
            f"the group has {len(metrics)} metrics, at most {limits.GROUP_METRICS} are allowed",
        )
    for name, values in metrics.items():
        if not re.fullmatch(limits.METRIC_NAME_PATTERN, name):
            raise RefusedError(Reason.MALFORMED, f"{name[:100]!r} is not a valid name of a metric")
        if np.isinf(values).any():
            raise RefusedError(Reason.NON_FINITE, f"metric {name!r} is infinite")
        if (np.abs(values) > limits.METRIC_VALUE).any():
            raise RefusedError(
                Reason.OVER_LIMIT, f"metric {name!r} is beyond {limits.METRIC_VALUE:g} in magnitude"
            )


def _check_completion(completion: Completion, vocabulary_size: int | None, *, where: str) -> None:
    _check_ids(completion.token_ids, vocabulary_size, where=where)
    if not np.isfinite(completion.behaviour_logprob).all():
        raise RefusedError(Reason.NON_FINITE, f"{where} has a behaviour logprob that is not finite")
    largest = 0.0 if completion.actions is None else limits.LOG_DENSITY
    if (completion.behaviour_logprob > largest).any():
        worst = float(completion.behaviour_logprob.max())
        raise RefusedError(Reason.MALFORMED, f"{where} has a behaviour logprob of {worst}, above {largest:g}")
    if completion.actions is not None:
        _check_actions(completion.actions, where=where)
    if completion.kept_mass is not None:
        _check_kept_mass(completion.kept_mass, where=where)
    if (completion.policy_version < 0).any():
        raise RefusedError(Reason.MALFORMED, f"{where} names a negative policy version")
    if (np.diff(completion.policy_version) < 0).any():
        raise RefusedError(Reason.MALFORMED, f"{where} goes back to an older policy version")
    if completion.is_drawn is not None:
        _check_replies(completion, completion.is_drawn, where=where)


def _check_replies(completion: Completion, is_drawn: NDArray[np.bool_], *, where: str) -> None:
    if not (is_drawn[0] and is_drawn[-1]):
        raise RefusedError(
            Reason.MALFORMED, f"{where} begins or ends with a token that the policy did not draw"
        )
    replied = np.flatnonzero(~is_drawn)
    versions, kept_mass = completion.policy_version, completion.kept_mass
    if (
        completion.behaviour_logprob[replied].any()
        or (versions[replied] != versions[replied - 1]).any()
        or (kept_mass is not None and (kept_mass[replied] != 1).any())
    ):
        raise RefusedError(
            Reason.MALFORMED, f"{where} has a logprob, version or kept mass for a token that was not drawn"
        )


def _check_actions(actions: NDArray[np.float32], *, where: str) -> None:
    if not np.isfinite(actions).all():
        raise RefusedError(Reason.NON_FINITE, f"{where} has an action that is not finite")
    if ((actions < 0) | (actions > 1)).any():
        raise RefusedError(
            Reason.MALFORMED,
            f"{where} has actions of {float(actions.min())} to {float(actions.max())}, outside [0, 1]",
        )


def _check_kept_mass(kept_mass: NDArray[np.float32], *, where: str) -> None:
    if not np.isfinite(kept_mass).all():
        raise RefusedError(Reason.NON_FINITE, f"{where} has a kept mass that is not finite")
    if ((kept_mass <= 0) | (kept_mass > 1)).any():
        raise RefusedError(
            Reason.MALFORMED,
            f"{where} has kept masses of {float(kept_mass.min())} to {float(kept_mass.max())}, "
            "outside (0, 1]",
        )


def _check_ids(ids: NDArray[np.int32], vocabulary_size: int | None, *, where: str) -> None:
    if (ids < 0).any():
        raise RefusedError(Reason.MALFORMED, f"{where} has token id {int(ids.min())}, below 0")
    if vocabulary_size is not None and (ids >= vocabulary_size).any():
        raise RefusedError(
            Reason.MALFORMED,
            f"{where} has token id {int(ids.max())}, the vocabulary ends at {vocabulary_size - 1}",
        )
