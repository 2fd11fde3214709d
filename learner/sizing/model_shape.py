"""The sizes of a causal language model, from its config.json or from a size such as 8B; pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

FAMILIES: Final = (
    *("llama", "mistral", "granite", "phi3", "smollm3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
    *("olmo2", "mixtral", "qwen3_moe"),
)
"""Families whose parameters are counted exactly: a test holds them to transformers' own models."""

_TIED: Final = ("smollm3", "gemma", "gemma2", "gemma3_text")
"""Embedding and head are one tensor where config.json does not say."""
_FOUR_NORMS: Final = ("gemma2", "gemma3_text")
_NORMS_OF_A_HEAD: Final = ("qwen3", "qwen3_moe", "gemma3_text")
_EXPERTS: Final = {
    "mixtral": "intermediate_size",
    "qwen3_moe": "moe_intermediate_size",
}
"""The key of an expert's width."""


class UnknownModelError(ValueError):
    """The sizes of a model cannot be told; says why."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder of attention and gated feed-forward layers."""

    name: str
    layers: int
    width: int
    inner: int
    """Between the matrices of the feed-forward part; of a mixture, of all experts that a token passes."""
    heads: int
    kv_heads: int
    attention: int
    """Width of queries and keys together."""
    vocabulary: int
    is_tied: bool
    has_head_norms: bool
    layer_matrices: int
    """Elements of a layer that tensor parallelism divides."""
    layer_vectors: int
    """Elements that it does not."""
    active_matrices: int
    """Elements of matrices that a token is multiplied with."""

    @classmethod
    def of_config(cls, document: Mapping[str, Any], *, name: str) -> "ModelShape":
        """Read the sizes in a config.json.

        Raises:
            UnknownModelError: its family is not known, or a key is missing.
        """
        config = document.get("text_config", document)
        kind = config.get("model_type", "")
        if kind not in FAMILIES:
            raise UnknownModelError(f"models of type {kind!r} are not known here, only {', '.join(FAMILIES)}")
        inner_key = _EXPERTS.get(kind, "intermediate_size")
        try:
            width, heads, inner = (config[key] for key in ("hidden_size", "num_attention_heads", inner_key))
            layers, vocabulary = config["num_hidden_layers"], config["vocab_size"]
            experts, chosen = 0, 1
            if kind in _EXPERTS:
                experts = config.get("num_experts") or config["num_local_experts"]
                chosen = config["num_experts_per_tok"]
        except KeyError as error:
            raise UnknownModelError(f"config.json has no {error}") from error
        kv_heads = config.get("num_key_value_heads") or heads
        of_head = config.get("head_dim") or width // heads
        attention, products = of_head * (heads + kv_heads), 3 * width * inner
        shared = 2 * width * attention + width * experts
        vectors = width * (4 if kind in _FOUR_NORMS else 2)
        vectors += 2 * of_head * (kind in _NORMS_OF_A_HEAD) + attention * (kind == "olmo2")
        if kind == "qwen2" or config.get("attention_bias"):
            vectors += attention + of_head * kv_heads + width * (kind != "qwen2")
        if config.get("mlp_bias"):
            vectors += 2 * inner + width
        return cls(
            name=name,
            layers=layers,
            width=width,
            inner=inner * chosen,
            heads=heads,
            kv_heads=kv_heads,
            attention=attention,
            vocabulary=vocabulary,
            is_tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
            has_head_norms=kind in _NORMS_OF_A_HEAD,
            layer_matrices=shared + products * max(1, experts),
            layer_vectors=vectors,
            active_matrices=shared + products * chosen,
        )

    @classmethod
    def of_size(cls, text: str) -> "ModelShape":
        """Return the shape of a public model of about this size, with as many layers as make it this size.

        Raises:
            UnknownModelError: it is not a size.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([MBmb])", text)
        wanted = float(match[1]) * {"m": 1e6, "b": 1e9}[match[2].lower()] if match else 0.0
        if not 1e6 <= wanted <= 2e12:
            raise UnknownModelError("it is neither a directory nor a size from 1M to 2000B")
        near = min(_PUBLIC, key=lambda one: max(one.parameters / wanted, wanted / one.parameters))
        if abs(near.parameters / wanted - 1) <= 0.1:
            return replace(near, name=f"{text}, as {near.name}")
        layers = max(1, round((wanted - near.ends) / (near.layer_matrices + near.layer_vectors)))
        return replace(near, name=f"{text}, as {near.name} with {layers} layers", layers=layers)

    @property
    def keys(self) -> float:
        """Width of keys, and of values."""
        return self.attention * self.kv_heads / (self.heads + self.kv_heads)

    @property
    def embedding(self) -> int:
        """Elements of the embedding, and of the head."""
        return self.vocabulary * self.width

    @property
    def ends(self) -> int:
        """Parameters outside of the layers: embedding, last norm, head."""
        return self.embedding * (1 if self.is_tied else 2) + self.width

    @property
    def parameters(self) -> int:
        """Everything that is trained."""
        return self.layers * (self.layer_matrices + self.layer_vectors) + self.ends


def _public(name: str, kind: str, *sizes: int, is_tied: bool = False) -> ModelShape:
    keys = (
        *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "vocab_size"),
    )
    config = {"model_type": kind, "tie_word_embeddings": is_tied, **dict(zip(keys, sizes, strict=True))}
    return ModelShape.of_config(config, name=name)


_PUBLIC: Final = (
    _public("SmolLM2-135M", "llama", 30, 576, 1536, 9, 3, 64, 49152, is_tied=True),
    _public("Qwen3-0.6B", "qwen3", 28, 1024, 3072, 16, 8, 128, 151936, is_tied=True),
    _public("Qwen3-1.7B", "qwen3", 28, 2048, 6144, 16, 8, 128, 151936, is_tied=True),
    _public("Qwen3-4B", "qwen3", 36, 2560, 9728, 32, 8, 128, 151936, is_tied=True),
    _public("Qwen3-8B", "qwen3", 36, 4096, 12288, 32, 8, 128, 151936),
    _public("Qwen3-14B", "qwen3", 40, 5120, 17408, 40, 8, 128, 151936),
    _public("Qwen3-32B", "qwen3", 64, 5120, 25600, 64, 8, 128, 151936),
    _public("Llama-3.1-70B", "llama", 80, 8192, 28672, 64, 8, 128, 128256),
    _public("Llama-3.1-405B", "llama", 126, 16384, 53248, 128, 8, 128, 128256),
)
"""Shapes for a number of parameters, as in the models' own config.json."""
