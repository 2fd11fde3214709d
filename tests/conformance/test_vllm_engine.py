"""The vLLM engine alone: its options, its refusals, and caches kept at a new version."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from node.errors import ConfigError, Reason, StartupError
from node.values.groups.sampling_parameters import SamplingParameters
from sampler.engines.vllm import live_parameters
from sampler.engines.words.model_words import ArrayWords, copy_words
from support.engines import Driven, load
from support.refusals import refused
from support.tiny_model import make_mixed_model, make_tiny_model

PLAIN = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=12)
LONG_PROMPT = "".join(str(n % 10) for n in range(200))
"""Longer than a block of vLLM's cache, so that requests share its prefix."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"), head_size=32)


@pytest.fixture(params=["keep", "recompute"])
def driven(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Driven]:
    engine = load("vllm", model_dir, kv_cache=request.param, context_tokens=240)
    yield Driven.of(engine, "in_place", model_dir)
    engine.close()


def test_no_request_begins_with_a_prefix_that_other_weights_computed(
    driven: Driven, request: pytest.FixtureRequest
) -> None:
    is_kept = "keep" in request.node.name
    driven.add(LONG_PROMPT, PLAIN, completions=4)
    for _ in range(4):
        driven.step()
    driven.take(driven.shuffled)
    running = driven.run_out()[LONG_PROMPT]
    driven.add(LONG_PROMPT, PLAIN, completions=4)
    later = driven.run_out()[LONG_PROMPT].completions
    assert {version for completion in later for version in completion.policy_version} == {1}
    driven.assert_scored(LONG_PROMPT, later, PLAIN)
    errors = []
    for completion in running.completions:
        assert completion.policy_version.tolist() == sorted(completion.policy_version)
        scores, _ = driven.recomputed(LONG_PROMPT, completion, PLAIN)
        errors.append(np.abs(completion.behaviour_logprob - scores).max())
    # Kept keys and values are of the old weights: those logprobs are of no version.
    assert (max(errors) > 1e-2) == is_kept


def test_no_request_begins_with_a_prefix_of_a_version_that_was_damaged(driven: Driven) -> None:
    version = driven.take(driven.shuffled)
    driven.add(LONG_PROMPT, PLAIN, completions=4)
    driven.run_out()
    weights, repaired = driven.engine.weights, driven.base
    copy_words(ArrayWords(repaired), weights.live, layout=driven.engine.layout)
    weights.settle()
    driven.versions[version] = repaired
    driven.engine.serve(version)
    driven.add(LONG_PROMPT, PLAIN, completions=4)
    driven.assert_scored(LONG_PROMPT, driven.run_out()[LONG_PROMPT].completions, PLAIN)


def test_what_does_not_fit_the_configured_context_is_refused(driven: Driven) -> None:
    with refused(Reason.OVER_LIMIT, "240"):
        driven.add("1" * 229, PLAIN)


def test_a_spare_copy_is_refused_before_the_model_is_loaded(model_dir: Path) -> None:
    with pytest.raises(StartupError, match="its parameters cannot move"):
        load("vllm", model_dir, apply="spare")


def test_arguments_that_vllm_does_not_have_are_a_wrong_configuration(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_argument"):
        load("vllm", model_dir, extra_arguments={"no_such_argument": 1})


def test_a_model_that_vllm_cannot_hold_as_it_is_published_is_a_startup_error(tmp_path: Path) -> None:
    make_mixed_model(tmp_path)
    with pytest.raises(StartupError, match=r"float16.* Set sampler\.engine = 'torch'"):
        load("vllm", tmp_path)


def test_layers_that_new_words_do_not_reach_are_found_at_the_start(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As once with tied embeddings on a CPU: the head was computed with a copy that no reload replaced."""
    monkeypatch.setattr(live_parameters.LiveParameters, "settle", lambda self: None)
    with pytest.raises(StartupError, match="does not compute with words written to it"):
        load("vllm", model_dir)
