"""A model whose values are read after it was sharded, each rank reading its own part of the files.

    config.json --> model without values --> sharded --> values of the shards, from the safetensors files

Memory that nothing was written to costs nothing, so a rank's memory is that of its shards. Where names in the
files are not those of the model (experts that transformers joins, for example), there is no such way.
"""

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from learner.masters.tensor_files import load_tensors
from node.kinds.registry import CAUSAL_LM, kind_of
from node.weights.format.layout import Layout
from node.weights.format.model_files import StoredDtypes
from node.weights.format.model_tensors import canonical_tensors, names_in_files, tensor_specs

_PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True, eq=False)
class EmptyModel:
    """A model without values."""

    model: PreTrainedModel
    small: PreTrainedModel
    """One layer and a few tokens of the same family, with values, to be tried."""
    names: Mapping[str, str]
    """Canonical name of a tensor -> its name in the files."""
    canonical: Mapping[str, str]
    """Every name in the files that is of the model -> canonical name. Tied tensors may have several."""
    layout: Layout
    """As ``Policy`` has it."""

    @classmethod
    def of(cls, model_dir: Path) -> "EmptyModel | None":
        """Return the model of a directory; None: it is not a language model, or cannot be read in parts.

        Raises:
            OSError, ValueError: as transformers, where it cannot make the model.
        """
        if kind_of(model_dir) is not CAUSAL_LM:
            return None
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        small = small_model(config)
        with no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=torch.float32, trust_remote_code=False
            )
        model.tie_weights()
        state = model.state_dict()
        parts = names_in_files(state, functools.partial(revert_weight_conversion, model))
        stored = StoredDtypes.of(model_dir)
        of_storage = {tensor.data_ptr(): name for name, tensor in canonical_tensors(state).items()}
        canonical = {name: of_storage[state[name].data_ptr()] for name in stored.by_name if name in state}
        names = {name: in_file for in_file, name in canonical.items()}
        is_renamed = any(part != name for part, name in parts.items())
        if small is None or is_renamed or names.keys() != set(of_storage.values()):
            return None
        return cls(model, small, names, canonical, Layout.of(tensor_specs(state, stored)))

    def fill(self, tensors: Mapping[str, Tensor], model_dir: Path) -> None:
        """Read the values of tensors by their canonical names, or of this rank's part of each.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file has another shape than the model.
        """
        load_tensors(model_dir, {self.names[name]: tensor.detach() for name, tensor in tensors.items()})


def small_model(config: PretrainedConfig, *, layers: int = 1) -> PreTrainedModel | None:
    """Return some layers of a family, with values so loud that what bends its logits shows; None: cannot."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers, text.vocab_size = layers, _PROBE_TOKENS
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    try:
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            small, dtype=torch.float32, trust_remote_code=False
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=random)
    model.train(False)
    return model
