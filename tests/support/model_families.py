"""Small random models of many families, made in a directory."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from support.tiny_model import VOCABULARY_SIZE, make_tiny_model

ENDS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
USUAL = ENDS | {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,  # vLLM's heads have 32 numbers or more on a CPU
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": USUAL
    | {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "Mistral": USUAL | {"sliding_window": 8},
    "Gemma3Text": USUAL | {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 16},
    "Phi3": USUAL,
    "Granite": USUAL | {"logits_scaling": 4.0, "residual_multiplier": 0.5},
    "SmolLM3": USUAL | {"no_rope_layers": [1, 0]},
    "Qwen3Moe": USUAL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Mixtral": USUAL | {"num_local_experts": 4},
    # vLLM's kernel for a CPU pads 48 to a multiple of 32.
    "Olmoe": USUAL | {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48},
    "Qwen2Moe": USUAL
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"shared_expert_intermediate_size": 64},
    # The first layer has no experts, and the router a bias.
    "Glm4Moe": USUAL
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 32},
    "GPT2": ENDS
    | {"vocab_size": VOCABULARY_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    | {"initializer_range": 0.2},
}


def make_model(directory: Path, family: str, settings: dict[str, Any]) -> Path:
    """Save a random bf16 model of a family, with the tiny one's tokenizer."""
    make_tiny_model(directory)
    config = getattr(transformers, f"{family}Config")(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.bfloat16().save_pretrained(directory)
    return directory
