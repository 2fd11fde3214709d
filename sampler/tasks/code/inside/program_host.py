"""Runs a program in its sandbox.

    run CPU_SECONDS MEMORY_BYTES     as a script, with standard input and output
    serve CPU_SECONDS MEMORY_BYTES   as a module whose functions are called: requests in, replies out

In ``serve`` a line each way, values as in ``shared``:
["global", name] | ["attribute", object, name] | ["call", object, [argument...], {name: argument}]
| ["items", object] | ["length", object] | ["truth", object] | ["text", object]
-> [value] | {"raised": [type, text]}

The program shares this process, and may make it reply whatever it likes. It does not know what is expected.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from sampler.tasks.code.inside.shared import begin, packed, unpacked


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
    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    try:
        what, target, *rest = request
        if what == "global":
            return [packed(space[target], refer)]
        subject = objects[target]
        match what:
            case "attribute":
                value = getattr(subject, rest[0])
            case "call":
                arguments = [unpacked(each, objects.__getitem__) for each in rest[0]]
                named = {name: unpacked(each, objects.__getitem__) for name, each in rest[1].items()}
                value = subject(*arguments, **named)
            case "items":
                value = list(subject)
            case "length":
                value = len(subject)
            case "truth":
                value = bool(subject)
            case _:
                value = str(subject)
        return [packed(value, refer)]
    except Exception as error:
        # Whatever a program raises is an answer: tests may expect it.
        return {"raised": [type(error).__name__, str(error)[:1000]]}


if __name__ == "__main__":
    main(*sys.argv[1:])
