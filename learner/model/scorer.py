"""Models whose one forward pass goes from rows to logprobs of actions; ``TokenScorer``: of tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from learner.model.logit_form import LogitForm, logit_form
from learner.model.micro_batches import MicroBatch, token_rows
from learner.model.pack import Pack
from learner.model.pack_attention import kernel_works
from learner.model.packed_families import adopt_packs
from learner.model.prefix_tree import PrefixTree
from learner.model.step_rows import PaddedRows, StepRows
from learner.model.token_logprob import VocabularySlice, token_logprob
from learner.step_settings import Packing
from node.values.groups.rollout import RolloutGroup

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
        self.logit_form: LogitForm | None = None
        """How logits come from the last hidden state and the head; None: the model makes them itself."""
        self.vocabulary: VocabularySlice | None = None
        """The part of the head that is here; None: all of it."""
        self.has_head = True
        """Whether the last layer and the head are here, and not on a later stage of a pipeline."""
        self.master_dtype: torch.dtype = next(self.model.parameters()).dtype
        self.slower: dict[str, str] = {}
        """Ways in which it is slower than others, for the log -> why."""
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
        return [len(row) for row in token_rows(groups)]

    def step_rows(self, groups: Sequence[RolloutGroup], *, packing: Packing) -> StepRows:
        """Return the rows of a step as they are to be cut into micro-batches."""
        return PaddedRows(self.row_tokens(groups))

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


class TokenScorer(Scorer):
    """A causal language model whose one forward pass goes from token ids to logprobs of tokens.

    Base model and head are used inside this forward alone, so that hooks on it see every parameter.
    """

    def __init__(
        self, model: PreTrainedModel, *, compute_dtype: torch.dtype | None, tried: PreTrainedModel | None
    ) -> None:
        """Wrap ``model``, which stays in evaluation mode.

        Args:
            tried: of the same family, where ``model`` has no values yet; None: it has.
        """
        super().__init__(model, compute_dtype=compute_dtype)
        self.logit_form = logit_form(model if tried is None else tried)
        if self.logit_form is None:
            self.slower["logits of whole micro-batches"] = "how this model makes them is not known"
        problem = adopt_packs(model, tried=tried)
        self.reads_packs = problem is None
        """Whether it computes the same for packs as for rows."""
        if problem is not None:
            self.slower["no packs for this model: it reads row by row"] = problem

    def step_rows(self, groups: Sequence[RolloutGroup], *, packing: Packing) -> StepRows:
        if packing == "prefixes" and self.reads_packs:
            return PrefixTree.of(token_rows(groups))
        return super().step_rows(groups, packing=packing)

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        target_ids: Tensor,
        temperature: Tensor,
        pack: Pack | None = None,
    ) -> Tensor:
        """Return log p(target | everything before it) under softmax(logits / temperature).

        Args:
            inputs: [rows, length], token ids, padded on the right: causal attention never looks there. Or
                [rows, length, width], hidden states of the stage before.
            positions: [targets], int64, of the flattened ``input_ids``: of the tokens before the targets.
            target_ids: [targets], those tokens.
            temperature: [targets], > 0, as the completions were sampled with.
            pack: what the one row of ``inputs`` is, which may be padded; None: rows.

        Returns:
            [targets], nats; carries the gradient. Without a head: hidden states for the next stage.
        """
        is_narrow = self.compute_dtype is not None
        given: dict[str, Any] = {"inputs_embeds" if inputs.is_floating_point() else "input_ids": inputs}
        if pack is not None:
            given |= pack.keywords(inputs.shape[1])
            kernel_works(inputs.device)  # tried here, if never before
        with torch.autocast(inputs.device.type, dtype=self.compute_dtype, enabled=is_narrow):
            if self.has_head and self.logit_form is None:
                logits = self.model(**given, use_cache=False).logits
                logits = logits.flatten(0, 1).index_select(0, positions)
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature[:, None]
                chosen: Tensor = logits.gather(-1, target_ids[:, None]).squeeze(-1)
                return chosen - torch.logsumexp(logits, dim=-1)
            hidden: Tensor = self.model.base_model(**given, use_cache=False).last_hidden_state
        if not self.has_head:
            return hidden.to(self.master_dtype).contiguous()
        assert self.logit_form is not None
        head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        weight, bias = head.weight, head.bias
        if self.vocabulary is not None:
            weight, bias = weight.to_local(), None if bias is None else bias.to_local()
        return token_logprob(
            hidden.flatten(0, 1).index_select(0, positions),
            weight,
            bias,
            target_ids=target_ids,
            temperature=temperature,
            form=self.logit_form,
            compute_dtype=self.compute_dtype,
            vocabulary=self.vocabulary,
        )
