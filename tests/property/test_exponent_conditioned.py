"""Whatever the words are, every implementation makes the same payload of them, and they come back."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from node.weights.codec.exponent_conditioned.payload_format import PayloadFault
from node.weights.format.digests import Words, words_digest
from support.exponent_conditioned import fault_of, implementations

IMPLEMENTATIONS = implementations()


@st.composite
def base_and_new(draw: st.DrawFn) -> tuple[Words, Words]:
    """Draw a frame at any alignment: of any bits, or of few exponents; changed anywhere, by anything."""
    start = draw(st.integers(0, 40))
    seed = draw(st.integers(0, 1 << 32))
    random = np.random.default_rng(seed)
    size = draw(st.one_of(st.integers(1, 300), st.integers(4000, 4200), st.just(70_000)))
    if size < 300 and draw(st.booleans()):
        base = draw(hnp.arrays(np.uint16, size))
    else:
        exponents = draw(st.integers(0, 255)) + random.integers(0, draw(st.integers(1, 40)), size)
        base = (random.integers(0, 1 << 16, size) & 0x807F | (exponents & 0xFF) << 7).astype(np.uint16)
    share = draw(st.sampled_from([0.0, 0.0001, 0.002, 0.02, 0.3, 0.7, 0.97, 1.0]))
    largest = draw(st.sampled_from([1, 2, 9, 500, 0x8000]))
    words = base.copy()
    moved = np.flatnonzero(random.random(size) < share)
    words[moved] += random.integers(-largest, largest, moved.size, endpoint=True).astype(np.uint16)
    return np.concatenate([np.zeros(start, np.uint16), base])[start:], words


@settings(max_examples=50)
@given(base_and_new())
def test_all_implementations_agree_and_the_words_come_back(pair: tuple[Words, Words]) -> None:
    base, words = pair
    deltas = [each.encode(words, base=base, limit_bytes=8 * words.size + 64) for each in IMPLEMENTATIONS]
    assert all(delta == deltas[0] for delta in deltas)
    assert deltas[0].changes == np.count_nonzero(base != words)
    assert deltas[0].digest == words_digest(words)
    assert deltas[0].is_finite == bool(((words & 0x7F80) != 0x7F80).all())
    payload = deltas[0].payload
    if payload:
        for each in IMPLEMENTATIONS:
            assert fault_of(each, payload, base=base) == (PayloadFault.NONE, words.tobytes())
