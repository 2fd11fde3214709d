"""Runs tests/fuzz/kernel_asan.c on processors that this machine does not have: `make neon`.

Every processor must print the digest that this one does, and choose the path that it has.
"""

import subprocess
import tempfile
from pathlib import Path
from typing import Final

from node.weights.codec.native import PATHS, PORTABLE

SOURCE: Final = Path(__file__).with_name("kernel_asan.c")
# The emulator does not run the sanitizers' library: what is undefined is an illegal instruction.
FLAGS: Final = ("-O3", "-std=c11", "-static", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")
FRAMES: Final = "400"

PROCESSORS: Final = (
    ("64-bit ARM", "aarch64-linux-gnu-gcc", ("qemu-aarch64",), PORTABLE),
    ("x86-64 of 2006, without POPCNT", "gcc", ("qemu-x86_64", "-cpu", "Conroe"), PORTABLE),
    ("x86-64 with AVX2", "gcc", ("qemu-x86_64", "-cpu", "Haswell"), "AVX2"),
)


def main() -> int:
    """Return 1 if a processor differs from this one."""
    with tempfile.TemporaryDirectory() as folder:
        expected, path = _run("gcc", (), Path(folder))
        print(f"{path:8} {expected} this processor")
        differing = 0
        for name, compiler, emulator, wanted in PROCESSORS:
            found, path = _run(compiler, emulator, Path(folder))
            is_right = (found, path) == (expected, wanted)
            remark = "" if is_right else f": DIFFERS, or is not on its path {wanted}"
            print(f"{path:8} {found} {name}{remark}")
            differing += not is_right
    return 1 if differing else 0


def _run(compiler: str, emulator: tuple[str, ...], folder: Path) -> tuple[str, str]:
    """Return what the program prints, and the name of its best path."""
    program = folder / compiler
    if not program.exists():
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(program)], check=True)
    command = [*emulator, str(program), "1", FRAMES]
    # The emulator warns of each feature of the processor that it leaves out.
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}: {result.stderr}")
    *answers, path = result.stdout.split()
    return " ".join(answers), PATHS[int(path)]


if __name__ == "__main__":
    raise SystemExit(main())
