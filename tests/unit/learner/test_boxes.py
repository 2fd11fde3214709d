"""Where the elements of a shard lie, against torch.chunk."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.ranks.boxes import Sharding, coordinates
from learner.sizing.mesh_sizes import Coordinate, MeshSizes

STAGES = 3
SIZES = st.builds(MeshSizes, st.integers(1, 2), st.integers(1, 4), st.integers(1, 3), st.just(STAGES))
SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    shape = draw(SHAPES)
    axes = st.sampled_from([None, *range(min(2, len(shape)))])
    shard_axis = draw(st.sampled_from([None, 0]) if shape else st.none())
    stages = draw(st.lists(st.integers(0, STAGES - 1), min_size=1, unique=True).map(sorted))
    return Sharding(shape, shard_axis, draw(axes), stages=tuple(stages))


def chunked(sharding: Sharding, at: Coordinate, sizes: MeshSizes) -> list[int]:
    """The flat indices of a part, in its own order."""
    part = torch.arange(int(np.prod(sharding.shape))).reshape(sharding.shape)
    for axis, number, parts in (
        (sharding.slice_axis, at.slice, sizes.tp),
        (sharding.shard_axis, at.shard, sizes.dp_shard),
    ):
        if axis is not None:
            runs = torch.chunk(part, parts, dim=axis)
            part = runs[number] if number < len(runs) else part.narrow(axis, 0, 0)
    return part.flatten().tolist() if at.stage in sharding.stages else []


@given(shardings(), SIZES, st.data())
def test_a_box_has_the_elements_that_torch_deals_to_the_rank(
    sharding: Sharding, sizes: MeshSizes, data: st.DataObject
) -> None:
    elements = int(np.prod(sharding.shape))
    first = data.draw(st.integers(0, elements - 1))
    count = data.draw(st.integers(1, elements - first))
    sent: list[int] = []
    for at in coordinates(sizes):
        whole = chunked(sharding, at, sizes)
        box = sharding.box(at, sizes)
        source, to, here = box.within(first, count)
        assert box.count(first, count) == here
        of_run = np.arange(first, first + count)[to].tolist()
        assert np.array(whole, np.int64)[source].tolist() == of_run
        assert len(of_run) == here
        assert of_run == [index for index in whole if first <= index < first + count]
        sent += of_run if sharding.is_sent_by(at) else []
    assert sorted(sent) == list(range(first, first + count))


def test_ranks_are_numbered_by_stage_then_replica_then_shard_then_slice() -> None:
    sizes = MeshSizes(2, 3, 2, 2)
    assert sizes.ranks == 24
    assert sizes.coordinate(0) == Coordinate(0, 0, 0, stage=0)
    assert sizes.coordinate(1) == Coordinate(0, 0, 1, stage=0)
    assert sizes.coordinate(2) == Coordinate(0, 1, 0, stage=0)
    assert sizes.coordinate(7) == Coordinate(1, 0, 1, stage=0)
    assert sizes.coordinate(12 + 7) == Coordinate(1, 0, 1, stage=1)
    assert [sizes.share(rank) for rank in (0, 1, 2, 7, 12 + 7)] == [0, 0, 1, 3, 3]
