"""The digests of a tokenizer and of its chat template: peers with the same ones prompt and decode alike.

They are computed from the saved files, so that they depend on no library's version and need no tokenizer
library.
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


def chat_template(model_dir: Path) -> str:
    """Return the chat template saved with the tokenizer, as transformers finds it; empty: there is none.

    Raises:
        StartupError: its file cannot be read.
    """
    try:
        return (model_dir / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass  # older models have it in the tokenizer's configuration
    except (OSError, ValueError) as error:
        raise _unreadable(model_dir / "chat_template.jinja", error) from error
    path = model_dir / "tokenizer_config.json"
    try:
        template = json.loads(path.read_bytes()).get("chat_template") or ""
        if not isinstance(template, str):
            template = {entry["name"]: entry["template"] for entry in template}.get("default", "")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise _unreadable(path, error) from error
    return str(template)


def chat_template_digest(model_dir: Path) -> bytes:
    """Return TOKENIZER_DIGEST_BYTES of BLAKE3 over the chat template; of an empty one, where there is none.

    Raises:
        StartupError: its file cannot be read.
    """
    return blake3.blake3(chat_template(model_dir).encode()).digest(length=TOKENIZER_DIGEST_BYTES)


def _unreadable(path: Path, error: Exception) -> StartupError:
    return StartupError(f"{path} cannot be read: {error}", fix="Copy the model directory again")
