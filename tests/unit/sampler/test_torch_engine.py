import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from node.errors import Reason, RefusedError, StartupError
from node.rollout import Finish, SamplingParameters
from node.weights.format.model_tensors import canonical_tensors
from sampler.engines.decoding.cached_model import CachedModel
from sampler.engines.decoding.decode_batch import _with_gaps_filled
from sampler.engines.decoding.draws import by_inverse, by_noise
from sampler.engines.decoding.kv_cache import GROWTH_COLUMNS, KeyValueCache
from sampler.engines.decoding.readback import Readback
from sampler.engines.decoding.sampling_distribution import RowSampling, sampling_distribution
from sampler.engines.engine import FinishedRequest, GenerationRequest, SampledCompletion
from sampler.engines.model_words import ArrayWords, copy_words
from sampler.engines.stop_strings import text_before_stop
from sampler.engines.torch_engine import TorchEngine
from sampler.engines.torch_options import TorchOptions
from support.model_words import words_of
from support.tiny_model import make_tiny_model

PLAIN = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=12)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(params=["cpu", "cuda"])
def engine(model_dir: Path, request: pytest.FixtureRequest) -> TorchEngine:
    return made(model_dir, like=request.param)


def made(model_dir: Path, *, like: str = "cpu", **options: Any) -> TorchEngine:
    """Load an engine that reads what it drew, and fills gaps in its batch, as on such a device."""
    engine = TorchEngine(
        model_dir,
        device="cpu",
        compute_dtype=torch.float32,
        threads=1,
        seed=7,
        options=TorchOptions(**options),
    )
    if like == "cuda":
        engine._decoder._readback = Readback(depth=1)
        engine._decoder._batch._keeps_order = False
    return engine


def other_words(tmp_path: Path, seed: int) -> NDArray[np.uint16]:
    other = make_tiny_model(tmp_path / str(seed), seed=seed)
    return live(TorchEngine(other, device="cpu", compute_dtype=torch.float32, threads=1, seed=0))


def live(engine: TorchEngine) -> NDArray[np.uint16]:
    return words_of(engine.weights.live, layout=engine.layout)


def load(engine: TorchEngine, words: NDArray[np.uint16], version: int, *, in_place: bool = False) -> None:
    """Change the live words as a verified version does."""
    if in_place:
        copy_words(ArrayWords(words), engine.weights.live, layout=engine.layout)
        engine.weights.settle()
    else:
        spare = engine.weights.new_spare()
        copy_words(ArrayWords(words), spare, layout=engine.layout)
        engine.weights.swap(spare)
    engine.serve(version)


def request(
    engine: TorchEngine,
    prompt: str,
    *,
    name: str = "",
    completions: int = 3,
    sampling: SamplingParameters = PLAIN,
) -> GenerationRequest:
    return GenerationRequest(name or prompt, engine.encode(prompt), completions, sampling)


def run_out(engine: TorchEngine) -> dict[str, FinishedRequest]:
    finished: dict[str, FinishedRequest] = {}
    while engine.running:
        finished |= {f.request_id: f for f in engine.step()}
    return finished


