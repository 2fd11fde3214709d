"""Makes a replay inexact on purpose: other moments, in a checkpoint that looks whole."""

import json
from pathlib import Path

import blake3
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from node.system.sealed import sealed, unsealed


def disturb_moments(checkpoint: Path) -> None:
    """Change the first moments of a checkpoint by a quarter, and correct the digests."""
    index = unsealed((checkpoint / "index.json").read_bytes())
    for path in (checkpoint / "optimizer").iterdir():
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        changed = {name: one * 1.25 for name, one in tensors.items() if name.startswith("exp_avg/")}
        save_file(tensors | changed, path, metadata)
        digest = blake3.blake3(path.read_bytes()).hexdigest()
        index["files"][str(path.relative_to(checkpoint))] = digest
    (checkpoint / "index.json").write_bytes(sealed(json.dumps(index)))
