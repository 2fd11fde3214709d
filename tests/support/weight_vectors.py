"""The examples of proto/WEIGHTS.md in proto/vectors/weights.json, made from code.

    PYTHONPATH=.:proto:tests python -m support.weight_vectors      writes the file anew

Arrays of words are hexadecimal, two bytes a word, the low one first.
"""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from bench.held_policy import HeldPolicy
from bench.whole_versions import encode_version
from node.identity.signatures import SigningKey
from node.weights.codec.frame_codec import encode_frame, encode_planes, encode_step_planes
from node.weights.format.digests import Words, payload_digest, words_digest
from node.weights.format.layout import Layout, TensorSpec
from node.weights.format.manifest import sign
from support.exponent_conditioned import FAULTS, FAULTS_BASE, coded, trained_step, trained_words

FILE: Final = Path(__file__).parents[2] / "proto" / "vectors" / "weights.json"

SPECS: Final = (TensorSpec("layer.weight", (3, 100)), TensorSpec("bias", (50,)), TensorSpec("scale", ()))
MIXED_SPECS: Final = (
    TensorSpec("a.norm", (5,)),
    TensorSpec("b.bias", (40,), "float32"),
    TensorSpec("c.weight", (3, 7), "float8_e4m3fn"),
    TensorSpec("d.count", (2,), "int64"),
    TensorSpec("e.half", (3, 2), "float16"),
    TensorSpec("f.flag", (3,), "bool"),
    TensorSpec("g.norm", (2,)),
)
FRAME_WORDS: Final = 128
MIXED_FRAME_WORDS: Final = 31


def vectors() -> dict[str, Any]:
    """Return what the file holds."""
    return {
        "exponent_conditioned": [
            {"name": name, "base": _hex(base), "words": _hex(words), "payload": coded(words, base=base).hex()}
            for name, (base, words) in _pairs().items()
        ],
        "refused": [
            {"name": name, "base": _hex(FAULTS_BASE), "payload": payload.hex(), "fault": fault.name}
            for name, (payload, fault) in FAULTS.items()
        ],
        "frames": _frames(),
        **_artifact(),
        "mixed_layout": _mixed_layout(),
    }


def _pairs() -> dict[str, tuple[Words, Words]]:
    alike = np.full(20, 120 << 7, np.uint16)
    by_hand = alike.copy()
    by_hand[[3, 7, 8]] += np.array([1, 0xFFFF, 5], np.uint16)
    runs = alike + np.uint16(1)
    runs[[5, 6]] = alike[0]
    trained = trained_words(600, seed=1)
    anything = np.random.default_rng(2).integers(0, 1 << 16, 100).astype(np.uint16)
    return {
        "by hand": (alike, by_hand),
        "runs": (alike, runs),
        "one word": (np.array([0x3F80], np.uint16), np.array([0xBF80], np.uint16)),
        "a small step": (trained, trained_step(trained, seed=2, step=3e-6)),
        "a large step": (trained, trained_step(trained, seed=3, step=1e-3)),
        "anything": (anything, anything[::-1].copy()),
    }


def _frames() -> list[dict[str, str]]:
    base = trained_words(300, seed=4)
    words = trained_step(base, seed=5, step=1e-5)
    keyframe = encode_frame(words, base=None)
    return [
        {"codec": "UNCHANGED", "base": _hex(base), "words": _hex(base), "payload": ""},
        {"codec": "RAW", "base": "", "words": _hex(words), "payload": _hex(words)},
        {
            "codec": keyframe.codec.name,
            "base": "",
            "words": _hex(words),
            "payload": keyframe.payload.hex(),
        },
        *_planes(),
    ]


def _planes() -> list[dict[str, str]]:
    counts = _bytes_as_words(np.arange(-50, 50, dtype="<i4"))
    values = np.random.default_rng(8).normal(0, 0.02, 100).astype("<f4")
    base, words = _bytes_as_words(values), _bytes_as_words(values + np.float32(1e-6))
    planes = encode_planes(counts, element_bytes=4)
    steps = encode_step_planes(words, base=base, element_bytes=4)
    return [
        {
            "codec": "PLANES",
            "dtype": "int32",
            "base": "",
            "words": _hex(counts),
            "payload": planes.hex(),
        },
        {
            "codec": "STEP_PLANES",
            "dtype": "float32",
            "base": _hex(base),
            "words": _hex(words),
            "payload": steps.hex(),
        },
    ]


def _bytes_as_words(array: NDArray[Any]) -> Words:
    return np.frombuffer(array.tobytes(), np.uint16)


def _mixed_layout() -> dict[str, Any]:
    layout = Layout.of(MIXED_SPECS, frame_words=MIXED_FRAME_WORDS)
    return {
        "tensors": [{"name": s.name, "shape": s.shape, "dtype": s.dtype} for s in MIXED_SPECS],
        "frame_words": MIXED_FRAME_WORDS,
        "starts": {span.name: span.start_word for span in layout.tensors},
        "frames": [[span.start_word, span.words, span.dtype.name] for span in layout.frames],
        "digest": layout.digest.hex(),
    }


def _artifact() -> dict[str, Any]:
    layout = Layout.of(SPECS, frame_words=FRAME_WORDS)
    base = trained_words(layout.words, seed=6)
    words = trained_step(base, seed=7, step=1e-5)
    encoded = encode_version(
        words,
        version=8,
        base=HeldPolicy.of(7, base, layout=layout),
        layout=layout,
        run_id="example",
        learner_epoch=3,
        published_at_s=1_800_000_000.5,
    )
    key = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
    manifest = encoded.manifest
    return {
        "layout": {
            "tensors": [{"name": s.name, "shape": s.shape, "dtype": s.dtype} for s in SPECS],
            "frame_words": FRAME_WORDS,
            "frames": [[span.start_word, span.words] for span in layout.frames],
            "digest": layout.digest.hex(),
        },
        "artifact": {
            "base": _hex(base),
            "words": _hex(words),
            "payloads": [payload.hex() for payload in encoded.payloads],
            "words_digests": [f"{words_digest(words[span.slice]):016x}" for span in layout.frames],
            "payload_digests": [payload_digest(payload).hex() for payload in encoded.payloads],
            "root": manifest.root.hex(),
            "base_root": manifest.base_root.hex(),
            "public_key": key.public_key.hex(),
            "signed_manifest": sign(manifest, key).hex(),
        },
    }


def _hex(words: Words) -> str:
    return words.astype("<u2").tobytes().hex()


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(vectors(), indent=1) + "\n")
