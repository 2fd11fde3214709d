import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from node.errors import Reason, RefusedError
from node.rollout import Finish, SamplingParameters
from sampler.engines.decoding.cached_model import CachedModel
from sampler.engines.decoding.decode_batch import _with_gaps_filled
from sampler.engines.decoding.kv_cache import GROWTH_COLUMNS
from sampler.engines.decoding.sampling import by_inverse, by_noise
from sampler.engines.stop_strings import text_before_stop
from sampler.engines.torch_engine import TorchEngine
from support.torch_engines import PLAIN, assert_scored, live, load, made, other_words, request, run_out


@pytest.mark.parametrize("prompts", [["7"], ["7", "3+4=", "abc def ghi 12345"]], ids=len)
def test_logprobs_equal_a_forward_pass_without_cache_for_prompts_of_different_length(
    engine: TorchEngine, model_dir: Path, prompts: list[str]
) -> None:
    for prompt in prompts:
        engine.add(request(engine, prompt))
    finished = run_out(engine)
    for prompt in prompts:
        assert_scored(engine, model_dir, finished[prompt], prompt)


@pytest.mark.parametrize("in_place", [False, True], ids=["spare", "in place"])
def test_after_a_swap_in_mid_generation_every_logprob_is_that_of_the_version_it_names(
    engine: TorchEngine, model_dir: Path, tmp_path: Path, in_place: bool
) -> None:
    words = {0: live(engine), 5: other_words(tmp_path, 5)}
    prompts = ["9", "12+34=", "hello"]
    for prompt in prompts:
        engine.add(request(engine, prompt, completions=6))
    for _ in range(4):
        assert not engine.step()
    load(engine, words[5], 5, in_place=in_place)
    finished = run_out(engine)
    mixed = 0
    for prompt in prompts:
        assert_scored(engine, model_dir, finished[prompt], prompt, words=words)
        for completion in finished[prompt].completions:
            assert completion.policy_version[:4].tolist() == [0] * len(completion.policy_version[:4])
            assert (completion.policy_version[4:] == 5).all()
            mixed += len(completion.token_ids) > 4
    assert mixed > 0


def test_a_request_added_in_mid_generation_is_scored_exactly_and_leaves_the_others_exact(
    engine: TorchEngine, model_dir: Path
) -> None:
    engine.add(request(engine, "1+1="))
    for _ in range(3):
        engine.step()
    engine.add(request(engine, "a rather long prompt 1"))
    engine.add(request(engine, "2"))
    finished = run_out(engine)
    assert set(finished) == {"1+1=", "a rather long prompt 1", "2"}
    for prompt, group in finished.items():
        assert_scored(engine, model_dir, group, prompt)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParameters(temperature=0.7, top_p=1.0, top_k=3, max_new_tokens=8),
        SamplingParameters(temperature=1.3, top_p=0.6, top_k=0, max_new_tokens=8),
        SamplingParameters(temperature=1.3, top_p=1.0, top_k=0, max_new_tokens=8, min_p=0.3),
        SamplingParameters(temperature=0.9, top_p=0.8, top_k=9, max_new_tokens=8, min_p=0.1),
    ],
)
def test_truncated_sampling_records_the_renormalised_logprob_and_the_mass_kept(
    engine: TorchEngine, model_dir: Path, sampling: SamplingParameters
) -> None:
    engine.add(request(engine, "5-2=", sampling=sampling, completions=4))
    engine.add(request(engine, "5", completions=4))
    finished = run_out(engine)
    assert all(completion.kept_mass is None for completion in finished["5"].completions)
    for completion in finished["5-2="].completions:
        assert completion.kept_mass is not None
        assert completion.kept_mass.min() < 0.99
    assert_scored(engine, model_dir, finished["5-2="], "5-2=", sampling=sampling)


