"""Words as the two bytes a keyframe keeps apart."""

import numpy as np
import pytest

from node.weights.codec import native, planes
from node.weights.format.digests import Words, words_digest

SIZES = (1, 31, 32, 120, 121, 4095, 4096, 4097, 70_001)
"""Around what the kernel hashes and makes at a time."""


def words_of(size: int) -> Words:
    return np.random.default_rng(size).integers(0, 1 << 16, size).astype(np.uint16)


@pytest.mark.parametrize("path", [None, *range(len(native.PATHS))], ids=["numpy", *native.PATHS])
def test_words_are_made_again_and_named_by_every_implementation(
    path: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = None if path is None else native.load(path)
    monkeypatch.setattr(planes, "_kernel", lambda: kernel)
    for size in SIZES:
        words, made = words_of(size), np.zeros(size, np.uint16)
        assert planes.join_words(*planes.split_words(words), out=made) == words_digest(words)
        np.testing.assert_array_equal(made, words)


@pytest.mark.needs("kernel")
def test_the_kernel_reads_no_bytes_that_are_not_there() -> None:
    kernel = native.load()
    assert kernel is not None
    for rest, exponents in ((b"\0" * 4, b"\0" * 5), (b"\0" * 5, b"\0" * 4), (b"\0" * 6, b"\0" * 6)):
        with pytest.raises(ValueError, match="5 words"):
            kernel.join(rest, exponents, out=np.zeros(5, np.uint16))
