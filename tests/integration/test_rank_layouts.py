"""A step is the same step however a learner's ranks share it, to the last bits of float64."""

import json
from typing import Final

import pytest

from learner.ranks.mesh_sizes import MeshSizes
from support.rank_processes import Case, Compared, compare_all, run_on_ranks

RANKS: Final = 4
CASES: Final = {
    "dp_shard": Case(
        MeshSizes(1, 4, 1),
        has_reference=True,
        settings={"reference_kl_coefficient": 0.1},
        checkpoints_activations=True,
    ),
    "dp_replicate": Case(MeshSizes(4, 1, 1), settings={"scales_rate_by_sample_size": True}),
    "dp_replicate and dp_shard, the whole batch at once": Case(MeshSizes(2, 2, 1), objective="eqp"),
    "tp, one micro-batch, the whole batch at once": Case(
        MeshSizes(1, 1, 4), objective="version_aware", settings={"micro_batch_tokens": 1 << 20}
    ),
    "tp and dp_shard, a head of its own, normalised queries": Case(
        MeshSizes(1, 2, 2), model="qwen3", settings={"staleness_discount": "sample_size"}
    ),
    "tp and dp_replicate, fast steps": Case(
        MeshSizes(2, 1, 2), settings={"fast_steps": 1, "reposition_share": 0.5}
    ),
    "no plan": Case(MeshSizes(1, 2, 2), model="gpt2"),
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compared]:
    path = tmp_path_factory.mktemp("ranks") / "figures.json"
    run_on_ranks(compare_all, CASES, path, ranks=RANKS)
    return {name: Compared(**figures) for name, figures in json.loads(path.read_text()).items()}


@pytest.mark.parametrize("name", CASES)
def test_ranks_take_the_steps_of_one_process(name: str, compared: dict[str, Compared]) -> None:
    of_case = compared[name]
    assert of_case.moved > 5e-3
    assert of_case.difference < 1e-9
    assert of_case.figures_differ_by < 1e-9


@pytest.mark.parametrize("name", ["dp_shard", "no plan"])
def test_a_rank_of_four_holds_a_quarter_of_parameters_gradients_and_moments(
    name: str, compared: dict[str, Compared]
) -> None:
    assert compared[name].held_share <= 1.1 / RANKS


def test_a_family_without_a_plan_for_tensor_parallelism_is_sharded_over_all_ranks(
    compared: dict[str, Compared],
) -> None:
    assert compared["no plan"].sizes == "dp_replicate 1, dp_shard 4, tp 1"
