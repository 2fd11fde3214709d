"""proto/vectors/weights.json is what proto/WEIGHTS.md and every implementation say it is."""

import json

import numpy as np
import pytest

from bench.held_policy import HeldPolicy
from node.weights.codec.exponent_conditioned.choice import Implementation
from node.weights.codec.exponent_conditioned.payload_format import PayloadFault
from node.weights.codec.frame_codec import decode_frame
from node.weights.format.digests import Words, payload_digest, version_root, words_check, words_digest
from node.weights.format.dtypes import DTYPES
from node.weights.format.layout import Layout, TensorSpec
from node.weights.format.manifest import Codec, verify_signed
from support.exponent_conditioned import fault_of, implementations
from support.weight_vectors import FILE, vectors
from support.whole_version import WholeVersion

VECTORS = json.loads(FILE.read_text())
each = pytest.mark.parametrize("implementation", implementations(), ids=lambda each: each.name)


def words_of(text: str) -> Words:
    return np.frombuffer(bytes.fromhex(text), "<u2").astype(np.uint16)


def test_the_file_is_what_the_code_makes() -> None:
    made = json.loads(json.dumps(vectors()))
    for frames in (made["frames"], VECTORS["frames"]):
        for frame in frames:
            # Two versions of zstd may code the same bytes differently.
            del frame["payload"]
    assert made == VECTORS


@each
@pytest.mark.parametrize("vector", VECTORS["exponent_conditioned"], ids=lambda vector: vector["name"])
def test_every_implementation_makes_and_reads_the_payloads(
    implementation: Implementation, vector: dict[str, str]
) -> None:
    base, words, payload = (
        words_of(vector["base"]),
        words_of(vector["words"]),
        bytes.fromhex(vector["payload"]),
    )
    assert implementation.encode(words, base=base, limit_bytes=1 << 20).payload == payload
    assert fault_of(implementation, payload, base=base) == (PayloadFault.NONE, words.tobytes())


@each
@pytest.mark.parametrize("vector", VECTORS["refused"], ids=lambda vector: vector["name"])
def test_every_implementation_refuses_the_same(
    implementation: Implementation, vector: dict[str, str]
) -> None:
    fault, _ = fault_of(implementation, bytes.fromhex(vector["payload"]), base=words_of(vector["base"]))
    assert fault.name == vector["fault"]


@pytest.mark.parametrize("vector", json.loads(FILE.read_text())["frames"], ids=lambda vector: vector["codec"])
def test_the_other_codecs_read_their_payloads(vector: dict[str, str]) -> None:
    words = words_of(vector["words"])
    base = words_of(vector["base"]) if vector["base"] else None
    out = np.zeros_like(words)
    dtype = DTYPES[vector.get("dtype", "bfloat16")]
    payload = bytes.fromhex(vector["payload"])
    digest = decode_frame(Codec[vector["codec"]], payload, base=base, out=out, dtype=dtype)
    np.testing.assert_array_equal(out, words)
    assert digest == words_digest(words)


def test_a_layout_of_many_dtypes_is_as_written() -> None:
    told = VECTORS["mixed_layout"]
    specs = [TensorSpec(each["name"], tuple(each["shape"]), each["dtype"]) for each in told["tensors"]]
    layout = Layout.of(specs, frame_words=told["frame_words"])
    assert {tensor.name: tensor.start_word for tensor in layout.tensors} == told["starts"]
    assert [[span.start_word, span.words, span.dtype.name] for span in layout.frames] == told["frames"]
    assert layout.digest.hex() == told["digest"]


def test_an_artifact_applies_with_every_digest_as_written() -> None:
    told, artifact = VECTORS["layout"], VECTORS["artifact"]
    specs = [TensorSpec(each["name"], tuple(each["shape"]), each["dtype"]) for each in told["tensors"]]
    layout = Layout.of(specs, frame_words=told["frame_words"])
    assert layout.digest.hex() == told["digest"]
    assert [[span.start_word, span.words] for span in layout.frames] == told["frames"]
    signed, public_key = (bytes.fromhex(artifact[name]) for name in ("signed_manifest", "public_key"))
    manifest = verify_signed(signed, public_key=public_key, run_id="example")
    payloads = [bytes.fromhex(payload) for payload in artifact["payloads"]]
    assert [payload_digest(payload).hex() for payload in payloads] == artifact["payload_digests"]
    digests = [int(digest, 16) for digest in artifact["words_digests"]]
    assert [frame.new_check for frame in manifest.frames] == [words_check(digest) for digest in digests]
    assert manifest.root == version_root(layout.digest, digests)
    assert (manifest.root.hex(), manifest.base_root.hex()) == (artifact["root"], artifact["base_root"])
    base = HeldPolicy.of(manifest.base_version, words_of(artifact["base"]), layout=layout)
    stage = WholeVersion(manifest, layout=layout, base=base)
    for frame, payload in enumerate(payloads):
        stage.put(frame, payload)
    np.testing.assert_array_equal(stage.finish().words, words_of(artifact["words"]))
