"""Words that are published, and words that never are."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from bench.held_policy import HeldPolicy
from node.errors import Reason, RefusedError
from node.weights.assembly.encode import CodedFrame, code_frames, join
from node.weights.format.digests import Words, payload_digest, words_digest
from node.weights.format.layout import Layout, TensorSpec
from node.weights.format.manifest import Codec
from support.refusals import refused
from support.weights import LAYOUT, RUN_ID, Learner, random_words


def test_the_largest_finite_values_zeros_and_denormals_are_published() -> None:
    learner = Learner()
    words = learner.words(1).copy()
    words[:6] = [0x7F7F, 0xFF7F, 0x8000, 0x0000, 0x0001, 0x8001]
    learner.versions[1] = HeldPolicy.of(1, words, layout=LAYOUT)
    assert learner.encode(1, 0).manifest.root == learner.versions[1].version.root


def test_a_frame_that_did_not_change_costs_nothing() -> None:
    learner = Learner()
    words = learner.words(0).copy()
    words[LAYOUT.frames[2].start_word] ^= 1
    learner.versions[1] = HeldPolicy.of(1, words, layout=LAYOUT)
    encoded = learner.encode(1, 0)
    assert [len(payload) > 0 for payload in encoded.payloads] == [False, False, True, False, False]
    assert encoded.manifest.frames[0].codec is Codec.UNCHANGED


def test_words_of_another_model_are_our_own_mistake() -> None:
    good = random_words(1)
    unfit: list[Any] = [good[:-1], good.astype(np.int32), np.repeat(good, 2)[::2], good.reshape(1, -1)]
    for words in unfit:
        with pytest.raises(ValueError, match="the layout has"):
            HeldPolicy.of(0, words, layout=LAYOUT)


MANY = Layout.of([TensorSpec("a", (64 * 16,))], frame_words=16)


def code_many(
    pool: ThreadPoolExecutor, *, new: Callable[[int], Words], put: Callable[[bytes], object]
) -> tuple[CodedFrame, ...]:
    return code_frames(
        range(len(MANY.frames)), new=new, base=None, layout=MANY, put=put, executor=pool, under_way=5
    )


def test_no_more_frames_are_under_way_than_was_said_and_they_are_put_in_order() -> None:
    words, lock, begun, most = random_words(3, layout=MANY), threading.Lock(), 0, 0
    put: list[bytes] = []

    def new(frame: int) -> Words:
        nonlocal begun, most
        with lock:
            begun += 1
            most = max(most, begun - len(put))
        return words[MANY.frames[frame].slice]

    with ThreadPoolExecutor(4) as pool:
        coded = code_many(pool, new=new, put=put.append)
    assert most <= 5
    assert [payload_digest(payload) for payload in put] == [each.record.payload_digest for each in coded]
    assert [each.digest for each in coded] == [words_digest(words[f.slice]) for f in MANY.frames]


def test_when_coding_fails_nobody_reads_the_new_words_any_more() -> None:
    words, is_over, readers = random_words(3, layout=MANY), threading.Event(), threading.Barrier(4)
    late: list[int] = []

    def new(frame: int) -> Words:
        if frame < 4:
            readers.wait(timeout=10)  # All four threads are reading.
        if is_over.is_set():
            late.append(frame)
        return words[MANY.frames[frame].slice]

    def full(payload: bytes) -> None:
        raise RefusedError(Reason.DISK, "no room")

    with ThreadPoolExecutor(4) as pool:
        with refused(Reason.DISK):
            code_many(pool, new=new, put=full)
        is_over.set()
    assert late == []


def test_a_manifest_is_made_of_all_frames_and_of_a_newer_version() -> None:
    learner = Learner()
    coded = code_frames(
        range(len(LAYOUT.frames)),
        new=lambda frame: learner.words(2)[LAYOUT.frames[frame].slice],
        base=lambda frame: learner.words(1)[LAYOUT.frames[frame].slice],
        layout=LAYOUT,
        put=len,
        executor=None,
        under_way=1,
    )
    for kept, version in ((coded[:-1], 2), (coded, 1)):
        with pytest.raises(ValueError, match=r"frames were coded|cannot start"):
            join(
                kept,
                version=version,
                base=learner.versions[1].version,
                layout=LAYOUT,
                run_id=RUN_ID,
                learner_epoch=1,
                published_at_s=0.0,
            )
