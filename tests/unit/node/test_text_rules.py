"""Which changes of a model directory make another reader of texts, and how they are told."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from node.text.text_rules import SUMMARY_CHARACTERS, TextRules, differing_rules
from support.refusals import cannot_start

FILES: Mapping[str, Any] = {
    "tokenizer.json": {"model": {"vocab": {"a": 0}}},
    "tokenizer_config.json": {
        "bos_token": None,
        "eos_token": {"__type": "AddedToken", "content": "<end>", "lstrip": False},
        "model_max_length": 2048,
    },
    "generation_config.json": {"eos_token_id": [2], "temperature": 0.6},
    "config.json": {"eos_token_id": 4, "hidden_size": 8},
    "chat_template.jinja": "{{ messages }}",
}


def rules_of(directory: Path, changes: Mapping[str, Any]) -> TextRules:
    directory.mkdir(exist_ok=True)
    for name, content in {**FILES, **changes}.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(content if name.endswith("jinja") else json.dumps(content))
    return TextRules.of(directory)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokenizer.json": {"model": {"vocab": {"b": 0}}}}, "tokenizer.json is"),
        ({"tokenizer_config.json": {"eos_token": "<other>"}}, 'eos_token is "<other>" (the run has "<end>")'),
        ({"tokenizer_config.json": {}}, 'eos_token is not there (the run has "<end>")'),
        ({"tokenizer_config.json": None}, "eos_token is not there"),
        (
            {
                "tokenizer_config.json": {
                    **FILES["tokenizer_config.json"],
                    "clean_up_tokenization_spaces": True,
                }
            },
            "clean_up_tokenization_spaces is true (the run has none)",
        ),
        ({"special_tokens_map.json": {"pad_token": "<pad>"}}, 'pad_token is "<pad>" (the run has none)'),
        ({"added_tokens.json": {"<x>": 7}}, 'added tokens is {"<x>":7} (the run has none)'),
        ({"generation_config.json": {"eos_token_id": [2, 3]}}, "is [2,3,4] (the run has [2,4])"),
        ({"generation_config.json": None}, "end tokens of generation_config.json and config.json is [4]"),
        ({"config.json": {"text_config": {"eos_token_id": [5]}}}, "is [2,5] (the run has [2,4])"),
        ({"chat_template.jinja": "{{ messages[0] }}"}, 'chat template is "{{ messages[0] }}"'),
        ({"chat_template.jinja": "x" * 100}, "chat template is of digest "),
        ({"chat_template.jinja": None}, "chat template is not there"),
        (
            {"additional_chat_templates/tool_use.jinja": "tools"},
            "chat template 'tool_use' is \"tools\" (the run has none)",
        ),
    ],
)
def test_a_file_by_which_texts_are_read_otherwise_is_another_digest_and_is_told(
    tmp_path: Path, changes: Mapping[str, Any], told: str
) -> None:
    ours, theirs = rules_of(tmp_path / "ours", {}), rules_of(tmp_path / "theirs", changes)
    assert theirs.digest != ours.digest
    assert told in differing_rules(theirs.summary, ours.summary)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_config.json": {"eos_token": "<end>", "name_or_path": "/here", "padding_side": "left"}},
        {"generation_config.json": {"eos_token_id": 2, "temperature": 1.0, "max_new_tokens": 5}},
        {"generation_config.json": {"eos_token_id": [4, 2]}, "config.json": {}},
        {"config.json": {"eos_token_id": 4, "torch_dtype": "bfloat16"}},
    ],
)
def test_what_says_nothing_about_texts_does_not_count(tmp_path: Path, changes: Mapping[str, Any]) -> None:
    ours, theirs = rules_of(tmp_path / "ours", {}), rules_of(tmp_path / "theirs", changes)
    assert (theirs.digest, theirs.summary) == (ours.digest, ours.summary)


def test_end_tokens_are_those_of_both_files(tmp_path: Path) -> None:
    assert rules_of(tmp_path, {}).end_ids == {2, 4}


def test_a_summary_has_a_bound(tmp_path: Path) -> None:
    many = {f"key_{number}": "x" * 50 for number in range(1000)}
    assert len(rules_of(tmp_path, {"tokenizer_config.json": many}).summary) == SUMMARY_CHARACTERS


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json"])
def test_a_file_that_is_not_an_object_is_named(tmp_path: Path, name: str) -> None:
    with cannot_start(name):
        rules_of(tmp_path, {name: [1]})
