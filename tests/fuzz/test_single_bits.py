"""Every single bit: of a signed manifest, of a payload, of the words held. A wrong one is found."""

from collections.abc import Iterator

import numpy as np
import pytest

from bench.held_policy import HeldPolicy
from node.errors import RefusedError
from node.identity.signatures import SigningKey
from node.weights.assembly.apply import WrongBaseError
from node.weights.codec.frame_codec import encode_frame, encode_planes, encode_step_planes
from node.weights.format.digests import payload_digest, words_check, words_digest
from node.weights.format.layout import Layout, TensorSpec
from node.weights.format.manifest import (
    DOMAIN,
    Codec,
    DamagedFrameError,
    FrameRecord,
    Manifest,
    sign,
    verify_signed,
)
from support.weights import RUN_ID, drifted, random_words
from support.whole_version import WholeVersion

KEY = SigningKey.generate()
WIDE = (Codec.PLANES, Codec.STEP_PLANES)
"""Codecs of elements that are not two bytes; a layout begins with the widest."""
CODECS = (*WIDE, Codec.UNCHANGED, Codec.RAW, Codec.EXPONENT_CONDITIONED, Codec.KEYFRAME)
FRAME_WORDS = 40
LAYOUT = Layout.of(
    [
        *(TensorSpec(codec.name, (FRAME_WORDS // 2,), "float32") for codec in WIDE),
        *(TensorSpec(f"{codec}", (FRAME_WORDS,)) for codec in CODECS if codec not in WIDE),
    ],
    frame_words=FRAME_WORDS,
)
"""One frame for each codec."""

BASE = HeldPolicy.of(1, random_words(1, layout=LAYOUT), layout=LAYOUT)


def _made() -> tuple[Manifest, tuple[bytes, ...], HeldPolicy]:
    """Return a delta, its payloads and the version it makes."""
    words = drifted(BASE.words, 2, share=0.1)
    frame_of = {codec: span.slice for codec, span in zip(CODECS, LAYOUT.frames, strict=True)}
    mantissas = np.random.default_rng(3).integers(0, 128, FRAME_WORDS, np.uint16)
    words[frame_of[Codec.UNCHANGED]] = BASE.words[frame_of[Codec.UNCHANGED]]
    # What repeats is short in planes of bytes; one exponent is in a keyframe's.
    words[frame_of[Codec.PLANES]] = 0x3F80
    words[frame_of[Codec.KEYFRAME]] = 0x3F80 | mantissas
    wanted = HeldPolicy.of(2, words, layout=LAYOUT)
    payloads, records = [], []
    for codec, span in zip(CODECS, LAYOUT.frames, strict=True):
        new, base = words[span.slice], BASE.words[span.slice]
        if codec is Codec.RAW:
            payload = new.tobytes()
        elif codec is Codec.PLANES:
            payload = encode_planes(new, element_bytes=4)
        elif codec is Codec.STEP_PLANES:
            payload = encode_step_planes(new, base=base, element_bytes=4)
        else:
            coded = encode_frame(new, base=None if codec is Codec.KEYFRAME else base)
            assert coded.codec is codec
            payload = coded.payload
        payloads.append(payload)
        check = words_check(words_digest(new))
        records.append(FrameRecord(codec, len(payload), check, payload_digest(payload)))
    manifest = Manifest(
        run_id=RUN_ID,
        learner_epoch=1,
        layout_digest=LAYOUT.digest,
        version=2,
        root=wanted.version.root,
        base_version=1,
        base_root=BASE.version.root,
        published_at_s=1.0,
        frames=tuple(records),
    )
    return manifest, tuple(payloads), wanted


MANIFEST, DELTA, WANTED = _made()
SIGNED = sign(MANIFEST, KEY)


def flips(content: bytes) -> Iterator[bytes]:
    """Return ``content`` with each of its bits wrong in turn."""
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


def staged(manifest: Manifest = MANIFEST, base: HeldPolicy = BASE) -> WholeVersion:
    return WholeVersion(manifest, layout=LAYOUT, base=base)


def take(stage: WholeVersion) -> set[int]:
    """Put everything; give the frames that nothing held could be used for."""
    wrong = set(stage.take_held())
    for frame in stage.missing():
        try:
            stage.put(frame, DELTA[frame])
        except WrongBaseError as error:
            wrong.add(error.frame)
    return wrong


def test_the_artifact_is_good() -> None:
    stage = staged(verify_signed(SIGNED, public_key=KEY.public_key, run_id=RUN_ID))
    assert take(stage) == set()
    np.testing.assert_array_equal(stage.finish().words, WANTED.words)


def test_every_bit_of_the_signed_manifest_is_found() -> None:
    for damaged in flips(SIGNED):
        with pytest.raises(RefusedError):
            verify_signed(damaged, public_key=KEY.public_key, run_id=RUN_ID)


def test_there_is_a_frame_of_every_codec() -> None:
    assert {record.codec for record in MANIFEST.frames} == set(Codec)
    assert [span.dtype.name for span in LAYOUT.frames[:3]] == ["float32", "float32", "bfloat16"]


@pytest.mark.parametrize("frame", [frame for frame, payload in enumerate(DELTA) if payload])
def test_every_bit_of_a_payload_is_found_in_its_frame_and_the_others_are_not_in_doubt(frame: int) -> None:
    stage = staged()
    for damaged in flips(DELTA[frame]):
        with pytest.raises(DamagedFrameError) as found:
            stage.put(frame, damaged)
        assert found.value.frame == frame
    assert take(stage) == set()
    np.testing.assert_array_equal(stage.finish().words, WANTED.words)


@pytest.mark.parametrize("frame", range(len(CODECS)), ids=[codec.name for codec in CODECS])
def test_every_bit_of_the_words_held_is_found_in_its_frame_where_they_matter(frame: int) -> None:
    span = LAYOUT.frames[frame]
    for bit in range(16 * FRAME_WORDS):
        words = BASE.words.copy()
        words[span.start_word + bit // 16] ^= 1 << bit % 16
        stage = staged(base=HeldPolicy(BASE.version, words))
        wrong = take(stage)
        assert wrong == ({frame} if CODECS[frame].needs_base else set())
        if wrong:
            with pytest.raises(RefusedError, match="lacks 1 frames"):
                stage.finish()
        else:
            np.testing.assert_array_equal(stage.finish().words, WANTED.words)


def test_every_bit_of_the_frame_records_and_roots_is_found_even_when_the_learner_has_signed_it() -> None:
    """Flip a bit at the learner between coding and signing."""
    for damaged in flips(MANIFEST.to_bytes()):
        changed = damaged + KEY.sign(DOMAIN, damaged)
        try:
            manifest = verify_signed(changed, public_key=KEY.public_key, run_id=RUN_ID)
            stage = staged(manifest)
            # A payload read by another codec makes words that seem to come of a wrong base.
            wrong = take(stage)
            assert len(wrong) == (manifest.frames != MANIFEST.frames)
            made = stage.finish().version.root
        except RefusedError:
            continue
        # What is left says who made which version when; the words are the same.
        assert made == manifest.root == WANTED.version.root
