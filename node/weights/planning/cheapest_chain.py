"""Plans the cheapest chain of artifacts from a version held to a version wanted, by bytes; pure.

Versions are nodes, and artifacts are edges from a base to a newer version. A keyframe starts at
NO_BASE, where every peer can start at no cost. Edges only lead to larger numbers, so visiting them
in the order of the version they make yields the shortest path.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from node.values.policy import NO_BASE, Artifact, ArtifactKey

PUBLIC_VERSION: Final = 0
"""The base model, which every peer has on disk. A peer without weights starts here or at NO_BASE."""


def plan_catch_up(
    held: int, head: int, artifacts: Iterable[Artifact], *, artifact_cost_bytes: int = 0
) -> tuple[Artifact, ...] | None:
    """Return the artifacts to apply, in order, to get from version ``held`` to ``head``.

    The peer also has the public base model on disk, so the first artifact may start from PUBLIC_VERSION. The
    chain has the fewest bytes; among equals, the fewest artifacts. It is empty if ``head`` is held; None if
    there is no chain, as for any older version.

    Args:
        artifact_cost_bytes: cost of each artifact besides its bytes: what the peer's link could have carried
            while it asked. On a long link fewer, larger artifacts are then cheaper.
    """
    if head < held:
        return None
    # Cost (bytes, artifacts) and last artifact of the cheapest chain to each version reached so far.
    reached: dict[int, tuple[int, int, Artifact | None]] = dict.fromkeys(
        (held, PUBLIC_VERSION, NO_BASE), (*price(()), None)
    )
    # A tuple is compared five times as fast as a key.
    for artifact in sorted(artifacts, key=lambda artifact: (artifact.key.version, artifact.key.base_version)):
        start = reached.get(artifact.key.base_version)
        if start is None:
            continue
        cost = (start[0] + artifact.size_bytes + artifact_cost_bytes, start[1] + 1)
        best = reached.get(artifact.key.version)
        if best is None or cost < best[:2]:
            reached[artifact.key.version] = (*cost, artifact)
    if head not in reached:
        return None
    path: list[Artifact] = []
    last = reached[head][2]
    while last is not None:
        path.append(last)
        last = reached[last.key.base_version][2]
    return tuple(reversed(path))


def plan_fresh(head: int, artifacts: Iterable[Artifact]) -> tuple[Artifact, ...] | None:
    """Return the cheapest chain to ``head`` for a peer that has only the public base model."""
    return plan_catch_up(PUBLIC_VERSION, head, artifacts)


def start_of(key: ArtifactKey) -> int:
    """Return the version an artifact belongs after: a keyframe's own, else its base."""
    return key.version if key.is_keyframe else key.base_version


def price(path: Sequence[Artifact]) -> tuple[int, int]:
    """Return the bytes and the number of artifacts of a chain: the order in which chains are cheaper."""
    return sum(artifact.size_bytes for artifact in path), len(path)


def newest_reachable(artifacts: Iterable[Artifact]) -> int | None:
    """Return the newest version that a peer with only the public base model can reach; None: none."""
    reached = {PUBLIC_VERSION, NO_BASE}
    newest = None
    for artifact in sorted(artifacts, key=lambda artifact: artifact.key):
        if artifact.key.base_version in reached:
            newest = artifact.key.version
            reached.add(newest)
    return newest


def upload_path(local: Iterable[Artifact], *, remote: Iterable[Artifact], head: int) -> tuple[Artifact, ...]:
    """Return the local artifacts that move a hub with ``remote`` to ``head`` with the fewest bytes sent.

    They are in the order to apply; empty if the hub can get there already, or cannot.
    """
    has = {artifact.key for artifact in remote}
    at_no_cost = [Artifact(key, 0) for key in has]
    lacks = [artifact for artifact in local if artifact.key not in has]
    path = plan_fresh(head, [*at_no_cost, *lacks]) or ()
    return tuple(artifact for artifact in path if artifact.key not in has)


def plan_upload(local: Iterable[Artifact], *, remote: Iterable[Artifact], head: int) -> tuple[Artifact, ...]:
    """Return the local artifacts that a hub with ``remote`` should get, most urgent first.

    First the ``upload_path``; then, for late joiners, the newest delta from the public base model and
    the newest keyframe; then, newest first, whatever else the hub lacks and would retain: nothing that
    starts before its oldest keyframe.
    """
    local, remote = tuple(local), tuple(remote)
    has = {artifact.key for artifact in remote}
    lacks = [artifact for artifact in local if artifact.key not in has]
    oldest = min((key.version for key in has if key.is_keyframe), default=NO_BASE)
    newest_first = sorted(lacks, key=lambda artifact: artifact.key, reverse=True)
    rest = [artifact for artifact in newest_first if start_of(artifact.key) >= oldest]
    keyframes = [artifact for artifact in rest if artifact.key.is_keyframe]
    from_public = sorted((a for a in local if a.key.base_version == PUBLIC_VERSION), key=lambda a: a.key)
    fresh = [a for a in from_public[-1:] if a.key not in has and a.key.version >= oldest]
    path = upload_path(local, remote=remote, head=head)
    return tuple(dict.fromkeys([*path, *fresh, *keyframes[:1], *rest]))
