"""Messages between a sampler and its engine's process, in JSON, which keeps every float32 and NaN.

    {"call": "step"}                     ->  {"running": 3, "waiting": 1, "use": {...}, "finished": [...]}
    {"call": "move", "moves": "read 5 0"} ->  {}, and the words in shared memory
    any call                             ->  {"error": "RefusedError", "fields": {...}}

Both ends are one installation of this package, so a message has no version.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from node.errors import ConfigError, HeteroRLError, Reason, RefusedError, StartupError
from node.values.groups.rollout import Completion, Finish
from node.values.groups.sampling_parameters import SamplingParameters
from sampler.engines.engine import GenerationRequest

Message = dict[str, Any]

_ERRORS: Final[Mapping[type[Exception], tuple[str, ...]]] = {
    RefusedError: ("reason", "what", "fix"),
    StartupError: ("what", "fix"),
    ConfigError: ("key", "value", "source", "rule", "fix"),
}
"""Errors that mean something to the sampler, with the arguments that make them."""


def send(connection: Connection, message: Message) -> None:
    """Send a message, in which there may be arrays, requests and completions."""
    connection.send_bytes(json.dumps(message, default=_plain).encode())


def receive(connection: Connection) -> Message:
    """Return the next message; EOFError if the other side is gone."""
    message: Message = json.loads(connection.recv_bytes())
    return message


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else asdict(value)


def request_from(fields: Mapping[str, Any]) -> GenerationRequest:
    """Return a request that was sent, with the completions it has."""
    sampling = {**fields["sampling"], "stop": tuple(fields["sampling"]["stop"])}
    return GenerationRequest(
        fields["request_id"],
        np.array(fields["prompt_token_ids"], np.int32),
        fields["wanted"],
        SamplingParameters(**sampling),
        tuple(map(_completion_from, fields["completions"])),
    )


def _completion_from(fields: Mapping[str, Any]) -> Completion:
    kept_mass, actions = fields["kept_mass"], fields["actions"]
    return Completion(
        np.array(fields["token_ids"], np.int32),
        np.array(fields["behaviour_logprob"], np.float32),
        np.array(fields["policy_version"], np.int32),
        Finish(fields["finish"]),
        None if kept_mass is None else np.array(kept_mass, np.float32),
        reward=fields["reward"],
        actions=None if actions is None else np.array(actions, np.float32),
    )


def error_message(error: Exception) -> Message:
    """Return the message of which ``error_from`` makes an error of the same meaning."""
    for kind, names in _ERRORS.items():
        if isinstance(error, kind):
            return {"error": kind.__name__, "fields": {name: str(getattr(error, name)) for name in names}}
    if isinstance(error, ValueError):
        return {"error": "ValueError", "fields": {"what": str(error)}}
    return {"error": "RuntimeError", "fields": {"what": f"{type(error).__name__}: {error}"}}


def error_from(message: Message) -> HeteroRLError | ValueError | RuntimeError:
    """Return the error of an ``error_message``; RuntimeError for what has no class of its own here."""
    fields = message["fields"]
    match message["error"]:
        case "RefusedError":
            return RefusedError(Reason[fields["reason"].upper()], fields["what"], fix=fields["fix"])
        case "StartupError":
            return StartupError(**fields)
        case "ConfigError":
            return ConfigError(**fields)
        case "ValueError":
            return ValueError(fields["what"])
        case _:
            return RuntimeError(fields["what"])
