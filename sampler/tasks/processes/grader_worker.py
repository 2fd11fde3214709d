"""The process that runs a task's code: reads requests from standard input, answers on standard output.

    python -m sampler.tasks.processes.grader_worker CPU_SECONDS MEMORY_BYTES

Without arguments both are the first line: where systemd starts it for a connection (``grader_link``). Then a
JSON object a line:

    {"path": "p.m:Task", "options": {...}}  -> {"prompts": 100, ...} | {"unusable": ...}
    {"index": 7, "row": "{...}"}            -> {"text": "3+4="} | {"messages": [...]} | {"error": ...}
                                               | {"bad_row": ...} | {"odd": ...} | {"too_long": characters},
                                               the first two with {"template_arguments": {...}}
    {"index": 7, "row": "{...}", "conversation": [{"role": ..., "content": ...}]}
                                            -> the same | {"is_over": true}
    {"index": 7, "row": "{...}", "completions": [["7", 2, "end"]], "rendered": "3+4="}
                                            -> {"rewards": [1.0], "metrics": {"a": [0.5]}} | {"error": ...}
                                               | {"odd": ...} | {"unavailable": ...}, each with
                                               {"outages": {reason: n}}

Every request but the first has a "number", which its answer repeats: what a task writes where answers are
read is not taken for one.

The kernel enforces the limits: address space of each process, number of processes, CPU seconds for each
request. They stop a task that loops or hoards memory; they are not a sandbox against a malicious one.
What the numbers are worth is for the sampler to check, which shares no process with the task.
"""

import json
import os
import resource
import sys
import sysconfig
import traceback
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, Final

from node.errors import ConfigError
from node.questions.data_row import RowError
from node.questions.messages import MessagesError, messages_of
from sampler.process_tree import PROCESSES, go_on_in_child, processes_of_user
from sampler.tasks.code_digest import code_digest
from sampler.tasks.returned_rewards import RULE, CompletionError, awaited, grade_each, rewards_and_metrics
from sampler.tasks.task import CompletionText, GraderOutageError, TaskSetup, load_task

PROMPT_CHARACTERS: Final = 4 << 20
"""About the length of a prompt of a million tokens, the most that a group may have."""

TURNS: Final = 16
"""Turns of a completion at most, unless a task that replies says otherwise."""

_INSTALLED: Final = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
"""Where modules lie that are not the task's own."""

TRACEBACK_CHARACTERS: Final = 8000
"""The end of a traceback that is passed on; its last frames say most."""


