"""A manifest is signed by one learner, for one run and one model."""

import struct
from dataclasses import replace

import pytest

from node.errors import Reason, RefusedError
from node.identity.signatures import SigningKey
from node.values import limits
from node.values.policy import NO_BASE
from node.weights.format.digests import payload_digest
from node.weights.format.layout import Layout
from node.weights.format.manifest import (
    DOMAIN,
    Codec,
    FrameRecord,
    Manifest,
    parse,
    sign,
    signed_by,
    verify_signed,
)
from support.refusals import refused
from support.weights import LAYOUT, RUN_ID, SPECS, Learner

LEARNER = Learner()
DELTA = LEARNER.encode(2, 1).manifest
KEYFRAME = LEARNER.encode(2, None).manifest


def with_frame(manifest: Manifest, **changes: object) -> Manifest:
    """Change the first frame."""
    first = replace(manifest.frames[0], **changes)  # type: ignore[arg-type]
    return replace(manifest, frames=(first, *manifest.frames[1:]))


def refusal(manifest: Manifest) -> RefusedError:
    with pytest.raises(RefusedError) as refused:
        parse(manifest.to_bytes())
    return refused.value


@pytest.mark.parametrize("manifest", [DELTA, KEYFRAME], ids=["delta", "keyframe"])
def test_a_manifest_is_what_it_was_after_it_travelled(manifest: Manifest) -> None:
    assert parse(manifest.to_bytes()) == manifest
    signed = sign(manifest, LEARNER.key)
    verified = verify_signed(signed, public_key=LEARNER.key.public_key, run_id=RUN_ID)
    assert (verified, verified.signed) == (manifest, signed)
    assert signed_by(manifest, LEARNER.key).signed == signed


def test_the_root_is_that_of_the_words_whatever_the_coding() -> None:
    assert DELTA.root == KEYFRAME.root == LEARNER.versions[2].version.root
    assert DELTA.base_root == LEARNER.encode(1, 0).manifest.root


FRAME_BYTES = 24


def test_a_frame_costs_24_bytes() -> None:
    more = replace(DELTA, frames=(*DELTA.frames, DELTA.frames[0]))
    assert len(more.to_bytes()) - len(DELTA.to_bytes()) == FRAME_BYTES
    assert FRAME_BYTES * limits.FRAMES_PER_ARTIFACT < limits.MANIFEST_BYTES - 1000


def test_a_manifest_without_frames_has_162_bytes_of_a_run_named_bench() -> None:
    signed = sign(replace(DELTA, run_id="bench"), LEARNER.key)
    assert len(signed) - FRAME_BYTES * len(DELTA.frames) == 162


def signed_as(message: bytes, *, domain: bytes = DOMAIN) -> bytes:
    return message + LEARNER.key.sign(domain, message)


