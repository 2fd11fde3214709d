"""Makes a replay inexact on purpose: other moments, in a checkpoint that looks whole."""

import json
from pathlib import Path

import blake3
import numpy as np

from node.system.sealed import sealed, unsealed


def disturb_moments(checkpoint: Path) -> None:
    """Change the first moments of a checkpoint by a quarter, and correct the digests."""
    index = unsealed((checkpoint / "index.json").read_bytes())
    for path in (checkpoint / "optimizer").iterdir():
        data = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        for name, tensor in header.items():
            if name.startswith("exp_avg/"):
                begin, end = (start + offset for offset in tensor["data_offsets"])
                moments = np.frombuffer(bytes(data[begin:end]), "<f4") * 1.25
                data[begin:end] = moments.astype("<f4").tobytes()
        path.write_bytes(data)
        index["files"][str(path.relative_to(checkpoint))] = blake3.blake3(bytes(data)).hexdigest()
    (checkpoint / "index.json").write_bytes(sealed(json.dumps(index)))
