"""Failures of a fetch in a row, and whom to blame for each."""

import logging
from collections.abc import Callable

from node.errors import Reason, Recovery, RefusedError
from node.rpc.call_ends import ConnectionLost
from node.system.backoff import Backoff
from node.values.policy import ArtifactKey
from node.weights.transfer.ranges import LyingSourceError
from node.weights.transfer.source_turns import Fault
from node.weights.transfer.sources import Sources

logger = logging.getLogger(__name__)


class Attempts:
    """Failures in a row, bounded for each source. Progress begins the count anew."""

    def __init__(
        self,
        key: ArtifactKey,
        *,
        sources: Sources,
        candidates: Callable[[ArtifactKey], tuple[str, ...]],
        per_source: int,
        backoff: Backoff,
    ) -> None:
        """Begin with no failure; ``candidates`` says whom to ask: ``sources.candidates`` or ``.readable``."""
        self._key = key
        self._sources = sources
        self._candidates = candidates
        self._limit = per_source * len(sources)
        self._backoff = backoff
        self._failed = 0

    def names(self) -> tuple[str, ...]:
        """Return the sources that may have the artifact, at least one.

        Raises RefusedError: UNKNOWN_VERSION: nobody has it any more.
        """
        names = self._candidates(self._key)
        if not names:
            raise RefusedError(
                Reason.UNKNOWN_VERSION,
                f"no source has version {self._key.version} from {self._key.base_version} any more",
                fix="plan again from a new announcement",
            )
        return names

    def reset(self) -> None:
        self._failed = 0
        self._backoff.reset()

    async def wait_after(self, name: str, error: ConnectionLost | RefusedError) -> None:
        """Set a source aside; return when it is time to try again.

        Raises ConnectionLost, RefusedError: ``error``, if trying again will not help, or not any more.
        """
        passes = not isinstance(error, RefusedError) or error.reason.recovery is Recovery.WAIT
        if isinstance(error, RefusedError) and error.reason is Reason.UNKNOWN_VERSION:
            self._sources.lacks(name, self._key)
        else:
            self._sources.fault(name, _fault(error, passes=passes), str(error))
        others = [other for other in self._candidates(self._key) if other != name]
        self._failed += 1
        if not (passes or others) or self._failed >= self._limit:
            raise error
        logger.debug("trying again", extra={"error": str(error), "failed": self._failed})
        if not any(map(self._sources.is_standing, self._candidates(self._key))):
            await self._backoff.wait()


def _fault(error: ConnectionLost | RefusedError, *, passes: bool) -> Fault:
    if isinstance(error, LyingSourceError):
        return Fault.LIED
    if passes or not isinstance(error, RefusedError):
        return Fault.LOST
    return Fault.REFUSED if error.is_remote else Fault.LIED
