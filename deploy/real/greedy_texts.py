"""What a model directory answers greedily: by the samplers' torch engine, and by transformers alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from node.rollout import SamplingParameters
from sampler.config import SamplerConfig
from sampler.engines.engine import GenerationRequest
from sampler.engines.engine_registry import load_engine
from sampler.tasks.task import Message

Prompt: TypeAlias = str | Sequence[Message]


def engine_texts(model_dir: Path, prompts: Sequence[Prompt], sampling: SamplingParameters) -> list[str]:
    """Return the torch engine's texts, all prompts in one batch, computed in float32 on one thread.

    Args:
        model_dir: The model.
        prompts: Texts, or messages for its chat template.
        sampling: Of the most likely token each time: ``top_k`` is 1.
    """
    settings = SamplerConfig(model_dir=model_dir, engine="torch", threads=1, seed=0)
    engine = load_engine("torch", settings)
    texts: dict[str, str] = {}
    try:
        for number, prompt in enumerate(prompts):
            engine.add(GenerationRequest(str(number), engine.encode(prompt), 1, sampling))
        while engine.running:
            for request in engine.step():
                texts[request.request_id] = engine.decode(request.completions[0].token_ids)
    finally:
        engine.close()
    return [texts[str(number)] for number in range(len(prompts))]


def transformers_texts(
    model_dir: Path, prompts: Sequence[Prompt], *, max_new_tokens: int, stop: Sequence[str]
) -> list[str]:
    """Return the texts of transformers' own ``generate``, one prompt at a time, as above."""
    torch.set_num_threads(1)  # two that wait for each other are slow on busy cores
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    texts = []
    for prompt in prompts:
        inputs: Any = (
            tokenizer(prompt, return_tensors="pt")
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(
                [dict(message) for message in prompt],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
        )
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=max_new_tokens,
            **({"stop_strings": list(stop), "tokenizer": tokenizer} if stop else {}),
        )
        texts.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts
