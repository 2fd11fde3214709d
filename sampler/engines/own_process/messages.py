"""Messages between a sampler and its engine's process, in JSON, with the bytes of arrays in base64.

    {"call": "step"}                     ->  {"running": 3, "waiting": 1, "use": {...}, "finished": [...]}
    {"call": "move", "moves": "read 5 0"} ->  {}, and the words in shared memory
    any call                             ->  {"error": "RefusedError", "fields": {...}}

    {"call": "step_on"}                   ->  {"steps": 4, "finished": [...], "refused": [...], ...}
    {"call": "change", "changes": [...]}  ->  more of these; neither side waits for the other
    {"call": "halt"}                      ->  {"is_last": true, ...}

Both ends are one installation of this package, so a message has no version.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from node.errors import ConfigError, HeteroRLError, Reason, RefusedError, StartupError
from node.values.groups.rollout import Completion, Finish
from node.values.groups.sampling_parameters import SamplingParameters
from sampler.engines.engine import GenerationRequest
from sampler.engines.stepping import RequestChange, StepResults

Message = dict[str, Any]

_WIRE: Final = {"i": np.dtype(np.int32), "f": np.dtype(np.float32)}
"""Kind of an array's elements -> their type in messages; every array has one dimension."""

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
    if isinstance(value, np.ndarray):
        # Numbers in decimal took a twentieth of the time of a process that draws 40 000 tokens a second.
        return base64.b64encode(value.astype(_WIRE[value.dtype.kind]).tobytes()).decode()
    return asdict(value)


def integers_from(text: str) -> NDArray[np.int32]:
    """Return an array of integers that was sent, [n]."""
    return np.frombuffer(base64.b64decode(text), _WIRE["i"]).astype(np.int32)


def _floats_from(text: str) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(text), _WIRE["f"]).astype(np.float32)


def results_message(results: StepResults) -> Message:
    """Return the message of which ``results_from`` makes the same results."""
    refused = [(name, error_message(error)) for name, error in results.refused]
    return {"finished": results.finished, "refused": refused, "steps": results.steps}


def results_from(message: Message) -> StepResults:
    """Return the results in a message."""
    refused = [(name, error_from(told)) for name, told in message["refused"]]
    return StepResults(
        [request_from(fields) for fields in message["finished"]],
        [(name, error) for name, error in refused if isinstance(error, RefusedError)],
        message["steps"],
    )


def changes_from(message: Message) -> list[RequestChange]:
    """Return the changes in a message."""
    return [change if isinstance(change, str) else request_from(change) for change in message["changes"]]


def request_from(fields: Mapping[str, Any]) -> GenerationRequest:
    """Return a request that was sent, with the completions it has."""
    sampling = {**fields["sampling"], "stop": tuple(fields["sampling"]["stop"])}
    return GenerationRequest(
        fields["request_id"],
        integers_from(fields["prompt_token_ids"]),
        fields["wanted"],
        SamplingParameters(**sampling),
        tuple(map(_completion_from, fields["completions"])),
    )


def _completion_from(fields: Mapping[str, Any]) -> Completion:
    kept_mass, actions = fields["kept_mass"], fields["actions"]
    return Completion(
        integers_from(fields["token_ids"]),
        _floats_from(fields["behaviour_logprob"]),
        integers_from(fields["policy_version"]),
        Finish(fields["finish"]),
        None if kept_mass is None else _floats_from(kept_mass),
        reward=fields["reward"],
        actions=None if actions is None else _floats_from(actions),
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
