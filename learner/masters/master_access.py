"""Access to the float32 masters: the optimizer writes them, the publisher reads them, never both at once.

                     hold(v)                take()
    being written -----------> holding v -----------> being read -- release() --> holding v, read
         ^                        | begin_writing(): v       | begin_writing() waits    |
         |                        | is never published       v                          |
         `------------------------+--------------------------+--------------------------'

Between two optimizer steps the masters are a free snapshot of the newest version: the publisher reads them
while the next step runs forward and backward. The optimizer waits for a read that has begun, and for the one
that an idle publisher was promised. Any other version is superseded by the next.
"""

import asyncio
import threading
from collections.abc import Callable


class MasterAccess:
    """A lock that knows versions, between three threads: event loop, training, publishing."""

    def __init__(self, *, monotonic: Callable[[], float], version: int = 0) -> None:
        """Begin with masters that hold ``version``, whose words the publisher has already."""
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._taken = version
        self._holds: int | None = version
        """None while they are written."""
        self._unread: int | None = None
        self._is_kept = False
        """Being read, or promised to the publisher: the optimizer waits."""
        self._is_awaited = False
        self.is_last = False
        """Whether no step follows: what the masters hold is published even where it changes no word."""
        self.newest_published: tuple[int, float] | None = None
        """The newest version published by this process, and the seconds from masters to stored for upload."""
        self._held = asyncio.Event()
        self._superseded = 0

    def begin(self, version: int) -> None:
        """Begin anew with masters that hold ``version``, as at first. Any thread."""
        with self._changed:
            self._taken = self._holds = version

    def hold(self, version: int) -> None:
        """Record which version the masters hold until ``begin_writing``. Event loop."""
        with self._changed:
            self._holds = version
            if version == self._taken:
                return
            self._offer(version)

    def begin_writing(self) -> float:
        """Wait until nobody reads, and return the seconds that took. Training thread, before each write.

        The wait is at most one pass over the model: see ``Publisher``.
        """
        started_s = self._monotonic()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_kept)
            self._holds = None
            if self._unread is not None:
                self._unread = None
                self._superseded += 1
        return self._monotonic() - started_s

    @property
    def version(self) -> int:
        """The version taken last; at first, the one begun with. Event loop."""
        return self._taken

    @property
    def has_unread(self) -> bool:
        """Whether the masters hold a version that was not taken. Any thread."""
        return self._unread is not None

    def take(self) -> int | None:
        """Return the version to read now, if there is one; ``release`` must follow. Event loop."""
        with self._changed:
            version, self._unread = self._unread, None
            if version is not None:
                self._taken, self._is_kept = version, True
            return version

    def release(self) -> None:
        """End reading. Any thread."""
        with self._changed:
            self._is_kept = False
            self._changed.notify_all()

    def put_back(self) -> None:
        """Offer what was taken and released once more, unless the masters hold another by now. Event loop."""
        with self._changed:
            if self._holds == self._taken:
                self._offer(self._taken)

    def end(self) -> None:
        """Offer what the masters hold once more, as the last version. Event loop."""
        with self._changed:
            self.is_last = True
            if self._holds is not None:
                self._offer(self._holds)

    async def wait_for_version(self) -> None:
        """Wait until there is a version to take, which then stays until ``take`` or ``give_up``."""
        if self.has_unread:
            return
        self._held.clear()
        self._is_awaited = True
        try:
            await self._held.wait()
        finally:
            self._is_awaited = False

    def give_up(self) -> None:
        """Free the optimizer from a promise that will not be used; a read goes on. Event loop."""
        with self._changed:
            if self._unread is None:
                return
        self.release()

    def take_superseded(self) -> int:
        """Return how many versions were superseded unread since the last call."""
        with self._changed:
            superseded, self._superseded = self._superseded, 0
        return superseded

    def _offer(self, version: int) -> None:
        self._unread = version
        self._is_kept = self._is_kept or self._is_awaited
        self._held.set()
