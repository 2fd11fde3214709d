"""A step on a GPU against the same step on a CPU, and the words that are published of what it made."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.config import LearnerConfig
from learner.journal.progress import Progress
from learner.journal.restart import JournalPlace
from learner.masters.master_words import MasterWords
from learner.masters.version_coder import LocalCoder
from learner.model.model import Policy, load_policy, load_reference
from learner.model.pack_attention import kernel_works
from learner.objective.menu import MENU
from learner.step.train_step import StepOutcome, train_step
from learner.step_settings import StepSettings
from learner.training.random_state import RandomState
from node.kinds.ranking.values import as_text
from node.values.groups.rollout import RolloutGroup
from node.weights.format.digests import Words
from node.weights.format.layout import Layout, TensorSpec
from sampler.config import SamplerConfig
from sampler.engines.engine import GenerationRequest
from sampler.engines.engine_registry import load_engine
from support.checkpoints import open_checkpoints, restore, save
from support.gpu import DEVICE
from support.groups import SAMPLING, make_group
from support.made_up_groups import VERSION, gradient_of, made_up_groups, nearby
from support.noise_mask import MASK, image_text, make_masks
from support.ranking import make_ranker
from support.step_settings import changed, make_step_settings
from support.tiny_model import make_mixed_model

pytestmark = pytest.mark.gpu

PARTS = 24
"""Few tokens a micro-batch: the groups are cut into several."""

QUERY, OTHER = as_text("1+2", ["3", "4", "12+5="]), as_text("7", ["1", "22", "333", "4", "5"])

SETTINGS = make_step_settings(kl_coefficient=0.1, gradient_clip_norm=1e9, micro_batch_tokens=PARTS)


@pytest.fixture(scope="module")
def groups(model_dir: Path) -> list[RolloutGroup]:
    """Return groups near the policy, whose ratios no objective cuts off altogether."""
    return nearby(made_up_groups(0), load_policy(model_dir, device="cpu"))


def on_both(
    model_dir: Path, groups: Sequence[RolloutGroup], settings: StepSettings, **options: Any
) -> tuple[tuple[Tensor, StepOutcome], tuple[Tensor, StepOutcome]]:
    """Return the gradient that a step applies and its outcome: on the CPU in float32, on the device."""
    exact = gradient_of(load_policy(model_dir, device="cpu"), groups, settings)
    gradient, outcome = gradient_of(load_policy(model_dir, device=DEVICE, **options), groups, settings)
    assert gradient.device.type == torch.device(DEVICE).type
    return exact, (gradient.cpu(), outcome)


def apart(actual: Tensor, expected: Tensor) -> float:
    """Return the distance of two gradients, as a share of the expected one's length."""
    assert expected.norm() > 1e-3
    return float((actual - expected).norm() / expected.norm())


def assert_same_figures(actual: StepOutcome, expected: StepOutcome, *, rel_tol: float = 1e-3) -> None:
    assert actual.is_applied
    assert actual.numbers.tokens == expected.numbers.tokens
    assert actual.numbers.teaching_groups == expected.numbers.teaching_groups
    shown, same = ({"loss": one.loss} | one.numbers.flat() for one in (actual, expected))
    for name in ("loss", "gradient_norm", "kl_nats", "ess_ratio", "surprisal_nats"):
        of_gpu, of_cpu = shown[name], same[name]
        assert math.isclose(of_gpu, of_cpu, rel_tol=rel_tol, abs_tol=rel_tol / 100), (
            f"{name}: {of_gpu}, {of_cpu}"
        )


def test_tails_of_all_lengths_have_a_kernel() -> None:
    device = torch.empty(0, device=DEVICE).device
    assert kernel_works(device) == (device.type == "cuda")


@pytest.mark.parametrize("objective", sorted(MENU))
def test_every_objectives_step_is_the_one_of_a_cpu(
    model_dir: Path, groups: list[RolloutGroup], objective: str
) -> None:
    config = LearnerConfig(
        model_dir=model_dir,
        learning_rate=1e-3,
        objective=objective,
        kl_coefficient=0.1,
        gradient_clip_norm=1e9,
        micro_batch_tokens=PARTS,
    )
    (expected, of_cpu), (actual, of_gpu) = on_both(model_dir, groups, StepSettings.of(config))
    assert apart(actual, expected) < 1e-3
    assert_same_figures(of_gpu, of_cpu)


