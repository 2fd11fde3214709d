"""Who reads which artifact now, and who asked for one and will come back: those artifacts stay.

    asked for --> stays LINGER_S longer than retention would keep it, the LINGERING_ARTIFACTS asked for last
    being read -> stays until its last reader is done

On a link of five seconds a manifest is answered when two more keyframes have made its artifact surplus;
without this the frames it names would be gone when they are asked for. Any thread may call.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Final, TypeVar

from node.policy import ArtifactKey

LINGER_S: Final = 60.0
"""How long an artifact that was asked for stays: twice the longest round trip there is any sense in."""

LINGERING_ARTIFACTS: Final = 8
"""Beyond what is retained anyway, so that the disk stays bounded: each may be a whole model."""

T = TypeVar("T")


class Readers:
    """The readers of a store's artifacts."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Begin without readers; ``monotonic`` gives the seconds that lingering is measured in."""
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._reading: Counter[ArtifactKey] = Counter()
        self._asked_at_s: dict[ArtifactKey, float] = {}
        self.lingering_artifacts = 0
        """How many surplus artifacts stayed when retention last looked."""

    @contextmanager
    def reading(self, key: ArtifactKey, *, find: Callable[[], object], lingers: bool) -> Iterator[None]:
        """Count the body as a reader of an artifact, which ``find`` looks up; it raises what ``find`` raises.

        With ``lingers`` the reader will come back for more.
        """
        with self._lock:
            find()
            self._reading[key] += 1
        try:
            yield
        finally:
            with self._lock:
                if lingers:
                    self._asked_at_s[key] = self._monotonic()
                self._reading[key] -= 1
                if not self._reading[key]:
                    del self._reading[key]

    def removable(self, surplus: Iterable[ArtifactKey]) -> Set[ArtifactKey]:
        """Return those of the surplus artifacts that nobody is expected back for."""
        surplus, now = frozenset(surplus), self._monotonic()
        with self._lock:
            self._asked_at_s = {key: at_s for key, at_s in self._asked_at_s.items() if now - at_s < LINGER_S}
            asked = sorted(surplus.intersection(self._asked_at_s), key=self._asked_at_s.__getitem__)
        lingering = asked[-LINGERING_ARTIFACTS:]
        self.lingering_artifacts = len(lingering)
        return surplus.difference(lingering)

    def remove_unless_read(self, key: ArtifactKey, remove: Callable[[], T]) -> T | None:
        """Return what ``remove`` does, or None where somebody reads the artifact: it stays."""
        with self._lock:
            return None if key in self._reading else remove()
