"""Requests as vLLM takes them and completions as it returns them, in this process or from a server; pure."""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import numpy as np

from node.values.groups.rollout import Completion, Finish
from sampler.engines.engine import GenerationRequest

_TOKEN_BYTES: Final = 512
"""More than JSON needs for a token: its id and its logprob, each twice, and what stands around them."""

_NO_LOGPROB: Final = -9999.0
"""The server's way to say that a logprob is not a number."""


def sampling_arguments(request: GenerationRequest, *, count: int, end_ids: Collection[int]) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for ``count`` completions."""
    sampling = request.sampling
    return {
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
        # Stop strings are looked for in the text that graders see, where tags that are special tokens stand.
        "skip_special_tokens": False,
        "logprobs": 0,
    }


def completion_of(
    request: GenerationRequest,
    *,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    ranks: Sequence[int],
    versions: Iterable[tuple[int, int, int]],
    reasons: tuple[str, Any],
) -> Completion:
    """Return one completion.

    Args:
        ranks: In the place of a rank the workers' sampler puts the bits of the kept mass.
        versions: Spans of tokens: start, end, and the version that drew them.
        reasons: vLLM's ``finish_reason`` and ``stop_reason``.
    Raises:
        ValueError: a token is of no version, or the completion ended for no reason that is known.
    """
    version = np.full(len(token_ids), -1, np.int32)
    for start, end, number in versions:
        version[start:end] = number
    if version.min(initial=0) < 0:
        raise ValueError(f"a completion of {len(token_ids)} tokens, some of no version")
    is_truncated = request.sampling.is_truncated
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        behaviour_logprob=np.array(logprobs, np.float32).clip(max=0.0),
        policy_version=version,
        finish=_finish(reasons),
        kept_mass=np.array(ranks, np.int32).view(np.float32) if is_truncated else None,
    )


def _finish(reasons: tuple[str, Any]) -> Finish:
    match reasons:
        case "length", _:
            return Finish.LENGTH
        case "stop", str():
            return Finish.STOP
        case "stop", _:
            return Finish.END
        case reason:
            raise ValueError(f"a completion that ended for the reason {reason}")


def version_label(session: str, version: int) -> str:
    """Return the name of a version's weights at a server: two sessions have none in common."""
    return f"{session}.{version}"


def most_answer_bytes(request: GenerationRequest, *, count: int) -> int:
    """Return how long a server's answer may be."""
    return (1 << 20) + _TOKEN_BYTES * count * request.sampling.max_new_tokens


def completions_in(answer: Any, request: GenerationRequest, *, count: int, session: str) -> list[Completion]:
    """Return the completions in a server's answer; an error of any kind if it has others or fewer."""
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    if len(choices) != count:
        raise ValueError(f"{len(choices)} completions instead of {count}")
    return [_chosen(choice, request, session) for choice in choices]


def _chosen(choice: Any, request: GenerationRequest, session: str) -> Completion:
    ids, tokens = choice["token_ids"], choice["logprobs"]["content"]
    n = len(ids)
    if not 1 <= n <= request.sampling.max_new_tokens or [token["token_id"] for token in tokens] != ids:
        raise ValueError(f"a completion of {n} tokens with {len(tokens)} logprobs, or those of others")
    logprobs = [token["logprob"] for token in tokens]
    return completion_of(
        request,
        token_ids=ids,
        logprobs=[np.nan if logprob <= _NO_LOGPROB else logprob for logprob in logprobs],
        ranks=[token["rank"] for token in tokens],
        versions=[
            (span["start"], span["end"], _version(span["version"], session))
            for span in choice["weight_versions"]
        ],
        reasons=(choice["finish_reason"], choice["stop_reason"]),
    )


def _version(label: str, session: str) -> int:
    found = re.fullmatch(rf"{session}\.(\d+)", label)
    if found is None:
        raise ValueError(f"weights named {label!r}, which are not of this session")
    return int(found[1])
