"""Which part of a tensor a rank holds, and who sends it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.ranks.words.tensor_shards import Sharding
from learner.sizing.mesh_sizes import Coordinate, MeshSizes

STAGES = 3
SIZES = st.builds(MeshSizes, st.integers(1, 2), st.integers(1, 4), st.integers(1, 3), st.just(STAGES))
SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    shape = draw(SHAPES)
    axes = st.sampled_from([None, *range(min(2, len(shape)))])
    shard_axis = draw(st.sampled_from([None, 0]) if shape else st.none())
    return Sharding(shape, shard_axis, draw(axes), stages=(draw(st.integers(0, STAGES - 1)),))


@given(shardings(), SIZES)
def test_each_element_is_sent_once_by_a_rank_that_holds_it(sharding: Sharding, sizes: MeshSizes) -> None:
    sent = torch.zeros(sharding.shape, dtype=torch.int64)
    for rank in range(sizes.ranks):
        at = sizes.coordinate(rank)
        if sharding.is_sent_by(at):
            sharding.part(sent, at, sizes).add_(1)
            assert at.stage in sharding.stages
    assert (sent == 1).all()


@given(shardings(), SIZES)
def test_replicas_hold_the_same_part_and_undivided_axes_are_whole(
    sharding: Sharding, sizes: MeshSizes
) -> None:
    whole = torch.arange(int(torch.tensor(sharding.shape).prod())).reshape(sharding.shape)
    for rank in range(sizes.ranks):
        at = sizes.coordinate(rank)
        part = sharding.part(whole, at, sizes)
        assert torch.equal(part, sharding.part(whole, at._replace(replica=0, stage=0), sizes))
        divided = {sharding.shard_axis, sharding.slice_axis}
        for axis, length in enumerate(sharding.shape):
            assert part.shape[axis] == length or axis in divided


def test_ranks_are_numbered_by_stage_then_replica_then_shard_then_slice() -> None:
    sizes = MeshSizes(2, 3, 2, 2)
    assert sizes.ranks == 24
    assert sizes.coordinate(0) == Coordinate(0, 0, 0, stage=0)
    assert sizes.coordinate(1) == Coordinate(0, 0, 1, stage=0)
    assert sizes.coordinate(2) == Coordinate(0, 1, 0, stage=0)
    assert sizes.coordinate(7) == Coordinate(1, 0, 1, stage=0)
    assert sizes.coordinate(12 + 7) == Coordinate(1, 0, 1, stage=1)
    assert [sizes.share(rank) for rank in (0, 1, 2, 7, 12 + 7)] == [0, 0, 1, 3, 3]
