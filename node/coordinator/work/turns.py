"""Requests that wait, callers in turn; pure."""

from collections import OrderedDict
from typing import Generic, TypeVar

Waiting = TypeVar("Waiting")


class Turns(Generic[Waiting]):
    """The requests that wait, callers in turn and each one's in order; every step costs O(1).

        caller a   a1 a2 a3        taken: a1 b1 c1 a2 a3
        caller b   b1
        caller c   c1

    A caller that asks a thousand times at once waits for a thousand turns; the others wait for one of its.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[Waiting, None]] = OrderedDict()
        self._requests = 0

    def __len__(self) -> int:
        return self._requests

    def of(self, caller: str) -> int:
        return len(self._waiting.get(caller, ()))

    def add(self, caller: str, request: Waiting) -> None:
        self._waiting.setdefault(caller, OrderedDict())[request] = None
        self._requests += 1

    def remove(self, caller: str, request: Waiting) -> bool:
        own = self._waiting.get(caller)
        if own is None or request not in own:
            return False
        del own[request]
        self._requests -= 1
        if not own:
            del self._waiting[caller]
        return True

    def take(self) -> Waiting:
        """Remove the request whose turn it is, and return it; there must be one."""
        caller, own = next(iter(self._waiting.items()))
        request, _ = own.popitem(last=False)
        self._requests -= 1
        if own:
            self._waiting.move_to_end(caller)
        else:
            del self._waiting[caller]
        return request
