"""The readers of artifacts, present and expected back: what they need is not removed.

    being read   stays until its last reader is done
    asked for    stays LINGER_S longer than retention would keep it; at most LINGERING_ARTIFACTS, the latest

On a link with a round trip of five seconds, two more keyframes may have made an artifact surplus before the
answer with its manifest arrives. Without this, its frames would be gone when they are asked for. Any thread
may call.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Final, TypeVar

from node.values.policy import ArtifactKey

LINGER_S: Final = 60.0
"""How long an artifact that was asked for stays: twice the longest round trip worth supporting."""

LINGERING_ARTIFACTS: Final = 8
"""At most, beyond what is retained: each may be a whole model, and the disk stays bounded."""

T = TypeVar("T")


class Readers:
    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Begin without readers; lingering is measured by the clock ``monotonic``, seconds."""
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._reading: Counter[ArtifactKey] = Counter()
        self._asked_at_s: dict[ArtifactKey, float] = {}
        self.lingering_artifacts = 0
        """How many surplus artifacts stayed at the last ``removable``."""

    @contextmanager
    def reading(self, key: ArtifactKey, *, find: Callable[[], object], lingers: bool) -> Iterator[None]:
        """Count the body as a reader of an artifact; first raise what ``find``, which looks it up, raises.

        With ``lingers`` the reader is expected back for more.
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
        """Return the surplus artifacts that no reader is expected back for."""
        surplus, now = frozenset(surplus), self._monotonic()
        with self._lock:
            self._asked_at_s = {key: at_s for key, at_s in self._asked_at_s.items() if now - at_s < LINGER_S}
            asked = sorted(surplus.intersection(self._asked_at_s), key=self._asked_at_s.__getitem__)
        lingering = asked[-LINGERING_ARTIFACTS:]
        self.lingering_artifacts = len(lingering)
        return surplus.difference(lingering)

    def remove_unless_read(self, key: ArtifactKey, remove: Callable[[], T]) -> T | None:
        """Return the result of ``remove``; None: the artifact is being read, and stays."""
        with self._lock:
            return None if key in self._reading else remove()
