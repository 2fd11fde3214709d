"""Every peer cuts the same model into the same frames."""

import pytest

from node import limits
from node.errors import Reason, RefusedError
from node.weights.layout import Layout, TensorSpec


def spans(layout: Layout) -> list[tuple[int, int]]:
    return [(frame.start_word, frame.words) for frame in layout.frames]


def test_small_tensors_share_a_frame_and_a_large_one_is_cut() -> None:
    layout = Layout.of(
        [TensorSpec("d", (10, 10)), TensorSpec("a", (40,)), TensorSpec("c", (7,)), TensorSpec("b", (2, 5))],
        frame_words=50,
    )
    assert spans(layout) == [(0, 50), (50, 7), (57, 50), (107, 50)]
    assert layout.words == 157


def test_the_tail_of_a_large_tensor_is_a_frame_of_its_own() -> None:
    layout = Layout.of([TensorSpec("a", (105,)), TensorSpec("b", (3,))], frame_words=50)
    assert spans(layout) == [(0, 50), (50, 50), (100, 5), (105, 3)]


def test_tensors_are_in_the_order_of_the_bytes_of_their_names() -> None:
    layout = Layout.of(
        [TensorSpec("é", (1,)), TensorSpec("b", (2,)), TensorSpec("B", (3,)), TensorSpec("a.10", (4,))]
    )
    assert [tensor.name for tensor in layout.tensors] == ["B", "a.10", "b", "é"]
    assert [tensor.start_word for tensor in layout.tensors] == [0, 3, 7, 9]


def test_a_scalar_is_one_word() -> None:
    assert Layout.of([TensorSpec("scale", ())]).words == 1


def test_the_digest_depends_on_names_shapes_and_frames_but_not_on_the_order_given() -> None:
    a, b = TensorSpec("a", (6,)), TensorSpec("b", (4,))
    digests = {
        Layout.of(specs, frame_words=words).digest
        for specs, words in (
            ([a, b], 8),
            ([a, b], 9),
            ([TensorSpec("a", (2, 3)), b], 8),
            ([TensorSpec("aa", (6,)), b], 8),
            ([TensorSpec("a", (5,)), TensorSpec("b", (5,))], 8),
        )
    }
    assert len(digests) == 5
    assert Layout.of([b, a], frame_words=8) == Layout.of([a, b], frame_words=8)


def test_a_word_knows_its_tensor() -> None:
    layout = Layout.of([TensorSpec("a", (3,)), TensorSpec("b", (2,))])
    assert [layout.tensor_at(word).name for word in range(5)] == ["a", "a", "a", "b", "b"]


def test_a_dtype_that_cannot_be_coded_is_refused_by_name() -> None:
    with pytest.raises(RefusedError, match=r"'norm' is float32.*bfloat16") as refused:
        Layout.of([TensorSpec("norm", (3,), "float32")])
    assert refused.value.reason is Reason.LAYOUT_MISMATCH


@pytest.mark.parametrize(
    "specs",
    [
        [],
        [TensorSpec("", (1,))],
        [TensorSpec("a\0b", (1,))],
        [TensorSpec("n" * 1025, (1,))],
        [TensorSpec("a", (1,)), TensorSpec("a", (2,))],
        [TensorSpec("a", (3, 0))],
        [TensorSpec("a", (-1, -1))],
    ],
)
def test_names_and_shapes_that_break_a_rule_are_refused(specs: list[TensorSpec]) -> None:
    with pytest.raises(RefusedError) as refused:
        Layout.of(specs)
    assert refused.value.reason is Reason.MALFORMED


def test_a_model_of_too_many_frames_is_refused_before_they_are_made() -> None:
    with pytest.raises(RefusedError) as refused:
        Layout.of([TensorSpec("a", (1 << 62,))])
    assert refused.value.reason is Reason.OVER_LIMIT
    with pytest.raises(RefusedError):
        Layout.of([TensorSpec("a", (2,))], frame_words=limits.FRAME_WORDS + 1)
