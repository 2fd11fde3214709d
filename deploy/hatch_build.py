"""Compiles node/weights/codec/native/kernel.c while the package is built, or installed editable.

A compiler is not required: without one the node codes weights in numpy, 30 to 100 times slower, and warns.
CC names another compiler than cc, gcc or clang; HETERORL_NO_KERNEL=1 leaves the kernel out.
"""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("node/weights/codec/native/kernel.c")
LIBRARY = SOURCE.with_name("kernel.so")
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and if that worked make the wheel one for this platform."""
        problem = compile_kernel(Path(self.root))
        if problem:
            self.app.display_warning(f"no C kernel, weights are coded in numpy, far slower: {problem}")
            return
        self.app.display_info("the C kernel is compiled")
        build_data["artifacts"].append(LIBRARY.as_posix())
        build_data["pure_python"] = False
        # The library depends on the platform, not on the version of Python.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def compile_kernel(root: Path) -> str | None:
    """Make the library; give what went wrong."""
    (root / LIBRARY).unlink(missing_ok=True)
    if os.environ.get("HETERORL_NO_KERNEL") == "1":
        return "HETERORL_NO_KERNEL is set"
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None)
    if compiler is None:
        return "there is no C compiler"
    made = root / LIBRARY.with_suffix(f".{os.getpid()}")
    command = [compiler, *FLAGS, str(root / SOURCE), "-o", str(made)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        made.unlink(missing_ok=True)
        return f"{compiler} failed: {result.stderr.strip()[-500:]}"
    made.rename(root / LIBRARY)
    return None
