"""Frames tile the words, whatever the tensors."""

from hypothesis import given, settings
from hypothesis import strategies as st

from node.weights.layout import Layout, TensorSpec

SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=20)


@settings(deadline=None)
@given(sizes=SIZES, frame_words=st.integers(1, 100))
def test_frames_tile_the_words_and_no_small_tensor_is_cut(sizes: list[int], frame_words: int) -> None:
    layout = Layout.of(
        [TensorSpec(f"t{i:02}", (size,)) for i, size in enumerate(sizes)], frame_words=frame_words
    )
    assert layout.words == sum(sizes)
    end = 0
    for frame in layout.frames:
        assert frame.start_word == end
        assert 1 <= frame.words <= frame_words
        end += frame.words
    assert end == layout.words
    assert len(layout.frames) <= 2 * layout.words / frame_words + 1
    for tensor in layout.tensors:
        if tensor.words <= frame_words:
            last = tensor.start_word + tensor.words
            assert any(
                f.start_word <= tensor.start_word and last <= f.start_word + f.words for f in layout.frames
            )
