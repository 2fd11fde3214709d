"""Leases, completions and groups as values."""

import enum
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from node.values import limits
from node.values.groups.sampling_parameters import SamplingParameters

Scalar = TypeVar("Scalar", bound=np.generic)


class Finish(enum.StrEnum):
    """Why a completion ended."""

    END = "end"
    """The model's end token, which is the completion's last."""
    STOP = "stop"
    """A stop string. Its tokens are part of the completion, since the policy drew them. The graded text ends
    before it."""
    LENGTH = "length"
    """The token limit."""


class LeasePurpose(enum.StrEnum):
    """The use of a lease's group."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    """A held-out prompt: the coordinator records its rewards, and the learner never sees the group."""


@dataclass(frozen=True, slots=True)
class PromptLease:
    """The right and duty to sample one prompt once; ``lease_id`` becomes the group id."""

    lease_id: str
    task: str
    prompt_index: int
    group_size: int
    sampling: SamplingParameters
    ttl_s: float
    purpose: LeasePurpose = LeasePurpose.TRAINING
    row: bytes = b""
    """The prompt's row of the run's data, a JSON object; empty: the run has no data."""
    task_digest: bytes = b""
    """Digest of the task's name and options, by which the prompt is made and graded."""
    policy_version: int | None = None
    """The version that has to draw every token; None: any that is not too old."""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The answer to a request for leases."""

    leases: tuple[PromptLease, ...]
    retry_after_s: float
    """When to ask again; 0 where as many were granted as were asked for."""
    waits_for: str
    """The bound that was reached; empty: none."""
    evaluate_from: int | None = None
    """The version under evaluation, or the least that the next evaluation may be of, that the sampler has not
    come to; None: go on."""
    is_held_out_left: bool = False
    """Whether held-out prompts of the sampler's version are left that it may be asked, though not now."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One completion, n >= 1 tokens, including the end token or the stop string that ended it.

    An engine draws one turn; a completion of several holds what the task replied between them.
    """

    token_ids: NDArray[np.int32]
    """[n]"""
    behaviour_logprob: NDArray[np.float32]
    """[n], nats, of what each token was drawn from: after temperature and truncation, renormalised."""
    policy_version: NDArray[np.int32]
    """[n], the version that drew each token; never decreases within a completion."""
    finish: Finish
    kept_mass: NDArray[np.float32] | None = None
    """[n], in (0, 1]: share of the whole softmax, after temperature, of the tokens that min-p, top-k and
    top-p kept at each draw. None without truncation, or where the engine does not know it."""
    is_drawn: NDArray[np.bool_] | None = None
    """[n], False for the tokens of replies, which the policy read and did not write: each has logprob 0, kept
    mass 1 and the version of the token before it. None: all were drawn."""
    reward: float = math.nan
    """NaN until it is graded: by its sampler, by an engine that computes it, or, where the run says so, by a
    verifier. It stays NaN where the grader abstained; then the learner leaves the completion out."""
    actions: NDArray[np.float32] | None = None
    """[n], in [0, 1]: real actions, whose logprobs are log-densities; ``token_ids`` then count them from 0.
    None: the tokens are the actions."""

    @property
    def drawn(self) -> NDArray[np.bool_]:
        """[n], whether the policy drew each token."""
        return np.ones(len(self.token_ids), np.bool_) if self.is_drawn is None else self.is_drawn

    def of_drawn(self, column: NDArray[Scalar]) -> NDArray[Scalar]:
        """Return the entries of a column, [n], that are of tokens the policy drew."""
        return column if self.is_drawn is None else column[self.is_drawn]

    @property
    def drawn_tokens(self) -> int:
        """How many tokens the policy drew."""
        return len(self.token_ids) if self.is_drawn is None else int(self.is_drawn.sum())

    @property
    def has_reward(self) -> bool:
        """Whether it is graded, and its grader did not abstain."""
        return not math.isnan(self.reward)

    @property
    def is_finished(self) -> bool:
        """Whether it ended by itself rather than at the token limit."""
        return self.finish is not Finish.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTerms:
    """A group's header: everything besides its columns."""

    run_id: str
    group_id: str
    layout_digest: bytes
    tokenizer_digest: bytes
    task: str
    prompt_index: int
    sampling: SamplingParameters
    sampling_started_at_s: float
    sampling_finished_at_s: float
    graded_at_s: float
    task_digest: bytes = b""
    """Digest of the task's name and options by which it was graded."""
    grader_digest: bytes = b""
    """Digest of the code that graded it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeader(GroupTerms):
    """All that a hub reads of a group. Who decodes the columns checks that they agree with it."""

    completions: int
    prompt_tokens: int
    longest_completion: int
    """Tokens."""
    tokens: int
    """Tokens of all completions, replies included."""
    oldest_version: int
    newest_version: int
    least_reward: float
    largest_reward: float


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """A group as its sampler encoded it, which the coordinator keeps and hands on as it came."""

    header: bytes
    columns: bytes
    group_id: str = ""
    """The one it is handed in under; the header has its own word for it."""
    sampler_id: str = ""
    """Who made it: whose connection it came over. Empty on the way to the coordinator."""
    spooled_at_s: float = 0.0
    """Unix seconds on the coordinator's clock; 0 before."""

    def made_by(self, sampler_id: str) -> "EncodedGroup":
        """Return it with the sampler that made it."""
        return EncodedGroup(self.header, self.columns, self.group_id, sampler_id)

    @property
    def parts(self) -> tuple[bytes, bytes]:
        """The bytes that are stored."""
        return self.header, self.columns

    @property
    def size_bytes(self) -> int:
        return len(self.header) + len(self.columns)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RolloutGroup(GroupTerms):
    """All completions of one prompt: the unit that is leased, sent, judged and trained on."""

    prompt_token_ids: NDArray[np.int32]
    completions: tuple[Completion, ...]
    metrics: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Name -> [completions]: what the grader measured besides the reward, finite, or NaN where it returned
    none."""
    sampler_id: str = ""
    """Who made it, as the coordinator says to the learner; empty before."""
    spooled_at_s: float = 0.0
    """Unix seconds on the coordinator's clock; 0 before."""
    source: EncodedGroup | None = None
    """The bytes that it came in, of which its arrays are views; None: it was made here. They have all of its
    completions, also those that ``without_abstained`` leaves out."""

    @property
    def header(self) -> GroupHeader:
        """The header that agrees with it."""
        rewards = [completion.reward for completion in self.completions if completion.has_reward]
        return GroupHeader(
            **{one.name: getattr(self, one.name) for one in fields(GroupTerms)},
            completions=len(self.completions),
            prompt_tokens=len(self.prompt_token_ids),
            longest_completion=max((len(c.token_ids) for c in self.completions), default=0),
            tokens=self.tokens,
            oldest_version=self.oldest_version,
            newest_version=self.newest_version,
            least_reward=float(np.float32(min(rewards, default=math.nan))),
            largest_reward=float(np.float32(max(rewards, default=math.nan))),
        )

    @property
    def oldest_version(self) -> int:
        """Oldest behaviour version of any token; staleness counts from it."""
        return min(
            (int(c.policy_version.min()) for c in self.completions if len(c.policy_version)), default=0
        )

    @property
    def newest_version(self) -> int:
        """Newest behaviour version of any token."""
        return max(
            (int(c.policy_version.max()) for c in self.completions if len(c.policy_version)), default=0
        )

    @property
    def is_graded(self) -> bool:
        """Whether any completion has a reward."""
        return any(completion.has_reward for completion in self.completions)

    @property
    def is_renormalised(self) -> bool:
        """Whether its logprobs are normalised over less than the vocabulary."""
        return self.sampling.is_truncated

    @property
    def reward_mean(self) -> float:
        """The mean over the completions that have a reward; NaN where none has."""
        rewards = [completion.reward for completion in self.completions if completion.has_reward]
        return float(np.mean(rewards)) if rewards else math.nan

    def without_abstained(self) -> "RolloutGroup":
        """Return the group with the completions that have a reward, which are those that can teach.

        Mean, deviation and expectations of the group are then over these alone.
        """
        kept = [number for number, one in enumerate(self.completions) if one.has_reward]
        if len(kept) == len(self.completions):
            return self
        return replace(
            self,
            completions=tuple(self.completions[number] for number in kept),
            metrics={name: values[kept] for name, values in self.metrics.items()},
        )

    @property
    def metric_means(self) -> dict[str, float]:
        """The mean of each metric over the completions that have it; absent where none has."""
        given = {name: values[~np.isnan(values)] for name, values in self.metrics.items()}
        return {name: float(values.mean(dtype=np.float64)) for name, values in given.items() if values.size}

    @property
    def tokens(self) -> int:
        """Completion tokens of the whole group, replies included."""
        return sum(len(c.token_ids) for c in self.completions)

    @property
    def drawn_tokens(self) -> int:
        """Tokens of the whole group that the policy drew."""
        return sum(c.drawn_tokens for c in self.completions)


def mean_metrics(groups: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the groups that have it, given ``metric_means`` of each.

    Names come from samplers: those that most groups have are kept, as many as one group may have.
    """
    means: defaultdict[str, list[float]] = defaultdict(list)
    for of_group in groups:
        for name, mean in of_group.items():
            means[name].append(mean)
    names = sorted(means, key=lambda name: (-len(means[name]), name))[: limits.GROUP_METRICS]
    return {name: fmean(means[name]) for name in sorted(names)}


def other_options(group: GroupTerms, task_digest: bytes) -> str:
    """Return how the options that a group was graded by differ from the run's; empty where they do not."""
    if group.task_digest == task_digest:
        return ""
    return (
        f"it was graded by task options {group.task_digest.hex() or 'without a digest'}, "
        f"the run's are {task_digest.hex()}, as the coordinator's configuration says"
    )
