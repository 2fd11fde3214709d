"""The plan of a model agrees with transformers and autograd; layouts cover every rank."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from learner.config import LearnerConfig
from learner.plan_command import add_arguments
from learner.sizing.devices import DEVICES
from learner.sizing.layouts import Planned, plan_layouts
from learner.sizing.model_shape import FAMILIES, ModelShape, UnknownModelError
from learner.sizing.rank_costs import RankLayout, lag, rank_memory, step_time
from node.commands.cli import main
from node.exit_code import ExitCode

SIZES: dict[str, Any] = {
    "vocab_size": 44,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "phi3": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


def made(family: str, **changes: Any) -> tuple[ModelShape, PreTrainedModel]:
    config = AutoConfig.for_model(family, **SIZES | OF_FAMILY.get(family, {}) | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return ModelShape.of_config(json.loads(config.to_json_string()), name=family), model


def planned(
    size: str, *, ranks: int, gigabytes: float = 80, device: str = "h100", tokens: int = 1 << 18
) -> list[Planned]:
    shape, memory_bytes = ModelShape.of_size(size), 1e9 * gigabytes
    return plan_layouts(
        shape, DEVICES[device], ranks=ranks, memory_bytes=memory_bytes, tokens=tokens, row_tokens=2048
    )


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {"tie_word_embeddings": is_tied}) for family in FAMILIES for is_tied in (True, False)),
        ("llama", {"attention_bias": True}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_parameters_are_as_many_as_transformers_makes(family: str, changes: dict[str, Any]) -> None:
    shape, model = made(family, **changes)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("compute_bytes", [2, 4])
def test_activations_are_what_autograd_saves(family: str, compute_bytes: int) -> None:
    shape, model = made(family, hidden_size=96, intermediate_size=160, head_dim=24)
    rows, length = 3, 7
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = tensor.dtype == torch.bfloat16 and {tuple(tensor.shape), tuple(tensor.shape[::-1])} & shapes
        if tensor.untyped_storage().data_ptr() not in weights and not is_cast:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    is_narrow = compute_bytes == 2
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_narrow),
    ):
        ids = torch.zeros(rows, length, dtype=torch.int64)
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    found = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    layout = RankLayout(micro_batch_tokens=rows * length)
    said = rank_memory(shape, layout, compute_bytes=compute_bytes)["activations"]
    logits = 4 * rows * length * shape.vocabulary
    # The last norm is saved too, and a few numbers for each head.
    assert said - logits == pytest.approx(found, rel=0.12)
    assert said - logits <= found


def test_a_long_prompt_of_many_completions_takes_memory(capsys: pytest.CaptureFixture[str]) -> None:
    needed = []
    for prompt in ("1", "1000"):
        asked = ["0.6B", "--gpus", "1", "--memory", "80", "--row", "1200", "--prompt", prompt, "--json"]
        assert main(["plan", *asked]) == ExitCode.DRAINED
        needed.append(json.loads(capsys.readouterr().out)["layouts"][0]["memory"]["activations"])
    # 9600 tokens of rows, of which the model reads 2600; 28 layers, 8 heads of 128.
    assert needed[1] - needed[0] == pytest.approx(28 * 16_384 * 2 * 1024 * 2 * (9600 / 2600 - 1), rel=0.01)


def test_what_a_rank_holds_is_sixteen_bytes_a_parameter_over_the_shards() -> None:
    shape = ModelShape.of_size("8B")
    for shards in (1, 2, 4):
        held = rank_memory(shape, RankLayout(dp_shard=shards), compute_bytes=2)["held"]
        assert held == 16 * shape.parameters / shards
    assert rank_memory(shape, RankLayout(dp_shard=4, offload=True), compute_bytes=2)["held"] == 0


def test_the_words_of_two_versions_count_where_ranks_compute_in_their_hosts_memory() -> None:
    of_cores, of_gpus = (
        planned("135M", ranks=2, gigabytes=16, device=name, tokens=1 << 14)[0].memory
        for name in ("core", "h100")
    )
    assert of_cores["words"] == 4 * ModelShape.of_size("135M").parameters / 2
    assert "words" not in of_gpus


def test_slices_divide_matrices_and_stages_divide_layers() -> None:
    shape = ModelShape.of_config(
        {"model_type": "llama", **SIZES, "vocab_size": 10, "num_hidden_layers": 4}, name="hand"
    )
    # A layer: attention 2 * 32 * 16 * 6, feed-forward 3 * 32 * 48, two norms of 32.
    assert (shape.layer_matrices, shape.layer_vectors) == (6144 + 4608, 64)
    whole, sliced, staged = (
        rank_memory(shape, layout, compute_bytes=4)["held"] / 16
        for layout in (RankLayout(), RankLayout(tp=2), RankLayout(pp=2))
    )
    assert whole == 4 * (10752 + 64) + 2 * 320 + 32
    assert sliced == 4 * (5376 + 64) + (640 + 32) / 2
    assert staged == 2 * (10752 + 64) + 320 + 32


def test_rematerialisation_saves_memory_and_costs_time() -> None:
    shape, device = ModelShape.of_size("1.7B"), DEVICES["h100"]
    layouts = [RankLayout(rematerialise=how) for how in ("none", "selective", "layers")]
    kept = [rank_memory(shape, one, compute_bytes=2)["activations"] for one in layouts]
    times = [step_time(shape, one, device, tokens=1 << 18, row_tokens=2048).middle for one in layouts]
    assert kept == sorted(kept, reverse=True)
    assert times == sorted(times)


def test_a_step_on_one_device_takes_its_products_and_its_optimizer() -> None:
    shape, device = ModelShape.of_size("135M"), DEVICES["core"]
    step = step_time(shape, RankLayout(), device, tokens=1280, row_tokens=80)
    products = 6 * (shape.layers * shape.layer_matrices + shape.embedding) * 1280 / device.flops_s.middle
    optimizer = 28 * shape.parameters / device.memory_bytes_s
    assert step.middle == pytest.approx(products + optimizer, rel=0.01)
    assert step.low < step.middle < step.high


@pytest.mark.parametrize("ranks", [1, 2, 6, 8, 64])
def test_every_layout_has_all_ranks_and_divides_the_model(ranks: int) -> None:
    shape = ModelShape.of_size("8B")
    layouts = planned("8B", ranks=ranks)
    cuts = [(one.layout.dp_replicate, one.layout.dp_shard, one.layout.tp, one.layout.pp) for one in layouts]
    assert len(set(cuts)) == len(cuts)
    for one in layouts:
        assert one.layout.ranks == ranks
        assert shape.heads % one.layout.tp == shape.kv_heads % one.layout.tp == 0
        assert one.layout.pp <= shape.layers
        assert one.layout.micro_batch_tokens >= 2048
        assert one.fits == (one.needed_bytes <= 80e9)
    fitting = [one.fits for one in layouts]
    assert fitting == sorted(fitting, reverse=True)


def test_more_memory_never_makes_the_best_step_slower() -> None:
    best = []
    for gigabytes in (24, 40, 80, 160, 320):
        fitting = (one.step_s.middle for one in planned("8B", ranks=8, gigabytes=gigabytes) if one.fits)
        best.append(min(fitting, default=float("inf")))
    assert best == sorted(best, reverse=True)
    assert best[-1] < float("inf")


def test_every_setting_that_is_named_takes_the_value() -> None:
    for ranks in (8, 64):
        for one in planned("70B", ranks=ranks):
            values = {key.removeprefix("learner."): value for key, value in one.layout.keys.items()}
            LearnerConfig(model_dir=Path(), learning_rate=1e-6, **values)


def test_a_sampler_lags_by_its_delta_until_that_takes_longer_than_a_step() -> None:
    shape = ModelShape.of_size("135M")
    near = lag(shape, link_mbit_s=100, step_s=10)
    assert near.versions.middle == near.delta_s.middle / 10
    far = lag(shape, link_mbit_s=0.1, step_s=10)
    assert far.delta_s.middle > 10
    assert far.versions.middle == far.keyframe_s / 10


@pytest.mark.parametrize("text", ["8", "8T", "B", "-8B", "0B", "0.5M", "3000B", "8B8B", "runs/none"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(UnknownModelError):
        ModelShape.of_size(text)


@pytest.mark.parametrize(("text", "layers"), [("135M", 30), ("8B", 36), ("7B", 30)])
def test_a_size_becomes_a_shape_of_about_that_size(text: str, layers: int) -> None:
    shape = ModelShape.of_size(text)
    assert shape.layers == layers
    wanted = float(text[:-1]) * {"M": 1e6, "B": 1e9}[text[-1]]
    assert shape.parameters == pytest.approx(wanted, rel=0.1)


def test_the_command_names_the_settings_and_says_what_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "8B", "--gpus", "8", "--memory", "80"]) == ExitCode.DRAINED
    printed = capsys.readouterr().out
    assert "learner.tp = 8" in printed
    assert "Not measured" in printed
    assert "being made, take 4.1 GB of the host for each rank" in printed
    assert main(["plan", "135M", "--gpus", "2", "--memory", "16", "--device", "core", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"]["parameters"] == 134_515_008
    assert {layout["keys"].get("learner.dp_shard") for layout in told["layouts"]} >= {2, None}


def test_a_model_that_fits_nowhere_is_told_as_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "405B", "--gpus", "1", "--memory", "24"]) == ExitCode.FAILED
    assert "None fits 24 GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("[1]", "cannot be read"),
        ("{", "cannot be read"),
        ('{"model_type": "mamba"}', "models of type 'mamba' are not known here"),
        ('{"model_type": "llama", "hidden_size": 8}', "config.json has no 'num_attention_heads'"),
    ],
)
def test_a_directory_without_a_usable_configuration_is_refused(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main(["plan", str(tmp_path), "--gpus", "1", "--memory", "8"]) == ExitCode.COULD_NOT_START
    printed = capsys.readouterr().err
    assert said in printed
    assert "a size such as 8B" in printed


@pytest.mark.parametrize("arguments", [["--gpus", "0"], ["--gpus", "x"], ["--gpus", "1", "--memory", "-3"]])
def test_impossible_arguments_are_refused(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["8B", "--memory", "8", *arguments])
