"""A rollout of a ``verifiers`` environment whose model is somebody else's engine.

go_on(turn) --> the environment's own rollout --asks its client for the next turn--> what it added: the reply
                                              '--ends------------------------------> None
"""

import asyncio
import json
import re
from typing import Any, Final

from verifiers import Client, OverlongPromptError
from verifiers.types import AssistantMessage, Response, ResponseMessage, ToolCall
from verifiers.utils.message_utils import normalize_messages

from node.grading.completion import Message
from node.system.waits import drop

_TOOL_CALL: Final = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""How Qwen's and Hermes' chat templates have the model call a tool."""


def plain(messages: Any) -> list[Message]:
    """Return messages with their text alone; ValueError if one holds something else."""
    normal = normalize_messages(messages, field_name="messages")
    return [{"role": one.role, "content": _text(one.content)} for one in normal]


class DrawnTurns(Client):
    """A client that the environment takes for a model's server."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: asyncio.Queue[Any] = asyncio.Queue()
        self.turns: asyncio.Queue[Response | None] = asyncio.Queue()

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
    ) -> Response:
        self.asked.put_nowait(prompt)
        if (turn := await self.turns.get()) is None:
            raise OverlongPromptError("no room for another turn")
        return turn

    def setup_client(self, config: Any) -> Any:
        raise TypeError("there is no server to configure")

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return messages, {}

    async def raise_from_native_response(self, response: Response) -> None:
        pass

    async def from_native_response(self, response: Response) -> Response:
        return response

    async def close(self) -> None:
        pass


class Rollout:
    """One rollout, for as long as its conversation goes on.

    Attributes:
        heard: What was said up to the newest turn.
        reply: What the environment said to that; None: it has ended.
    """

    def __init__(self, environment: Any, row: Any) -> None:
        self._environment = environment
        self._client = DrawnTurns()
        self._asked = normalize_messages(row["prompt"], field_name="prompt")
        self._running = asyncio.ensure_future(environment.rollout(row, self._client, "policy", {}))
        self.heard: list[Message] = []
        self.reply: list[Message] | None = []

    async def go_on(self, text: str, *, is_cut: bool) -> None:
        """Hand in the turn that follows ``heard`` and ``reply``.

        Raises:
            ValueError: the environment does not go on from its prompt, or from what was said.
            Exception: whatever the environment raises.
        """
        if not self.heard:
            await self._next(self._asked)
        turn = self._turn(text, is_cut=is_cut)
        self.heard = [*self.heard, *(self.reply or []), {"role": "assistant", "content": text}]
        self._client.turns.put_nowait(turn)
        self.reply = await self._next([*self._asked, _message(turn)])

    async def state(self) -> Any:
        """End the rollout, if it goes on, and return its state with reward and metrics."""
        self._client.turns.put_nowait(None)
        state = await self._running
        await self._environment.rubric.score_rollout(state)
        await self._environment.rubric.cleanup(state)
        return state

    def cancel(self) -> None:
        """Drop the rollout."""
        drop(self._running)

    async def _next(self, before: list[Any]) -> list[Message] | None:
        asking = asyncio.ensure_future(self._client.asked.get())
        await asyncio.wait({asking, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            asking.cancel()
            self._running.result()
            return None
        self._asked = asking.result()
        if plain(self._asked[: len(before)]) != plain(before):
            raise ValueError("the environment rewrites what was said, which no policy could have drawn so")
        return plain(self._asked[len(before) :])

    def _turn(self, text: str, *, is_cut: bool) -> Response:
        calls = _tool_calls(text) if self._environment.tool_defs else []
        return Response(
            id="turn",
            created=0,
            model="policy",
            message=ResponseMessage(
                content=text,
                tool_calls=calls or None,
                finish_reason="length" if is_cut else "tool_calls" if calls else "stop",
                is_truncated=is_cut,
            ),
        )


def _message(turn: Response) -> AssistantMessage:
    return AssistantMessage(content=turn.message.content, tool_calls=turn.message.tool_calls)


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    if any(part.get("type") != "text" for part in content):
        raise ValueError("a message holds something else than text")
    return "".join(part["text"] for part in content)


def _tool_calls(text: str) -> list[ToolCall]:
    calls = []
    for number, found in enumerate(_TOOL_CALL.findall(text)):
        try:
            call = json.loads(found)
            name, arguments = str(call["name"]), json.dumps(call.get("arguments", {}))
        except (ValueError, KeyError):
            continue  # no call of a tool, but a text
        calls.append(ToolCall(id=f"call-{number}", name=name, arguments=arguments))
    return calls
