"""Two environments of the library verifiers: a game of several turns, and a sum for a tool."""

from typing import Any

import verifiers
from datasets import Dataset


def load_environment(kind: str = "game", **arguments: Any) -> verifiers.Environment:
    return {"game": _Game, "tool": _tool, "single": _single, "rewriting": _Rewriting}[kind](**arguments)


def _rows() -> Dataset:
    return Dataset.from_list([{"question": f"find {n}", "answer": str(n)} for n in range(5)])


def _is_right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"].strip() == answer)


class _Game(verifiers.MultiTurnEnv):  # type: ignore[misc]
    """Counts wrong guesses in the state of the rollout, which a replay would count again."""

    def __init__(self, **arguments: Any) -> None:
        rubric = verifiers.Rubric(funcs=[_found], weights=[1.0])
        super().__init__(dataset=_rows(), rubric=rubric, system_prompt="Guess.", **arguments)

    async def setup_state(self, state: Any) -> None:
        state["guesses"] = 0

    @verifiers.stop  # type: ignore[untyped-decorator]
    async def is_found(self, state: Any) -> bool:
        steps = state["trajectory"]
        return bool(steps) and steps[-1]["completion"][-1]["content"] == state["answer"]

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        state["guesses"] += 1
        return [{"role": "user", "content": f"wrong {state['guesses']}"}]


def _found(completion: Any, answer: str, state: Any) -> float:
    guesses: int = state["guesses"]
    return _is_right([m for m in completion if m["role"] == "assistant"], answer) / (1 + guesses)


class _Rewriting(_Game):
    async def get_prompt_messages(self, state: Any) -> Any:
        return [{"role": "user", "content": "another prompt"}]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def _tool() -> verifiers.Environment:
    rubric = verifiers.Rubric(funcs=[_is_right])
    return verifiers.ToolEnv(tools=[add], max_turns=5, dataset=_rows(), rubric=rubric)


def _single() -> verifiers.Environment:
    return verifiers.SingleTurnEnv(dataset=_rows(), rubric=verifiers.Rubric(funcs=[_is_right]))
