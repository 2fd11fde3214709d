"""A step is the same step however a learner's ranks share it, to the last bits of float64."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch

from learner.journal.checkpoint import load_into
from learner.model.model import Policy
from learner.sizing.mesh_sizes import DIMENSIONS, MeshSizes
from learner.step.train_step import train_step
from support.made_up_groups import VERSION, made_up_groups
from support.rank_processes import (
    Case,
    Compared,
    Ranks,
    save_and_publish,
    take_step,
    tiny_model,
    write_compared,
)
from support.step_settings import make_step_settings

RANKS: Final = 4
FEWER: Final = {"micro_batch_tokens": 48}
"""Micro-batches, of slices: their shapes are what takes the longest."""
CASES: Final = {
    "dp_shard": Case(
        MeshSizes(1, 4, 1),
        has_reference=True,
        settings={"reference_kl_coefficient": 0.1},
        rematerialise="layers",
    ),
    "dp_replicate, row by row": Case(
        MeshSizes(4, 1, 1), settings={"scales_rate_by_sample_size": True, "packing": "none"}
    ),
    "dp_replicate and dp_shard, the whole batch at once": Case(MeshSizes(2, 2, 1), objective="eqp"),
    "tp, one micro-batch, the whole batch at once": Case(
        MeshSizes(1, 1, 4), objective="version_aware", settings={"micro_batch_tokens": 1 << 20}
    ),
    "tp and dp_shard, a head of its own, normalised queries": Case(
        MeshSizes(1, 2, 2),
        model="qwen3",
        settings={"staleness_discount": "sample_size"} | FEWER,
        rematerialise="selective",
        layers=1,
    ),
    "tp and dp_replicate, fast steps, capped logits": Case(
        MeshSizes(2, 1, 2),
        model="nanochat",
        settings={"fast_steps": 1, "reposition_share": 0.5} | FEWER,
        layers=1,
    ),
    "no plan": Case(MeshSizes(1, 2, 2), model="gpt2"),
    "pp, row by row": Case(
        MeshSizes(pp=4), layers=5, rematerialise="selective", settings={"packing": "none"}
    ),
    "pp and dp_shard, a tied head on both ends": Case(
        MeshSizes(dp_shard=2, pp=2),
        layers=3,
        has_reference=True,
        settings={"reference_kl_coefficient": 0.1},
        rematerialise="layers",
    ),
    "pp and tp, two rounds, the whole batch at once": Case(
        MeshSizes(tp=2, pp=2),
        model="qwen3",
        objective="eqp",
        has_reference=True,
        settings={"reference_kl_coefficient": 0.1},
    ),
    "pp and dp_replicate, fast steps, scaled embeddings and logits": Case(
        MeshSizes(dp_replicate=2, pp=2), model="granite", settings={"fast_steps": 1, "reposition_share": 0.5}
    ),
}

NARROW: Final = {
    "bfloat16, tp": Case(MeshSizes(tp=4), settings=FEWER, is_narrow=True, layers=1),
    "bfloat16, pp and dp_shard": Case(MeshSizes(dp_shard=2, pp=2), is_narrow=True, rematerialise="selective"),
}

Compare = Callable[[str], Compared]

pytestmark = pytest.mark.timeout(400)  # four processes, on two cores that other tests use too


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(RANKS) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def compared(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Compare:
    """Return what compares a case, once."""

    @cache
    def of_case(name: str) -> Compared:
        path = tmp_path_factory.mktemp("ranks") / "figures.json"
        ranks.run(write_compared, (CASES | NARROW)[name], path)
        return Compared(**json.loads(path.read_text()))

    return of_case


@pytest.mark.parametrize("name", CASES)
def test_ranks_take_the_steps_of_one_process(name: str, compared: Compare) -> None:
    of_case = compared(name)
    assert of_case.moved > 5e-3
    assert of_case.difference < 1e-9
    assert of_case.figures_differ_by < 1e-9


@pytest.mark.parametrize("name", NARROW)
def test_in_bfloat16_a_step_of_ranks_is_that_of_one_process_to_half_a_percent(
    name: str, compared: Compare
) -> None:
    assert 0 < compared(name).first_figures_differ_by < 5e-3
    assert compared(name).figures_differ_by < 0.1


@pytest.mark.parametrize("name", ["dp_shard", "no plan"])
def test_a_rank_of_four_holds_a_quarter_of_parameters_gradients_and_moments(
    name: str, compared: Compare
) -> None:
    assert compared(name).held_share <= 1.1 / RANKS


def test_the_manuals_table_says_what_is_tested_with_what() -> None:
    def is_in_use(key: str, case: Case) -> bool:
        if key in DIMENSIONS:
            return case.sizes.shape[DIMENSIONS.index(key)] > 1
        name, _, value = key.partition(" = ")
        if name == "rematerialise":
            return case.rematerialise == value.strip('"')
        return case.is_narrow if name == "compute_dtype" else bool((case.settings or {}).get(name))

    def is_tested(row: str, column: str) -> bool:
        others = {row, column} if row in DIMENSIONS else {column, *DIMENSIONS}
        return any(
            is_in_use(row, case)
            and is_in_use(column, case)
            and {key for key in DIMENSIONS if is_in_use(key, case)} <= others
            for case in (CASES | NARROW).values()
        )

    manual = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text()
    head, _, *rows = re.search(r"(\| tested with (?:.*\n)+?)\n", manual)[1].splitlines()  # type: ignore[index]
    columns = [cell.strip(" `") for cell in head.split("|")[2:-1]]
    assert columns == list(DIMENSIONS)
    for row in rows:
        name, *cells = [cell.strip() for cell in row.split("|")[1:-1]]
        said = dict(zip(columns, [cell == "yes" for cell in cells], strict=True))
        assert said == {column: is_tested(name.strip("`"), column) for column in columns}, name


def test_a_family_without_a_plan_for_tensor_parallelism_is_sharded_over_all_ranks(
    compared: Compare,
) -> None:
    assert compared("no plan").sizes == "pp 1, dp_replicate 1, dp_shard 4, tp 1"


@pytest.mark.needs("kernel")
def test_a_checkpoint_goes_on_in_any_layout_and_the_words_are_those_of_one_process(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(save_and_publish, tmp_path)
    # The checkpoint of stages and slices goes on as stages alone too.
    with Ranks(2) as fewer:
        fewer.run(take_step, tmp_path, 2, MeshSizes(pp=2), "-again")
    settings = make_step_settings(objective="drift_aware")
    policy = Policy(tiny_model("llama"))
    optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-2, fused=True)
    for name, before in (("0", None), ("1", "0"), ("2", "1"), ("2-again", "1")):
        load_into(policy, optimizer, tmp_path / f"checkpoint-{name}")
        words = np.empty(policy.layout.words, np.uint16)
        policy.snapshot(words)
        assert (words == np.load(tmp_path / f"words-{name}.npy")).all()
        if before is None:
            continue
        # Resumed from a checkpoint of another layout; one process does too, and takes the same step.
        resumed = {name: tensor.detach().clone() for name, tensor in policy.tensors.items()}
        load_into(policy, optimizer, tmp_path / f"checkpoint-{before}")
        train_step(policy, optimizer, made_up_groups(int(name[0])), version=VERSION, settings=settings)
        for tensor_name, tensor in policy.tensors.items():
            assert torch.allclose(tensor, resumed[tensor_name], rtol=0, atol=1e-9), (name, tensor_name)