@pytest.mark.parametrize("rematerialise", ["layers", "selective"])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_is_computed_again_for_the_backward_pass_changes_no_gradient(
    model_dir: Path, groups: list[RolloutGroup], rematerialise: Any, compute_dtype: torch.dtype | None
) -> None:
    kept, again = (
        gradient_of(
            load_policy(model_dir, device=DEVICE, rematerialise=how, compute_dtype=compute_dtype),
            groups,
            SETTINGS,
        )[0]
        for how in ("none", rematerialise)
    )
    # A backward pass need not add up twice alike.
    assert apart(again, kept) < (1e-3 if compute_dtype is None else 2e-2)


def test_a_step_in_bfloat16_is_close_to_the_exact_one(model_dir: Path, groups: list[RolloutGroup]) -> None:
    (expected, of_cpu), (actual, of_gpu) = on_both(model_dir, groups, SETTINGS, compute_dtype=torch.bfloat16)
    assert 1e-6 < apart(actual, expected) < 0.1  # it is not float32 by another name
    assert abs(of_gpu.numbers.surprisal_nats - of_cpu.numbers.surprisal_nats) < 0.05


def test_adamw_moves_the_masters_as_on_a_cpu(model_dir: Path, groups: list[RolloutGroup]) -> None:
    rate, steps = 1e-3, 5
    after = {}
    for device in ("cpu", DEVICE):
        policy = load_policy(model_dir, device=device)
        optimizer = torch.optim.AdamW(policy.parameters.values(), lr=rate, fused=True)
        for version in range(steps):
            settings = changed(SETTINGS, gradient_clip_norm=0.5)
            assert train_step(policy, optimizer, groups, version=VERSION + version, settings=settings)
        assert policy.is_finite()
        after[device] = torch.cat([tensor.detach().cpu().flatten() for tensor in policy.tensors.values()])
    base = load_policy(model_dir, device="cpu")
    before = torch.cat([tensor.detach().flatten() for tensor in base.tensors.values()])
    moved = (after["cpu"] - before).norm()
    assert moved > rate
    # AdamW's first steps are as large where the gradient is next to nothing, and may go either way there.
    assert float((after[DEVICE] - after["cpu"]).norm()) < 0.05 * moved


def test_the_penalty_towards_the_base_model_is_the_one_of_a_cpu(
    model_dir: Path, groups: list[RolloutGroup]
) -> None:
    settings, outcomes = changed(SETTINGS, reference_kl_coefficient=0.1), {}
    for device in ("cpu", DEVICE):
        policy = load_policy(model_dir, device=device)
        reference = load_reference(model_dir, device=device, compute_dtype=None)
        with torch.no_grad():
            for number, parameter in enumerate(policy.parameters.values()):
                parameter.mul_(1 + 0.01 * (number % 3))
        optimizer = torch.optim.SGD(policy.parameters.values(), lr=1.0)
        outcomes[device] = train_step(
            policy, optimizer, groups, version=VERSION, settings=settings, reference=reference
        )
    of_gpu, of_cpu = outcomes[DEVICE], outcomes["cpu"]
    kl_of_cpu, kl_of_gpu = (one.numbers.reference_kl_nats for one in (of_cpu, of_gpu))
    assert kl_of_cpu is not None
    assert kl_of_cpu > 1e-4
    assert_same_figures(of_gpu, of_cpu)
    assert math.isclose(kl_of_gpu or 0.0, kl_of_cpu, rel_tol=1e-2)


def masters_of(kind: str, directory: Path, device: str) -> Policy:
    makers: dict[str, Callable[[Path], object]] = {
        "ranking": make_ranker,
        "noise_mask": make_masks,
        "mixed": make_mixed_model,
    }
    if not (directory / "config.json").exists():
        makers[kind](directory)
    return load_policy(directory, device=device)


@pytest.mark.parametrize("kind", ["ranking", "noise_mask"])
def test_other_policies_are_drawn_from_and_learned_as_on_a_cpu(tmp_path: Path, kind: str) -> None:
    on_cpu = masters_of(kind, tmp_path, "cpu")
    engine = load_engine(kind, SamplerConfig(model_dir=tmp_path, seed=3, threads=1, device=DEVICE))
    prompts = [QUERY, OTHER] if kind == "ranking" else [image_text(0), image_text(1)]
    groups = []
    for number, text in enumerate(prompts):
        sampling = SAMPLING if kind == "ranking" else MASK
        prompt = engine.tokenizer.encode(text)
        engine.add(GenerationRequest(str(number), prompt, 4, sampling))
        [finished] = engine.step()
        completions = tuple(
            replace(one, reward=float(place)) for place, one in enumerate(finished.completions)
        )
        groups.append(
            make_group(f"{number}.1", prompt_token_ids=prompt, completions=completions, sampling=sampling)
        )
    settings = changed(SETTINGS, kl_coefficient=0.0)
    expected, of_cpu = gradient_of(on_cpu, groups, settings)
    close = 1e-3
    # The engine's logprobs are those of the learner.
    assert of_cpu.numbers.kl_nats == pytest.approx(0.0, abs=close)
    actual, of_gpu = gradient_of(load_policy(tmp_path, device=DEVICE), groups, settings)
    assert apart(actual.cpu(), expected) < close
    assert_same_figures(of_gpu, of_cpu, rel_tol=close)


