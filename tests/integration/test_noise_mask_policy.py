"""A policy of noise masks: its engine draws what the density says, and a run trains it and its classifier."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta, chisquare  # type: ignore[import-untyped]

from learner.model.model import load_policy
from node.errors import Reason, RefusedError
from node.exit_code import ExitCode
from node.kinds.noise_mask.network import read_prompts
from node.values.groups.well_formed import check_group
from sampler.config import SamplerConfig
from sampler.engines.engine import PROBE_ID, GenerationRequest
from sampler.engines.engine_registry import load_engine, load_in_own_process
from support.hub import running_hub
from support.identity import MadeRun
from support.learning import has_learnt, learn
from support.noise_mask import GRID, MASK, PIXELS, engine_of, image_text, make_masks, masked_group
from support.ranking import make_ranker
from support.refusals import cannot_start, refused
from support.sampler import sampling
from support.tiny_model import make_tiny_model
from support.waiting import until


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_masks(tmp_path_factory.mktemp("masks"))


def test_learner_and_sampler_have_one_layout_with_both_networks_and_the_base(model_dir: Path) -> None:
    engine, policy = engine_of(model_dir), load_policy(model_dir, device="cpu")
    assert engine.layout == policy.layout
    names = {span.name.partition(".")[0] for span in engine.layout.tensors}
    assert names == {"policy", "classifier"}
    assert "policy.base" in {span.name for span in engine.layout.tensors}
    assert {span.dtype.name for span in engine.layout.tensors} == {"float32"}


def test_masks_are_drawn_as_often_as_their_beta_says(model_dir: Path) -> None:
    """20 bins of equal probability for each of the nine cells, whose parameters differ."""
    engine = engine_of(model_dir)
    spread = {"policy.base": torch.linspace(-1.0, 1.5, 2 * GRID**2).view(2, -1)}
    engine._model.load_state_dict(spread, strict=False)
    group = masked_group(engine, wanted=1024)
    check_group(group)
    masks = np.stack([one.actions for one in group.completions if one.actions is not None])
    policy = load_policy(model_dir, device="cpu")
    policy.model.load_state_dict(spread, strict=False)
    prompt = torch.from_numpy(group.prompt_token_ids[None])
    with torch.no_grad():
        [(a, b)] = policy.model.policy(read_prompts(prompt, policy.model.config)[0]).exp().double()  # type: ignore[operator, arg-type]
    for cell in range(GRID**2):
        share = beta.cdf(masks[:, cell], float(a[cell]), float(b[cell]))
        counted, _ = np.histogram(share, bins=20, range=(0, 1))
        assert chisquare(counted).pvalue > 1e-3


def test_requests_of_one_step_get_what_each_gets_alone(model_dir: Path) -> None:
    together, alone = engine_of(model_dir), engine_of(model_dir)
    greedy = replace(MASK, top_k=1)
    prompts = [alone.tokenizer.encode(image_text(seed)) for seed in range(4)]
    requests = [
        GenerationRequest(f"{number}.1", prompt, wanted, sampling)
        for number, (prompt, wanted, sampling) in enumerate(
            zip(prompts, (4, 2, 1, 60), (MASK, greedy, MASK, MASK), strict=True)
        )
    ]
    for request in requests:
        together.add(request)
    first, last = together.step(), together.step()
    assert [[len(one.completions) for one in of_step] for of_step in (first, last)] == [[4, 2, 1], [60]]
    for request, found in zip(requests, first + last, strict=True):
        alone.add(request)
        [expected] = alone.step()
        assert found.request_id == request.request_id
        for one, other in zip(found.completions, expected.completions, strict=True):
            assert one.actions is not None
            assert other.actions is not None
            np.testing.assert_allclose(one.actions, other.actions, atol=1e-5)
            np.testing.assert_allclose(one.behaviour_logprob, other.behaviour_logprob, atol=1e-4)
            assert one.reward == pytest.approx(other.reward, abs=1e-5)


def test_greed_leaves_the_mask_out_and_the_image_clean(model_dir: Path) -> None:
    engine = engine_of(model_dir)
    group = masked_group(engine, wanted=2, sampling=replace(MASK, top_k=1))
    check_group(group)
    for one in group.completions:
        assert one.actions is not None
        assert (one.actions == 1).all()
        assert not one.behaviour_logprob.any()
    model = engine._model
    image, label = read_prompts(torch.from_numpy(group.prompt_token_ids[None]), model.config)
    clean = float(torch.nn.functional.cross_entropy(model(image), label))
    assert group.completions[0].reward == pytest.approx(-clean, abs=1e-5)


def test_sampling_that_is_not_a_masks_and_an_image_of_another_size_are_refused_by_name(
    model_dir: Path, subtests: pytest.Subtests
) -> None:
    engine = engine_of(model_dir)
    settings: dict[str, Any]
    for settings, said in (
        ({"top_p": 0.9}, "drawn from whole densities"),
        ({"stop": ("1",)}, "drawn from whole densities"),
        ({"temperature": 0.5}, "no temperature"),
        ({"max_new_tokens": 8}, "9 cells"),
    ):
        with subtests.test(str(settings)), pytest.raises(RefusedError, match=said):
            masked_group(engine, sampling=replace(MASK, **settings))
    prompt = engine.tokenizer.encode(image_text(0, pixels=PIXELS - 1))
    with refused(Reason.MALFORMED, "72"):
        engine.add(GenerationRequest("1.1", prompt, 1, MASK))


def test_the_probe_of_a_version_shows_densities_that_are_no_numbers(model_dir: Path) -> None:
    engine = engine_of(model_dir)
    probe = GenerationRequest(PROBE_ID, engine.probe, 1, replace(MASK, max_new_tokens=1))
    engine.add(probe)
    assert np.isfinite(engine.step()[0].completions[0].behaviour_logprob).all()
    with torch.no_grad():
        engine._model.policy.base.fill_(torch.nan)
    engine.add(probe)
    assert not np.isfinite(engine.step()[0].completions[0].behaviour_logprob).any()


@pytest.mark.usefixtures("warm_engines")
def test_an_engine_in_its_own_process_returns_real_actions_and_rewards(model_dir: Path) -> None:
    config = SamplerConfig(model_dir=model_dir, seed=3, threads=1, engine_process="own")
    engine = load_in_own_process("auto", config, step_limit_s=60.0)
    try:
        prompt = engine.tokenizer.encode(image_text(0))
        engine.add(GenerationRequest("1.1", prompt, 2, MASK))
        [finished] = engine.step()
    finally:
        engine.close()
    here = masked_group(engine_of(model_dir), wanted=2)
    for one, other in zip(finished.completions, here.completions, strict=True):
        np.testing.assert_array_equal(one.actions, other.actions)
        assert one.reward == other.reward


@pytest.mark.parametrize(
    ("make", "engine", "kind"),
    [
        (make_masks, "torch", "noise_mask"),
        (make_masks, "ranking", "noise_mask"),
        (make_tiny_model, "noise_mask", "noise_mask"),
        (make_ranker, "torch", "ranking"),
        (make_tiny_model, "ranking", "ranking"),
    ],
)
def test_an_engine_for_another_kind_of_policy_is_refused_before_it_loads(
    tmp_path: Path, make: Callable[[Path], Path], engine: str, kind: str
) -> None:
    model_dir = make(tmp_path)
    with cannot_start(kind):
        load_engine(engine, SamplerConfig(model_dir=model_dir, engine=engine))


async def test_a_real_learner_teaches_policy_and_classifier_of_a_real_sampler(
    made: MadeRun, tmp_path: Path
) -> None:
    model_dir = make_masks(tmp_path / "model")
    rows = []
    for seed in range(64):
        label, *pixels = map(int, image_text(seed).split())
        rows.append({"image": np.reshape(pixels, (6, 6, 2)).tolist(), "label": label})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "task": "noise_mask",
        "prompts": None,
        "data": {"file": tmp_path / "rows.jsonl", "evaluation_rows": 8},
        "evaluation": {"every_versions": 8, "prompts": 8},
        "max_new_tokens": GRID**2,
        "group_size": 4,
        "batch_groups": 8,
    }
    async with (
        running_hub(made, **settings) as hub,
        sampling(made, hub.address, model_dir) as sampler,
    ):
        await until(lambda: sampler.registry.get_sample_value("heterorl_sampler_held_version") is not None)
        assert await learn(made, hub.address, model_dir, versions=20, learning_rate=1e-2) is ExitCode.DRAINED
    assert has_learnt(made, versions=20)
