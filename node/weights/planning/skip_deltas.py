"""Plans deltas over many versions for peers that fell behind; pure.

    versions      ... 56 57 58 59 60 61 62 63 64          head: 64
    level 2       56 --> 60 --> 64                        from one multiple of 4 to the next
    level 3       56 ----------> 64                       of 8, and so on
    public        0 -------------------------------> 64   of ``public_every_versions``

With all levels a peer catches up over a lag of k versions in about 2 log2 k artifacts. A level is
made only while some peer is that far behind, because it costs the learner's uplink about a third of
the steps it replaces. Version numbers may be missing; a level then goes from the first version
published after a multiple to the first after the next.
"""

from collections.abc import Iterable
from typing import Final

from node.values.policy import Artifact, ArtifactKey
from node.weights.planning.cheapest_chain import PUBLIC_VERSION, plan_fresh

FIRST_LEVEL: Final = 2
"""Two or three merged steps are hardly smaller than the steps themselves (measured: 0.85 of two)."""

LAST_LEVEL: Final = 9
"""Beyond 512 versions a delta from the public base model costs no more."""


def next_base(
    head: int, artifacts: Iterable[Artifact], *, longest_lag_versions: int, public_every_versions: int
) -> int | None:
    """Return the version from which the next delta to ``head`` should start; None: there are enough.

    Only a base whose words can be made from ``artifacts``, everything retained, is returned.
    """
    artifacts = tuple(artifacts)
    made = {artifact.key for artifact in artifacts}
    versions = sorted({artifact.key.version for artifact in artifacts if artifact.key.version <= head})
    for base in _bases(head, versions, longest_lag_versions, public_every_versions):
        is_known = base == PUBLIC_VERSION or plan_fresh(base, artifacts) is not None
        if is_known and ArtifactKey(head, base) not in made:
            return base
    return None


def _bases(head: int, versions: list[int], longest_lag_versions: int, public_every: int) -> Iterable[int]:
    """Yield every base there should be a delta from, the longest stride first."""
    if len(versions) < 2 or versions[-1] != head:
        return
    previous = versions[-2]
    if head // public_every != previous // public_every:
        yield PUBLIC_VERSION
    for level in range(LAST_LEVEL, FIRST_LEVEL - 1, -1):
        stride = 1 << level
        block = previous // stride
        if stride <= longest_lag_versions and head // stride != block:
            base = next(version for version in [PUBLIC_VERSION, *versions] if version // stride == block)
            if base != previous:
                yield base
