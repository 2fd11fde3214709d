"""Duties of every engine, for each one that is installed: torch always, vLLM by `make test-vllm`."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from node.errors import Reason, StartupError
from node.values.groups.rollout import Finish
from node.values.groups.sampling_parameters import SamplingParameters
from node.weights.format.digests import Words, version_root, words_digest
from node.weights.format.layout import Layout
from node.weights.format.model_files import StoredDtypes
from node.weights.format.model_tensors import tensor_specs
from sampler.engines.engine import MOST_ASKED, GenerationRequest
from sampler.engines.words.model_words import version_of
from support.engines import NAMES, WAYS, Driven, load, marks_of, tolerance_of
from support.refusals import refused
from support.tiny_model import END, make_tiny_model

PLAIN = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=12)
GREEDY = SamplingParameters(temperature=1.0, top_p=1.0, top_k=1, max_new_tokens=24)
END_ID = 1
PROMPTS = ["7", "3+4=", "abc def 54321"]
"""Greedy text of none depends on differences of less than 0.02 nats."""


CASES = [
    (name, apply, is_tied)
    for name, apply in WAYS
    for is_tied in (True, False)
    # How torch's words are tied does not depend on the process or on how a version is taken.
    if is_tied or not name.startswith("torch") or apply == "spare"
]


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=marks_of(case[0])) for case in CASES],
    ids=[f"{name}-{apply}-{'tied' if is_tied else 'untied'}" for name, apply, is_tied in CASES],
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    name, apply, is_tied = request.param
    model_dir = make_tiny_model(tmp_path_factory.mktemp("base"), head_size=32, is_tied=is_tied)
    engine = load(name, model_dir, apply=apply)
    yield Driven.of(engine, apply, model_dir, tolerance=tolerance_of(name))
    engine.close()


@pytest.fixture
def driven(loaded: Driven) -> Driven:
    """The engine with the base model's words and nothing running."""
    loaded.take(loaded.base)
    return loaded


@pytest.fixture(scope="module")
def other(loaded: Driven) -> Words:
    return loaded.shuffled


def test_the_layout_is_the_one_the_learner_derives(driven: Driven) -> None:
    state = AutoModelForCausalLM.from_pretrained(driven.model_dir, dtype=torch.float32).state_dict()
    assert driven.engine.layout == Layout.of(tensor_specs(state, StoredDtypes.of(driven.model_dir)))


def test_the_words_of_the_base_model_are_its_files(driven: Driven) -> None:
    stored = load_file(driven.model_dir / "model.safetensors")
    for span in driven.engine.layout.tensors:
        name = span.name if span.name in stored else "model.embed_tokens.weight"
        held = driven.base[span.start_word : span.start_word + span.words]
        np.testing.assert_array_equal(held, stored[name].view(torch.int16).numpy().view(np.uint16).ravel())


@pytest.mark.parametrize("is_swapped", [False, True], ids=["one version", "a version a turn"])
def test_a_second_turn_goes_on_from_the_first_and_the_reply(
    driven: Driven, other: Words, is_swapped: bool
) -> None:
    for prompt in PROMPTS:
        driven.add(prompt, PLAIN)
    first_turns = driven.run_out()
    if is_swapped:
        driven.take(other)
    reply = driven.engine.tokenizer.encode_reply("12 higher")
    assert driven.engine.tokenizer.decode(reply) == "12 higher"
    begun = {
        f"{prompt}/{number}": (prompt, np.concatenate([first.token_ids, reply]), first.policy_version[-1])
        for prompt, finished in first_turns.items()
        for number, first in enumerate(finished.completions)
    }
    for request_id, (prompt, row, _) in begun.items():
        token_ids = np.concatenate([driven.engine.tokenizer.encode(prompt), row])
        driven.engine.add(GenerationRequest(request_id, token_ids, 1, PLAIN))
    for request_id, finished in driven.run_out().items():
        (prompt, row, version), (second,) = begun[request_id], finished.completions
        assert (second.policy_version[0] > version) == is_swapped
        whole = replace(
            second,
            token_ids=np.concatenate([row, second.token_ids]),
            policy_version=np.concatenate([np.full(len(row), version, np.int32), second.policy_version]),
        )
        scores, _ = driven.recomputed(prompt, whole, PLAIN)
        np.testing.assert_allclose(second.behaviour_logprob, scores[len(row) :], atol=driven.tolerance)


@pytest.mark.parametrize("is_swapped", [False, True], ids=["base", "after a swap"])
def test_greedy_text_is_that_of_transformers(driven: Driven, other: Words, is_swapped: bool) -> None:
    if is_swapped:
        driven.take(other)
    for prompt in PROMPTS:
        driven.add(prompt, GREEDY, completions=1)
    finished = driven.run_out()
    for prompt in PROMPTS:
        drawn = finished[prompt].completions[0].token_ids.tolist()
        assert drawn == driven.greedy(prompt, tokens=GREEDY.max_new_tokens)


