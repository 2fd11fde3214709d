"""The steps that ``bench.learner`` compares: one model, one batch, three ways to go one step down.

    bare    what any step does at least, from tensors that lie ready: forward, full logits, log softmax,
            gather, a mean for a loss, backward, gradient clipping, AdamW. No objective, no metrics.
    ours    train_step.train_step, from groups to the step's outcome. `ours, grpo` has TRL's loss; the one
            with another objective's name is what the learner does where nothing is configured.
            `ours, padded` is `ours, grpo` with every completion a padded row.
    trl     GRPOTrainer.training_step of TRL, then clipping and AdamW as its loop does: trl_steps.py.

All start from the same float32 weights, with torch's fused AdamW, and take the same groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Qwen3ForCausalLM

from bench.shared.made_groups import made_group
from bench.shared.random_model import qwen3_config
from learner.config import LearnerConfig
from learner.model.model import Policy
from learner.step.train_step import train_step
from learner.step_settings import StepSettings
from node.values.groups.rollout import Completion, Finish, RolloutGroup
from node.values.groups.sampling_parameters import SamplingParameters

LEARNING_RATE: Final = 1e-6
"""Small: every step then is like the first, however many are timed."""

CLIP_NORM: Final = 1.0

_GRPO: Final = {"objective": "grpo", "kl_coefficient": 0.0}
"""Settings of TRL's loss."""

_DEFAULT: Final[str] = LearnerConfig.model_fields["objective"].default

OURS: Final[Mapping[str, Mapping[str, Any]]] = {
    "ours, grpo": _GRPO,
    f"ours, {_DEFAULT}": {"objective": _DEFAULT},
    "ours, padded": {**_GRPO, "packing": "none"},
}
"""Settings of the learner for each of our steps."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and a batch."""

    name: str
    vocabulary: int
    width: int
    layers: int
    groups: int
    group_size: int
    prompt_tokens: int
    completion_tokens: int
    rounds: int
    """How often each step is timed."""
    least_tokens: tuple[int, int] | None = None
    """Tokens of the shortest prompt and the shortest completion; None: all are as long as the longest."""

    @property
    def rows(self) -> int:
        return self.groups * self.group_size

    def draw_lengths(self, random: np.random.Generator) -> tuple[int, list[int]]:
        """Return a prompt's length and those of its completions, most of which are short."""
        prompt, completion = self.least_tokens or (self.prompt_tokens, self.completion_tokens)
        skewed = random.random(self.group_size) ** 3
        lengths = completion + (skewed * (self.completion_tokens + 1 - completion)).astype(int)
        return int(random.integers(prompt, self.prompt_tokens + 1)), lengths.tolist()


