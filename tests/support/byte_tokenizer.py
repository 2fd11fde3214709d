"""A model directory with a tokenizer of bytes and special tokens, any chat template, and no weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL: Final = ("<pad>", "<bos>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, BOS, ENDOFTEXT, IM_START, IM_END = range(5)

_MESSAGE: Final = "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
_OPENING: Final = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CHATML: Final = "{% for m in messages %}" + _MESSAGE + "{% endfor %}" + _OPENING


def make_byte_tokenizer(
    directory: Path,
    *,
    template: str | None = CHATML,
    adds: tuple[str, str] = ("", ""),
    special: Sequence[str] = (),
    generation: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Write tokenizer and settings; ``adds`` are the tokens put before and after a text."""
    directory.mkdir(parents=True, exist_ok=True)
    tokens = [*SPECIAL, *special]
    vocabulary = {token: n for n, token in enumerate([*tokens, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    before, after = adds
    if before or after:
        made.post_processor = processors.TemplateProcessing(
            single=" ".join(filter(None, (before, "$A", after))),
            special_tokens=[(token, vocabulary[token]) for token in adds if token],
        )
    made.save(str(directory / "tokenizer.json"))
    files: dict[str, Any] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<|im_end|>",
            "pad_token": "<pad>", **settings,
        },
        "config.json": {"model_type": "llama", **(config or {})},
        "generation_config.json": generation,
    }  # fmt: skip
    for name, content in files.items():
        if content is not None:
            (directory / name).write_text(json.dumps(content))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory
