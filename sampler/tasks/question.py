"""What the built-in tasks share: a prompt from a question, and the answer within a completion."""

from collections.abc import Sequence

from node.task_options import PromptOptions
from sampler.tasks.task import CompletionText, Message

_OPEN, _CLOSE = "<answer>", "</answer>"


def asked(question: str | Sequence[Message], options: PromptOptions) -> str | Sequence[Message]:
    """Return a question with the system prompt: messages where the chat template is used, else a text."""
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
    if options.system:
        messages = [{"role": "system", "content": options.system}, *messages]
    return messages if options.chat else "\n\n".join(message["content"] for message in messages)


def answer_of(completion: CompletionText, options: PromptOptions) -> str | None:
    """Return what of a completion is graded, stripped; None: it has no answer."""
    text = completion.text
    match options.answer_from:
        case "text":
            return text.strip()
        case "last_line":
            return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)
        case "tags":
            end = text.rfind(_CLOSE)
            # The closing tag may have been the stop string.
            end = len(text) if end < 0 and completion.finish == "stop" else end
            start = text.rfind(_OPEN, 0, max(0, end))
            return None if start < 0 else text[start + len(_OPEN) : end].strip()
