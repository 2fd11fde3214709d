"""The last release, as a wheel that is built from the commit that CHANGELOG.md names."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from deploy.needs import last_release
from support.warm_processes import RELEASES

ROOT = Path(__file__).parents[2]


def install_release(directory: Path, *, imports: Path) -> str:
    """Build the release's wheel, unpack it, and return the name of a warm interpreter that imports from it.

    Args:
        imports: A folder from which it imports besides.
    """
    source, wheels, installed = (directory / name for name in ("source", "wheels", "installed"))
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", last_release()], check=True, stdout=subprocess.PIPE
    ).stdout
    source.mkdir(parents=True)
    # Python before 3.11.4 filters no archive.
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive, check=True)
    # Without the kernel, which takes seconds to compile: it codes in numpy what today's code decodes in C.
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)],
        cwd=source, env=os.environ | {"HETERORL_NO_KERNEL": "1"}, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = wheels.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(installed)
    python = str(directory / "python")
    RELEASES[python] = (installed, imports)
    return python
