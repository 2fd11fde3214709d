"""The device that ``auto`` stands for. It is chosen without torch, so that a configuration can show it."""

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, Field

AUTO: Final = "auto"

_GPU_NODES: Final = ("nvidia[0-9]*", "kfd", "dxg")
"""Devices of NVIDIA, of AMD (which torch calls cuda too), of NVIDIA under WSL."""

_BUILT_FOR_GPU: Final = re.compile(r"^(cuda|hip)\b[^=]*= *'", re.MULTILINE)


def chosen_device(name: str, *, nodes: Path = Path("/dev"), environ: Mapping[str, str] = os.environ) -> str:
    """Return ``name``; for ``auto``, cuda where there are a GPU and a torch built for one, else cpu."""
    if name != AUTO:
        return name
    is_hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    has_gpu = any(path for pattern in _GPU_NODES for path in nodes.glob(pattern))
    return "cuda" if has_gpu and not is_hidden and _is_torch_for_gpu() else "cpu"


def _is_torch_for_gpu() -> bool:
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    try:
        return _BUILT_FOR_GPU.search(Path(torch.origin).with_name("version.py").read_text()) is not None
    except OSError:
        return False


Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"), AfterValidator(chosen_device)]
"""A configured device; ``auto`` is resolved as the configuration is read."""
