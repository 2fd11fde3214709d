"""TRL's GRPO step on the batch of ``bench.learner``. Needs `pip install heterorl-node[bench]`.

What is driven is the trainer itself: ``GRPOTrainer.training_step`` (per-token logprobs and entropies by its
fused head, loss, backward, metrics), then ``clip_grad_norm_`` and the optimizer as ``Trainer`` calls them.
Left out, because rollouts come from elsewhere here as they do for the learner: generation, scoring and the
data loader. The batch goes in where ``_prepare_inputs`` would have given it. All in float32, as the others;
TRL's default is bfloat16.

    trl                 the recorded logprobs serve as those of the old policy: one forward pass. The least
                        that TRL can do, and nobody's setting: it never takes logprobs of an engine for these
    trl, external       what TRL does where another engine samples (``use_vllm``): a forward pass of its own
                        makes the old policy's logprobs again, whatever came with the rollouts
    trl, as it comes    likewise with activation checkpointing, which is TRL's default: less memory, and
                        layers run forward twice

Entropies are made in all of them and cannot be switched off.
"""

import tempfile
import warnings
from functools import partial
from typing import Any, Final

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from bench.learner.steps import CLIP_NORM, Shape, make_model, make_optimizer, padded_ids
from learner.objective.formulas.advantage import standardised_advantage
from node.values.groups.rollout import RolloutGroup


class _Trainer(GRPOTrainer):
    """Takes batches as they are."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return generation_batch


class Trl:
    """See this module."""

    def __init__(
        self, shape: Shape, groups: list[RolloutGroup], *, recomputes: bool, checkpoints: bool
    ) -> None:
        self._recomputes = recomputes
        made = make_model(shape)
        self.model: torch.nn.Module = made
        self._trainer = _trainer(shape, made)
        if checkpoints:  # as ``Trainer.train`` does when it begins
            made.activation_checkpointing_enable()
        # The trainer has changed the model's forward pass by now; the optimizer is made as the others' are.
        self.optimizer = make_optimizer(self.model)
        self._inputs = _inputs(shape, groups)

    def __call__(self) -> float:
        inputs = dict(self._inputs)
        if self._recomputes:
            inputs["old_per_token_logps"] = self._old_logprobs()
        self._trainer.training_step(self.model, inputs, None)
        norm = self._trainer.accelerator.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.model.zero_grad()
        return float(norm)

    def _old_logprobs(self) -> Tensor:
        prompts, completions = self._inputs["prompt_ids"], self._inputs["completion_ids"]
        ids = torch.cat([prompts, completions], dim=1)
        with torch.no_grad():
            logprobs: Tensor = self._trainer._get_per_token_logps_and_entropies(
                self.model, ids, torch.ones_like(ids), completions.shape[1], batch_size=len(ids)
            )[0]
        return logprobs


TRL_STEPS: Final = {
    "trl": partial(Trl, recomputes=False, checkpoints=False),
    "trl, external": partial(Trl, recomputes=True, checkpoints=False),
    "trl, as it comes": partial(Trl, recomputes=True, checkpoints=True),
}


def _inputs(shape: Shape, groups: list[RolloutGroup]) -> dict[str, Tensor]:
    ids = padded_ids(groups)
    completions = [completion for group in groups for completion in group.completions]
    prompt_ids, completion_ids = ids[:, : shape.prompt_tokens], ids[:, shape.prompt_tokens :]
    advantages = [
        standardised_advantage(torch.tensor([c.reward for c in group.completions], dtype=torch.float64))
        for group in groups
    ]
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": torch.ones_like(completion_ids),
        "advantages": torch.cat(advantages).float(),
        "old_per_token_logps": torch.stack([torch.from_numpy(c.behaviour_logprob) for c in completions]),
        "num_items_in_batch": torch.tensor(float(completion_ids.numel())),
    }


def _trainer(shape: Shape, model: torch.nn.Module) -> GRPOTrainer:
    vocabulary = {"<pad>": 0, "<end>": 1, **{str(n): n for n in range(2, shape.vocabulary)}}
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<end>",
    )
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=shape.rows,
            num_generations=shape.group_size,
            max_completion_length=shape.completion_tokens,
            loss_type="grpo",
            beta=0.0,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
        )
        trainer = _Trainer(
            model=model,
            args=config,
            reward_funcs=_no_reward,
            train_dataset=Dataset.from_dict({"prompt": ["2"] * shape.rows}),
            processing_class=tokenizer,
        )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def _no_reward(completions: list[str], **_: object) -> list[float]:
    return [0.0] * len(completions)