def naive_logprob(
    model_dir: Path,
    words: dict[int, NDArray[np.uint16]],
    prompt: NDArray[np.int32],
    completion: SampledCompletion,
    sampling: SamplingParameters = PLAIN,
) -> NDArray[np.float32]:
    """Score every token by a whole forward pass of its own: no cache, no batch, no padding.

    Kept masses, where there are any, are checked on the way.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    scores: list[float] = []
    kept_masses: list[float] = []
    with torch.no_grad():
        for position, (token, version) in enumerate(
            zip(completion.token_ids, completion.policy_version, strict=True)
        ):
            start = 0
            for tensor in canonical_tensors(model.state_dict()).values():
                part = torch.from_numpy(words[int(version)][start : start + tensor.numel()].copy())
                tensor.copy_(part.view(torch.bfloat16).view(tensor.shape))
                start += tensor.numel()
            ids = np.concatenate([prompt, completion.token_ids[:position]])
            logits = model(torch.tensor(ids[None], dtype=torch.long), use_cache=False).logits[:, -1]
            distribution = sampling_distribution(logits, RowSampling.of([sampling], device=logits.device))
            scores.append(float(distribution.logprob[0, int(token)]))
            kept_masses.append(float(distribution.kept_mass))
    assert completion.kept_mass is None or np.allclose(completion.kept_mass, kept_masses, atol=1e-5)
    return np.array(scores, np.float32)


def test_logprobs_equal_a_forward_pass_without_cache_for_prompts_of_different_length(
    engine: TorchEngine, model_dir: Path
) -> None:
    prompts = ["7", "3+4=", "abc def ghi 12345"]
    for prompt in prompts:
        engine.add(request(engine, prompt))
    finished = run_out(engine)
    for prompt in prompts:
        for completion in finished[prompt].completions:
            naive = naive_logprob(
                model_dir,
                {0: live(engine)},
                engine.encode(prompt),
                completion,
            )
            np.testing.assert_allclose(completion.behaviour_logprob, naive, atol=1e-5)


def test_a_prompt_of_one_token_alone_is_scored_exactly(engine: TorchEngine, model_dir: Path) -> None:
    engine.add(request(engine, "7"))
    for completion in run_out(engine)["7"].completions:
        naive = naive_logprob(
            model_dir,
            {0: live(engine)},
            engine.encode("7"),
            completion,
        )
        np.testing.assert_allclose(completion.behaviour_logprob, naive, atol=1e-5)


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
        for completion in finished[prompt].completions:
            naive = naive_logprob(model_dir, words, engine.encode(prompt), completion)
            np.testing.assert_allclose(completion.behaviour_logprob, naive, atol=1e-5)
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
        for completion in group.completions:
            naive = naive_logprob(
                model_dir,
                {0: live(engine)},
                engine.encode(prompt),
                completion,
            )
            np.testing.assert_allclose(completion.behaviour_logprob, naive, atol=1e-5)


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
        naive = naive_logprob(model_dir, {0: live(engine)}, engine.encode("5-2="), completion, sampling)
        assert completion.kept_mass is not None
        assert completion.kept_mass.min() < 0.99
        np.testing.assert_allclose(completion.behaviour_logprob, naive, atol=1e-5)


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


def test_the_end_token_finishes_a_completion_and_the_limit_cuts_it(engine: TorchEngine) -> None:
    end = 1
    engine.add(request(engine, "4", completions=200))
    completions = run_out(engine)["4"].completions
    assert {c.finish for c in completions} == {Finish.END, Finish.LENGTH}
    for completion in completions:
        assert (completion.finish is Finish.END) == (completion.token_ids[-1] == end)
        assert end not in completion.token_ids[:-1]
        assert completion.finish is Finish.END or len(completion.token_ids) == PLAIN.max_new_tokens


def test_the_text_of_a_completion_has_no_special_tokens(engine: TorchEngine) -> None:
    assert engine.decode(np.array([*engine.encode("3+4"), 1], np.int32)) == "3+4"


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
        text = engine.decode(completion.token_ids)
        before = text_before_stop(text, stop)
        if completion.finish is Finish.STOP:
            assert text in {before + string for string in stop}
        else:
            assert before == text
    for completion in [*completions[:10], *finished["5"].completions]:
        prompt = engine.encode("5" if completion in finished["5"].completions else "4")
        naive = naive_logprob(model_dir, {0: live(engine)}, prompt, completion)
        np.testing.assert_allclose(completion.behaviour_logprob, naive, atol=1e-5)


def test_completions_longer_than_the_room_of_a_new_cache_are_scored_exactly(
    engine: TorchEngine, model_dir: Path
) -> None:
    long = replace(PLAIN, max_new_tokens=GROWTH_COLUMNS + 70)
    engine.add(request(engine, "8*8=", completions=40, sampling=long))
    for _ in range(30):
        engine.step()
    engine.add(request(engine, "2", completions=2))
    completions = run_out(engine)["8*8="].completions
    longest = max(completions, key=lambda completion: len(completion.token_ids))
    assert len(longest.token_ids) > GROWTH_COLUMNS
    naive = naive_logprob(model_dir, {0: live(engine)}, engine.encode("8*8="), longest)
    np.testing.assert_allclose(longest.behaviour_logprob, naive, atol=1e-4)


@pytest.mark.parametrize("like", ["cpu", "cuda"])
def test_running_completions_draw_a_token_for_each_chunk_of_a_long_prompt(model_dir: Path, like: str) -> None:
    engine = made(model_dir, like=like, prefill_chunk_tokens=8)
    engine.add(request(engine, "1", completions=4, sampling=replace(PLAIN, max_new_tokens=60)))
    engine.step()
    assert engine.waiting == 0
    prompt = "abc def ghi 12345 " * 3
    engine.add(request(engine, prompt))
    # 54 tokens but the last, 8 at a time: it joins in the 7th step.
    for _ in range(6):
        before = [row.drawn for row in engine._decoder._batch.rows]
        engine.step()
        assert [row.drawn for row in engine._decoder._batch.rows[: len(before)]] > before
        assert engine.waiting == 1
    engine.step()
    assert engine.waiting == 0
    for completion in run_out(engine)[prompt].completions:
        naive = naive_logprob(model_dir, {0: live(engine)}, engine.encode(prompt), completion)
        np.testing.assert_allclose(completion.behaviour_logprob, naive, atol=1e-5)


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
        for completion in finished.completions:
            naive = naive_logprob(directory, {0: live(engine)}, engine.encode(prompt), completion)
            np.testing.assert_allclose(completion.behaviour_logprob, naive, atol=1e-5)


@pytest.mark.parametrize("like", ["cpu", "cuda"])
def test_rows_draw_on_while_others_are_read_again_and_no_step_reads_more_than_a_chunk(
    model_dir: Path, tmp_path: Path, like: str
) -> None:
    engine = made(model_dir, like=like, prefill_chunk_tokens=16)
    words = {0: live(engine), 5: other_words(tmp_path, 5), 6: other_words(tmp_path, 6)}
    sampling = replace(PLAIN, max_new_tokens=40)
    prompts = ["7", "12+34=", "abc def ghi 12345", "a prompt of 32 tokens 1234567890"]
    for prompt in prompts:
        engine.add(request(engine, prompt, sampling=sampling, completions=4))
        for _ in range(3):
            engine.step()
    decoder = engine._decoder
    finished: dict[str, FinishedRequest] = {}
    read = widths_read(decoder._model)
    for version in (5, 6):
        load(engine, words[version], version)
        assert not decoder._batch.rows
        assert not read
        behind = [len(decoder._stale.rows)]
        while behind[-1]:
            finished |= {one.request_id: one for one in engine.step()}
            behind.append(len(decoder._stale.rows))
            assert sum(read) <= 16
            read.clear()
            if version == 5 and len(set(behind)) == 3:
                break
            engine.add(request(engine, "1", name=f"{version}.{len(behind)}", completions=1))
        assert len(set(behind)) > 2
    finished |= run_out(engine)
    versions = set()
    for name, group in finished.items():
        token_ids = engine.encode(name if name in prompts else "1")
        for completion in group.completions:
            naive = naive_logprob(model_dir, words, token_ids, completion, sampling)
            np.testing.assert_allclose(completion.behaviour_logprob, naive, atol=1e-5)
            versions.add(tuple(np.unique(completion.policy_version)))
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
    engine.add(request(engine, "abc def ghi 1", completions=4, sampling=replace(PLAIN, max_new_tokens=30)))
    finished: set[str] = set()
    behind = 0
    for version in range(1, 400):
        engine.add(request(engine, "7", name=str(version), completions=2))
        for _ in range(3):
            finished |= {one.request_id for one in engine.step()}
        behind += bool(engine._decoder._stale.rows)
        engine.serve(version)
        if "abc def ghi 1" in finished:
            break
    assert "abc def ghi 1" in finished
    assert behind > version / 2


def test_a_request_cancelled_while_it_is_read_again_leaves_the_others_exact(model_dir: Path) -> None:
    engine = made(model_dir, prefill_chunk_tokens=8)
    for prompt in ("12+34=", "abc def", "9"):
        engine.add(request(engine, prompt))
    for _ in range(4):
        engine.step()
    engine.serve(1)
    engine.step()
    engine.cancel(["12+34="])
    assert (engine.running, engine.waiting) == (2, 0)
    finished = run_out(engine)
    assert set(finished) == {"abc def", "9"}
    for prompt, group in finished.items():
        for completion in group.completions:
            words = dict.fromkeys((0, 1), live(engine))
            naive = naive_logprob(model_dir, words, engine.encode(prompt), completion)
            np.testing.assert_allclose(completion.behaviour_logprob, naive, atol=1e-5)


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
        for completion in group.completions:
            naive = naive_logprob(model_dir, words, engine.encode(prompt), completion)
            np.testing.assert_allclose(completion.behaviour_logprob, naive, atol=1e-5)


def test_a_prompt_that_is_being_read_is_read_again_by_new_weights(model_dir: Path, tmp_path: Path) -> None:
    engine = made(model_dir, prefill_chunk_tokens=8)
    words = {5: other_words(tmp_path, 5)}
    engine.add(request(engine, "abc def ghi 12345"))
    engine.step()
    load(engine, words[5], 5)
    for completion in run_out(engine)["abc def ghi 12345"].completions:
        naive = naive_logprob(model_dir, words, engine.encode("abc def ghi 12345"), completion)
        np.testing.assert_allclose(completion.behaviour_logprob, naive, atol=1e-5)


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
    for completion in run_out(engine)["3+4="].completions:
        naive = naive_logprob(model_dir, {0: live(engine)}, engine.encode("3+4="), completion)
        np.testing.assert_allclose(completion.behaviour_logprob, naive, atol=1e-5)


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
    for completion in finished["1+2="].completions:
        naive = naive_logprob(
            model_dir,
            {0: live(engine)},
            engine.encode("1+2="),
            completion,
        )
        np.testing.assert_allclose(completion.behaviour_logprob, naive, atol=1e-5)


def test_words_cover_tied_weights_once_under_the_smallest_name(engine: TorchEngine) -> None:
    names = [spec.name for spec in engine.layout.tensors]
    assert names == sorted(names, key=str.encode)
    assert "lm_head.weight" in names
    assert "model.embed_tokens.weight" not in names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_words_of_the_base_model_are_its_own_whatever_it_computes_in(
    model_dir: Path, dtype: torch.dtype
) -> None:
    engine = TorchEngine(model_dir, device="cpu", compute_dtype=dtype, threads=1, seed=7)
    tensors = canonical_tensors(AutoModelForCausalLM.from_pretrained(model_dir).state_dict())
    expected = torch.cat([t.bfloat16().view(torch.int16).view(-1) for t in tensors.values()])
    np.testing.assert_array_equal(live(engine), expected.numpy().view(np.uint16))


def test_read_only_words_can_be_loaded(engine: TorchEngine, model_dir: Path, tmp_path: Path) -> None:
    words = other_words(tmp_path, 3)
    words.flags.writeable = False
    load(engine, words, 1)
    engine.add(request(engine, "8-1="))
    for completion in run_out(engine)["8-1="].completions:
        naive = naive_logprob(model_dir, {1: words}, engine.encode("8-1="), completion)
        np.testing.assert_allclose(completion.behaviour_logprob, naive, atol=1e-5)


def test_a_base_model_saved_in_float32_is_served_as_it_is(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    model.save_pretrained(tmp_path)
    engine = TorchEngine(tmp_path, device="cpu", compute_dtype=torch.float32, threads=1, seed=7)
    assert {span.dtype.name for span in engine.layout.tensors} == {"float32"}
    served, saved = engine._model.state_dict(), model.state_dict()
    assert all(torch.equal(served[name], saved[name]) for name in saved)


def test_an_older_version_is_refused(engine: TorchEngine) -> None:
    engine.serve(3)
    with pytest.raises(ValueError, match="older"):
        engine.serve(2)


def test_a_prompt_that_leaves_no_room_is_refused(engine: TorchEngine) -> None:
    with pytest.raises(RefusedError) as caught:
        engine.add(request(engine, "1" * 250))
    assert caught.value.reason is Reason.OVER_LIMIT
    assert engine.running == 0


def test_a_directory_without_a_model_is_a_startup_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        TorchEngine(tmp_path, device="cpu", compute_dtype=torch.float32, threads=1, seed=0)