class Step(Protocol):
    """One optimizer step on the shape's batch, again and again."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def __call__(self) -> float:
        """Take the step; give the norm of its gradient before clipping."""
        ...


Maker = Callable[[Shape, list[RolloutGroup]], Step]


def step_makers(shape: Shape) -> Mapping[str, Maker]:
    """Return the steps that can be compared on a shape: TRL's where it is installed.

    Bare and TRL's take completions of one length alone.
    """
    ours: dict[str, Maker] = {name: partial(_our_step, settings) for name, settings in OURS.items()}
    if shape.least_tokens is not None:
        return ours
    own = {"bare": _bare_step, "bare, again": _bare_step, **ours}
    try:
        from bench.learner.trl_steps import TRL_STEPS
    except ImportError:
        return own
    return {**own, **TRL_STEPS}


def _bare_step(shape: Shape, groups: list[RolloutGroup]) -> Step:
    return Bare(make_model(shape), padded_ids(groups), prompt_tokens=shape.prompt_tokens)


def _our_step(settings: Mapping[str, Any], shape: Shape, groups: list[RolloutGroup]) -> Step:
    return Ours(Policy(make_model(shape)), groups, **settings)


def gradient_of(step: Step) -> Tensor:
    """Take the step; give the gradient its optimizer saw, all parameters one after the other."""
    seen: list[Tensor] = []

    def look(*_: object) -> None:
        seen.extend(p.grad.flatten().clone() for p in step.model.parameters() if p.grad is not None)

    handle = step.optimizer.register_step_pre_hook(look)
    try:
        step()
    finally:
        handle.remove()
    return torch.cat(seen)


def make_model(shape: Shape) -> Qwen3ForCausalLM:
    """Return the model that every step of a shape starts from."""
    torch.manual_seed(0)
    head_width = max(16, shape.width // 4)
    config = qwen3_config(shape.vocabulary, shape.width, 3 * shape.width, shape.layers, 4, 2, head_width)
    return Qwen3ForCausalLM(config)


def make_groups(shape: Shape) -> list[RolloutGroup]:
    """Return the groups of the batch: random tokens, with logprobs of a model that knows nothing, roughly."""
    random = np.random.default_rng(0)

    def tokens(count: int) -> NDArray[np.int32]:
        return random.integers(2, shape.vocabulary, count).astype(np.int32)

    def completion(length: int) -> Completion:
        logprob = random.normal(0, 0.05, length) - np.log(shape.vocabulary)
        return Completion(
            token_ids=tokens(length),
            behaviour_logprob=np.minimum(0, logprob).astype(np.float32),
            policy_version=np.zeros(length, np.int32),
            reward=random.random(),
            finish=Finish.END,
        )

    def group(number: int) -> RolloutGroup:
        prompt_tokens, lengths = shape.draw_lengths(random)
        return made_group(
            str(number),
            tokens(prompt_tokens),
            tuple(map(completion, lengths)),
            SamplingParameters(1.0, 1.0, 0, max_new_tokens=shape.completion_tokens),
            prompt_index=number,
        )

    return [group(number) for number in range(shape.groups)]


def completion_tokens(groups: Sequence[RolloutGroup]) -> int:
    """Return the tokens that a step learns from."""
    return sum(len(completion.token_ids) for group in groups for completion in group.completions)


def distinct_positions(groups: Sequence[RolloutGroup]) -> int:
    """Return how many positions differ in themselves or in what is before them, within a group."""
    after: dict[tuple[int, int], int] = {}
    for number, group in enumerate(groups, start=1):
        for completion in group.completions:
            place = -number
            for token in (*group.prompt_token_ids, *completion.token_ids[:-1]):
                place = after.setdefault((place, int(token)), len(after))
    return len(after)


def positions_read(step: Step) -> int:
    """Take a step and return how many positions the model's layers see in it, padding included."""
    seen = 0

    def look(_module: object, _inputs: object, output: Tensor) -> None:
        nonlocal seen
        seen += output.shape[:-1].numel()

    (embedding,) = (part for part in step.model.modules() if isinstance(part, torch.nn.Embedding))
    handle = embedding.register_forward_hook(look)
    try:
        step()
    finally:
        handle.remove()
    return seen


def padded_ids(groups: list[RolloutGroup]) -> Tensor:
    """Return [rows, prompt and completion], int64, of rows that are all as long."""
    return torch.tensor(
        np.stack([np.concatenate([g.prompt_token_ids, c.token_ids]) for g in groups for c in g.completions])
    ).long()


def gathered_logprob(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Return [rows, length - 1]: the logprob of every token but the first, from all logits at once."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)


class Bare:
    """See this module."""

    def __init__(
        self,
        model: torch.nn.Module,
        ids: Tensor,
        *,
        prompt_tokens: int,
        rows: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Take ``ids``, [rows, prompt and completion], in micro-batches of ``rows``.

        Products are in ``dtype``: float32 or bfloat16.
        """
        self.model: torch.nn.Module = model.train(False)
        self.optimizer = make_optimizer(model)
        self._parts = torch.split(ids, rows or len(ids))
        self._first, self._tokens = prompt_tokens - 1, len(ids) * (ids.shape[1] - prompt_tokens)
        self._dtype = dtype

    def __call__(self) -> float:
        for part in self._parts:
            is_narrow = self._dtype != torch.float32
            with torch.autocast(part.device.type, torch.bfloat16, enabled=is_narrow):
                logprob = gathered_logprob(self.model, part)
            (-logprob[:, self._first :].sum() / self._tokens).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)


class Ours:
    """The learner's step."""

    def __init__(self, policy: Policy, groups: list[RolloutGroup], **settings: Any) -> None:
        """Take a step with these settings of the learner."""
        self._policy, self._groups = policy, groups
        self.model: torch.nn.Module = policy.model
        self.optimizer = make_optimizer(self.model)
        config = LearnerConfig(
            model_dir=Path(), learning_rate=LEARNING_RATE, gradient_clip_norm=CLIP_NORM, **settings
        )
        self._settings = StepSettings.of(config)

    def __call__(self) -> float:
        outcome = train_step(self._policy, self.optimizer, self._groups, version=0, settings=self._settings)
        assert outcome.is_applied, outcome
        return outcome.numbers.gradient_norm
