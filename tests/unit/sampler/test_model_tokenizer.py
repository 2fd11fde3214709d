"""Which tokens end a completion, what of one is graded, and how prompts of every kind become tokens."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.errors import Reason
from sampler.engines.text.model_tokenizer import ModelTokenizer
from sampler.engines.text.stop_strings import StopSearch
from sampler.engines.text.template_process import TemplateProcess
from support.byte_tokenizer import BOS, CHATML, ENDOFTEXT, IM_END, IM_START, PAD, make_byte_tokenizer
from support.refusals import cannot_start, refused

BOTH = {ENDOFTEXT, IM_END}
ASKED = {"role": "user", "content": "hi"}
SAID = {"role": "assistant"}
ASKED_TEXT = "<|im_start|>user\nhi<|im_end|>\n"
OPENING = "<|im_start|>assistant\n"
CALL = {"function": {"name": "f", "arguments": {"q": ["x"]}}}
TAGS = ("<think>", "</think>", "<answer>", "</answer>")

OPENS_THINK = CHATML.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
NO_OPENING = CHATML.partition("{% if add")[0]
TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['content'] is string %}"
    "{{ m['content'] }}{% endif %}{% for t in m.get('tool_calls') or [] %}"
    "{{ '<tool_call>' + (t['function'] | tojson) + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PARTS = CHATML.replace(
    "m['content']",
    "(m['content'] if m['content'] is string else m['content'] | map(attribute='text') | join('+'))",
)

HINTED = CHATML.replace("{% if add", "{{ hint }}{% if add")
REFUSING = "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}" + CHATML
THOUGHTLESS = CHATML.replace("m['content']", "(m['content'].split('</think>')[-1] | trim)")


PROCESS = TemplateProcess(cpu_limit_s=0.3, memory_bytes=128 << 20)
"""Shared, since it takes a second to start."""


def tokenizer(directory: Path, **options: Any) -> ModelTokenizer:
    return ModelTokenizer(make_byte_tokenizer(directory, **options), templates=PROCESS)


def text_of(made: ModelTokenizer, prompt: Any, **arguments: Any) -> str:
    return made.decode_prompt(made.encode(prompt, arguments))


def reply_of(made: ModelTokenizer, reply: Any, **arguments: Any) -> str:
    return made.decode_prompt(made.encode_reply(reply, arguments))


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({"generation": {"eos_token_id": [ENDOFTEXT, IM_END]}}, BOTH),
        ({"generation": {"eos_token_id": ENDOFTEXT}}, BOTH),
        ({"generation": {"eos_token_id": ENDOFTEXT}, "template": None}, BOTH),
        ({"generation": {"eos_token_id": ENDOFTEXT}, "eos_token": "<|endoftext|>"}, BOTH),
        ({"generation": {}, "config": {"eos_token_id": ENDOFTEXT}}, BOTH),
        ({"generation": {"eos_token_id": None}, "config": {"eos_token_id": [ENDOFTEXT]}}, BOTH),
        ({"config": {"text_config": {"eos_token_id": ENDOFTEXT}}}, BOTH),
        ({"config": {"eos_token_id": None}}, {IM_END}),
        ({"generation": {"eos_token_id": -1}, "template": None}, {IM_END}),
        ({"eos_token": None}, {IM_END}),
        ({"eos_token": None, "template": None}, set()),
        # Where nothing follows a message, what begins the next one ends it.
        (
            {
                "template": CHATML.replace("<|im_end|>", ""),
                "eos_token": "<|endoftext|>",
                "generation": {"eos_token_id": ENDOFTEXT},
            },
            {ENDOFTEXT, IM_START},
        ),
    ],
)
def test_a_completion_ends_with_every_token_that_a_file_or_the_template_ends_with(
    tmp_path: Path, options: dict[str, Any], ends: set[int]
) -> None:
    assert tokenizer(tmp_path, **options).end_ids == ends


@pytest.mark.parametrize("end", ["2", True, [2, "4"], 2.0])
def test_an_end_token_that_is_not_a_number_is_named(tmp_path: Path, end: object) -> None:
    with cannot_start("generation_config.json", "eos_token_id"):
        tokenizer(tmp_path, generation={"eos_token_id": end})


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML.replace("<|im_end|>", "</turn>"), "'</turn>', which is not one token"),
        (
            "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
            "it ends the assistant's message with 'a'",
        ),
        ("{{ messages[-1]['content'] }}", "writes nothing after"),
    ],
)
def test_a_template_whose_end_of_a_turn_ends_nothing_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str, said: str
) -> None:
    assert tokenizer(tmp_path, template=template).end_ids == {IM_END}
    (warning,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert said in warning.__dict__["detail"]


def test_a_template_whose_end_is_a_token_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer(tmp_path)
    assert not [one for one in caplog.records if one.levelno == logging.WARNING]


def test_tags_that_are_special_tokens_are_graded_and_end_and_padding_are_not(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, special=TAGS, generation={"eos_token_id": ENDOFTEXT})
    ids = made.encode_reply("<think>2+2</think><answer>4</answer>")
    for after in ([], [IM_END], [ENDOFTEXT], [PAD, PAD, IM_END]):
        whole = np.array([*ids, *after], np.int32)
        assert made.decode(whole) == "<think>2+2</think><answer>4</answer>"
    assert made.decode(np.array([BOS, *made.encode_reply("4")], np.int32)) == "<bos>4"


def test_a_stop_string_that_is_a_special_token_stops(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, special=TAGS)
    search = StopSearch(made.decode_window, ["</answer>"])
    ids = made.encode_reply("<answer>4</answer>").tolist()
    assert [search.append(token) for token in ids] == [False] * (len(ids) - 1) + [True]


@pytest.mark.parametrize(
    ("adds", "prompt", "text"),
    [
        (("<bos>", ""), "1+1=", "<bos>1+1="),
        (("<bos>", ""), f"<bos>{ASKED_TEXT}{OPENING}", f"<bos>{ASKED_TEXT}{OPENING}"),
        (("<bos>", "<|im_end|>"), "1+1=", "<bos>1+1="),
        (("", "<|im_end|>"), "1+1=", "1+1="),
        (("", "<|im_end|>"), "1<|im_end|>", "1<|im_end|>"),
        (("<bos>", ""), "a<bos>", "<bos>a<bos>"),
        (("", ""), "<bos>a", "<bos>a"),
        (("<bos>", ""), [ASKED], f"{ASKED_TEXT}{OPENING}"),
        (("<bos>", "<|im_end|>"), "", "<bos>"),
    ],
)
def test_a_prompt_has_one_beginning_and_no_end(
    tmp_path: Path, adds: tuple[str, str], prompt: Any, text: str
) -> None:
    assert text_of(tokenizer(tmp_path, adds=adds), prompt) == text


def test_messages_have_the_bos_that_their_template_writes_and_no_second_one(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, template="{{ bos_token }}" + CHATML, adds=("<bos>", ""))
    assert made.encode([ASKED])[0] == BOS
    assert text_of(made, [ASKED]) == f"<bos>{ASKED_TEXT}{OPENING}"


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (NO_OPENING, [ASKED], f"{ASKED_TEXT}{OPENING}"),
        (OPENS_THINK, [ASKED], f"{ASKED_TEXT}{OPENING}<think>\n"),
        ("[{% for m in messages %}{{ m['content'] }}]{% endfor %}", [ASKED], "[hi]"),
        # An answer that is opened is gone on with.
        (CHATML, [ASKED, {**SAID, "content": "Let me "}], f"{ASKED_TEXT}{OPENING}Let me "),
        (NO_OPENING, [ASKED, {**SAID, "content": "Let me"}], f"{ASKED_TEXT}{OPENING}Let me"),
        (CHATML, [ASKED, {**SAID, "content": ""}], f"{ASKED_TEXT}{OPENING}"),
        (THOUGHTLESS, [ASKED, {**SAID, "content": "<think>x</think> So "}], f"{ASKED_TEXT}{OPENING}So "),
        (
            CHATML,
            [ASKED, {**SAID, "content": [{"type": "text", "text": "Let me"}]}],
            f"{ASKED_TEXT}{OPENING}Let me",
        ),
        # Parts, for templates that read them and for those that do not.
        (PARTS, [{"role": "user", "content": [{"type": "text", "text": "h"}, {"text": "i"}]}],
         f"<|im_start|>user\nh+i<|im_end|>\n{OPENING}"),
        (PARTS, [ASKED, {**SAID, "content": [{"text": "a"}, {"text": "b"}]}], f"{ASKED_TEXT}{OPENING}a+b"),
        *(
            (template, [{"role": "user", "content": [{"type": "text", "text": "h"}, "i"]}],
             f"<|im_start|>user\nh\ni<|im_end|>\n{OPENING}")
            for template in (CHATML, TOOLS, CHATML.replace("m['content']", "(m['content'] | string)"))
        ),
        # Calls of tools, with and without a content.
        *(
            (
                TOOLS,
                [ASKED, {**SAID, **content, "tool_calls": [CALL]},
                 {"role": "tool", "content": "42"}],
                f"{ASKED_TEXT}{OPENING}<tool_call>{json.dumps(CALL['function'])}</tool_call><|im_end|>\n"
                f"<|im_start|>tool\n42<|im_end|>\n{OPENING}",
            )
            for content in ({"content": None}, {"content": ""}, {})
        ),
        (CHATML, [{"role": "system", "content": None, "name": None}, ASKED],
         f"<|im_start|>system\n<|im_end|>\n{ASKED_TEXT}{OPENING}"),
    ],
)  # fmt: skip
def test_messages_of_every_kind_are_rendered_up_to_where_the_policy_goes_on(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], text: str
) -> None:
    assert text_of(tokenizer(tmp_path, template=template), messages) == text


def test_a_template_sees_the_tools_of_its_prompt(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, template=TOOLS)
    assert text_of(made, [ASKED], tools=[{"name": "f"}]) == ASKED_TEXT + '{"name": "f"}' + OPENING


def test_a_template_for_prompts_with_tools_is_taken_for_them(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    made = ModelTokenizer(tmp_path, templates=PROCESS)
    assert text_of(made, [ASKED]) == ASKED_TEXT + OPENING
    assert text_of(made, [ASKED], tools=[{"name": "f"}]) == "with tools"


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (TOOLS, [ASKED, {**SAID, "content": "", "tool_calls": [CALL]}], "answer"),
        (CHATML, [ASKED, {**SAID, "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "42"}],
         "tools"),
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}", [ASKED, {**SAID, "content": "a"}], "0 times"),
        (CHATML, [{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'"),
        (None, [ASKED], "chat_template"),
        (REFUSING, [{"role": "tool", "content": "1"}], "no tools here"),
    ],
)  # fmt: skip
def test_messages_that_nothing_can_go_on_from_are_refused_with_the_reason(
    tmp_path: Path, template: str | None, messages: list[dict[str, Any]], said: str
) -> None:
    with refused(Reason.MALFORMED, said):
        tokenizer(tmp_path, template=template).encode(messages)


TALK = [ASKED, {**SAID, "content": "b"}, ASKED, {**SAID, "content": "<think>x"}, ASKED]


@pytest.mark.parametrize("template", [HINTED, NO_OPENING])
def test_a_reply_is_what_the_template_writes_after_the_last_answer_up_to_where_another_begins(
    tmp_path: Path, template: str
) -> None:
    made = tokenizer(tmp_path, template=template, adds=("<bos>", ""))
    assert reply_of(made, TALK) == f"<|im_end|>\n{ASKED_TEXT}{OPENING}"
    assert reply_of(made, "ab") == "ab"
    if template is HINTED:
        assert reply_of(made, TALK, hint="12") == f"<|im_end|>\n{ASKED_TEXT}12{OPENING}"
        assert text_of(made, TALK) == text_of(made, TALK[:3]) + "<think>x" + reply_of(made, TALK)


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (CHATML.replace("m['content']", "''"), TALK, "0 times"),
        (CHATML.replace("m['content']", "m['content'] * 2"), TALK, "2 times"),
        (REFUSING, [*TALK[:2], {"role": "tool", "content": "1"}], "no tools here"),
    ],
)
def test_a_reply_that_the_template_does_not_take_or_after_an_answer_it_does_not_write_once_is_refused(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], said: str
) -> None:
    with refused(Reason.MALFORMED, said):
        tokenizer(tmp_path, template=template).encode_reply(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 99999999999 }}",
        "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{{ 'x' * 9999999 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_never_ends_or_fills_the_memory_is_named_and_the_next_prompt_is_made(
    tmp_path: Path, template: str
) -> None:
    """It does so for one prompt, so that the process that renders must go on."""
    for_bad = "{% if messages[0]['content'] == 'bad' %}" + template + "{% endif %}" + CHATML
    made = tokenizer(tmp_path, template=for_bad)
    with refused(Reason.MALFORMED, "chat_template.jinja"):
        made.encode([{"role": "user", "content": "bad"}])
    assert text_of(made, [ASKED]) == ASKED_TEXT + OPENING


def test_a_template_that_loops_for_every_prompt_does_not_keep_a_tokenizer_from_loading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = tokenizer(tmp_path, template="{{ (messages | length + 8) ** (9 ** 9) }}")
    assert made.end_ids == {IM_END}
    (warned,) = [
        one for one in caplog.records if one.message == "chat template does not render plain messages"
    ]
    assert "was not done after 0.3 s of CPU time" in warned.__dict__["detail"]
