"""Runs a program in its sandbox.

    run CPU_SECONDS MEMORY_BYTES     as a script, with standard input and output
    serve CPU_SECONDS MEMORY_BYTES   as a module whose functions are called: requests in, replies out

In ``serve`` a line each way, values as in ``shared``:
["global", name] | ["attribute", object, name] | ["call", object, [argument...], {name: argument}]
| ["items", iterator, at most] | ["text", object]
-> [value] | {"raised": [type, text]}

The program shares this process, and may make it reply whatever it likes. It does not know what is expected.
"""

import json
import os
import sys
from collections import deque
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from itertools import islice
from pathlib import Path
from typing import Any, Final

from sampler.tasks.code.inside.shared import begin, packed, unpacked

_SERIES: Final = (Iterator, range, KeysView, ValuesView, ItemsView, deque)
"""Sent as iterators over what they hold."""


def main(mode: str, cpu_s: str, memory_bytes: str) -> None:
    """Do what the command line says."""
    program = Path("/program.py").read_bytes()
    begin(int(cpu_s), int(memory_bytes))
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 2)
    sys.argv = ["program.py"]
    if mode == "run":
        exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
        return
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
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
        return {"raised": [type(error).__name__, str(error)[:1000]]}


if __name__ == "__main__":
    main(*sys.argv[1:])
