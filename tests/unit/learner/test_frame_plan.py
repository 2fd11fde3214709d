"""Who codes which frame, and of what."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.ranks.boxes import Sharding
from learner.ranks.frame_plan import FramePlan, frame_owners
from learner.sizing.mesh_sizes import MeshSizes
from node.weights.format.layout import Layout, TensorSpec

SIZES = st.builds(MeshSizes, st.integers(1, 2), st.integers(1, 3), st.integers(1, 2))
DTYPES = st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"])


@st.composite
def plans(draw: st.DrawFn) -> tuple[FramePlan, dict[str, Sharding], MeshSizes]:
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=5))
    specs = [TensorSpec(f"t{number}", shape, draw(DTYPES)) for number, shape in enumerate(shapes)]
    shardings, sizes = {}, draw(SIZES)
    for spec in specs:
        axes = [None, *range(min(2, len(spec.shape)))]
        shard_axis = draw(st.sampled_from([None, 0])) if spec.shape else None
        shardings[spec.name] = Sharding(spec.shape, shard_axis, draw(st.sampled_from(axes)))
    layout = Layout.of(specs, frame_words=draw(st.sampled_from([4, 16, 1024])))
    return FramePlan(layout, shardings, sizes), shardings, sizes


@settings(deadline=None)
@given(plans())
def test_a_frame_gets_each_of_its_elements_once_from_ranks_that_hold_it(
    planned: tuple[FramePlan, dict[str, Sharding], MeshSizes],
) -> None:
    plan, shardings, sizes = planned
    for frame in range(len(plan.layout.frames)):
        for overlap in plan.layout.overlaps(frame):
            width = overlap.tensor.dtype.element_bytes
            first = 2 * overlap.tensor_word // width
            elements = min(2 * overlap.words // width, overlap.tensor.elements - first)
            got = np.zeros(elements, np.int64)
            for rank in range(sizes.ranks):
                for part in plan.parts(frame, sender=rank):
                    if part.piece == overlap:
                        source, to = part.places()
                        got[to] += 1
                        box = shardings[overlap.tensor.name].box(sizes.coordinate(rank), sizes)
                        assert np.arange(box.rows.count * box.columns.count)[source].size == part.count
            assert (got == 1).all()


@settings(deadline=None)
@given(plans())
def test_no_rank_exceeds_its_share_of_the_words_by_a_frame(
    planned: tuple[FramePlan, dict[str, Sharding], MeshSizes],
) -> None:
    plan, _, sizes = planned
    words = [frame.words for frame in plan.layout.frames]
    loads = [sum(words[frame] for frame in plan.own(rank)) for rank in range(sizes.ranks)]
    assert sum(loads) == plan.layout.words
    assert max(loads) < -(-sum(words) // sizes.ranks) + max(words)
    in_rounds = [frame for one in plan.rounds(2) for frame in one]
    assert sorted(in_rounds) == list(range(len(words)))
    for rank in range(sizes.ranks):
        assert [frame for frame in in_rounds if plan.owners[frame] == rank] == plan.own(rank)


def test_a_frame_goes_to_the_rank_that_holds_it_and_one_that_is_divided_to_the_rank_with_room() -> None:
    assert frame_owners([4, 4, 4, 4], [[0, 4], [2, 2], [4, 0], [2, 2]]) == (1, 0, 0, 1)
    # A rank that holds everything has its share and no more.
    assert frame_owners([4, 4, 2], [[4, 0], [4, 0], [2, 0]]) == (0, 1, 0)


def test_shards_as_large_as_frames_send_each_other_nothing() -> None:
    layout = Layout.of([TensorSpec("a", (8, 4)), TensorSpec("b", (16, 4))], frame_words=8)
    sizes = MeshSizes(1, 4, 1)
    plan = FramePlan(layout, {"a": Sharding((8, 4), 0), "b": Sharding((16, 4), 0)}, sizes)
    for frame, owner in enumerate(plan.owners):
        assert [rank for rank in range(4) if list(plan.parts(frame, sender=rank))] == [owner]
