"""The digest by which two peers know that they mean the same text by the same token ids.

Computed from the saved ``tokenizer.json`` alone, so that a learner and a sampler agree on it
whatever library version reads the file, and no tokenizer library is needed to do it.
"""

import json
from pathlib import Path
from typing import Final

import blake3

from node.errors import StartupError

TOKENIZER_DIGEST_BYTES: Final = 16
_MEANING: Final = ("added_tokens", "normalizer", "pre_tokenizer", "model", "post_processor", "decoder")
"""What defines the ids. Left out: padding and truncation, which libraries store as they were last used."""


def tokenizer_digest(model_dir: Path) -> bytes:
    """Digest the tokenizer saved in ``model_dir``: TOKENIZER_DIGEST_BYTES bytes of BLAKE3.

    Raises:
        StartupError: there is no ``tokenizer.json``, or it is not a JSON object.
    """
    path = model_dir / "tokenizer.json"
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise StartupError(
            f"{path} does not exist", fix="Point model_dir at a model saved with its fast tokenizer"
        ) from error
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}", fix="Copy the model directory again") from error
    if not isinstance(document, dict):
        raise StartupError(f"{path} is not a JSON object", fix="Copy the model directory again")
    meaning = {key: document.get(key) for key in _MEANING}
    canonical = json.dumps(meaning, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return blake3.blake3(canonical.encode()).digest(length=TOKENIZER_DIGEST_BYTES)
