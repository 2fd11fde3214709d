"""A model whose one forward pass goes from rows to logprobs of actions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from learner.training.micro_batches import MicroBatch, row_lengths
from learner.training.token_logprob import VocabularySlice
from node.rollout import RolloutGroup

UNBOUNDED: Final = 1 << 30
"""Context of a model that does not bound it (convolutions, recurrences)."""


class Scorer(torch.nn.Module, ABC):
    """A model of some kind; see ``node.kinds.registry``."""

    def __init__(self, model: PreTrainedModel, *, compute_dtype: torch.dtype | None) -> None:
        """Wrap ``model``, which stays in evaluation mode: dropout would make it another policy."""
        super().__init__()
        self.model = model
        self.train(False)
        self.compute_dtype = compute_dtype
        self.has_plain_head = False
        """Whether logits are the output embeddings times the last hidden state, and nothing else."""
        self.vocabulary: VocabularySlice | None = None
        """The part of the head that is here; None: all of it."""
        self.has_head = True
        """Whether the last layer and the head are here, and not on a later stage of a pipeline."""
        self.master_dtype: torch.dtype = next(self.model.parameters()).dtype
        text = model.config.get_text_config()
        self.context_tokens: int = getattr(text, "max_position_embeddings", UNBOUNDED)
        """Longest prompt and completion together."""

    def objection(self, group: RolloutGroup) -> str | None:
        """Return why no policy of this kind can have made a group, which is well-formed; None: one can."""
        if any(completion.actions is not None for completion in group.completions):
            return "it has real actions, and the actions of this run's policy are tokens"
        return None

    def row_tokens(self, groups: Sequence[RolloutGroup]) -> list[int]:
        """Return how many tokens the model reads for each row: what ``micro_batch_tokens`` is a bound of."""
        return row_lengths(groups)

    def beside_loss(self, part: MicroBatch) -> Tensor | None:
        """Return the loss of what is trained beside the policy, summed over rows; None: there is nothing."""
        return None

    def step_taken(self, parts: Sequence[MicroBatch]) -> None:
        """Follow the rows of a step that was taken, in buffers that no gradient moves."""
        return

    @abstractmethod
    def forward(self, inputs: Tensor, positions: Tensor, target_ids: Tensor, temperature: Tensor) -> Tensor:
        """Return log p(action | everything before it), of scores divided by the temperature.

        Args:
            inputs: [rows, length], ids, padded on the right: nothing ever looks there.
            positions: [targets], int64, of the flattened ``inputs``: of what precedes the actions.
            target_ids: [targets], those actions, row after row; real ones are floating.
            temperature: [targets], > 0, as the completions were sampled with.

        Returns:
            [targets], nats; carries the gradient.
        """
