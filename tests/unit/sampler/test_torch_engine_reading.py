"""A torch engine reads prompts, and completions after a swap: chunk by chunk, while others draw on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sampler.engines.decoding.cached_model import CachedModel
from sampler.engines.decoding.kv_cache import KeyValueCache
from sampler.engines.engine import GenerationRequest
from support.torch_engines import PLAIN, assert_scored, live, load, made, other_words, request, run_out


def test_running_completions_draw_a_token_for_each_chunk_of_a_long_prompt(model_dir: Path) -> None:
    engine = made(model_dir, prefill_chunk_tokens=8)
    engine.add(request(engine, "1", completions=4, sampling=replace(PLAIN, max_new_tokens=60)))
    engine.step()
    assert engine.waiting == 0
    prompt = "abc def ghi 12345 " * 3
    engine.add(request(engine, prompt))
    # 54 tokens but the last, 8 at a time: it joins in the 7th step.
    for _ in range(6):
        before = [row.drawn for row in engine._batch.rows]
        engine.step()
        assert [row.drawn for row in engine._batch.rows[: len(before)]] > before
        assert engine.waiting == 1
    engine.step()
    assert engine.waiting == 0
    assert_scored(engine, model_dir, run_out(engine)[prompt], prompt)


def test_rows_draw_on_while_others_are_read_again_and_no_step_reads_more_than_a_chunk(
    model_dir: Path, tmp_path: Path
) -> None:
    engine = made(model_dir, like="cuda", prefill_chunk_tokens=16)
    words = {0: live(engine), 5: other_words(tmp_path, 5), 6: other_words(tmp_path, 6)}
    sampling = replace(PLAIN, max_new_tokens=40)
    prompts = ["7", "12+34=", "abc def ghi 12345", "a prompt of 32 tokens 1234567890"]
    for prompt in prompts:
        engine.add(request(engine, prompt, sampling=sampling, completions=4))
        for _ in range(3):
            engine.step()
    finished: dict[str, GenerationRequest] = {}
    read = widths_read(engine._batch._model)
    for version in (5, 6):
        load(engine, words[version], version)
        assert not engine._batch.rows
        assert not read
        behind = [len(engine._stale.rows)]
        while behind[-1]:
            finished |= {one.request_id: one for one in engine.step()}
            behind.append(len(engine._stale.rows))
            assert sum(read) <= 16
            read.clear()
            if version == 5 and len(set(behind)) == 3:
                break
            engine.add(request(engine, "1", name=f"{version}.{len(behind)}", completions=1))
        assert len(set(behind)) > 2
    finished |= run_out(engine)
    versions: set[tuple[int, ...]] = set()
    for name, group in finished.items():
        prompt = name if name in prompts else "1"
        assert_scored(engine, model_dir, group, prompt, words=words, sampling=sampling)
        versions |= {tuple(np.unique(completion.policy_version)) for completion in group.completions}
    assert {(0, 5, 6), (0, 6)} <= versions


def widths_read(model: CachedModel) -> list[int]:
    """Return a list to which every later pass over more than a step's tokens adds how many it reads."""
    widths: list[int] = []
    read = model.read

    def counting(token_ids: torch.Tensor, cache: KeyValueCache) -> None:
        widths.append(token_ids.numel())
        read(token_ids, cache)

    model.read = counting  # type: ignore[method-assign]
    return widths


def test_long_rows_finish_though_versions_and_new_requests_come_faster_than_rows_are_read(
    model_dir: Path,
) -> None:
    engine = made(model_dir, prefill_chunk_tokens=24)
    engine.add(request(engine, "abc def ghi 1", completions=4, sampling=replace(PLAIN, max_new_tokens=10)))
    finished: set[str] = set()
    behind = 0
    for version in range(1, 400):
        engine.add(request(engine, "7", name=str(version), completions=2))
        for _ in range(3):
            finished |= {one.request_id for one in engine.step()}
        behind += bool(engine._stale.rows)
        engine.serve(version)
        if "abc def ghi 1" in finished:
            break
    assert "abc def ghi 1" in finished
    assert behind > version / 2


def test_a_request_that_is_cancelled_while_its_prompt_is_read_draws_nothing(model_dir: Path) -> None:
    engine = made(model_dir, prefill_chunk_tokens=8)
    for prompt in ("abc def ghi 12345", "9 abc def ghi 1234"):
        engine.add(request(engine, prompt))
    engine.step()
    engine.cancel(["abc def ghi 12345"])
    assert (engine.running, engine.waiting) == (1, 1)
    assert set(run_out(engine)) == {"9 abc def ghi 1234"}
    engine.add(request(engine, "abc def ghi 12345"))
    engine.step()
    engine.cancel(["abc def ghi 12345"])
    assert (engine.running, engine.waiting, engine.step()) == (0, 0, [])
