"""A question as the model is asked it, with the system prompt of the task's options."""

import itertools
from collections.abc import Sequence

from node.grading.completion import Message
from node.questions.messages import content_text
from node.tasks.task_options import PromptOptions


def asked(question: str | Sequence[Message], options: PromptOptions) -> str | Sequence[Message]:
    """Return a question with the system prompt: messages where the chat template is used, else a text.

    The system prompt of the options comes before one of the row, in the same message.
    """
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
    if options.system:
        messages = [{"role": "system", "content": options.system}, *messages]
    messages = _with_one_system_message(messages)
    return messages if options.chat else "\n\n".join(map(content_text, messages))


def _with_one_system_message(messages: Sequence[Message]) -> list[Message]:
    """Join the system messages that messages begin with: most templates take one, in the first place."""
    leading = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    if len(leading) < 2:
        return list(messages)
    content = "\n\n".join(map(content_text, leading))
    return [{**leading[0], "content": content}, *messages[len(leading) :]]
