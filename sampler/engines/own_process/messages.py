"""Messages between a sampler and its engine's process, in JSON, which keeps every float32 and NaN.

    {"call": "step"}                     ->  {"running": 3, "waiting": 1, "finished": [...]}
    {"call": "move", "moves": "read 5 0"} ->  {}, and the words in shared memory
    any call                             ->  {"error": "RefusedError", ...}

Both ends are one installation of this package, so a message has no version.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from node.errors import ConfigError, HeteroRLError, Reason, RefusedError, StartupError
from node.rollout import Finish, SamplingParameters
from sampler.engines.engine import FinishedRequest, GenerationRequest, SampledCompletion

Message = dict[str, Any]

_FIELDS: Final[dict[type[Exception], tuple[str, ...]]] = {
    StartupError: ("what", "fix"),
    ConfigError: ("key", "value", "source", "rule", "fix"),
}
"""Arguments of the errors that mean something to the sampler."""


def request_message(request: GenerationRequest) -> Message:
    """Return what ``request_from`` makes ``request`` of."""
    return {
        "call": "add",
        "request_id": request.request_id,
        "prompt_token_ids": request.prompt_token_ids.tolist(),
        "completions": request.completions,
        "sampling": asdict(request.sampling),
    }


def request_from(message: Message) -> GenerationRequest:
    """Return the request of a ``request_message``."""
    sampling = message["sampling"]
    return GenerationRequest(
        message["request_id"],
        np.array(message["prompt_token_ids"], np.int32),
        message["completions"],
        SamplingParameters(**{**sampling, "stop": tuple(sampling["stop"])}),
    )


def finished_message(finished: Iterable[FinishedRequest]) -> list[Any]:
    """Return what ``finished_from`` makes ``finished`` of."""
    return [(request.request_id, [_columns(drawn) for drawn in request.completions]) for request in finished]


def _columns(drawn: SampledCompletion) -> Sequence[Any]:
    columns = (drawn.token_ids, drawn.behaviour_logprob, drawn.policy_version, drawn.kept_mass)
    return (drawn.finish.value, *(None if column is None else column.tolist() for column in columns))


def finished_from(message: Iterable[Any]) -> list[FinishedRequest]:
    """Return the finished requests of a ``finished_message``."""
    return [
        FinishedRequest(
            request_id,
            tuple(
                SampledCompletion(
                    np.array(token_ids, np.int32),
                    np.array(logprob, np.float32),
                    np.array(version, np.int32),
                    Finish(finish),
                    None if kept_mass is None else np.array(kept_mass, np.float32),
                )
                for finish, token_ids, logprob, version, kept_mass in completions
            ),
        )
        for request_id, completions in message
    ]


def error_message(error: Exception) -> Message:
    """Return what ``error_from`` makes an error of the same meaning of."""
    if isinstance(error, RefusedError):
        return {"error": "RefusedError", "reason": error.reason.name, "what": error.what, "fix": error.fix}
    for kind, names in _FIELDS.items():
        if isinstance(error, kind):
            return {"error": kind.__name__, **{name: str(getattr(error, name)) for name in names}}
    if isinstance(error, ValueError):
        return {"error": "ValueError", "what": str(error)}
    return {"error": "RuntimeError", "what": f"{type(error).__name__}: {error}"}


def error_from(message: Message) -> HeteroRLError | ValueError | RuntimeError:
    """Return the error of an ``error_message``; RuntimeError for what has no class of its own here."""
    kind, fields = message["error"], {name: value for name, value in message.items() if name != "error"}
    match kind:
        case "RefusedError":
            return RefusedError(Reason[fields["reason"]], fields["what"], fix=fields["fix"])
        case "StartupError":
            return StartupError(**fields)
        case "ConfigError":
            return ConfigError(**fields)
        case "ValueError":
            return ValueError(fields["what"])
        case _:
            return RuntimeError(fields["what"])
