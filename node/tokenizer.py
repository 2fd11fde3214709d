"""The digest of a tokenizer: two peers with the same digest decode token ids to the same text.

It is computed from the saved ``tokenizer.json`` alone, so that it depends on no library's version and needs
no tokenizer library.
"""

import json
from pathlib import Path
from typing import Final

import blake3

from node.errors import StartupError

TOKENIZER_DIGEST_BYTES: Final = 16
_MEANING: Final = ("added_tokens", "normalizer", "pre_tokenizer", "model", "post_processor", "decoder")
"""The parts that define the ids. Padding and truncation do not: libraries store them as last used."""


def tokenizer_digest(model_dir: Path) -> bytes:
    """Return TOKENIZER_DIGEST_BYTES of BLAKE3 over the tokenizer saved in ``model_dir``.

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
