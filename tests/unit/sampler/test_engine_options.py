"""An engine's own options are checked, with every fault named, before the engine is imported."""

from pathlib import Path
from typing import Any

import pytest

from node.config.settings import load
from node.errors import ConfigError, NotReadyError
from sampler.config import SamplerConfig
from sampler.engines.engine_options import TorchOptions, VllmOptions


def resolved(tmp_path: Path, text: str) -> SamplerConfig:
    path = tmp_path / "sampler.toml"
    path.write_text(
        f'[node]\nstate_dir = "state"\ncoordinator = "a:1"\n[sampler]\nmodel_dir = "model"\n{text}\n'
    )
    return load(roles=["sampler"], files=[path], environ={}).config.section(SamplerConfig)


def test_options_of_the_chosen_engine_are_taken(tmp_path: Path) -> None:
    config = resolved(tmp_path, 'engine = "vllm"\n[sampler.engine_options]\ncontext_tokens = 512\nbatch = 8')
    assert VllmOptions.model_validate(config.engine_options) == VllmOptions(context_tokens=512, batch=8)
    config = resolved(tmp_path, 'engine = "torch"\n[sampler.engine_options]\nkv_cache = "keep"')
    assert TorchOptions.model_validate(config.engine_options) == TorchOptions(kv_cache="keep")


@pytest.mark.parametrize(
    ("settings", "process"),
    [
        ('engine = "vllm"\ndevice = "cuda:1"', "own"),
        ('engine = "vllm"\ndevice = "cpu"', "inside"),
        ('engine = "torch"\ndevice = "cuda"', "inside"),
        ('engine = "vllm"\ndevice = "cuda"\nengine_process = "inside"', "inside"),
        ('engine = "torch"\nengine_process = "own"', "own"),
    ],
)
def test_only_vllm_on_a_gpu_has_a_process_of_its_own_unless_told(
    tmp_path: Path, settings: str, process: str
) -> None:
    assert resolved(tmp_path, settings).engine_process == process


@pytest.mark.parametrize(
    ("engine", "options", "rule"),
    [
        ("vllm", "batches = 4", "the engine vllm has no option 'batches', did you mean batch?"),
        ("vllm", "zzz = 4", "the engine vllm has no option 'zzz', there are async_scheduling, batch, "),
        ("vllm", "batch = 0", "batch = 0 must be greater than or equal to 1"),
        ("vllm", "memory_share = 1.5", "memory_share = 1.5 must be less than or equal to 1"),
        ("vllm", 'kv_cache = "drop"', "kv_cache = 'drop' must be 'recompute' or 'keep'"),
        ("vllm", "tensor_parallel = 0", "tensor_parallel = 0 must be greater than or equal to 1"),
        (
            "vllm",
            'extra_arguments = {quantization = "fp8"}',
            "must not have 'quantization': it would compute",
        ),
        ("vllm", "batch = 0\nmemory_share = 2", "or equal to 1; memory_share = 2 must"),
        ("torch", "batch = 4", "the engine torch has no option 'batch'"),
        ("remote", "", "the engine remote needs the option 'address'; the engine remote needs"),
        ("remote", 'address = "http://a:1"', "the engine remote needs the option 'weights_dir'"),
        ("remote", 'address = "a:1"\nweights_dir = "w"', "address = 'a:1' must match pattern"),
    ],
)
def test_a_wrong_option_is_refused_with_its_name_its_value_and_the_rule(
    tmp_path: Path, engine: str, options: str, rule: str
) -> None:
    with pytest.raises(NotReadyError) as refused:
        resolved(tmp_path, f'engine = "{engine}"' + (options and f"\n[sampler.engine_options]\n{options}"))
    [fault] = refused.value.faults
    assert isinstance(fault, ConfigError)
    assert fault.key == "sampler.engine_options"
    assert rule in str(fault)
    assert not options or "sampler.toml" in str(fault)


def test_options_of_an_engine_of_ones_own_are_its_own_business(tmp_path: Path) -> None:
    options: dict[str, Any] = {"anything": [1, 2]}
    config = resolved(tmp_path, 'engine = "a.b:c"\n[sampler.engine_options]\nanything = [1, 2]')
    assert config.engine_options == options


def test_a_wrong_engine_is_the_only_fault_of_its_options(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError) as refused:
        resolved(tmp_path, 'engine = "vlm"\n[sampler.engine_options]\nbatch = 4')
    [fault] = refused.value.faults
    assert isinstance(fault, ConfigError)
    assert fault.key == "sampler.engine"


@pytest.mark.parametrize(
    ("device", "tensor_parallel", "ids"),
    [("cpu", 1, None), ("cuda", 2, None), ("cuda:0", 1, [0]), ("cuda:3", 1, [3]), ("cuda:2", 2, [2, 3])],
)
def test_vllm_computes_on_the_device_that_is_named_and_those_after_it(
    device: str, tensor_parallel: int, ids: list[int] | None
) -> None:
    assert VllmOptions(tensor_parallel=tensor_parallel).device_ids(device) == ids
