"""The versions that a store keeps a way to beyond its retention: for its own process, not for its peers.

    <root>/pins.json    their numbers, sealed

What pins alone keep is not announced. Where the file is damaged, nothing is removed until versions are pinned
anew. The store's lock serialises the calls.
"""

import json
import logging
from collections.abc import Iterable, Set
from pathlib import Path

from node.system import durable
from node.system.sealed import sealed, unsealed
from node.values.policy import Artifact, ArtifactKey
from node.weights.planning.cheapest_chain import plan_fresh

logger = logging.getLogger(__name__)


class Pins:
    def __init__(self, path: Path) -> None:
        """Read the pins of an earlier process; without a file there are none."""
        self._path = path
        self._versions: frozenset[int] | None = frozenset()
        """None: not known."""
        try:
            self._versions = frozenset(int(version) for version in unsealed(path.read_bytes())["versions"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("pins of a store not usable", extra={"path": str(path), "detail": str(error)})
            self._versions = None

    @property
    def versions(self) -> frozenset[int]:
        """The versions pinned, as far as is known."""
        return self._versions or frozenset()

    def set(self, versions: Iterable[int]) -> None:
        """Pin these versions instead of those before. Raises OSError; then nothing has changed."""
        wanted = frozenset(versions)
        if wanted != self._versions:
            durable.write(self._path, sealed(json.dumps({"versions": sorted(wanted)})))
            self._versions = wanted

    def kept(self, goes: Set[ArtifactKey], complete: Iterable[Artifact]) -> Set[ArtifactKey]:
        """Return which of the artifacts that retention lets go stay: the cheapest way to each version."""
        if self._versions is None or not goes:
            return goes
        artifacts = tuple(complete)
        chains = (plan_fresh(version, artifacts) or () for version in self._versions)
        return goes & {artifact.key for chain in chains for artifact in chain}
