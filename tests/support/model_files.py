"""A directory that looks like a model's without torch: the files are there, and nothing is in them."""

from pathlib import Path

_HEADER = b'{"weight": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}}'


def write_model_files(directory: Path) -> Path:
    """Write config.json, tokenizer.json and model.safetensors; return ``directory``."""
    directory.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (directory / name).write_text("{}")
    (directory / "model.safetensors").write_bytes(len(_HEADER).to_bytes(8, "little") + _HEADER)
    return directory