REFUSED = {
    "signed by anyone else": (sign(DELTA, SigningKey.generate()), Reason.BAD_SIGNATURE),
    "signed for something else": (
        signed_as(DELTA.to_bytes(), domain=b"heterorl-other-v1\0"),
        Reason.BAD_SIGNATURE,
    ),
    "another run of the same key": (sign(replace(DELTA, run_id="other"), LEARNER.key), Reason.FOREIGN_RUN),
    "over the limit, whatever its signature": (bytes(limits.MANIFEST_BYTES + 1), Reason.OVER_LIMIT),
    "at the limit": (bytes(limits.MANIFEST_BYTES), Reason.BAD_SIGNATURE),
    **{f"{size} bytes": (bytes(size), Reason.BAD_SIGNATURE) for size in (0, 1, 63, 64, 65)},
    "signed garbage": (signed_as(b"signed by mistake"), Reason.MALFORMED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_manifest_that_the_runs_learner_did_not_sign_for_this_run_is_refused(name: str) -> None:
    signed, reason = REFUSED[name]
    with refused(reason, *(("'other'", "'example'") if reason is Reason.FOREIGN_RUN else ())):
        verify_signed(signed, public_key=LEARNER.key.public_key, run_id=RUN_ID)


@pytest.mark.parametrize(
    "manifest",
    [
        replace(KEYFRAME, version=0),
        replace(KEYFRAME, learner_epoch=0),
        replace(KEYFRAME, published_at_s=0.0),
        replace(KEYFRAME, frames=KEYFRAME.frames[:1]),
        replace(DELTA, base_version=0),
    ],
)
def test_the_least_of_every_field_is_valid(manifest: Manifest) -> None:
    assert parse(manifest.to_bytes()) == manifest


def test_a_header_alone_lacks_its_frames() -> None:
    header = DELTA.to_bytes()[: -FRAME_BYTES * len(DELTA.frames) - len(RUN_ID)]
    for size, said in ((len(header), "5 frames"), (len(header) - 1, str(len(header) - 1))):
        with refused(Reason.MALFORMED, said):
            parse(header[:size])


@pytest.mark.parametrize(
    "manifest",
    [
        replace(DELTA, version=1),
        replace(DELTA, base_version=5),
        replace(DELTA, base_version=-2),
        replace(DELTA, version=-1, base_version=NO_BASE),
        replace(DELTA, learner_epoch=-1),
        replace(DELTA, run_id="Not A Name"),
        replace(DELTA, run_id="name\n"),
        replace(DELTA, run_id=""),
        replace(DELTA, published_at_s=float("nan")),
        replace(DELTA, published_at_s=float("inf")),
        replace(DELTA, published_at_s=-1.0),
        replace(DELTA, base_root=bytes(16)),
        replace(DELTA, base_version=NO_BASE),
        replace(KEYFRAME, base_root=b"r" * 16),
        replace(KEYFRAME, base_version=1),
        with_frame(KEYFRAME, codec=Codec.STEP_PLANES),
        with_frame(DELTA, codec=Codec.UNCHANGED),
        with_frame(DELTA, codec=Codec.UNCHANGED, payload_bytes=0),
        with_frame(DELTA, payload_bytes=0),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(manifest: Manifest) -> None:
    assert refusal(manifest).reason is Reason.MALFORMED


def test_an_unchanged_frame_has_the_digest_of_nothing() -> None:
    unchanged = with_frame(DELTA, codec=Codec.UNCHANGED, payload_bytes=0)
    assert "has the digest of a payload" in str(refusal(unchanged))
    good = with_frame(unchanged, payload_digest=payload_digest(b""))
    assert parse(good.to_bytes()) == good


@pytest.mark.parametrize("payload_bytes", [1, 15, 16, 2 * limits.FRAME_WORDS])
@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.UNCHANGED])
def test_a_codec_and_the_largest_payload_go_into_one_number(codec: Codec, payload_bytes: int) -> None:
    frame = with_frame(DELTA, codec=codec, payload_bytes=payload_bytes)
    assert parse(frame.to_bytes()) == frame


def test_limits_are_checked() -> None:
    too_large = with_frame(DELTA, payload_bytes=2 * limits.FRAME_WORDS + 1)
    assert refusal(too_large).reason is Reason.OVER_LIMIT
    assert refusal(replace(DELTA, frames=())).reason is Reason.OVER_LIMIT


def test_a_manifest_has_as_many_frames_as_an_artifact_may_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "FRAMES_PER_ARTIFACT", len(DELTA.frames))
    assert parse(DELTA.to_bytes()) == DELTA
    monkeypatch.setattr(limits, "FRAMES_PER_ARTIFACT", len(DELTA.frames) - 1)
    assert refusal(DELTA).reason is Reason.OVER_LIMIT


def test_a_frame_count_beyond_the_limit_is_refused_unread() -> None:
    content = bytearray(DELTA.to_bytes())
    count_at = 8 + 3 * 8 + 8 + 3 * 16
    assert struct.unpack_from("<I", content, count_at) == (len(LAYOUT.frames),)
    struct.pack_into("<I", content, count_at, 0xFFFFFFFF)
    with refused(Reason.OVER_LIMIT):
        parse(bytes(content))


def test_the_number_of_a_codec_to_come_is_refused() -> None:
    content = bytearray(DELTA.to_bytes())
    coding_at = len(content) - FRAME_BYTES * len(DELTA.frames)
    assert content[coding_at] & 0xF == DELTA.frames[0].codec
    for number in range(max(Codec) + 1, 16):
        content[coding_at] = content[coding_at] & 0xF0 | number
        with refused(Reason.MALFORMED, f"codec {number}"):
            parse(bytes(content))


def test_the_largest_number_a_frame_can_tell_is_refused() -> None:
    content = bytearray(DELTA.to_bytes())
    coding_at = len(content) - FRAME_BYTES * len(DELTA.frames)
    struct.pack_into("<I", content, coding_at, 0xFFFFFFF0 | Codec.RAW)
    with refused(Reason.OVER_LIMIT, "frame 0", str((1 << 28) - 1)):
        parse(bytes(content))


def test_a_manifest_of_another_model_is_refused() -> None:
    DELTA.check_layout(LAYOUT)
    renamed = Layout.of([replace(SPECS[0], name="other"), *SPECS[1:]], frame_words=1024)
    for manifest, layout in (
        (DELTA, Layout.of(SPECS, frame_words=512)),
        (DELTA, Layout.of(SPECS[1:], frame_words=1024)),
        (DELTA, renamed),
        (replace(DELTA, frames=DELTA.frames[1:]), LAYOUT),
    ):
        with refused(Reason.LAYOUT_MISMATCH):
            manifest.check_layout(layout)


def test_a_payload_too_large_for_its_frame_is_refused_once_the_layout_is_known() -> None:
    frames = tuple(
        FrameRecord(Codec.RAW, 2 * span.words + (index == 3), frame.new_check, frame.payload_digest)
        for index, (frame, span) in enumerate(zip(KEYFRAME.frames, LAYOUT.frames, strict=True))
    )
    manifest = parse(replace(KEYFRAME, frames=frames).to_bytes())
    with refused(Reason.OVER_LIMIT, "frame 3"):
        manifest.check_layout(LAYOUT)
