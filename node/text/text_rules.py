"""The rules by which a peer makes tokens of prompts, text of tokens, and an end of a completion.

    tokenizer.json                          ids, decoding         --.
    tokenizer_config.json (and what older tokenizers save beside)   |
    generation_config.json, config.json     end tokens              +--> one digest, and a summary for people
    chat templates                                                  |
    the rules of this software                                    --'

Two peers with the same digest read a prompt alike and grade the same text. With another, a verifier would
call honest samplers liars. All of it comes from the saved files, so that it depends on no library's version
and needs no tokenizer library.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import blake3

from node.errors import StartupError
from node.text.tokenizer import TOKENIZER_DIGEST_BYTES, chat_templates, tokenizer_digest

RULES: Final = 1
"""Goes up when this software reads prompts or texts otherwise: which special tokens have a text, what is put
before a prompt, what ends a completion. Samplers and verifiers with another are refused from the learner's
upgrade on."""

FILES: Final = (
    "tokenizer.json, tokenizer_config.json, generation_config.json, config.json, chat_template.jinja"
)
"""Files to copy where two peers differ."""

_MEANINGLESS: Final = frozenset(
    {
        "_commit_hash", "_name_or_path", "auto_map", "backend", "chat_template", "is_local",
        "local_files_only", "max_length", "model_input_names", "model_max_length", "name_or_path",
        "pad_to_multiple_of",
        "padding_side", "processor_class", "special_tokens_map_file", "stride", "tokenizer_file",
        "transformers_version", "truncation_side", "truncation_strategy", "use_fast",
    }
)  # fmt: skip
"""Keys of tokenizer_config.json that say where it came from, or how batches are padded and cut. The template
is compared by itself."""

SUMMARY_CHARACTERS: Final = 8000
"""Longest summary: hundreds of rules, where a tokenizer has twenty."""

_SHOWN_CHARACTERS: Final = 60
"""Longest value that a summary has in full; others are told apart by the beginning of a digest."""


@dataclass(frozen=True, slots=True)
class TextRules:
    """The rules of a model directory."""

    digest: bytes
    """TOKENIZER_DIGEST_BYTES of BLAKE3."""
    summary: str
    """A line for each rule: its name, a tab, its value."""
    end_ids: frozenset[int]
    """End tokens that generation_config.json and config.json name."""

    @classmethod
    def of(cls, model_dir: Path) -> "TextRules":
        """Read the rules of a model directory.

        Raises:
            StartupError: it has no tokenizer, or a file is damaged.
        """
        end_ids = _end_ids(model_dir)
        rules: dict[str, Any] = {
            "rules of the software": RULES,
            "tokenizer.json": tokenizer_digest(model_dir).hex(),
            "end tokens of generation_config.json and config.json": sorted(end_ids),
        }
        for key, value in _tokenizer_settings(model_dir).items():
            rules[f"tokenizer_config.json {key}"] = value
        for name, template in chat_templates(model_dir).items():
            rules["chat template" if name == "default" else f"chat template {name!r}"] = template
        canonical = {name: _canonical(value) for name, value in sorted(rules.items())}
        return cls(
            _digest(_canonical(canonical)),
            "\n".join(f"{name}\t{_shown(text)}" for name, text in canonical.items())[:SUMMARY_CHARACTERS],
            end_ids,
        )


def differing_rules(theirs: str, ours: str) -> str:
    """Return in which rules two summaries differ, for people; empty where one is not known."""
    if not theirs or not ours:
        return ""
    here, there = _lines(theirs), _lines(ours)
    names = [name for name in sorted(here | there) if here.get(name) != there.get(name)]
    return "; ".join(
        f"{name} is {here.get(name, 'not there')} (the run has {there.get(name, 'none')})" for name in names
    )


def _lines(summary: str) -> dict[str, str]:
    return {name: value for name, _, value in (line.partition("\t") for line in summary.splitlines())}


def _tokenizer_settings(model_dir: Path) -> Mapping[str, Any]:
    settings = _read(model_dir / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # then transformers reads what older versions saved beside it
        settings = {**settings, **_read(model_dir / "special_tokens_map.json")}
        if added := _read(model_dir / "added_tokens.json"):
            settings["added tokens"] = added
    return {
        key: value["content"] if isinstance(value, dict) and "content" in value else value
        for key, value in settings.items()
        if key not in _MEANINGLESS and value is not None
    }


def _end_ids(model_dir: Path) -> frozenset[int]:
    config = _read(model_dir / "config.json")
    text_config = config.get("text_config")
    path = model_dir / "generation_config.json"
    return (
        _ids(_read(path), path)
        | _ids(config, model_dir / "config.json")
        | _ids(text_config if isinstance(text_config, dict) else {}, model_dir / "config.json")
    )


def _ids(settings: Mapping[str, Any], path: Path) -> frozenset[int]:
    named = settings.get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise StartupError(
            f"{path} has eos_token_id = {named!r}, which is not the number of a token or a list of them",
            fix="Correct it, or copy the file again",
        )
    return frozenset(one for one in ids if one >= 0)  # -1 says that there is none


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a file, or an empty one if the file is missing."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}", fix="Copy the model directory again") from error
    if not isinstance(document, dict):
        raise StartupError(f"{path} is not a JSON object", fix="Copy the model directory again")
    return document


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _digest(text: str) -> bytes:
    return blake3.blake3(text.encode()).digest(length=TOKENIZER_DIGEST_BYTES)


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"of digest {_digest(text).hex()[:8]}"
