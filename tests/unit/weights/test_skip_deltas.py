"""Which deltas over many versions are made, worked by hand."""

from node.policy import NO_BASE, Artifact, ArtifactKey
from node.weights.planning.skip_deltas import next_base


def steps(*versions: int) -> list[Artifact]:
    return [Artifact(ArtifactKey(new, old), 10) for old, new in zip((0, *versions), versions, strict=False)]


def bases(head: int, artifacts: list[Artifact], *, lag: int = 1000, public_every: int = 1000) -> list[int]:
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


def test_a_version_gets_a_delta_for_every_power_of_two_that_divides_it() -> None:
    chain = steps(*range(1, 49))
    assert bases(48, chain) == [32, 40, 44]
    assert bases(47, steps(*range(1, 48))) == []
    assert bases(36, steps(*range(1, 37))) == [32]
    assert bases(64, steps(*range(1, 65))) == [0, 32, 48, 56, 60]


def test_nothing_longer_is_made_than_someone_is_behind() -> None:
    chain = steps(*range(1, 65))
    assert bases(64, chain, lag=8) == [56, 60]
    assert bases(64, chain, lag=3) == []


def test_every_so_often_there_is_one_from_the_public_base_model_whoever_is_behind() -> None:
    assert bases(16, steps(*range(1, 17)), lag=0, public_every=16) == [0]
    assert bases(17, steps(*range(1, 18)), lag=0, public_every=16) == []


def test_two_versions_are_enough_for_a_delta_over_both() -> None:
    assert bases(16, steps(3, 16), lag=0, public_every=16) == [0]


def test_where_numbers_are_missing_strides_go_from_the_first_of_a_block_to_the_first_of_the_next() -> None:
    chain = steps(1, 2, 5, 6, 7, 9)
    assert bases(5, chain[:3], lag=4) == [0]
    assert bases(9, chain, lag=4) == [5]
    assert bases(9, chain, lag=8) == [0, 5]


def test_what_the_step_already_does_is_not_made_again() -> None:
    assert bases(8, steps(4, 8), lag=4) == []


def test_a_base_whose_words_cannot_be_made_any_more_is_passed_over() -> None:
    chain = [*steps(*range(1, 17))[11:], Artifact(ArtifactKey(12, NO_BASE), 100)]
    assert bases(16, chain, lag=16) == [0, 12]


def test_the_first_version_needs_nothing() -> None:
    assert bases(1, steps(1), lag=1000, public_every=1) == []
    assert bases(0, []) == []
