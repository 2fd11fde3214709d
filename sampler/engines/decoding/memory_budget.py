"""Whether the caches of some requests fit the memory set aside for them; pure.

Rows are padded to the longest of them, so requests together need rows times columns, with every completion
as long as it may become. What was admitted can always be finished: no row is put off or computed again.
"""

from collections.abc import Iterable

from node.errors import Reason, RefusedError
from sampler.engines.decoding.rows import RunningRequest


class MemoryBudget:
    """How much the caches of running requests may take."""

    def __init__(self, total_bytes: int | None, *, token_bytes: int, spare_columns: int) -> None:
        """Set the bound.

        Args:
            total_bytes: None: no bound.
            token_bytes: of the cache of one token.
            spare_columns: that a cache may have beyond those in use.
        """
        self._total_bytes = total_bytes
        self._token_bytes = token_bytes
        self._spare_columns = spare_columns

    def has_room(self, requests: Iterable[RunningRequest]) -> bool:
        """Return whether ``requests`` may all run at once."""
        return self._total_bytes is None or self._bytes(list(requests)) <= self._total_bytes

    def check(self, running: RunningRequest) -> None:
        """Refuse a request that never fits.

        Raises:
            RefusedError: OVER_LIMIT.
        """
        if not self.has_room([running]):
            request = running.request
            raise RefusedError(
                Reason.OVER_LIMIT,
                f"a prompt of {len(running.prompt)} tokens with {request.completions} completions of up to "
                f"{request.sampling.max_new_tokens} needs {self._bytes([running])} bytes of key-value cache, "
                f"there are {self._total_bytes}",
                fix="raise memory_bytes in sampler.engine_options or lower coordinator.max_new_tokens",
            )

    def _bytes(self, requests: list[RunningRequest]) -> int:
        # One row more for each prompt, which is read once and then repeated.
        rows = sum(r.request.completions - len(r.done) + 1 for r in requests)
        columns = max((len(r.prompt) + r.request.sampling.max_new_tokens for r in requests), default=0)
        return rows * (columns + self._spare_columns) * self._token_bytes
