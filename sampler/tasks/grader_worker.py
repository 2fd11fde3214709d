"""The process that runs a task's code: reads requests from standard input, answers on standard output.

    python -m sampler.tasks.grader_worker package.module:Class CPU_SECONDS MEMORY_BYTES

The kernel enforces the limits: address space for the whole process, CPU seconds for each request. They stop a
task that loops or hoards memory; they are no sandbox against a malicious one.
"""

import json
import os
import resource
import sys
from typing import Any

from node.errors import ConfigError
from sampler.tasks.framing import PROMPT_CHARACTERS, framed
from sampler.tasks.task import Task, load_task


def main(path: str, cpu_limit_s: int, memory_limit_bytes: int) -> None:
    """Serve until standard input ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    # A grader that prints must not write into the replies.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    try:
        task = load_task(path)
        ready = {"prompts": int(task.prompts), "is_stateful": bool(getattr(task, "is_stateful", False))}
    except ConfigError as error:
        replies.write(framed({"unusable": _told(error.__cause__ or error)}))
        return
    replies.write(framed(ready))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _allow_cpu(cpu_limit_s)
        replies.write(framed(_graded(task, request) if "texts" in request else _prompted(task, request)))


def _allow_cpu(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _prompted(task: Task, request: dict[str, Any]) -> dict[str, Any]:
    try:
        text = task.prompt(request["index"])
        if not isinstance(text, str):
            return {"odd": f"returned {type(text).__name__}, not a text"}
        text.encode()  # A tokenizer refuses half a surrogate pair.
    except Exception as error:
        # Whatever a task raises is reported for this prompt; the next one may be fine.
        return {"error": _told(error)}
    return {"too_long": len(text)} if len(text) > PROMPT_CHARACTERS else {"text": text}


def _graded(task: Task, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"rewards": [float(task.grade(request["index"], text)) for text in request["texts"]]}
    except Exception as error:
        # Likewise, for this group.
        return {"error": _told(error)}


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
