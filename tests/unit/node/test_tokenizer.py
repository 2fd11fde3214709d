import json
from pathlib import Path
from typing import Any

import pytest

from node.text.tokenizer import TOKENIZER_DIGEST_BYTES, chat_template, chat_template_digest, tokenizer_digest
from support.refusals import cannot_start

SAVED: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": 0, "content": "<end>"}],
    "normalizer": None,
    "pre_tokenizer": {"type": "Split"},
    "post_processor": None,
    "decoder": {"type": "Fuse"},
    "model": {"type": "WordLevel", "vocab": {"<end>": 0, "a": 1, "é": 2}},
}


def digest_of(directory: Path, *, indent: int | None = None, changes: dict[str, Any] | None = None) -> bytes:
    (directory / "tokenizer.json").write_text(json.dumps(SAVED | (changes or {}), indent=indent))
    return tokenizer_digest(directory)


def test_equal_tokenizers_have_equal_digests_however_they_were_written(tmp_path: Path) -> None:
    digest = digest_of(tmp_path)
    assert len(digest) == TOKENIZER_DIGEST_BYTES
    assert digest_of(tmp_path, indent=2) == digest
    assert digest_of(tmp_path, changes={"padding": {"length": 8}, "truncation": {"max_length": 9}}) == digest


@pytest.mark.parametrize("key", ["added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder"])
def test_whatever_changes_the_meaning_of_ids_changes_the_digest(tmp_path: Path, key: str) -> None:
    assert digest_of(tmp_path, changes={key: ["other"]}) != digest_of(tmp_path)


def test_two_ids_swapped_change_the_digest(tmp_path: Path) -> None:
    swapped = {"type": "WordLevel", "vocab": {"<end>": 0, "a": 2, "é": 1}}
    assert digest_of(tmp_path, changes={"model": swapped}) != digest_of(tmp_path)


def test_a_missing_tokenizer_names_its_path(tmp_path: Path) -> None:
    with cannot_start("tokenizer.json"):
        tokenizer_digest(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_a_file_that_is_no_json_object_is_a_startup_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with cannot_start("tokenizer.json"):
        tokenizer_digest(tmp_path)


@pytest.mark.parametrize(
    "saved", ["hello", [{"name": "tools", "template": "x"}, {"name": "default", "template": "hello"}]]
)
def test_a_chat_template_is_found_where_transformers_finds_it(tmp_path: Path, saved: object) -> None:
    assert chat_template(tmp_path) == ""
    none = chat_template_digest(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": saved}))
    assert chat_template(tmp_path) == "hello"
    (tmp_path / "chat_template.jinja").write_text("goodbye")
    assert chat_template(tmp_path) == "goodbye"
    assert chat_template_digest(tmp_path) != none
    assert len(none) == TOKENIZER_DIGEST_BYTES


@pytest.mark.parametrize("saved", ['{"chat_template": [1]}', "[]", "{"])
def test_a_chat_template_that_cannot_be_read_is_named(tmp_path: Path, saved: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(saved)
    with cannot_start("tokenizer_config.json"):
        chat_template(tmp_path)
