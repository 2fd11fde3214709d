"""Runs a program as a module in its sandbox; its functions are called: requests in, replies out.

    function_host CPU_SECONDS MEMORY_BYTES

A line each way, values as in ``shared``:
["global", name] | ["attribute", object, name] | ["call", object, [argument...], {name: argument}]
| ["items", iterator, at most] | ["text", object]
-> [value] | {"raised": [name of the nearest builtin type, text]}

The program shares this process, and may make it reply whatever it likes. It does not know what is expected.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from itertools import islice

from sampler.graders.code.inside.shared import begin, packed, unpacked

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

_SERIES: Final = (Iterator, range, KeysView, ValuesView, ItemsView, deque)
"""Sent as iterators over what they hold."""


def main() -> None:
    """Do what the command line says."""
    _, cpu_s, memory_bytes = sys.argv
    with open("/program.py", "rb") as file:
        program = file.read()
    begin(int(cpu_s), int(memory_bytes))
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    sys.argv = ["program.py"]
    space: dict[str, Any] = {"__name__": "program"}
    exec(compile(program, "program.py", "exec"), space)
    objects: list[Any] = []
    for line in requests:
        replies.write(json.dumps(_reply(json.loads(line), space, objects)).encode() + b"\n")


def _reply(request: list[Any], space: dict[str, Any], objects: list[Any]) -> Any:
    def refer(value: Any) -> dict[str, int]:
        is_series = isinstance(value, _SERIES)
        objects.append(iter(value) if is_series else value)
        return {"iterator" if is_series else "object": len(objects) - 1}

    def known(tag: str, number: int) -> Any:
        return objects[number]

    try:
        what, target, *rest = request
        if what == "global":
            return [packed(space[target], refer)]
        subject = objects[target]
        match what:
            case "attribute":
                value = getattr(subject, rest[0])
            case "call":
                arguments = [unpacked(each, known) for each in rest[0]]
                value = subject(*arguments, **{name: unpacked(each, known) for name, each in rest[1].items()})
            case "items":
                value = list(islice(subject, rest[0]))
            case _:
                value = str(subject)
        return [packed(value, refer)]
    except BaseException as error:
        # Whatever a program raises is an answer, and none ends this process: tests may expect it.
        builtin = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return {"raised": [builtin.__name__, str(error)[:1000]]}