def test_logprobs_are_those_of_the_version_each_token_names(driven: Driven, other: Words) -> None:
    before = max(driven.versions)
    for prompt in PROMPTS:
        driven.add(prompt, PLAIN, completions=6)
    while driven.engine.waiting:
        driven.step()
    driven.steps(4)
    after = driven.take(other)
    driven.add("added later", PLAIN)
    finished = driven.run_out()
    assert set(finished) == {*PROMPTS, "added later"}
    named = set()
    for prompt, group in finished.items():
        driven.assert_scored(prompt, group.completions, PLAIN)
        named |= {tuple(np.unique(completion.policy_version)) for completion in group.completions}
    assert (before, after) in named
    assert named <= {(before,), (before, after), (after,)}


def test_versions_that_come_in_the_midst_of_the_one_before_leave_every_logprob_exact(
    driven: Driven, other: Words
) -> None:
    for prompt in PROMPTS:
        driven.add(prompt, replace(PLAIN, max_new_tokens=40), completions=3)
    while driven.engine.waiting:
        driven.step()
    for words in (other, driven.base, other, driven.base):
        driven.steps(5)
        driven.take(words)
    finished = driven.run_out()
    assert set(finished) == set(PROMPTS)
    named = []
    for prompt, group in finished.items():
        driven.assert_scored(prompt, group.completions, PLAIN)
        for completion in group.completions:
            assert completion.policy_version.tolist() == sorted(completion.policy_version)
            named.append(len(set(completion.policy_version)))
    assert max(named) >= 3


@pytest.mark.parametrize("name", NAMES)
def test_kept_caches_make_logprobs_those_of_the_mixture_each_token_was_drawn_from(
    tmp_path: Path, name: str
) -> None:
    make_tiny_model(tmp_path, head_size=32)
    engine = load(name, tmp_path, kv_cache="keep")
    driven = Driven.of(engine, "in_place", tmp_path, tolerance=tolerance_of(name))
    for prompt in PROMPTS:
        driven.add(prompt, PLAIN, completions=4)
    while engine.waiting:
        driven.step()
    apart = []
    for _ in range(2):
        driven.steps(4)
        driven.take(driven.shuffled)
    finished = driven.run_out()
    for prompt in PROMPTS:
        for completion in finished[prompt].completions:
            mixture = driven.recomputed_over_kept_caches(prompt, completion)
            np.testing.assert_allclose(completion.behaviour_logprob, mixture, atol=driven.tolerance)
            alone, _ = driven.recomputed(prompt, completion, PLAIN)
            apart.append(np.abs(completion.behaviour_logprob - alone).max())
    assert max(apart) > 1e-2
    driven.add("added later", PLAIN)
    driven.assert_scored("added later", driven.run_out()["added later"].completions, PLAIN)
    engine.close()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParameters(temperature=0.7, top_p=1.0, top_k=3, max_new_tokens=8),
        SamplingParameters(temperature=1.3, top_p=0.6, top_k=0, max_new_tokens=8),
        SamplingParameters(temperature=1.5, top_p=0.9, top_k=8, max_new_tokens=8, min_p=0.1),
    ],
    ids=["top-k", "top-p", "min-p and both"],
)
def test_truncated_sampling_records_the_renormalised_logprob_and_the_mass_kept(
    driven: Driven, sampling: SamplingParameters
) -> None:
    driven.add("5-2=", sampling, completions=4)
    driven.add("5", PLAIN)
    finished = driven.run_out()
    driven.assert_scored("5-2=", finished["5-2="].completions, sampling)
    driven.assert_scored("5", finished["5"].completions, PLAIN)
    masses = [completion.kept_mass for completion in finished["5-2="].completions]
    assert min(float(mass.min()) for mass in masses if mass is not None) < 0.99


