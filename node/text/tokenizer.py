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


def chat_template_file(model_dir: Path) -> Path:
    """Return the file that the chat template is in; older models have it in the tokenizer's configuration."""
    path = model_dir / "chat_template.jinja"
    return path if path.exists() else model_dir / "tokenizer_config.json"


def chat_template(model_dir: Path) -> str:
    """Return the chat template saved with the tokenizer, as transformers finds it; empty: there is none.

    Raises:
        StartupError: its file cannot be read.
    """
    return chat_templates(model_dir).get("default", "")


def chat_templates(model_dir: Path) -> dict[str, str]:
    """Return the chat templates saved with the tokenizer, by name; prompts with tools may have their own.

    Raises:
        StartupError: a file cannot be read.
    """
    path = model_dir / "chat_template.jinja"
    try:
        named = sorted((model_dir / "additional_chat_templates").glob("*.jinja"))
        found = {path.stem: path.read_text(encoding="utf-8") for path in named}
        if path.exists() or found:
            default = {"default": path.read_text(encoding="utf-8")} if path.exists() else {}
            return found | default
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    path = model_dir / "tokenizer_config.json"
    try:
        saved = json.loads(path.read_bytes()).get("chat_template") or {}
        if isinstance(saved, str):
            return {"default": saved}
        if isinstance(saved, list):
            saved = {entry["name"]: entry["template"] for entry in saved}
        return {str(name): str(template) for name, template in saved.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise _unreadable(path, error) from error


def chat_template_digest(model_dir: Path) -> bytes:
    """Return TOKENIZER_DIGEST_BYTES of BLAKE3 over the chat template; of an empty one, where there is none.

    Raises:
        StartupError: its file cannot be read.
    """
    return blake3.blake3(chat_template(model_dir).encode()).digest(length=TOKENIZER_DIGEST_BYTES)


def _unreadable(path: Path, error: Exception) -> StartupError:
    return StartupError(f"{path} cannot be read: {error}", fix="Copy the model directory again")
