import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from node.errors import Reason
from sampler.engines.decoding.cached_model import CachedModel
from sampler.engines.decoding.sampling import by_inverse, by_noise
from sampler.engines.engine import CPU_ROWS, EngineUse
from support.refusals import refused
from support.torch_engines import assert_scored, live, load, made, other_words, request, run_out


@pytest.mark.parametrize(
    "changes",
    [{"use_sliding_window": True, "sliding_window": 7, "layer_types": None, "max_window_layers": 1}, {}],
    ids=["sliding window", "eager"],
)
def test_a_model_that_needs_masks_of_its_own_is_scored_exactly(
    model_dir: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model_dir, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    engine = made(directory, prefill_chunk_tokens=8)
    if not changes:
        engine._model.set_attn_implementation("eager")
        engine._batch._model = CachedModel(engine._model)
        engine._prompts._model = engine._batch._model
    assert not engine._batch._model._takes_whole_masks
    assert made(model_dir)._batch._model._takes_whole_masks
    for prompt in ("9", "abc def ghi 12345"):
        engine.add(request(engine, prompt))
    for prompt, finished in run_out(engine).items():
        assert_scored(engine, directory, finished, prompt)


def test_weights_that_are_not_finite_leave_nothing_behind_for_the_next_version(
    model_dir: Path, tmp_path: Path
) -> None:
    engine = made(model_dir)
    words = {0: live(engine), 6: other_words(tmp_path, 6)}
    for prompt in ("9", "abc def ghi 12345"):
        engine.add(request(engine, prompt))
    for _ in range(3):
        engine.step()
    load(engine, np.full_like(words[0], 0x7FC0), 5)
    with torch.inference_mode():
        engine._stale.read(2048, most_rows=8)
    assert len(engine._batch.rows) == 6
    load(engine, words[6], 6)
    for prompt, group in run_out(engine).items():
        assert_scored(engine, model_dir, group, prompt, words=words)


def test_requests_wait_for_memory_in_their_order_and_all_finish(model_dir: Path) -> None:
    # Keys and values of 2 layers, 2 heads of 16, 4 bytes: 512 bytes a token. A group of 3 completions and its
    # prompt is 4 rows of 2 + 12 + 64 columns: 156 kB. 1 MiB has room for 6 of them.
    engine = made(model_dir, memory_bytes=1 << 20)
    names = [f"r{n}" for n in range(10)]
    for name in names:
        engine.add(request(engine, "12", name=name))
    order: list[str] = []
    engine.step()
    assert (engine.running, engine.waiting) == (10, 4)
    assert engine.use == EngineUse(0.0, 10 / 6)
    while engine.running:
        order += [finished.request_id for finished in engine.step()]
        assert engine.cache_bytes <= 1 << 20
    assert set(order) == set(names)
    assert engine.waiting == 0
    assert engine.use == EngineUse()


def test_without_a_bound_on_memory_it_is_full_of_as_many_rows_as_a_cpu_draws_at_once(model_dir: Path) -> None:
    engine = made(model_dir)
    engine.add(request(engine, "12", name="a", completions=CPU_ROWS // 4))
    engine.step()
    assert engine.use == EngineUse(0.0, 0.25)
    engine.add(request(engine, "12", name="b", completions=CPU_ROWS))
    engine.step()
    assert engine.use == EngineUse(0.0, 1.0)


def test_a_group_that_would_never_fit_in_memory_is_refused(model_dir: Path) -> None:
    engine = made(model_dir, memory_bytes=1 << 20)
    with refused(Reason.OVER_LIMIT, "1048576"):
        engine.add(request(engine, "12", completions=27))
    assert engine.running == 0


def test_what_a_seed_draws_is_what_multinomial_draws() -> None:
    logprob = torch.log_softmax(torch.randn(50, 300, generator=torch.Generator().manual_seed(1)), dim=-1)
    drawn = by_noise(logprob, torch.Generator().manual_seed(3))
    same = torch.multinomial(logprob.exp(), 1, generator=torch.Generator().manual_seed(3)).squeeze(-1)
    assert torch.equal(drawn, same)


@pytest.mark.parametrize("draw", [by_noise, by_inverse])
def test_tokens_are_drawn_as_often_as_they_are_likely_and_never_if_cut_off(
    draw: Callable[[torch.Tensor, torch.Generator], torch.Tensor],
) -> None:
    n, probabilities = 20_000, torch.tensor([0.0, 0.5, 1e-3, 0.0, 0.3, 0.199, 0.0])
    drawn = draw(probabilities.log().expand(n, -1), torch.Generator().manual_seed(5))
    for count, p in zip(drawn.bincount(minlength=7).tolist(), probabilities.tolist(), strict=True):
        assert abs(count - n * p) <= 4 * (n * p * (1 - p)) ** 0.5


def test_completions_drawn_by_the_inverse_are_scored_exactly(model_dir: Path) -> None:
    engine = made(model_dir, draw="inverse")
    engine.add(request(engine, "3+4="))
    assert_scored(engine, model_dir, run_out(engine)["3+4="], "3+4=")
