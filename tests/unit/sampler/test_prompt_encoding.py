"""Prompts to token ids, with a tokenizer that puts a BOS before everything it is given."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from node.errors import Reason
from sampler.engines.text.model_tokenizer import ModelTokenizer
from sampler.engines.text.template_process import TemplateProcess
from support.refusals import refused

BOS, USER, ASSISTANT = "<bos>", "<user>", "<assistant>"
TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b1"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "whatever was written"},
    {"role": "user", "content": "2"},
]
CONTENT = "{{ message.content }}"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ raise_exception('no tools here') }}{% endif %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{{ hint }}{% if add_generation_prompt %}<assistant>{% endif %}"
)

PROCESS = TemplateProcess()


@pytest.fixture(params=[TEMPLATE, None])
def tokenizer(tmp_path: Path, request: pytest.FixtureRequest) -> ModelTokenizer:
    tokens = [BOS, USER, ASSISTANT, *"abc12"]
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=BOS))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    saved = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, bos_token=BOS, additional_special_tokens=[USER, ASSISTANT]
    )
    saved.chat_template = request.param
    saved.save_pretrained(tmp_path)
    return ModelTokenizer(tmp_path, templates=PROCESS)


def tokens(tokenizer: ModelTokenizer, ids: Any) -> list[str]:
    return [tokenizer.decode_prompt(ids[at : at + 1]) for at in range(len(ids))]


def tokens_of(tokenizer: ModelTokenizer, prompt: Any) -> list[str]:
    return tokens(tokenizer, tokenizer.encode(prompt))


@pytest.mark.parametrize("tokenizer", [TEMPLATE], indirect=True)
def test_messages_have_the_bos_that_their_template_writes_and_no_second_one(
    tokenizer: ModelTokenizer,
) -> None:
    assert tokens_of(tokenizer, [{"role": "user", "content": "ab"}]) == [BOS, USER, "a", "b", ASSISTANT]
    assert tokens_of(tokenizer, "ab") == [BOS, "a", "b"]


@pytest.mark.parametrize("tokenizer", [TEMPLATE], indirect=True)
def test_a_template_sees_its_arguments(tokenizer: ModelTokenizer) -> None:
    messages, hint = [{"role": "user", "content": "ab"}], {"hint": "12"}
    with_hint = tokenizer.encode(messages, hint)
    assert tokens(tokenizer, with_hint) == [BOS, USER, "a", "b", "1", "2", ASSISTANT]


@pytest.mark.parametrize("tokenizer", [TEMPLATE], indirect=True)
def test_what_a_template_refuses_is_the_prompts_fault(tokenizer: ModelTokenizer) -> None:
    with refused(Reason.MALFORMED, "no tools here"):
        tokenizer.encode([{"role": "tool", "content": "1"}])


@pytest.mark.parametrize("tokenizer", [None], indirect=True)
def test_messages_need_a_template(tokenizer: ModelTokenizer) -> None:
    with refused(Reason.MALFORMED, "chat_template"):
        tokenizer.encode([{"role": "user", "content": "ab"}])


def reply_of(tokenizer: ModelTokenizer, reply: Any, **arguments: Any) -> list[str]:
    return tokens(tokenizer, tokenizer.encode_reply(reply, arguments))


@pytest.mark.parametrize("tokenizer", [TEMPLATE], indirect=True)
def test_a_reply_is_what_the_template_writes_after_the_assistants_last_message(
    tokenizer: ModelTokenizer,
) -> None:
    assert reply_of(tokenizer, TURNS) == [USER, "2", ASSISTANT]
    assert reply_of(tokenizer, TURNS, hint="1") == [USER, "2", "1", ASSISTANT]
    assert reply_of(tokenizer, "ab") == ["a", "b"]


@pytest.mark.parametrize("tokenizer", [TEMPLATE], indirect=True)
def test_the_whole_is_what_the_template_renders_where_it_changes_no_message(
    tokenizer: ModelTokenizer,
) -> None:
    said = [*TURNS[:3], {"role": "assistant", "content": "12"}, TURNS[4]]
    whole = tokens_of(tokenizer, said)
    assert whole == [*tokens_of(tokenizer, said[:3]), "1", "2", *reply_of(tokenizer, said)]


@pytest.mark.parametrize(
    ("tokenizer", "times"),
    [
        (TEMPLATE.replace(CONTENT, content), content.count("content"))
        for content in ("", f"{CONTENT}{CONTENT}")
    ],
    indirect=["tokenizer"],
)
def test_a_template_that_does_not_write_the_message_once_is_refused(
    tokenizer: ModelTokenizer, times: int
) -> None:
    with refused(Reason.MALFORMED, str(times)):
        tokenizer.encode_reply(TURNS)


@pytest.mark.parametrize("tokenizer", [TEMPLATE], indirect=True)
def test_what_a_template_refuses_of_a_reply_is_said(tokenizer: ModelTokenizer) -> None:
    with refused(Reason.MALFORMED, "no tools here"):
        tokenizer.encode_reply([*TURNS[:2], {"role": "tool", "content": "1"}])
