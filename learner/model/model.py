"""The policy being trained: float32 masters, token logprobs, and the words that are published.

Learner logprobs come from the masters, samplers sample from what these are rounded to. The difference shows
in the KL gauge of a step whose groups are not stale.
"""

import functools
import logging
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from learner.config import Rematerialise
from learner.model.micro_batches import MicroBatch
from learner.model.rank_exchanges import ONE_RANK, Ranks
from learner.model.rematerialise import rematerialise_layers
from learner.model.scorer import Scorer, TokenScorer
from node.errors import StartupError
from node.kinds.registry import kind_of, kind_of_class
from node.weights.format.digests import Words
from node.weights.format.layout import Layout
from node.weights.format.model_files import StoredDtypes
from node.weights.format.model_tensors import canonical_tensors, names_in_files, tensor_specs

if TYPE_CHECKING:
    from learner.model.sliced_loading import EmptyModel

logger = logging.getLogger(__name__)

_ALL_BFLOAT16: Final = StoredDtypes()

Take = Callable[[MicroBatch, Tensor], None]
"""Takes the logprobs of a micro-batch's targets."""

Weigh = Callable[[MicroBatch, Tensor], Tensor]
"""Returns the gradient of a loss at them, [targets]."""


class Passes(Protocol):
    """Runner of micro-batches through a model."""

    def score(self, parts: Sequence[MicroBatch], take: Take) -> None:
        """Pass each micro-batch's logprobs to ``take``, without gradient."""
        ...

    def differentiate(self, parts: Sequence[MicroBatch], weigh: Weigh) -> None:
        """Pass each micro-batch's logprobs to ``weigh``, and add the gradient to the parameters'."""
        ...


class ScoringModel:
    """A model that is asked for logprobs of actions, whole or as one rank's part of it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compute_dtype: torch.dtype | None = None,
        ranks: Ranks = ONE_RANK,
        tried: PreTrainedModel | None = None,
    ) -> None:
        """Wrap ``model``, which nobody else may use from now on.

        Args:
            compute_dtype: of matrix products (autocast); None: that of the parameters.
            ranks: that share the model; each keeps its part.
            tried: see ``TokenScorer``.
        """
        self.model = model
        """In evaluation mode."""
        self.scorer: Scorer
        kind = kind_of_class(type(model).__name__)
        if ranks.is_shared and not kind.can_be_shared:
            raise StartupError(
                f"a policy of the kind {kind.name} is not shared out between ranks",
                fix="Leave dp_replicate, dp_shard, tp and pp at 1",
            )
        if kind.scorer is None:
            self.scorer = TokenScorer(model, compute_dtype=compute_dtype, tried=tried)
        else:
            self.scorer = pkgutil.resolve_name(kind.scorer)(model, compute_dtype=compute_dtype)
        self.ranks = ranks
        self._pipeline: Passes | None = None

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return self.ranks.device or next(self.model.parameters()).device

    @property
    def is_pipelined(self) -> bool:
        """Whether this is one stage of the model, which has logprobs on the last one alone."""
        return self._pipeline is not None

    def shard(self) -> None:
        """Keep this rank's part of the model."""
        self._pipeline = self.ranks.shard(self.scorer)

    def score(self, parts: Sequence[MicroBatch], take: Take) -> None:
        """Pass each micro-batch's logprobs to ``take``, without gradient; in a pipeline, at the end."""
        if self._pipeline is not None:
            self._pipeline.score(parts, take)
            return
        with torch.no_grad():
            for part in parts:
                take(part, self._logprobs_of(part))

    def differentiate(self, parts: Sequence[MicroBatch], weigh: Weigh) -> None:
        """Pass each micro-batch's logprobs to ``weigh``, and add the gradient to the parameters'."""
        if self._pipeline is not None:
            self._pipeline.differentiate(parts, weigh)
            return
        for part in parts:
            logprob = self._logprobs_of(part)
            logprob.backward(weigh(part, logprob))  # type: ignore[no-untyped-call]

    def differentiate_beside(self, parts: Sequence[MicroBatch], *, weight: Tensor | None) -> None:
        """Add the gradient of the loss beside the policy's, a mean over rows, times ``weight``; None: 1."""
        rows = sum(len(part.input_ids) for part in parts)
        for part in parts:
            if (loss := self.scorer.beside_loss(part)) is None:
                return
            (loss / rows if weight is None else weight * loss / rows).backward()  # type: ignore[no-untyped-call]

    def _logprobs_of(self, part: MicroBatch) -> Tensor:
        logprobs: Tensor = self.scorer(part.input_ids, *part.asked)
        return logprobs


