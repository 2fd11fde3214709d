"""The steps that ``bench.learner`` compares: one model, one batch, three ways to go one step down.

    bare    what any step does at least, from tensors that lie ready: forward, full logits, log softmax,
            gather, a mean for a loss, backward, gradient clipping, AdamW. No objective, no metrics.
    ours    train_step.train_step, from groups to the step's outcome. `ours, grpo` has TRL's loss;
            the other one is what the learner does where nothing is configured.
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
from transformers import Qwen3Config, Qwen3ForCausalLM

from learner.config import LearnerConfig
from learner.model.model import Policy
from learner.step.train_step import train_step
from learner.step_settings import StepSettings
from node.values.groups.rollout import Completion, Finish, RolloutGroup
from node.values.groups.sampling_parameters import SamplingParameters

LEARNING_RATE: Final = 1e-6
"""Small: every step then is like the first, however many are timed."""

CLIP_NORM: Final = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and a batch. Every completion is of full length: nothing is saved by skipping padding."""

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

    @property
    def rows(self) -> int:
        return self.groups * self.group_size


class Step(Protocol):
    """One optimizer step on the shape's batch, again and again."""

    model: Qwen3ForCausalLM
    optimizer: torch.optim.Optimizer

    def __call__(self) -> float:
        """Take the step; give the norm of its gradient before clipping."""
        ...


def step_makers() -> Mapping[str, Callable[[Shape, list[RolloutGroup]], Step]]:
    """Return the steps that can be compared here: TRL's where it is installed."""
    fields = LearnerConfig.model_fields
    default, kl_coefficient = fields["objective"].default, fields["kl_coefficient"].default
    own: dict[str, Callable[[Shape, list[RolloutGroup]], Step]] = {
        "bare": Bare,
        "bare, again": Bare,
        "ours, grpo": partial(Ours, objective="grpo", kl_coefficient=0.0),
        f"ours, {default}": partial(Ours, objective=default, kl_coefficient=kl_coefficient),
    }
    try:
        from bench.learner.trl_steps import TRL_STEPS
    except ImportError:
        return own
    return {**own, **TRL_STEPS}


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
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=3 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=max(16, shape.width // 4),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def make_groups(shape: Shape) -> list[RolloutGroup]:
    """Return the groups of the batch: random tokens, behaviour logprobs 0.05 nats around the model's own."""
    random, model = np.random.default_rng(0), make_model(shape)
    prompts = random.integers(2, shape.vocabulary, (shape.groups, shape.prompt_tokens)).astype(np.int32)
    tokens = random.integers(2, shape.vocabulary, (shape.rows, shape.completion_tokens)).astype(np.int32)
    noise = random.normal(0, 0.05, tokens.shape)
    rewards = random.random(shape.rows)
    groups = []
    for number, prompt in enumerate(prompts):
        completions = []
        for row in range(number * shape.group_size, (number + 1) * shape.group_size):
            ids = torch.tensor(np.concatenate([prompt, tokens[row]])).long()[None]
            with torch.no_grad():
                logprob = gathered_logprob(model, ids)[0, shape.prompt_tokens - 1 :].numpy()
            completions.append(made_completion(tokens[row], logprob + noise[row], reward=rewards[row]))
        groups.append(made_group(number, prompt, completions))
    return groups


def made_completion(
    tokens: NDArray[np.int32], logprob: NDArray[np.floating[Any]], *, reward: float
) -> Completion:
    """Return a completion of version 0; both are [tokens]."""
    return Completion(
        token_ids=tokens,
        behaviour_logprob=np.minimum(0, logprob).astype(np.float32),
        policy_version=np.zeros(len(tokens), np.int32),
        reward=float(reward),
        finish=Finish.END,
    )


def made_group(number: int, prompt: NDArray[np.int32], completions: Sequence[Completion]) -> RolloutGroup:
    """Return completions, all as long, as one group."""
    return RolloutGroup(
        run_id="bench",
        group_id=str(number),
        layout_digest=bytes(16),
        tokenizer_digest=bytes(16),
        task="bench",
        prompt_index=number,
        prompt_token_ids=prompt,
        completions=tuple(completions),
        sampling=SamplingParameters(1.0, 1.0, 0, max_new_tokens=len(completions[0].token_ids)),
        sampling_started_at_s=0.0,
        sampling_finished_at_s=0.0,
        graded_at_s=0.0,
    )


def padded_ids(groups: list[RolloutGroup]) -> Tensor:
    """Return [rows, prompt and completion], int64."""
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

    def __init__(self, shape: Shape, groups: list[RolloutGroup]) -> None:
        self._ids = padded_ids(groups)
        self._prompt_tokens = shape.prompt_tokens
        self.model = make_model(shape).train(False)
        self.optimizer = make_optimizer(self.model)

    def __call__(self) -> float:
        logprob = gathered_logprob(self.model, self._ids)
        (-logprob[:, self._prompt_tokens - 1 :].mean()).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)


class Ours:
    """The learner's step."""

    def __init__(
        self, shape: Shape, groups: list[RolloutGroup], *, objective: str, kl_coefficient: float
    ) -> None:
        self._groups = groups
        self.model = make_model(shape)
        self._policy = Policy(self.model)
        self.optimizer = make_optimizer(self.model)
        config = LearnerConfig(
            model_dir=Path(),
            learning_rate=LEARNING_RATE,
            objective=objective,
            kl_coefficient=kl_coefficient,
            gradient_clip_norm=CLIP_NORM,
        )
        self._settings = StepSettings.of(config)

    def __call__(self) -> float:
        outcome = train_step(self._policy, self.optimizer, self._groups, version=0, settings=self._settings)
        return outcome.numbers.gradient_norm
