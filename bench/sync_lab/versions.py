"""A model of 135 M parameters, and what training makes of it: versions as a learner would publish them.

The tensors are those of SmolLM2-135M. The words are drawn as trained weights lie, normal with a scale
per tensor; a step moves hidden fp32 masters by the same small amount in a random direction, as a sign-like
optimizer does, and rounds: what changes in bf16 then depends on the exponent as it does in real training.
"""

import json
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench.held_policy import HeldPolicy
from bench.whole_versions import encode_version
from node.identity.signatures import SigningKey
from node.values.policy import NO_BASE
from node.weights.format.digests import Words
from node.weights.format.layout import Layout, TensorSpec
from node.weights.format.manifest import sign

HIDDEN, FEED_FORWARD, KEY_VALUES = 576, 1536, 192


_DRAWN: Final = (1 << 24) + 1
"""Random numbers drawn before they are used again: frames are coded one by one, so it is not seen."""


@dataclass(frozen=True, slots=True)
class Model:
    """SmolLM2-135M, or a smaller or larger one of its kind."""

    layers: int = 30
    vocabulary: int = 49_152


SMALL: Final = Model(layers=2, vocabulary=16_384)
"""16 M parameters, for many receivers on one machine."""

LARGE: Final = Model(layers=98)
"""375 M parameters: a keyframe is 512 MB."""


def model_layout(model: Model) -> Layout:
    """Return the layout of a model."""
    specs = [
        TensorSpec("model.embed_tokens.weight", (model.vocabulary, HIDDEN)),
        TensorSpec("model.norm.weight", (HIDDEN,)),
    ]
    for layer in range(model.layers):
        shapes = {
            "input_layernorm": (HIDDEN,),
            "mlp.down_proj": (HIDDEN, FEED_FORWARD),
            "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
            "mlp.up_proj": (FEED_FORWARD, HIDDEN),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.k_proj": (KEY_VALUES, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.v_proj": (KEY_VALUES, HIDDEN),
        }
        specs += [TensorSpec(f"model.layers.{layer}.{name}.weight", shape) for name, shape in shapes.items()]
    return Layout.of(specs)


def load_layout(directory: Path) -> Layout:
    """Return the layout of what was published in a directory."""
    return model_layout(Model(**json.loads((directory / "model.json").read_text())))


@dataclass(frozen=True, slots=True)
class Published:
    """One artifact, which ``load_artifact`` reads by its name."""

    version: int
    base_version: int
    size_bytes: int

    @property
    def name(self) -> str:
        return f"{self.version}-{'key' if self.base_version == NO_BASE else self.base_version}"


@dataclass(frozen=True, slots=True)
class Training:
    """Versions that a run published, in a directory that hub and receivers read."""

    directory: Path
    density: float
    """Share of words that a step changed, measured over all steps."""
    steps: tuple[Published, ...]
    """Deltas 0 -> 1 -> 2 ..."""
    keyframes: tuple[Published, ...]
    """Keyframes of versions 1, 2 ..., as many as asked for."""


def publish_versions(
    directory: Path, model: Model, *, run_id: str, key: SigningKey, steps: int, keyframes: int, density: float
) -> Training:
    """Make ``words0.npy``, ``words.npy`` of the last version, ``steps`` deltas and the first keyframes."""
    directory.mkdir(parents=True)
    (directory / "model.json").write_text(json.dumps(asdict(model)))
    layout = model_layout(model)
    random = np.random.default_rng(0)
    masters = _masters(layout, random)
    words = _rounded(masters)
    np.save(directory / "words0.npy", words)
    step = _step_size(masters, density=density)
    held = HeldPolicy.of(0, words, layout=layout)
    deltas, keys, changed = [], [], 0

    def publish(words: Words, version: int, base: HeldPolicy | None) -> Published:
        return _publish(directory, layout, words, version, base=base, run_id=run_id, key=key)

    for version in range(1, steps + 1):
        masters += np.resize(random.choice(np.array([-step, step]), _DRAWN), layout.words)
        words = _rounded(masters)
        changed += int(np.count_nonzero(words != held.words))
        deltas.append(publish(words, version, held))
        if version <= keyframes:
            keys.append(publish(words, version, None))
        held = HeldPolicy.of(version, words, layout=layout)
    np.save(directory / "words.npy", held.words)
    return Training(directory, changed / steps / layout.words, tuple(deltas), tuple(keys))


def load_artifact(directory: Path, name: str) -> tuple[bytes, list[bytes]]:
    """Return a signed manifest and its payloads."""
    artifact: tuple[bytes, list[bytes]] = pickle.loads((directory / name).read_bytes())
    return artifact


def _masters(layout: Layout, random: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    masters = np.resize(random.standard_normal(_DRAWN, np.float32), layout.words)
    for tensor in layout.tensors:
        scale = 0.2 if "norm" in tensor.name else 1.5 / np.sqrt(tensor.shape[-1])
        masters[tensor.start_word : tensor.start_word + tensor.words] *= scale
    return masters


def _rounded(masters: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Words:
    """Return bf16 words, rounded to nearest even."""
    bits = masters.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _step_size(masters: np.ndarray[tuple[int], np.dtype[np.float32]], *, density: float) -> np.float32:
    """Find the step that changes ``density`` of the words, by halving on a sample."""
    sample = masters[:: max(1, masters.size // 1_000_000)].copy()
    before = _rounded(sample)
    low, high = 1e-9, 1e-2
    for _ in range(40):
        middle = (low * high) ** 0.5
        share = np.mean(_rounded(sample + np.float32(middle)) != before)
        low, high = (middle, high) if share < density else (low, middle)
    return np.float32(high)


def _publish(
    directory: Path,
    layout: Layout,
    words: Words,
    version: int,
    *,
    base: HeldPolicy | None,
    run_id: str,
    key: SigningKey,
) -> Published:
    encoded = encode_version(
        words,
        version=version,
        base=base,
        layout=layout,
        run_id=run_id,
        learner_epoch=1,
        published_at_s=float(version),
    )
    size = encoded.manifest.size_bytes
    published = Published(version, NO_BASE if base is None else base.version.number, size)
    artifact = sign(encoded.manifest, key), list(encoded.payloads)
    (directory / published.name).write_bytes(pickle.dumps(artifact))
    return published
