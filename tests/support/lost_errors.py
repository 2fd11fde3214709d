"""Errors of tasks that nobody has looked at, as asyncio finds them."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_error_is_lost() -> Iterator[None]:
    """Fail if a task of the running loop that ends within the body raised what nobody looked at."""
    loop, lost = asyncio.get_running_loop(), list[dict[str, Any]]()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: lost.append(context))
    try:
        yield
        gc.collect()
    finally:
        loop.set_exception_handler(before)
    assert [(context["message"], context.get("exception")) for context in lost] == []
