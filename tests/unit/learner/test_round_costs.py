"""Costs of a round of several sites, as planned, are those of real encoders, optimizers and deals."""

import gc
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import torch

from bench.changes import payload_bytes as counted_bytes
from bench.shared.fed_back_encoder import FedBackEncoder
from bench.shared.random_model import SIZES, qwen3_config
from learner.contributor.local_masters import LocalMasters
from learner.merging.changes.coder import ChangeEncoder
from learner.merging.deals import DealRules, Deals
from learner.merging.formulas.fragments import Fragments
from learner.merging.merge_settings import Compression, MergeSettings, Method
from learner.merging.outer_optimizer import OuterOptimizer
from learner.merging.round_costs import (
    PREFERRED,
    Sites,
    costs_of_methods,
    kept_bytes,
    learner_memory,
    payload_bytes,
    recommended,
    round_costs,
    version_bytes,
)
from learner.model.model import load_policy
from learner.sizing.devices import APPLY_S, KEYFRAME_SHARE, LINE_SHARE
from learner.sizing.model_shape import ModelShape
from node.commands.cli import main
from node.errors import Reason
from node.exit_code import ExitCode
from support.refusals import refused
from support.tiny_model import make_tiny_model

TINY = ModelShape.of_config(json.loads(qwen3_config(*SIZES["tiny"]).to_json_string()), name="tiny")
SMALL = ModelShape.of_size("135M")


def sites(
    line_mbit_s: float = 100.0, *, contributors: int = 3, step_s: float = 10.0, tokens: int = 1 << 16
) -> Sites:
    return Sites(contributors, line_mbit_s, round_trip_s=0.15, batch_groups=8, tokens=tokens, step_s=step_s)


@cache
def counted(steps: int) -> tuple[int, dict[Compression, int]]:
    """Return the parameters of a small model in training, and a contribution's bytes by each codec."""
    return counted_bytes("tiny", 1e-6, steps, rounds=4)


@pytest.mark.parametrize("compression", get_args(Compression))
@pytest.mark.parametrize("steps", [1, 4])
def test_a_contribution_has_as_many_bytes_as_planned(compression: Compression, steps: int) -> None:
    parameters, sizes = counted(steps)
    assert TINY.parameters == parameters
    planned = payload_bytes(TINY, MergeSettings(compression=compression, local_steps=steps))
    headers = 64 * (2 * 11 + 2)  # of 24 tensors, at most; they count where tensors are as small as these
    assert planned.low <= sizes[compression] <= planned.high + headers


@pytest.mark.parametrize("rank", [4, 8])
def test_factors_of_noise_have_their_full_rank_and_four_bits_an_entry(rank: int) -> None:
    shape = ModelShape.of_config(
        json.loads(qwen3_config(1024, 256, 512, 2, 4, 2, 64).to_json_string()), name=""
    )
    matrices = {"q": (256, 256), "k": (128, 256), "v": (128, 256), "o": (256, 256)}
    matrices |= {"gate": (512, 256), "up": (512, 256), "down": (256, 512)}
    tensors = {f"{layer}{name}": torch.Size(size) for layer in (0, 1) for name, size in matrices.items()}
    tensors |= {"embedding": torch.Size([1024, 256]), "norm": torch.Size([256])}
    tensors |= {f"norms{layer}": torch.Size([2 * 256 + 2 * 64]) for layer in (0, 1)}
    assert sum(size.numel() for size in tensors.values()) == shape.parameters
    settings = MergeSettings(compression="low_rank", rank=rank)
    payload = FedBackEncoder(settings, tensors).encode(
        {name: torch.randn(size) for name, size in tensors.items()}
    )
    assert payload_bytes(shape, settings).middle == pytest.approx(len(payload), rel=0.15)


def test_a_fragments_share_of_bytes_waits_for_its_turn() -> None:
    whole, part = (MergeSettings(method="streaming", fragments=count) for count in (1, 4))
    assert payload_bytes(SMALL, part).middle == payload_bytes(SMALL, whole).middle / 4
    # A quarter of the words, changed by four times as many steps: like a random walk, twice as far.
    assert version_bytes(SMALL, part).middle == pytest.approx(version_bytes(SMALL, whole).middle / 2)
    assert version_bytes(SMALL, MergeSettings(local_steps=1000)).high == 2 * SMALL.parameters * KEYFRAME_SHARE


def test_steps_and_exchange_follow_each_other_or_go_beside_each_other() -> None:
    """By hand: payloads of all three and the delta twice over the line, three round trips, the apply."""
    for line_mbit_s in (10.0, 10_000.0):
        waits, overlaps = (
            round_costs(SMALL, MergeSettings(overlap=overlap, outer_momentum=0), sites(line_mbit_s))
            for overlap in ("wait", "eager")
        )
        sent = 3 * waits.payload_bytes.middle + 2 * waits.version_bytes.middle
        exchange_s = sent / (line_mbit_s / 8 * 1e6 * LINE_SHARE) + 0.45 + APPLY_S
        assert waits.exchange_s == overlaps.exchange_s == pytest.approx(exchange_s)
        assert waits.round_s == pytest.approx(40 + exchange_s)
        assert overlaps.round_s == pytest.approx(max(40, exchange_s))
        assert waits.speedup == pytest.approx(3 * 40 / waits.round_s)
        assert waits.line_share == pytest.approx(exchange_s / waits.round_s)
        assert (waits.merge_lag_versions, overlaps.merge_lag_versions) == (0, 1)


def test_groups_bound_the_pace_where_the_line_is_slower_than_steps() -> None:
    slow = round_costs(SMALL, MergeSettings(method="dilocox"), sites(1.0, step_s=0.1))
    assert slow.round_s == pytest.approx(3 * 4 * 12 * (1 << 16) / (1e6 / 8 * LINE_SHARE))
    assert slow.speedup < 0.1


