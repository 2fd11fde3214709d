"""Runs a program as a script in its sandbox, with standard input and output.

script_host CPU_SECONDS MEMORY_BYTES
"""

import os
import sys

from sampler.graders.code.inside.shared import begin


def main() -> None:
    """Do what the command line says."""
    _, cpu_s, memory_bytes = sys.argv
    with open("/program.py", "rb") as file:
        program = file.read()
    begin(int(cpu_s), int(memory_bytes))
    os.dup2(os.open("/dev/null", os.O_RDWR), 2)
    sys.argv = ["program.py"]
    exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
