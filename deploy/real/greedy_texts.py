"""Greedy answers of a model directory, by every library that can read it, each in a process of its own.

    questions.json --> python -m deploy.real.greedy_texts READER QUESTIONS ANSWERS --> answers.json

All compute in float32, in which the most likely token is hardly ever a matter of rounding.
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from node.kinds.registry import kind_of, model_config
from node.values.groups.sampling_parameters import SamplingParameters
from sampler.config import SamplerConfig
from sampler.engines.engine import GenerationRequest
from sampler.engines.engine_registry import load_engine
from sampler.tasks.task import Message

Prompt: TypeAlias = str | Sequence[Message]
"""A text, or messages for the model's chat template."""

Reader: TypeAlias = Callable[[Path, Sequence[Prompt], SamplingParameters], list[str]]
"""(model directory, prompts, sampling whose ``top_k`` is 1) -> texts."""

_VLLM_KV_CACHE_BYTES: Final = 1 << 28

_REWARD: Final = "{:.2f}"
"""The text of a completion that is a reward; rounded, since libraries add in another order."""


def transformers_texts(model_dir: Path, prompts: Sequence[Prompt], sampling: SamplingParameters) -> list[str]:
    """Return the texts of transformers' own ``generate``, one prompt at a time."""
    import torch  # the readers import what they need: no interpreter has it all
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if (own := _OWN_TEXTS.get(kind_of(model_dir).name)) is not None:
        return own(model_dir, prompts)
    torch.set_num_threads(1)  # two that wait for each other are slow on busy cores
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    stop = {"stop_strings": list(sampling.stop), "tokenizer": tokenizer} if sampling.stop else {}
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
            max_new_tokens=sampling.max_new_tokens,
            **stop,
        )
        texts.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def _rankings(model_dir: Path, prompts: Sequence[Prompt]) -> list[str]:
    """Return candidates' numbers by transformers' own scores, one pair at a time."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from node.kinds.ranking.values import read_text, separator_of

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        model_dir, dtype=torch.float32, trust_remote_code=False
    )
    separator, texts = separator_of(model_config(model_dir)), []
    for prompt in prompts:
        query_text, candidate_texts = read_text(prompt)
        query, *candidates = tokenizer([query_text, *candidate_texts], add_special_tokens=False).input_ids
        with torch.no_grad():
            scores = [float(model(torch.tensor([[*query, separator, *one]])).logits) for one in candidates]
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        texts.append(" ".join(map(str, order)))
    return texts


def _rewards_of_clean_images(model_dir: Path, prompts: Sequence[Prompt]) -> list[str]:
    """Return minus the cross-entropy of the classifier alone, one clean image at a time."""
    import torch

    from node.kinds.noise_mask.network import NoiseMaskClassifier, read_prompts

    classifier = NoiseMaskClassifier.from_pretrained(model_dir, dtype=torch.float32)
    texts = []
    for prompt in prompts:
        image, label = read_prompts(torch.tensor([[int(n) for n in str(prompt).split()]]), classifier.config)
        with torch.no_grad():
            logprobs = classifier(image).log_softmax(dim=1)
        texts.append(_REWARD.format(float(logprobs[0, int(label)])))
    return texts


_OWN_TEXTS: Final = {"ranking": _rankings, "noise_mask": _rewards_of_clean_images}
"""Kind of policy -> what transformers makes of it, where that is not a text."""


def vllm_texts(model_dir: Path, prompts: Sequence[Prompt], sampling: SamplingParameters) -> list[str]:
    """Return the texts of vLLM's own ``LLM``, all prompts in one batch."""
    # Read by vLLM when it is imported.
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from vllm import LLM, SamplingParams

    model = LLM(
        str(model_dir),
        dtype="float32",
        enforce_eager=True,
        max_model_len=-1,  # as many tokens as the cache holds
        kv_cache_memory_bytes=_VLLM_KV_CACHE_BYTES,
    )
    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=sampling.max_new_tokens,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
    )
    answer = model.generate if isinstance(prompts[0], str) else model.chat
    return [output.outputs[0].text for output in answer(list(prompts), parameters, use_tqdm=False)]


def engine_texts(
    model_dir: Path, prompts: Sequence[Prompt], sampling: SamplingParameters, *, engine: str
) -> list[str]:
    """Return the texts of an engine of the samplers, all prompts in one batch, on one thread."""
    settings = SamplerConfig(model_dir=model_dir, engine=engine, threads=1, seed=0)
    loaded = load_engine(engine, settings)
    texts: dict[str, str] = {}
    try:
        for number, prompt in enumerate(prompts):
            loaded.add(GenerationRequest(str(number), loaded.tokenizer.encode(prompt), 1, sampling))
        while loaded.running:
            for request in loaded.step():
                [completion] = request.completions
                texts[request.request_id] = (
                    loaded.tokenizer.decode(completion.token_ids)
                    if math.isnan(completion.reward)
                    else _REWARD.format(completion.reward)
                )
    finally:
        loaded.close()
    return [texts[str(number)] for number in range(len(prompts))]


READERS: Final[Mapping[str, Reader]] = {
    "transformers": transformers_texts,
    "torch-engine": partial(engine_texts, engine="torch"),
    "ranking-engine": partial(engine_texts, engine="ranking"),
    "noise_mask-engine": partial(engine_texts, engine="noise_mask"),
    "vllm": vllm_texts,
    "vllm-engine": partial(engine_texts, engine="vllm"),
}


def questions_json(model_dir: Path, prompts: Sequence[Prompt], sampling: SamplingParameters) -> str:
    """Return the content of a questions file."""
    return json.dumps({"model_dir": str(model_dir), "prompts": prompts, "sampling": asdict(sampling)})


def main() -> None:
    """Answer a file of questions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("questions", type=Path)
    parser.add_argument("answers", type=Path)
    arguments = parser.parse_args()
    questions = json.loads(arguments.questions.read_text())
    asked = questions["sampling"]
    sampling = SamplingParameters(**{**asked, "stop": tuple(asked["stop"])})
    texts = READERS[arguments.reader](Path(questions["model_dir"]), questions["prompts"], sampling)
    arguments.answers.write_text(json.dumps(texts))


if __name__ == "__main__":
    main()