def test_tokens_are_drawn_as_often_as_their_logprob_says(driven: Driven) -> None:
    n = 2000
    driven.add("6+6=", SamplingParameters(1.0, 1.0, 0, max_new_tokens=1), completions=n)
    counts: dict[int, int] = {}
    probability: dict[int, float] = {}
    for completion in driven.run_out()["6+6="].completions:
        token = int(completion.token_ids[0])
        counts[token] = counts.get(token, 0) + 1
        probability[token] = float(np.exp(completion.behaviour_logprob[0]))
    assert sum(probability.values()) > 0.98
    for token, p in probability.items():
        assert abs(counts[token] - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 1


def test_words_read_back_are_those_of_the_version_taken(driven: Driven, other: Words) -> None:
    layout = driven.engine.layout
    for words in (other, driven.base):
        words.flags.writeable = False
        driven.take(words)
        np.testing.assert_array_equal(driven.live, words)
        signed = version_root(layout.digest, [words_digest(words[frame.slice]) for frame in layout.frames])
        assert version_of(1, driven.engine.weights.live, layout=layout).root == signed
        words.flags.writeable = True


def test_a_bit_that_flips_in_memory_is_read_back(driven: Driven) -> None:
    frame = driven.engine.layout.frames[0]
    good = driven.live[frame.slice].copy()
    damaged = good.copy()
    damaged[1] ^= 1 << 3
    driven.engine.weights.live.write(frame, damaged)
    assert words_digest(driven.engine.weights.live.read(frame)) == words_digest(damaged)
    driven.engine.weights.live.write(frame, good)
    assert words_digest(driven.engine.weights.live.read(frame)) == words_digest(good)


def test_a_cancelled_request_is_forgotten_and_the_rest_stays_exact(driven: Driven) -> None:
    for prompt in ("1+2=", "a long one to be dropped"):
        driven.add(prompt, PLAIN)
    for _ in range(2):
        driven.step()
    driven.add("pending", PLAIN)
    driven.engine.cancel(["a long one to be dropped", "pending", "unknown"])
    assert driven.engine.running == 1
    finished = driven.run_out()
    assert set(finished) == {"1+2="}
    driven.assert_scored("1+2=", finished["1+2="].completions, PLAIN)


def test_it_says_how_full_it_is(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sampler.engines.remote.remote_engine.GAUGES_S", 0.0)
    for prompt in (*PROMPTS, "8"):
        driven.add(prompt, replace(PLAIN, max_new_tokens=20), completions=150)
    uses = []
    while driven.engine.running:
        driven.step()
        uses.append(driven.engine.use)
    assert set(driven.run_out()) == {*PROMPTS, "8"}
    assert all(0.0 <= use.cache_share <= 1.0 and 0.0 <= use.asked_share <= MOST_ASKED for use in uses)
    # A server may have drawn some before it has read the next request.
    assert max(use.asked_share for use in uses) > 0.5
    assert uses[-1].asked_share < 0.5


@pytest.mark.parametrize("prompt", ["1" * 250, ""], ids=["too long", "empty"])
def test_a_prompt_that_leaves_no_room_is_refused(driven: Driven, prompt: str) -> None:
    with refused(Reason.OVER_LIMIT):
        driven.engine.add(GenerationRequest("a", driven.engine.tokenizer.encode(prompt), 2, PLAIN))
    assert driven.engine.running == 0
    assert driven.engine.step() == []


def test_the_end_token_finishes_a_completion_and_the_limit_cuts_it(driven: Driven) -> None:
    driven.add("4", PLAIN, completions=200)
    completions = driven.run_out()["4"].completions
    assert len(completions) == 200
    assert {c.finish for c in completions} == {Finish.END, Finish.LENGTH}
    for completion in completions:
        assert (completion.finish is Finish.END) == (completion.token_ids[-1] == END_ID)
        assert END_ID not in completion.token_ids[:-1]
        assert completion.finish is Finish.END or len(completion.token_ids) == PLAIN.max_new_tokens


def test_a_stop_string_ends_a_completion_and_is_part_of_it(driven: Driven) -> None:
    greedy = driven.greedy("3+4=", tokens=12)
    text = driven.engine.tokenizer.decode(np.array(greedy, np.int32))
    stop = text[3:6]
    sampling = replace(GREEDY, stop=("no such", stop))
    driven.add("3+4=", sampling, completions=1)
    [completion] = driven.run_out()["3+4="].completions
    assert completion.finish is Finish.STOP
    drawn = driven.engine.tokenizer.decode(completion.token_ids)
    assert text.startswith(drawn)
    assert drawn.endswith(stop)
    assert drawn.find(stop) == len(drawn) - len(stop)


def test_the_text_of_a_completion_has_no_special_tokens(driven: Driven) -> None:
    ids = driven.engine.tokenizer.encode(f"3+4{END}")
    assert (
        driven.engine.tokenizer.decode(np.array([*driven.engine.tokenizer.encode("3+4"), END_ID], np.int32))
        == "3+4"
    )
    assert END_ID in ids


def test_an_older_version_is_refused(driven: Driven) -> None:
    with pytest.raises(ValueError, match="older"):
        driven.engine.serve(max(driven.versions) - 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stored_as", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weights_are_loaded_under_either_name_and_a_closed_engine_frees_its_weights(
    tmp_path: Path, name: str, stored_as: str
) -> None:
    make_tiny_model(tmp_path, head_size=32)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    tied = stored.pop("model.embed_tokens.weight")
    save_file(stored | {stored_as: tied}, path, {"format": "pt"})
    engine = load(name, tmp_path)
    driven = Driven.of(engine, "in_place", tmp_path)
    span = next(span for span in engine.layout.tensors if span.name == "lm_head.weight")
    held = driven.base[span.start_word : span.start_word + span.words]
    np.testing.assert_array_equal(held, tied.view(torch.int16).numpy().view(np.uint16).ravel())
    driven.add("3+4=", GREEDY, completions=1)
    drawn = driven.run_out()["3+4="].completions[0].token_ids.tolist()
    assert drawn == driven.greedy("3+4=", tokens=GREEDY.max_new_tokens)
    weights = weakref.ref(engine.weights)
    engine.close()
    gc.collect()
    assert weights() is None


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_without_a_model_is_a_startup_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        load(name, tmp_path)
