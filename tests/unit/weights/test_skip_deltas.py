"""Which deltas over many versions are made, worked by hand."""

import pytest

from node.values.policy import NO_BASE, Artifact, ArtifactKey
from node.weights.planning.skip_deltas import next_base


def steps(*versions: int) -> list[Artifact]:
    return [Artifact(ArtifactKey(new, old), 10) for old, new in zip((0, *versions), versions, strict=False)]


def bases(head: int, artifacts: list[Artifact], *, lag: int, public_every: int) -> list[int]:
    """Make what is wanted until nothing is."""
    made: list[int] = []
    while True:
        base = next_base(
            head,
            [*artifacts, *(Artifact(ArtifactKey(head, base), 1) for base in made)],
            longest_lag_versions=lag,
            public_every_versions=public_every,
        )
        if base is None:
            return made
        made.append(base)


def to(head: int) -> list[Artifact]:
    return steps(*range(1, head + 1))


HOLES = steps(1, 2, 5, 6, 7, 9)
FROM_12 = [*to(16)[11:], Artifact(ArtifactKey(12, NO_BASE), 100)]


@pytest.mark.parametrize(
    ("head", "artifacts", "lag", "public_every", "expected"),
    [
        (48, to(48), 1000, 1000, [32, 40, 44]),
        (47, to(47), 1000, 1000, []),
        (36, to(36), 1000, 1000, [32]),
        (64, to(64), 1000, 1000, [0, 32, 48, 56, 60]),
        (64, to(64), 8, 1000, [56, 60]),
        (64, to(64), 3, 1000, []),
        (16, to(16), 0, 16, [0]),
        (17, to(17), 0, 16, []),
        (16, steps(3, 16), 0, 16, [0]),
        (5, HOLES[:3], 4, 1000, [0]),
        (9, HOLES, 4, 1000, [5]),
        (9, HOLES, 8, 1000, [0, 5]),
        (8, steps(4, 8), 4, 1000, []),
        (16, FROM_12, 16, 1000, [0, 12]),
        (1, steps(1), 1000, 1, []),
        (0, [], 1000, 1000, []),
    ],
    ids=[
        "a delta for every power of two that divides the version",
        "none for an odd version",
        "one from the last multiple of four",
        "from the first version too",
        "nothing longer than someone is behind",
        "nobody is behind by four",
        "every so often one from the public base model",
        "not at the version after",
        "two versions are enough for a delta over both",
        "missing numbers: from the first of a block",
        "to the first of the next",
        "over two blocks",
        "what the step does already is not made again",
        "a base whose words cannot be made any more is passed over",
        "the first version needs nothing",
        "nor does none",
    ],
)
def test_deltas_over_many_versions(
    head: int, artifacts: list[Artifact], lag: int, public_every: int, expected: list[int]
) -> None:
    assert bases(head, artifacts, lag=lag, public_every=public_every) == expected