def test_tokens_are_drawn_as_often_as_their_logprob_says(engine: TorchEngine) -> None:
    n = 4000
    engine.add(
        request(engine, "6+6=", completions=n, sampling=SamplingParameters(1.0, 1.0, 0, max_new_tokens=1))
    )
    drawn = run_out(engine)["6+6="].completions
    counts: dict[int, int] = {}
    probability: dict[int, float] = {}
    for completion in drawn:
        token = int(completion.token_ids[0])
        counts[token] = counts.get(token, 0) + 1
        probability[token] = float(np.exp(completion.behaviour_logprob[0]))
    assert sum(probability.values()) > 0.98
    for token, p in probability.items():
        assert abs(counts[token] - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 1


def test_a_stop_string_ends_a_completion_and_its_tokens_stay_in_it(
    engine: TorchEngine, model_dir: Path
) -> None:
    stop = ("a", "37", "xyz")
    sampling = replace(PLAIN, stop=stop)
    engine.add(request(engine, "4", completions=100, sampling=sampling))
    engine.add(request(engine, "5", completions=3))
    finished = run_out(engine)
    completions = finished["4"].completions
    assert {c.finish for c in completions} == {Finish.END, Finish.STOP, Finish.LENGTH}
    for completion in completions:
        text = engine.tokenizer.decode(completion.token_ids)
        before = text_before_stop(text, stop)
        if completion.finish is Finish.STOP:
            assert text in {before + string for string in stop}
        else:
            assert before == text
    for prompt, group in finished.items():
        assert_scored(engine, model_dir, group, prompt)


def test_completions_longer_than_the_room_of_a_new_cache_are_scored_exactly(
    engine: TorchEngine, model_dir: Path
) -> None:
    long = replace(PLAIN, max_new_tokens=GROWTH_COLUMNS + 70)
    engine.add(request(engine, "8*8=", completions=40, sampling=long))
    for _ in range(30):
        engine.step()
    engine.add(request(engine, "2", completions=2))
    group = run_out(engine)["8*8="]
    assert max(len(completion.token_ids) for completion in group.completions) > GROWTH_COLUMNS
    assert_scored(engine, model_dir, group, "8*8=", atol=1e-4)


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
        engine._decoder._model = CachedModel(engine._model)
        engine._decoder._batch._model = engine._decoder._model
    assert not engine._decoder._model._takes_whole_masks
    assert made(model_dir)._decoder._model._takes_whole_masks
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
        engine._decoder._stale.read(2048, most_rows=8)
    assert len(engine._decoder._batch.rows) == 6
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
    while engine.running:
        order += [finished.request_id for finished in engine.step()]
        assert engine._decoder.held_bytes <= 1 << 20
    assert set(order) == set(names)
    assert engine.waiting == 0


def test_a_group_that_would_never_fit_in_memory_is_refused(model_dir: Path) -> None:
    engine = made(model_dir, memory_bytes=1 << 20)
    with pytest.raises(RefusedError, match="1048576") as refused:
        engine.add(request(engine, "12", completions=27))
    assert refused.value.reason is Reason.OVER_LIMIT
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


@pytest.mark.parametrize(
    ("kept", "order"),
    [
        ([0, 1, 2], [0, 1, 2]),
        ([0, 3, 4], [0, 3, 4]),
        ([0, 1, 5, 7], [0, 1, 5, 7]),
        ([2, 3], [2, 3]),
        ([], []),
    ],
)
def test_gaps_are_filled_from_the_end(kept: list[int], order: list[int]) -> None:
    assert _with_gaps_filled(kept) == order


def test_a_cancelled_request_is_forgotten_and_the_rest_stays_exact(
    engine: TorchEngine, model_dir: Path
) -> None:
    for prompt in ("1+2=", "a long one to be dropped"):
        engine.add(request(engine, prompt))
    for _ in range(2):
        engine.step()
    engine.add(request(engine, "pending"))
    engine.cancel(["a long one to be dropped", "pending", "unknown"])
    assert engine.running == 1
    finished = run_out(engine)
    assert set(finished) == {"1+2="}
    assert_scored(engine, model_dir, finished["1+2="], "1+2=")
