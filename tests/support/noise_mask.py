"""Small policies of masks, images for them, and groups as their engine draws them."""

from pathlib import Path

import numpy as np

from node.kinds.noise_mask.engine import NoiseMaskEngine
from node.kinds.noise_mask.network import NoiseMaskConfig, make_directory
from node.kinds.noise_mask.values import as_text
from node.values.groups.rollout import RolloutGroup
from node.values.groups.sampling_parameters import SamplingParameters
from sampler.config import SamplerConfig
from sampler.engines.engine import GenerationRequest
from sampler.engines.engine_registry import load_engine
from support.groups import make_group

GRID = 3
MASK = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=GRID**2)
CONFIG = NoiseMaskConfig(height=6, width=6, channels=2, classes=4, grid=GRID, features=4)
PIXELS = 6 * 6 * 2


def make_masks(directory: Path, *, seed: int = 0) -> Path:
    """Save a model of images of 6 x 6 pixels, two channels and four classes; masks have nine cells."""
    return make_directory(directory, CONFIG, seed=seed)


def engine_of(model_dir: Path) -> NoiseMaskEngine:
    engine = load_engine("auto", SamplerConfig(model_dir=model_dir, seed=3, threads=1))
    assert isinstance(engine, NoiseMaskEngine)
    return engine


def image_text(seed: int, *, pixels: int = PIXELS) -> str:
    """Return the prompt of an image whose brightness is its class, and whose pixels are otherwise noise."""
    draw = np.random.default_rng(seed)
    label = int(draw.integers(4))
    return as_text(label, draw.integers(50 * label, 50 * label + 60, pixels))


def masked_group(
    engine: NoiseMaskEngine, *, seed: int = 0, wanted: int = 4, sampling: SamplingParameters = MASK
) -> RolloutGroup:
    """Draw a group of masks for an image, with the engine's rewards."""
    prompt = engine.tokenizer.encode(image_text(seed))
    engine.add(GenerationRequest("1.1", prompt, wanted, sampling))
    assert (engine.running, engine.waiting) == (1, 1)
    [finished] = engine.step()
    return make_group(
        f"{seed}.1", prompt_token_ids=prompt, completions=finished.completions, sampling=sampling
    )
