"""A contributor of several ranks hands in, and goes over to, what one process would."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from learner.contributor.local_trainer import LocalTrainer
from learner.contributor.terms import Terms
from learner.merging.changes.coder import decode_tensors
from learner.merging.merge_settings import MergeSettings
from learner.sizing.mesh_sizes import MeshSizes
from support.rank_contributors import STEP, MergedVersions, Method, Place, contribute
from support.rank_processes import Ranks
from support.refusals import cannot_start

RANKS: Final = 2
SITES: Final = 2
LAYOUTS: Final = {
    "dp_shard": MeshSizes(dp_shard=2),
    "dp_replicate": MeshSizes(dp_replicate=2),
    "tp": MeshSizes(tp=2),
    "pp": MeshSizes(pp=2),
}
MERGES: Final = {
    "in_step": MergeSettings(method="in_step"),
    "streaming": MergeSettings(method="streaming", local_steps=1, fragments=2),
    "word_changes": MergeSettings(method="word_changes", local_steps=1),
    "parablock": MergeSettings(method="parablock", local_steps=1),
    "largest": MergeSettings(method="in_step", compression="largest", share=0.05),
}
CASES: Final = [
    *(("word_changes", layout) for layout in LAYOUTS),  # has the words, an overlap and what is left over
    ("in_step", "dp_replicate"),
    ("streaming", "pp"),
    ("parablock", "dp_shard"),
    ("largest", "tp"),
]
"""Every layout, and every way to code and choose what is handed in, once."""

pytestmark = pytest.mark.timeout(400)  # several processes, on two cores that other tests use too


@pytest.fixture(scope="module")
def sites() -> Iterator[list[Ranks]]:
    with Ranks(RANKS) as first, Ranks(RANKS) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return what becomes of a contributor of one process."""

    @cache
    def of_merge(name: str) -> dict[str, Any]:
        path = tmp_path_factory.mktemp("alone") / "told"
        contribute(Method(MeshSizes(), MERGES[name]), Place(0, 1, 0, path), in_one_process=True)
        return read(path)

    return of_merge


def read(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = torch.load(path, weights_only=True)
    return told


def difference(ones: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    assert ones.keys() == others.keys()
    return max(float((ones[name] - others[name]).abs().max()) for name in ones)


def rounds_to(masters: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(masters[name].bfloat16(), others[name].bfloat16()) for name in masters)


@pytest.mark.parametrize(("merge", "layout"), CASES)
def test_ranks_hand_in_and_adopt_what_one_process_does(
    merge: str, layout: str, sites: list[Ranks], alone: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    method, path = Method(LAYOUTS[layout], MERGES[merge]), tmp_path / "told"
    sites[0].run(contribute, method, Place(0, 1, 0, path))
    ours, expected = read(path), alone(merge)
    shapes = {name: one.shape for name, one in expected["merged"].items()}
    before = MergedVersions(method.merge).before
    # Later word changes are coded against later words.
    for one, other in list(zip(ours["payloads"], expected["payloads"], strict=True))[
        : 1 if merge == "word_changes" else None
    ]:
        changes = [
            dict(decode_tensors(payload, method.merge, shapes, words_before=before))
            for payload in (one, other)
        ]
        assert difference(*changes) < 1e-9
    assert difference(ours["local"], expected["local"]) < 1e-9
    assert difference(ours["merged"], expected["merged"]) < 1e-9
    if layout not in ("dp_replicate", "tp"):  # tensor parallelism leaves norms whole
        share = sum(one.numel() for one in expected["local"].values()) / RANKS
        # Anchor, sent and two moments in float64, what is left over in float32; and a tied embedding twice.
        embedding = max(one.numel() for one in expected["local"].values())
        assert 20 * share < ours["grown_bytes"] < 36 * (1.05 * share + embedding)
    if method.merge.overlap == "wait":
        assert rounds_to(ours["local"], ours["merged"])


def test_dilocox_with_two_stages_at_two_sites_is_that_of_two_processes(
    sites: list[Ranks], tmp_path: Path
) -> None:
    """Low rank at 4 bits, a round of delay, feedback: equal to 1e-9 in float64, round after round."""
    merge = MergeSettings(method="dilocox", local_steps=2, rank=4)

    def of_sites(ranks: list[Ranks], method: Method, *, in_one_process: bool) -> list[dict[str, Any]]:
        limit = timedelta(seconds=300)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        places = [
            Place(site, SITES, store.port, tmp_path / f"{method.sizes} {site}") for site in range(SITES)
        ]

        def run(site: int) -> None:
            ranks[site].run(contribute, method, places[site], in_one_process)

        with ThreadPoolExecutor(SITES) as threads:
            list(threads.map(run, range(SITES)))
        return [read(place.path) for place in places]

    pipelined = of_sites(sites, Method(MeshSizes(pp=2), merge), in_one_process=False)
    with Ranks(1) as first, Ranks(1) as second:
        whole = of_sites([first, second], Method(MeshSizes(), merge), in_one_process=True)
    for ours, expected in zip(pipelined, whole, strict=True):
        assert difference(ours["merged"], expected["merged"]) < 1e-9
        assert difference(ours["local"], expected["local"]) < 1e-9
    assert difference(pipelined[0]["merged"], pipelined[1]["merged"]) == 0


def test_stages_do_not_train_fragments_alone() -> None:
    pipelined: Any = SimpleNamespace(policy=SimpleNamespace(is_pipelined=True))
    nothing: Any = None
    with cannot_start("trains_a_fragment", "pp"):
        LocalTrainer(pipelined, nothing, nothing).take(Terms(STEP, MERGES["parablock"], batch_groups=3))
