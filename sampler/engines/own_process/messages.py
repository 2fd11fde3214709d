"""What a sampler and its engine's process say to each other: a line of JSON, then the bytes of arrays.

    {"call": "step"}              ->  {"running": 3, "waiting": 1, "finished": [...]}, columns of completions
    {"call": "read", "frame": 5}  ->  {}, and the words in shared memory
    any call                      ->  {"error": "refused" | "failed" | ..., ...}

Both ends are one installation of this package, so a message has no version.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from node.errors import ConfigError, HeteroRLError, Reason, RefusedError, StartupError
from node.rollout import Finish, SamplingParameters
from sampler.engines.engine import FinishedRequest, GenerationRequest, SampledCompletion

Message = dict[str, Any]
Arrays = Sequence[NDArray[Any]]


def packed(message: Mapping[str, Any], arrays: Arrays = ()) -> bytes:
    """Return the bytes of a message and its arrays, of one dimension each."""
    head = {**message, "arrays": [[array.dtype.str, array.size] for array in arrays]}
    return b"".join([json.dumps(head).encode(), b"\n", *(array.tobytes() for array in arrays)])


def unpacked(data: bytes) -> tuple[Message, list[NDArray[Any]]]:
    """Return the message and its arrays."""
    head, _, rest = data.partition(b"\n")
    message: Message = json.loads(head)
    arrays: list[NDArray[Any]] = []
    start = 0
    for dtype, size in message.pop("arrays"):
        array = np.frombuffer(rest, dtype, count=size, offset=start)
        arrays.append(array.copy())  # aligned, and writable
        start += array.nbytes
    return message, arrays


def request_message(request: GenerationRequest) -> tuple[Message, Arrays]:
    """Return what ``request_from`` makes ``request`` of."""
    message = {
        "call": "add",
        "request_id": request.request_id,
        "completions": request.completions,
        "sampling": asdict(request.sampling),
    }
    return message, [request.prompt_token_ids]


def request_from(message: Message, arrays: Arrays) -> GenerationRequest:
    """Return the request of a ``request_message``."""
    sampling = message["sampling"]
    return GenerationRequest(
        message["request_id"],
        arrays[0],
        message["completions"],
        SamplingParameters(**{**sampling, "stop": tuple(sampling["stop"])}),
    )


def finished_message(finished: Iterable[FinishedRequest]) -> tuple[Message, Arrays]:
    """Return what ``finished_from`` makes ``finished`` of."""
    requests: list[tuple[str, list[tuple[str, int]]]] = []
    arrays: list[NDArray[Any]] = []
    for request in finished:
        completions: list[tuple[str, int]] = []
        for drawn in request.completions:
            columns: list[NDArray[Any]] = [drawn.token_ids, drawn.behaviour_logprob, drawn.policy_version]
            columns += [] if drawn.kept_mass is None else [drawn.kept_mass]
            completions.append((drawn.finish.value, len(columns)))
            arrays += columns
        requests.append((request.request_id, completions))
    return {"finished": requests}, arrays


def finished_from(message: Message, arrays: Arrays) -> list[FinishedRequest]:
    """Return the finished requests of a ``finished_message``."""
    rest = iter(arrays)

    def completion(finish: str, columns: int) -> SampledCompletion:
        token_ids, logprob, version = next(rest), next(rest), next(rest)
        kept_mass = next(rest) if columns == 4 else None
        return SampledCompletion(token_ids, logprob, version, Finish(finish), kept_mass)

    return [
        FinishedRequest(request_id, tuple(completion(*one) for one in completions))
        for request_id, completions in message["finished"]
    ]


def error_message(error: Exception) -> Message:
    """Return what ``error_from`` makes an error of the same meaning of."""
    match error:
        case RefusedError():
            return {"error": "refused", "reason": error.reason.name, "what": error.what, "fix": error.fix}
        case StartupError():
            return {"error": "startup", "what": error.what, "fix": error.fix}
        case ConfigError():
            fields = {name: str(getattr(error, name)) for name in ("key", "value", "source", "rule", "fix")}
            return {"error": "config", **fields}
        case ValueError():
            return {"error": "value", "what": str(error)}
        case _:
            return {"error": "failed", "what": f"{type(error).__name__}: {error}"}


def error_from(message: Message) -> HeteroRLError | ValueError | RuntimeError:
    """Return the error of an ``error_message``; RuntimeError for what has no class of its own here."""
    kind, fields = message["error"], {k: v for k, v in message.items() if k != "error"}
    match kind:
        case "refused":
            return RefusedError(Reason[fields["reason"]], fields["what"], fix=fields["fix"])
        case "startup":
            return StartupError(**fields)
        case "config":
            return ConfigError(**fields)
        case "value":
            return ValueError(fields["what"])
        case _:
            return RuntimeError(fields["what"])
