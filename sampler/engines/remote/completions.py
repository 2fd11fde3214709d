"""What a vLLM server is asked for completions, and how its answer is read and checked."""

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np

from node.rollout import Finish
from sampler.engines.engine import GenerationRequest, SampledCompletion

_TOKEN_BYTES: Final = 512
"""More than JSON needs for a token: its id and its logprob, each twice, and what stands around them."""

_NO_LOGPROB: Final = -9999.0
"""What the server says for a logprob that is no number."""


def version_label(session: str, version: int) -> str:
    """Return the name of a version's weights: two sessions have none in common."""
    return f"{session}.{version}"


def completions_body(
    request: GenerationRequest, *, count: int, name: str, salt: str, end_ids: Collection[int]
) -> dict[str, Any]:
    """Return the JSON that asks for ``count`` completions.

    Args:
        name: of the request, at the server.
        salt: Requests of one salt share prefixes: another one for other words, so that none outlives them.
    """
    sampling = request.sampling
    return {
        "request_id": name,
        "token_ids": request.prompt_token_ids.tolist(),
        "cache_salt": salt,
        "sampling_params": {
            "n": count,
            "temperature": sampling.temperature,
            "min_p": sampling.min_p,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": sorted(end_ids),
            "ignore_eos": True,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "detokenize": bool(sampling.stop),
            "logprobs": 0,
        },
    }


def most_answer_bytes(request: GenerationRequest, *, count: int) -> int:
    """Return how long the answer may be."""
    return (1 << 20) + _TOKEN_BYTES * count * request.sampling.max_new_tokens


def completions_of(
    answer: Any, request: GenerationRequest, *, count: int, session: str
) -> list[SampledCompletion]:
    """Return the completions in an answer.

    Raises:
        LookupError, TypeError, ValueError, OverflowError: it holds none, fewer, or not of this session.
    """
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    if len(choices) != count:
        raise ValueError(f"{len(choices)} completions instead of {count}")
    return [_completion(choice, request, session) for choice in choices]


def _completion(choice: Mapping[str, Any], request: GenerationRequest, session: str) -> SampledCompletion:
    ids, tokens = choice["token_ids"], choice["logprobs"]["content"]
    n = len(ids)
    if not 1 <= n <= request.sampling.max_new_tokens or [token["token_id"] for token in tokens] != ids:
        raise ValueError(f"a completion of {n} tokens with {len(tokens)} logprobs, or those of others")
    logprob = np.array([token["logprob"] for token in tokens], np.float32)
    logprob[logprob <= _NO_LOGPROB] = np.nan
    kept_mass = None
    if request.sampling.is_truncated:
        # The worker's sampler puts its bits in the place of the rank; see ``vllm_sampler``.
        kept_mass = np.array([token["rank"] for token in tokens], np.int32).view(np.float32)
    versions = np.full(n, -1, np.int32)
    for span in choice["weight_versions"]:
        found = re.fullmatch(rf"{session}\.(\d+)", span["version"])
        if found is None:
            raise ValueError(f"weights named {span['version']!r}, which are not of this session")
        versions[span["start"] : span["end"]] = int(found[1])
    if versions.min() < 0:
        raise ValueError(f"a completion of {n} tokens, some of no version")
    return SampledCompletion(
        token_ids=np.array(ids, np.int32),
        behaviour_logprob=logprob.clip(max=0.0),
        policy_version=versions,
        finish=_finish(choice),
        kept_mass=kept_mass,
    )


def _finish(choice: Mapping[str, Any]) -> Finish:
    match choice["finish_reason"], choice["stop_reason"]:
        case "length", _:
            return Finish.LENGTH
        case "stop", str():
            return Finish.STOP
        case "stop", _:
            return Finish.END
        case reason:
            raise ValueError(f"a completion that ended for the reason {reason}")
