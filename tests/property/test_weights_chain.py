"""The planner against a search that tries every way."""

import itertools
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from node.values.policy import NO_BASE, Artifact, ArtifactKey
from node.weights.planning.cheapest_chain import (
    PUBLIC_VERSION,
    newest_reachable,
    plan_catch_up,
    plan_fresh,
    plan_upload,
)

VERSIONS = st.integers(0, 6)


@st.composite
def artifact_sets(draw: st.DrawFn) -> tuple[Artifact, ...]:
    every_key = [ArtifactKey(v, b) for v in range(7) for b in range(NO_BASE, v)]
    chosen = draw(st.lists(st.sampled_from(every_key), unique=True, max_size=9))
    return tuple(Artifact(key, draw(st.integers(0, 20))) for key in chosen)


def every_way(held: int, head: int, artifacts: tuple[Artifact, ...]) -> list[tuple[Artifact, ...]]:
    """Return every chain from ``held``, from nothing or from the public base model."""
    ways: list[tuple[Artifact, ...]] = []
    for length in range(len(artifacts) + 1):
        for way in itertools.combinations(
            sorted(artifacts, key=lambda artifact: artifact.key.version), length
        ):
            at = held
            for number, step in enumerate(way):
                is_public = number == 0 and step.key.base_version == PUBLIC_VERSION
                if step.key.base_version not in (at, NO_BASE) and not is_public:
                    break
                at = step.key.version
            else:
                if at == head:
                    ways.append(way)
    return ways


def cost(way: tuple[Artifact, ...]) -> tuple[int, int]:
    return sum(artifact.size_bytes for artifact in way), len(way)


@settings(max_examples=200)
@given(held=st.integers(NO_BASE, 6), head=VERSIONS, artifacts=artifact_sets())
def test_no_way_is_cheaper_than_the_plan(held: int, head: int, artifacts: tuple[Artifact, ...]) -> None:
    found = plan_catch_up(held, head, artifacts)
    ways = every_way(held, head, artifacts) if head >= held else []
    if held <= head == PUBLIC_VERSION:
        ways.append(())
    if found is None:
        assert not ways
    else:
        assert found in ways
        assert cost(found) == min(map(cost, ways))


@given(head=VERSIONS, artifacts=artifact_sets(), order=st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_given(
    head: int, artifacts: tuple[Artifact, ...], order: Random
) -> None:
    shuffled = list(artifacts)
    order.shuffle(shuffled)
    assert plan_fresh(head, shuffled) == plan_fresh(head, artifacts)


@given(artifacts=artifact_sets())
def test_the_newest_reachable_version_is_the_newest_with_a_plan(artifacts: tuple[Artifact, ...]) -> None:
    made = {artifact.key.version for artifact in artifacts}
    planned = [version for version in made if plan_fresh(version, artifacts)]
    # A way of no artifacts leads to version 0 only; a keyframe of version 0 counts as published.
    if ArtifactKey(0) in {artifact.key for artifact in artifacts}:
        planned.append(0)
    assert newest_reachable(artifacts) == max(planned, default=None)


@given(local=artifact_sets(), remote=artifact_sets(), head=VERSIONS)
def test_a_hub_that_got_all_that_was_planned_reaches_whatever_could_be_reached(
    local: tuple[Artifact, ...], remote: tuple[Artifact, ...], head: int
) -> None:
    sent = plan_upload(local, remote=remote, head=head)
    assert len({artifact.key for artifact in sent}) == len(sent)
    assert not {artifact.key for artifact in sent} & {artifact.key for artifact in remote}
    assert (plan_fresh(head, [*remote, *sent]) is None) == (plan_fresh(head, [*remote, *local]) is None)
    # An older keyframe sent to open a way makes older artifacts wanted, once.
    sent += plan_upload(local, remote=[*remote, *sent], head=head)
    assert plan_upload(local, remote=[*remote, *sent], head=head) == ()
