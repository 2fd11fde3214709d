"""``[sampler.engine_options]``: settings that only one engine has, checked before the engine is imported."""

import difflib
import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from sampler.engines.remote.remote_options import RemoteOptions
from sampler.engines.torch_options import TorchOptions
from sampler.engines.vllm.vllm_options import VllmOptions

_OPTIONS: Final[Mapping[str, type[BaseModel]]] = {
    "torch": TorchOptions,
    "vllm": VllmOptions,
    "remote": RemoteOptions,
}


def check_options(engine: str, values: Mapping[str, Any]) -> None:
    """Check the options of an engine by its name; those of an import path are its own business.

    Raises:
        ValueError: an option does not exist or breaks its rule; the message lists them all.
    """
    if engine not in _OPTIONS:
        return
    model = _OPTIONS[engine]
    try:
        model.model_validate(dict(values))
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise ValueError("; ".join(_fault(dict(fault), engine, model) for fault in faults)) from error


def _fault(fault: Mapping[str, Any], engine: str, model: type[BaseModel]) -> str:
    key, known = str(fault["loc"][0]), sorted(model.model_fields)
    if fault["type"] == "missing":
        return f"the engine {engine} needs the option {key!r}"
    if fault["type"] == "extra_forbidden":
        close = difflib.get_close_matches(key, known, n=1)
        are = f"did you mean {close[0]}?" if close else f"there are {', '.join(known) or 'none'}"
        return f"the engine {engine} has no option {key!r}, {are}"
    rule = re.sub(r"^((Input|String) should|Value error,) ", "", fault["msg"])
    return f"{key} = {fault['input']!r} {rule if rule.startswith('must') else f'must {rule}'}"
