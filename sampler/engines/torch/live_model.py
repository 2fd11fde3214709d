"""A transformers model that computes with words that can be replaced."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from node.errors import StartupError
from node.weights.format.dtypes import BFLOAT16
from node.weights.format.layout import Layout
from node.weights.format.model_files import StoredDtypes
from node.weights.format.model_tensors import canonical_tensors, names_in_files, tensor_specs
from sampler.engines.engine import EngineSettings
from sampler.engines.text.model_tokenizer import ModelTokenizer
from sampler.engines.words.torch_words import LiveTensors, aliases


@dataclass(frozen=True, slots=True, eq=False)
class LiveModel:
    """The base model of a directory, rounded to the dtypes of its files, as version 0."""

    model: transformers.PreTrainedModel
    """In evaluation mode, without gradients."""
    tokenizer: ModelTokenizer
    generator: torch.Generator
    """Random numbers of the device."""
    layout: Layout
    weights: LiveTensors

    @classmethod
    def of(
        cls, auto_class: Any, settings: EngineSettings, *, compute_dtype: torch.dtype | None = None
    ) -> "LiveModel":
        """Load a model as an engine's settings say; ``compute_dtype`` in place of theirs."""
        return cls.load(
            auto_class,
            settings.model_dir,
            device=settings.device,
            compute_dtype=compute_dtype or dtype_of(settings),
            threads=settings.threads,
            seed=settings.seed,
        )

    @classmethod
    def load(
        cls,
        auto_class: Any,
        model_dir: Path,
        *,
        device: str,
        compute_dtype: torch.dtype,
        threads: int,
        seed: int | None,
    ) -> "LiveModel":
        """Load a model by one of transformers' Auto classes.

        Args:
            model_dir: Holds safetensors weights and a fast tokenizer.
            compute_dtype: bfloat16 or float32; float32 holds published floats exactly.
            threads: For tensor work of the whole process; 0 leaves the choice to torch.
        Raises:
            StartupError: the directory holds no such model, or this machine lacks the device.
        """
        if threads:
            torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            tokenizer = ModelTokenizer(model_dir)
            stored = StoredDtypes.of(model_dir)
            model = _load(auto_class, model_dir, compute_dtype)
            model.to(device)  # type: ignore[arg-type]  # transformers' wrapper hides the signature
            generator = torch.Generator(device)
        except (OSError, ValueError, RuntimeError) as error:
            raise StartupError(
                f"the model in {model_dir} does not load on {device}: {error}",
                fix="Set sampler.model_dir to a model saved as safetensors, sampler.device to a device here",
            ) from error
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        model.requires_grad_(False).train(False)
        same, state = aliases(model), model.state_dict()
        tensors = {name: same[tensor.data_ptr()] for name, tensor in canonical_tensors(state).items()}
        parts = names_in_files(state, partial(revert_weight_conversion, model))
        layout = Layout.of(tensor_specs(state, stored.of_parts(parts)))
        del state
        weights = LiveTensors(
            tensors,
            layout=layout,
            dtype=compute_dtype,
            device=torch.device(device),
            exact={} if compute_dtype is torch.float32 else _exact(auto_class, model_dir, layout),
        )
        return cls(model, tokenizer, generator, layout, weights)


def dtype_of(settings: EngineSettings) -> torch.dtype:
    """Return the dtype that an engine computes in."""
    return torch.float32 if settings.compute_dtype == "float32" else torch.bfloat16


def _exact(auto_class: Any, model_dir: Path, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors that bfloat16 does not hold exactly; the model is read again if there are any."""
    names = {span.name for span in layout.tensors if span.dtype.is_floating and span.dtype is not BFLOAT16}
    if not names:
        return {}
    state = canonical_tensors(_load(auto_class, model_dir, torch.float32).state_dict())
    return {name: tensor for name, tensor in state.items() if name in names}


def _load(auto_class: Any, model_dir: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    model: transformers.PreTrainedModel = auto_class.from_pretrained(
        model_dir, local_files_only=True, use_safetensors=True, dtype=dtype, trust_remote_code=False
    )
    return model