class Policy(ScoringModel):
    """The model in training, with its canonical tensors."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stored: StoredDtypes = _ALL_BFLOAT16,
        compute_dtype: torch.dtype | None = None,
        rematerialise: Rematerialise = "none",
        ranks: Ranks = ONE_RANK,
        tried: PreTrainedModel | None = None,
    ) -> None:
        """Wrap ``model``, as ``ScoringModel`` does; the log says what makes it slow.

        Args:
            stored: dtypes that floats are published in.
            rematerialise: what of a layer is computed again for its backward pass, as in LearnerConfig.
        """
        super().__init__(model, compute_dtype=compute_dtype, ranks=ranks, tried=tried)
        for what, why in self.scorer.slower.items():
            logger.warning(what, extra={"family": model.config.get_text_config().model_type, "why": why})
        # The publisher reads them as they lie.
        state = model.state_dict(keep_vars=True)
        for tensor in state.values():
            if not tensor.is_contiguous():
                tensor.data = tensor.data.contiguous()
        names = canonical_tensors(state)
        self.layout = Layout.of(tensor_specs(state, stored))
        if rematerialise != "none":
            rematerialise_layers(model, rematerialise)
        if ranks.is_shared:
            self.shard()
            state = model.state_dict(keep_vars=True)
        self.tensors: dict[str, Tensor] = {name: state[name] for name in names if name in state}
        """Name -> parameter or buffer, sorted by the bytes of the name; those of this stage in a pipeline."""
        self.master_words = ranks.words(self.tensors, self.layout)
        self.vocabulary_size: int = model.config.get_text_config().vocab_size

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The trainable ones of ``tensors``."""
        return {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}

    @torch.no_grad()
    def local_parameters(self) -> list[Tensor]:
        """Return this rank's part of each of them; writing to it changes the parameter."""
        return [self.ranks.local(parameter) for parameter in self.parameters.values()]

    def snapshot(self, words: Words) -> None:
        """Write the whole version into ``words``: [layout.words], floats rounded to nearest even."""
        self.master_words.copy_frames(
            lambda number, frame: np.copyto(words[self.layout.frames[number].slice], frame)
        )

    def is_finite(self) -> bool:
        """Whether every parameter and buffer is a number."""
        with torch.no_grad(), self.ranks.failures_named():
            parts = [self.ranks.local(tensor) for tensor in self.tensors.values()]
            # One copy to the host for all tensors.
            return self.ranks.all_true(bool(torch.stack([part.isfinite().all() for part in parts]).all()))


def load_policy(
    model_dir: Path,
    *,
    device: str,
    compute_dtype: torch.dtype | None = None,
    rematerialise: Rematerialise = "none",
    ranks: Ranks = ONE_RANK,
) -> Policy:
    """Load a model directory as float32 masters; the other arguments are those of ``Policy``.

    Raises:
        StartupError: it is not a model of a known kind in safetensors, or the device cannot hold it.
    """
    with model_errors_explained(model_dir, device=device), ranks.failures_named():
        empty = _empty_model(model_dir) if ranks.is_shared else None
        model = _load(model_dir) if empty is None else empty.model
        if empty is None:
            torch.nn.Module.to(model, torch.device(device))
        parts = names_in_files(model.state_dict(), functools.partial(revert_weight_conversion, model))
        policy = Policy(
            model,
            stored=StoredDtypes.of(model_dir).of_parts(parts),
            compute_dtype=compute_dtype,
            rematerialise=rematerialise,
            ranks=ranks,
            tried=None if empty is None else empty.small,
        )
        if empty is not None:
            empty.fill(policy.tensors, model_dir)
        return policy


def load_reference(
    model_dir: Path, *, device: str, compute_dtype: torch.dtype | None, ranks: Ranks = ONE_RANK
) -> ScoringModel:
    """Load a model directory to be compared with; nothing of it is trained.

    What a policy of the same directory casts for every product is stored cast: logprobs are bit for bit the
    policy's, in half of the memory where ``compute_dtype`` is bfloat16.

    Raises:
        StartupError: as ``load_policy``.
    """
    with model_errors_explained(model_dir, device=device), ranks.failures_named():
        empty = _empty_model(model_dir) if ranks.is_shared else None
        model = _load(model_dir) if empty is None else empty.model
        model.requires_grad_(False)
        tried = None if empty is None else empty.small
        scoring = ScoringModel(model, compute_dtype=compute_dtype, ranks=ranks, tried=tried)
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        for layer in model.modules():
            # The head may share its weight with the embedding, which no product casts.
            if isinstance(layer, torch.nn.Linear) and layer is not head and compute_dtype is not None:
                layer.to(compute_dtype)
        if empty is None:
            torch.nn.Module.to(model, torch.device(device))
        if ranks.is_shared:
            scoring.shard()
        if empty is not None:
            state = model.state_dict(keep_vars=True)
            empty.fill({name: state[name] for name in empty.names if name in state}, model_dir)
        return scoring


def _empty_model(model_dir: Path) -> "EmptyModel | None":
    from learner.model.sliced_loading import EmptyModel  # and with it much of torch.distributed

    return EmptyModel.of(model_dir)


def _load(model_dir: Path) -> PreTrainedModel:
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model_class = pkgutil.resolve_name(kind_of(model_dir).model_class)
    model: PreTrainedModel = model_class.from_pretrained(
        model_dir,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,  # no code of a model directory is run
    )
    return model


@contextmanager
def model_errors_explained(model_dir: Path, *, device: str) -> Iterator[None]:
    """Raise what loading a model directory fails with as a StartupError that says what it needs."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise StartupError(
            f"model_dir {model_dir} could not be loaded on {device}: {error}",
            fix="learner.model_dir needs config.json and model.safetensors, as transformers saves them",
        ) from error