@pytest.mark.parametrize("method", get_args(Method))
def test_a_buffer_as_large_as_planned_holds_the_groups_of_everybody(method: Method) -> None:
    costs = round_costs(SMALL, MergeSettings(method=method), sites())

    def connect_all(buffer_groups: int) -> None:
        rules = DealRules(
            8,
            costs.local_steps,
            buffer_groups,
            member_timeout_s=60,
            quorum=1.0,
            max_staleness_versions=8,
            restart_wait_s=0,
        )
        deals = Deals(rules, now=0.0)
        for name in ("a", "b", "c"):
            deals.connect(name, object(), (), was_trained=lambda _: False, now=0.0)

    connect_all(costs.buffer_groups)
    waits = round_costs(SMALL, MergeSettings(method=method, overlap="wait", outer_momentum=0), sites())
    with refused(Reason.BUSY):
        connect_all(waits.buffer_groups - 1)


def test_the_method_follows_the_line_from_the_nearest_to_one_learner_to_the_lightest() -> None:
    taken = [
        recommended(costs_of_methods(SMALL, sites(line), local_steps=None)).method
        for line in (100_000.0, 2000.0, 100.0, 4.0, 1.0)
    ]
    assert taken[0] == "in_step"
    order = [PREFERRED.index(method) for method in taken]
    assert order == sorted(order)
    assert len(set(taken)) >= 3


def test_other_local_steps_are_for_all_methods_that_have_any() -> None:
    rounds = {one.method: one for one in costs_of_methods(SMALL, sites(), local_steps=16)}
    assert {one.local_steps for one in rounds.values()} == {1, 16}
    assert rounds["in_step"].local_steps == 1
    assert set(rounds) == set(get_args(Method))


def living_bytes() -> int:
    """Return the bytes of all tensors there are."""
    gc.collect()
    tensors = (one for one in gc.get_objects() if isinstance(one, torch.Tensor))
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def grown_by(make: Callable[[], object]) -> int:
    """Return by how many bytes of tensors the body's result, which is kept so long, adds to what there is."""
    before = living_bytes()
    made = make()
    after = living_bytes()
    assert made is not None
    return after - before


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("compression", ["full", "four_bit"])
def test_a_contributor_keeps_as_much_as_planned(
    tmp_path: Path, compression: Compression, fragments: int
) -> None:
    policy = load_policy(make_tiny_model(tmp_path, hidden=64, layers=2), device="cpu", compute_dtype=None)
    settings = MergeSettings(compression=compression, fragments=fragments)
    parameters = sum(one.numel() for one in policy.parameters.values())
    shapes = {name: one.shape for name, one in policy.parameters.items()}
    due = Fragments.of({name: shape.numel() for name, shape in shapes.items()}, count=fragments).names[0]
    on_device, in_host = kept_bytes(settings)

    def handed_in() -> object:
        masters = LocalMasters(policy)
        encoder = ChangeEncoder(settings, shapes)
        is_exact = settings.compression == "full"
        encoder.encode(masters.changes(shapes.keys(), is_exact=is_exact), keep=masters.keep)
        masters.hand_in(due, overlap=settings.overlap)
        return masters, encoder

    words_bytes = 4  # of two versions, which are no tensors
    assert grown_by(handed_in) == pytest.approx((on_device + in_host - words_bytes) * parameters, rel=0.1)


def test_a_learner_that_merges_has_as_much_as_planned_for_each_parameter() -> None:
    parameters = {"whole": torch.zeros(200, 300)}
    changes = {"whole": torch.ones(200, 300, dtype=torch.float64)}
    optimizer = OuterOptimizer(parameters)
    for group in optimizer.param_groups:
        group.update(lr=0.7, momentum=0.5)
    optimizer.changes = changes
    count = parameters["whole"].numel()
    shape = TINY
    planned = learner_memory(shape, MergeSettings(method="diloco"), contributors=2)

    def stepped() -> object:
        optimizer.step()
        return optimizer

    assert grown_by(stepped) / count == planned["momentum"] / shape.parameters
    assert changes["whole"].nbytes / count == planned["mean change"] / shape.parameters
    assert planned["payloads"] >= 2 * counted(4)[1]["full"]
    plain = learner_memory(shape, MergeSettings(method="in_step"), contributors=2)
    assert "momentum" not in plain
    assert planned["checkpoint"] == 2 * plain["checkpoint"] == 8 * shape.parameters


def told(*arguments: str) -> list[str]:
    return ["plan", "135M", "--gpus", "1", "--memory", "16", "--device", "core", *arguments]


def test_the_command_plans_several_sites(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--sites", "3", "--line", "10", "--round-trip", "150", "--row", "128", "--tokens", "4096"]
    assert main(told(*asked)) == ExitCode.DRAINED
    printed = capsys.readouterr().out
    for method in get_args(Method):
        assert method in printed
    assert main(told(*asked, "--json")) == ExitCode.DRAINED
    planned = json.loads(capsys.readouterr().out)
    rounds = {one["method"]: one for one in planned["rounds"]}
    assert f"take {planned['recommended']}" in printed
    assert rounds["eager"]["buffer_groups"] >= 3 * 4 * 8
    assert planned["layouts"][0]["memory"]["anchor"] == 12 * SMALL.parameters
    assert all(math.isfinite(one["round_s"]) for one in rounds.values())


def test_without_sites_nothing_is_said_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(told("--json")) == ExitCode.DRAINED
    planned = json.loads(capsys.readouterr().out)
    assert "rounds" not in planned
    assert "anchor" not in planned["layouts"][0]["memory"]
