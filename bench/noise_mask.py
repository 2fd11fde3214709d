"""The use of a noise mask to a classifier of few images: errors on scikit-learn's digits, on paired seeds.

    python -m bench.noise_mask [--seeds 20]          -> bench/results/noise_mask.jsonl

Every arm of a seed has the same 150 training images, initial weights, rows a step and steps; the other 1647
images are asked at the end. What is not clean is masked for the first three quarters, then the policy is
dropped:

    clean          the classifier alone, on clean images
    as released    node.kinds.noise_mask.as_released
    split          cross-entropy for the classifier; rloo for the policy

Masks are drawn by the sampler's engine, and groups trained on by the learner's step, with the newest version
each time: nothing of the daemon lies between, so that nothing is stale. Machines do not change the figures.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]

from bench.forked_context import forked_context
from bench.shared.made_groups import made_group
from bench.shared.measure import CORES
from learner.config import LearnerConfig
from learner.model.model import Policy, load_policy
from learner.step.train_step import train_step
from learner.step_settings import StepSettings
from node.kinds.noise_mask.classifier import IMAGES_AT_ONCE, error, fine_tune
from node.kinds.noise_mask.engine import NoiseMaskEngine
from node.kinds.noise_mask.network import NoiseMaskClassifier, NoiseMaskConfig, make_directory, read_prompts
from node.values.groups.rollout import RolloutGroup
from node.values.groups.sampling_parameters import SamplingParameters
from sampler.config import SamplerConfig
from sampler.engines.engine import GenerationRequest
from sampler.engines.words.model_words import ArrayWords, copy_words

RESULTS: Final = Path(__file__).parent / "results" / "noise_mask.jsonl"
OBJECTIVES: Final = {"as released": "node.kinds.noise_mask.as_released:as_released", "split": "rloo"}
CLEAN: Final = "clean"
TRAINED: Final = 150
MASKS: Final = 2
"""Masks of an image in a step."""
RATE: Final = 1e-3
CONFIDENCE: Final = 0.95
BRIGHTEST: Final = 16

Prompts = NDArray[np.int32]
"""[images, 1 + pixels]: label and pixels."""


def main() -> int:
    """Run the seeds and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=400, help="5 steps each; a quarter of them clean")
    parser.add_argument("--processes", type=int, default=CORES, help="seeds beside each other")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    lines = []
    with (
        arguments.out.open("w") as out,
        ProcessPoolExecutor(arguments.processes, mp_context=forked_context(__name__)) as processes,
    ):
        for line in processes.map(partial(errors_of, epochs=arguments.epochs), range(arguments.seeds)):
            lines.append(line)
            print(json.dumps(line), file=out, flush=True)
        for found in differences(lines):
            print(json.dumps(found), file=out)
    print(arguments.out.read_text(), end="")
    return 0


def digits() -> Prompts:
    """Return all images of scikit-learn's digits as prompts."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    pixels = found.data.astype(np.int32) * 255 // BRIGHTEST
    return np.concatenate([found.target[:, None], pixels], axis=1).astype(np.int32)


def errors_of(seed: int, *, epochs: int) -> dict[str, float | int]:
    """Return the error of each arm with a seed, per cent, and how long all of them took."""
    torch.set_num_threads(1)
    started_s = time.monotonic()
    prompts = np.random.default_rng(seed).permutation(digits())
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_directory(Path(directory), NoiseMaskConfig(), seed=seed)
        arms: dict[str, NoiseMaskClassifier] = {
            CLEAN: NoiseMaskClassifier.from_pretrained(model_dir, dtype=torch.float32)
        }
        steps = epochs * -(-TRAINED // IMAGES_AT_ONCE)
        for arm, objective in OBJECTIVES.items():
            trained = under_masks(
                model_dir, prompts[:TRAINED], objective=objective, steps=steps * 3 // 4, seed=seed
            )
            trained.model.save_pretrained(Path(directory) / objective)
            arms[arm] = NoiseMaskClassifier.from_pretrained(Path(directory) / objective, dtype=torch.float32)
    config = NoiseMaskConfig()
    images, labels = read_prompts(torch.from_numpy(prompts), config)
    line: dict[str, float | int] = {"seed": seed, "epochs": epochs}
    for arm, classifier in arms.items():
        clean = epochs if arm == CLEAN else epochs // 4
        fine_tune(classifier, images[:TRAINED], labels[:TRAINED], epochs=clean, rate=RATE, seed=seed)
        line[arm] = round(100 * error(classifier, images[TRAINED:], labels[TRAINED:]), 3)
    return {**line, "took_s": round(time.monotonic() - started_s, 1)}


def under_masks(model_dir: Path, prompts: Prompts, *, objective: str, steps: int, seed: int) -> Policy:
    """Train policy and classifier together for some steps; return both."""
    settings = StepSettings.of(LearnerConfig(model_dir=model_dir, objective=objective, learning_rate=RATE))
    policy = load_policy(model_dir, device="cpu")
    optimizer = torch.optim.AdamW(policy.parameters.values(), lr=RATE, weight_decay=0.0, fused=True)
    engine = NoiseMaskEngine(SamplerConfig(model_dir=model_dir, seed=seed, threads=1))
    draw, words = np.random.default_rng(seed), np.empty(policy.layout.words, np.uint16)
    for version in range(steps):
        chosen = draw.choice(len(prompts), IMAGES_AT_ONCE // MASKS, replace=False)
        groups = list(drawn_groups(engine, prompts[chosen], version=version))
        train_step(policy, optimizer, groups, version=version, settings=settings)
        policy.snapshot(words)
        copy_words(ArrayWords(words), engine.weights.live, layout=engine.layout)
        engine.weights.settle()
        engine.serve(version + 1)
    return policy


def drawn_groups(engine: NoiseMaskEngine, prompts: Prompts, *, version: int) -> Iterator[RolloutGroup]:
    """Draw ``MASKS`` masks of each image, as groups with the engine's rewards."""
    sampling = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=64)
    for number, prompt in enumerate(prompts):
        engine.add(GenerationRequest(f"{version}.{number}", prompt, MASKS, sampling))
    while engine.running:
        for request in engine.step():
            yield made_group(
                request.request_id,
                request.prompt_token_ids,
                request.completions,
                sampling,
                layout_digest=engine.layout.digest,
                tokenizer_digest=engine.tokenizer.digest,
            )


def differences(lines: Sequence[dict[str, float | int]]) -> Iterator[dict[str, float | int | str]]:
    """Compare arms on the same seeds: mean differences in points of error, with intervals of Student's t."""
    for arm in (CLEAN, *OBJECTIVES):
        errors = np.array([line[arm] for line in lines], np.float64)
        yield {"arm": arm, "seeds": len(lines), "error_mean": round(float(errors.mean()), 3)}
    for arm, other in (("as released", CLEAN), ("split", CLEAN), ("split", "as released")):
        ours, theirs = ([line[name] for line in lines] for name in (arm, other))
        low, high = stats.ttest_rel(ours, theirs).confidence_interval(CONFIDENCE)
        figures = {"mean": (low + high) / 2, "low": low, "high": high}
        yield {"difference": f"{arm} - {other}"} | {key: round(float(n), 3) for key, n in figures.items()}


if __name__ == "__main__":
    sys.exit(main())