def main(*limits: str) -> None:
    """Serve until standard input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    go_on_in_child()
    if not (said := limits or sys.stdin.buffer.readline().split()):
        return  # Someone tried whether there is anybody.
    cpu_limit_s, memory_limit_bytes = map(int, said)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    # A grader that prints must not write into the replies.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    _limit_processes()
    process = os.getpid()
    try:
        setup = TaskSetup(**json.loads(sys.stdin.buffer.readline()))
        task = load_task(setup)
        prompts = task.prompts
        ready = {
            "prompts": None if prompts is None else int(prompts),
            "is_stateful": bool(getattr(task, "is_stateful", False)),
            "max_prompt_tokens": getattr(task, "max_prompt_tokens", None),
            "max_turns": _max_turns(task),
            "noise_ratio": getattr(task, "noise_ratio", None),
            "sees_tokens": bool(getattr(task, "sees_tokens", False)),
            "template_arguments": getattr(task, "template_arguments", {}),
            "code_digest": code_digest(setup).hex(),
        }
    except ConfigError as error:
        cause = error.__cause__ or error
        replies.write(framed({"unusable": f"{type(cause).__name__}: {cause}"[:1000]}))
        return
    replies.write(framed(ready))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _allow_cpu(cpu_limit_s)
        reply = _graded(task, request) if "completions" in request else _said(task, request)
        if os.getpid() != process:
            os._exit(0)  # a child that the task forked, and that came back from its code
        replies.write(framed({**reply, "number": request["number"]}))


def _limit_processes() -> None:
    most = processes_of_user() + PROCESSES
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if hard == resource.RLIM_INFINITY or most < hard:  # a limit cannot be raised
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def framed(message: dict[str, Any]) -> bytes:
    """Return ``message`` as a line: JSON escapes the line breaks within it."""
    return json.dumps(message).encode() + b"\n"


def _max_turns(task: Any) -> Any:
    if getattr(task, "reply", None) is None:
        return 1
    declared = getattr(task, "max_turns", None)
    return TURNS if declared is None else declared


def _allow_cpu(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime) + 1 + seconds
    if hard != resource.RLIM_INFINITY:  # the task may have lowered it
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _said(task: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return a prompt, or a reply where there is a conversation."""
    try:
        index, row = request["index"], _row(request)
        if "conversation" in request:
            if (made := task.reply(index, row, request["conversation"])) is None:
                return {"is_over": True}
            reply = _as_said(made)
        else:
            reply = _as_said(task.prompt(index, row))
            if (arguments := getattr(task, "template_arguments_of", None)) is not None:
                reply["template_arguments"] = dict(arguments(index, row))
        characters = len(reply.get("text") or json.dumps(reply, ensure_ascii=False))
    except RowError as error:
        return {"bad_row": str(error)[:1000]}
    except MessagesError as error:
        return {"odd": f"returned messages, and the list {error}"[:1000]}
    except Exception as error:
        # Whatever a task raises is reported for this prompt; the next one may be fine.
        return _raised(error)
    return {"too_long": characters} if characters > PROMPT_CHARACTERS else reply


def _as_said(made: Any) -> dict[str, Any]:
    if isinstance(made, str):
        made.encode()  # A tokenizer refuses half a surrogate pair.
        return {"text": made}
    if isinstance(made, list | tuple):
        return {"messages": messages_of(made)}
    return {"odd": f"returned {type(made).__name__}, not a text or a list of role and content"}


def _graded(task: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        index, row = request["index"], _row(request)
        prompt = request.get("rendered", "")
        completions = [replace(CompletionText(*one), prompt=prompt) for one in request["completions"]]
        if (grade_group := getattr(task, "grade_group", None)) is not None:
            returned = grade_group(index, row, completions)
        else:
            returned = grade_each(partial(task.grade, index, row), completions)
        rewards, metrics = rewards_and_metrics(awaited(returned))
        reply: dict[str, Any] = {"rewards": rewards, "metrics": metrics}
    except GraderOutageError as error:
        reply = {"unavailable": f"{error.outage}: {error}"[:1000]}
    except RowError as error:
        reply = {"bad_row": str(error)[:1000]}
    except CompletionError as error:
        who = getattr(task, "grader_name", f"{type(task).__name__}.grade")
        where = f"({who}, completion {error.number})"
        if error.returned:
            reply = {"odd": f"returned {error.returned[:800]} {where}; {RULE}"}
        else:
            reply = _raised(error.__cause__ or error)
            reply["error"] += f" {where}"
    except Exception as error:
        # Whatever it is, it is reported for this group.
        reply = _raised(error)
    if isinstance(outages := getattr(task, "outages", None), Counter):
        reply["outages"] = dict(outages)
        outages.clear()
    return reply


def _row(request: dict[str, Any]) -> Any:
    return json.loads(request["row"]) if request["row"] else None


def _raised(error: BaseException) -> dict[str, Any]:
    """Return what is reported of an exception: one line with the place it comes from, and the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    # Libraries that the task's code calls say less about where to look than the task's own file.
    own = [frame for frame in frames if not _is_installed(frame.filename)] or frames
    place = f" at {os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""
    return {
        "error": f"{type(error).__name__}{place}: {error}"[:1000],
        "traceback": "".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS:],
    }


def _is_installed(filename: str) -> bool:
    return filename.startswith((*_INSTALLED, os.path.dirname(__file__), "<"))


if __name__ == "__main__":
    main(*sys.argv[1:])
