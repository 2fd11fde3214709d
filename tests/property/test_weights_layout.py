"""Frames tile the words, whatever the tensors."""

from hypothesis import given
from hypothesis import strategies as st

from node.weights.format.dtypes import DTYPES
from node.weights.format.layout import Layout, TensorSpec

DTYPES_DRAWN = st.lists(
    st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(1, 300)), min_size=1, max_size=20
)


@given(drawn=DTYPES_DRAWN, frame_words=st.integers(4, 100))
def test_frames_of_many_dtypes_tile_the_words_by_whole_elements_of_one_dtype(
    drawn: list[tuple[str, int]], frame_words: int
) -> None:
    specs = [TensorSpec(f"t{i:02}", (size,), dtype) for i, (dtype, size) in enumerate(drawn)]
    layout = Layout.of(specs, frame_words=frame_words)
    end = 0
    for number, frame in enumerate(layout.frames):
        assert frame.start_word == end
        assert 1 <= frame.words <= frame_words
        assert 2 * frame.start_word % frame.dtype.element_bytes == 0
        assert 2 * frame.words % frame.dtype.element_bytes == 0
        pieces = list(layout.overlaps(number))
        assert {piece.tensor.dtype for piece in pieces} == {frame.dtype}
        assert sum(piece.words for piece in pieces) == frame.words
        end += frame.words
    assert end == layout.words
    for tensor in layout.tensors:
        assert 0 <= 2 * tensor.words - tensor.elements * tensor.dtype.element_bytes <= 1
