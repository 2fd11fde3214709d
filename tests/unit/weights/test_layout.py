"""Every peer cuts the same model into the same frames."""

import pytest

from node.errors import Reason, RefusedError
from node.values import limits
from node.weights.format.dtypes import DTYPES
from node.weights.format.layout import TENSOR_NAME_BYTES, Layout, TensorSpec
from support.refusals import refused


def spans(layout: Layout) -> list[tuple[int, int]]:
    return [(frame.start_word, frame.words) for frame in layout.frames]


def test_frames_are_filled_wherever_tensors_begin_and_end() -> None:
    layout = Layout.of(
        [TensorSpec("d", (10, 10)), TensorSpec("a", (40,)), TensorSpec("c", (7,)), TensorSpec("b", (2, 5))],
        frame_words=50,
    )
    assert spans(layout) == [(0, 50), (50, 50), (100, 50), (150, 7)]
    assert layout.words == 157


def test_tensors_are_in_the_order_of_the_bytes_of_their_names() -> None:
    layout = Layout.of(
        [TensorSpec("é", (1,)), TensorSpec("b", (2,)), TensorSpec("B", (3,)), TensorSpec("a.10", (4,))]
    )
    assert [tensor.name for tensor in layout.tensors] == ["B", "a.10", "b", "é"]
    assert [tensor.start_word for tensor in layout.tensors] == [0, 3, 7, 9]


def test_the_digest_depends_on_names_shapes_dtypes_and_frames_but_not_on_the_order_given() -> None:
    a, b = TensorSpec("a", (6,)), TensorSpec("b", (4,))
    digests = {
        Layout.of(specs, frame_words=words).digest
        for specs, words in (
            ([a, b], 8),
            ([a, b], 9),
            ([TensorSpec("a", (2, 3)), b], 8),
            ([TensorSpec("aa", (6,)), b], 8),
            ([TensorSpec("a", (5,)), TensorSpec("b", (5,))], 8),
            ([TensorSpec("a", (6,), "float16"), b], 8),
            ([TensorSpec("a", (6,), "int16"), b], 8),
        )
    }
    assert len(digests) == 7
    assert Layout.of([b, a], frame_words=8) == Layout.of([a, b], frame_words=8)


@pytest.mark.parametrize("name", ["a", "n" * TENSOR_NAME_BYTES, "é" * (TENSOR_NAME_BYTES // 2)])
def test_a_name_may_be_as_long_as_its_limit_in_bytes(name: str) -> None:
    assert Layout.of([TensorSpec(name, (1, 1))]).tensors[0].name == name
    with pytest.raises(RefusedError):
        Layout.of([TensorSpec(f"é{name}".ljust(TENSOR_NAME_BYTES, "n"), (1,))])


@pytest.mark.parametrize("frame_words", [1, limits.FRAME_WORDS])
def test_a_frame_may_have_one_word_and_as_many_as_its_limit(frame_words: int) -> None:
    assert spans(Layout.of([TensorSpec("a", (2,))], frame_words=frame_words))[0] == (0, min(frame_words, 2))
    with refused(Reason.OVER_LIMIT):
        Layout.of([TensorSpec("a", (2,))], frame_words=0 if frame_words == 1 else frame_words + 1)


def test_a_dtype_that_cannot_be_coded_is_refused_by_name() -> None:
    with refused(Reason.LAYOUT_MISMATCH, "'norm'", "complex64", "bfloat16"):
        Layout.of([TensorSpec("norm", (3,), "complex64")])


MIXED = (
    TensorSpec("a.norm", (5,), "bfloat16"),
    TensorSpec("b.bias", (3,), "float32"),
    TensorSpec("c.weight", (2, 7), "float8_e4m3fn"),
    TensorSpec("d.counts", (2,), "int64"),
    TensorSpec("e.odd", (3,), "int8"),
    TensorSpec("f.norm", (2,), "bfloat16"),
    TensorSpec("g.bias", (), "float32"),
    TensorSpec("h.half", (1,), "float16"),
)


def test_the_widest_elements_come_first_and_each_dtype_has_frames_of_its_own() -> None:
    layout = Layout.of(reversed(MIXED), frame_words=16)
    assert [(tensor.name, tensor.start_word, tensor.words) for tensor in layout.tensors] == [
        ("d.counts", 0, 8),
        ("b.bias", 8, 6),
        ("g.bias", 14, 2),
        ("a.norm", 16, 5),
        ("f.norm", 21, 2),
        ("h.half", 23, 1),
        ("c.weight", 24, 7),
        ("e.odd", 31, 2),
    ]
    assert layout.words == 33
    assert [(frame.start_word, frame.words, frame.dtype.name) for frame in layout.frames] == [
        (0, 8, "int64"),
        (8, 8, "float32"),
        (16, 7, "bfloat16"),
        (23, 1, "float16"),
        (24, 7, "float8_e4m3fn"),
        (31, 2, "int8"),
    ]


def test_a_frame_holds_whole_elements() -> None:
    layout = Layout.of([TensorSpec("a", (5,), "int64"), TensorSpec("b", (4,), "float32")], frame_words=11)
    assert spans(layout) == [(0, 8), (8, 8), (16, 4), (20, 8)]
    with refused(Reason.OVER_LIMIT, "'a'", "3"):
        Layout.of([TensorSpec("a", (5,), "int64")], frame_words=3)


def test_the_pieces_of_a_frame_say_where_each_tensor_is() -> None:
    layout = Layout.of([TensorSpec("a", (3,)), TensorSpec("b", (25,)), TensorSpec("c", (2,))], frame_words=10)
    told = [
        [
            (piece.tensor.name, piece.tensor_word, piece.frame_word, piece.words)
            for piece in layout.overlaps(n)
        ]
        for n in range(len(layout.frames))
    ]
    assert told == [
        [("a", 0, 0, 3), ("b", 0, 3, 7)],
        [("b", 7, 0, 10)],
        [("b", 17, 0, 8), ("c", 0, 8, 2)],
    ]


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
    with refused(Reason.MALFORMED):
        Layout.of(specs)


def test_one_frame_more_than_an_artifact_may_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FRAMES_PER_ARTIFACT", 100)
    with refused(Reason.OVER_LIMIT):
        Layout.of([TensorSpec("a", (100 * 64 + 1,))], frame_words=64)
    most = 100 - len(DTYPES)  # The last frame of each dtype may have few words.
    assert len(Layout.of([TensorSpec("a", (most * 64,))], frame_words=64).frames) == most
    with pytest.raises(RefusedError):
        Layout.of([TensorSpec("a", (most * 64 + 1,))], frame_words=64)
