"""The process that renders chat templates: reads requests from standard input, answers on standard output.

    python -m sampler.engines.text.template_worker CPU_SECONDS MEMORY_BYTES MOST_CHARACTERS

A JSON object a line, once it has written one that says that it is ready:

    {"template": "{% for ...", "messages": [...], "arguments": {...}, "opens": true}
                                            -> {"text": "..."} | {"error": ...} | {"too_long": characters}
                                               | {"too_large": true}

The kernel enforces the limits: CPU seconds for each request (SIGPROF), address space beyond what the process
has when it is ready. A template is a program of whoever made the model.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, Final

from transformers.utils.chat_template_utils import render_jinja_template

_ERROR_CHARACTERS: Final = 1000


def main(cpu_limit_s: float, memory_bytes: int, most_characters: int) -> None:
    """Serve until standard input ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    replies.write(b"{}\n")
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)  # SIGPROF ends the process
        reply = json.dumps(_rendered(json.loads(line), most_characters)).encode() + b"\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        while reply:
            reply = reply[replies.write(reply) :]


def _rendered(request: dict[str, Any], most_characters: int) -> dict[str, Any]:
    try:
        rendered: Any = render_jinja_template(
            conversations=[request["messages"]],
            chat_template=request["template"],
            add_generation_prompt=request["opens"],
            **request["arguments"],
        )
    except MemoryError:
        return {"too_large": True}
    except Exception as error:
        # Whatever a template or a filter raises is its answer to these messages.
        return {"error": f"{error or type(error).__name__}"[:_ERROR_CHARACTERS]}
    text: str = rendered[0][0]
    return {"text": text} if len(text) <= most_characters else {"too_long": len(text)}


if __name__ == "__main__":
    main(float(sys.argv[1]), *map(int, sys.argv[2:]))