@pytest.mark.parametrize("kind", ["ranking", "noise_mask", "mixed"])
def test_the_words_of_a_version_are_those_of_a_copy_on_a_cpu(tmp_path: Path, kind: str) -> None:
    policy = masters_of(kind, tmp_path, DEVICE)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            noise = torch.randn(parameter.shape, generator=random)
            parameter.add_(1e-2 * noise.to(parameter.device))
    there, here = np.empty(policy.layout.words, np.uint16), np.empty(policy.layout.words, np.uint16)
    policy.snapshot(there)
    copies = {name: tensor.detach().cpu() for name, tensor in policy.tensors.items()}
    copy_of(copies, policy.layout, here)
    np.testing.assert_array_equal(there, here)
    base = np.empty(policy.layout.words, np.uint16)
    load_policy(tmp_path, device="cpu").snapshot(base)
    assert (there != base).mean() > 0.1


def copy_of(tensors: dict[str, Tensor], layout: Layout, words: Words) -> None:
    MasterWords(tensors, layout).copy_frames(
        lambda number, frame: np.copyto(words[layout.frames[number].slice], frame)
    )


def test_every_master_is_rounded_as_on_a_cpu_small_and_negative_zeros_too() -> None:
    # All upper halves of a float32, each with lower halves on both sides of a tie.
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    bits = (upper | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).ravel()
    finite = bits[(bits & 0x7F80_0000) != 0x7F80_0000]
    masters = torch.from_numpy(finite.view(np.float32))
    layout = Layout.of([TensorSpec("a", (finite.size,))], frame_words=40_000)
    there, here = np.empty(layout.words, np.uint16), np.empty(layout.words, np.uint16)
    copy_of({"a": masters.to(DEVICE)}, layout, there)
    copy_of({"a": masters}, layout, here)
    np.testing.assert_array_equal(there, here)


def test_threads_that_code_a_version_together_code_the_masters(model_dir: Path) -> None:
    policy = load_policy(model_dir, device=DEVICE)
    specs = [TensorSpec(name, tuple(tensor.shape)) for name, tensor in policy.tensors.items()]
    layout = Layout.of(specs, frame_words=500)
    copies = {name: tensor.detach().cpu() for name, tensor in policy.tensors.items()}
    expected = MasterWords(copies, layout).digests()
    assert len(expected) > 16
    coder = LocalCoder(MasterWords(policy.tensors, layout), threads=4)
    assert [frame.digest for frame in coder.code_masters(lambda _: None)] == expected
    coder.close()


def test_a_checkpoint_restores_masters_moments_and_the_next_draw(
    model_dir: Path, groups: list[RolloutGroup], tmp_path: Path
) -> None:
    def learner() -> tuple[Policy, torch.optim.Optimizer]:
        policy = load_policy(model_dir, device=DEVICE)
        return policy, torch.optim.AdamW(policy.parameters.values(), lr=1e-3, fused=True)

    policy, optimizer = learner()
    for version in range(3):
        assert train_step(policy, optimizer, groups, version=3 + version, settings=SETTINGS).is_applied
    random_state = RandomState.on(policy.device)
    drawn = torch.rand(3, device=policy.device)
    save(open_checkpoints(tmp_path, policy), policy, optimizer, Progress(3), JournalPlace())
    restored, restored_optimizer = learner()
    restore(open_checkpoints(tmp_path, restored), restored, restored_optimizer)
    for name, tensor in policy.tensors.items():
        assert torch.equal(restored.tensors[name], tensor)
    before, after = optimizer.state_dict()["state"], restored_optimizer.state_dict()["state"]
    assert before.keys() == after.keys()
    assert all(torch.equal(after[n][key].cpu(), before[n][key].cpu()) for n in before for key in before[n])
    read = RandomState.from_bytes(random_state.to_bytes(), cuda_bytes=len(random_state.cuda))
    read.restore(policy.device)
    assert torch.equal(torch.rand(3, device=policy.device), drawn)
    # Both go on alike: a backward pass need not add up twice alike, a step from other moments is far away.
    for one, its_optimizer in ((policy, optimizer), (restored, restored_optimizer)):
        train_step(one, its_optimizer, groups, version=6, settings=SETTINGS)
    for name, tensor in policy.tensors.items():
        torch.testing.assert_close(restored.tensors[name], tensor, rtol=1e-4, atol=1e-5)
