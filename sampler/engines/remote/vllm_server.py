"""Calls a vLLM server over HTTP, on an event loop and a thread of its own.

Answers are bounded in time and size. Completions are asked for in the background, a bounded number at once;
to cancel one is to hang up, and the server then drops it.
"""

import asyncio
import json
import math
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from sampler.engines.engine_options import RemoteOptions
from sampler.engines.restartable_engine import EngineEndedError

Answer = TypeVar("Answer")

GENERATE: Final = "/inference/v1/generate"

ANSWER_BYTES: Final = 64 << 20
"""Longest answer about anything but completions: the names of all tensors of all workers fit in it."""

_PREFIX: Final = "vllm:"
_GAUGES: Final = tuple(
    _PREFIX + name for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
)
"""Gauges that are read here; a server's page of metrics is a hundred times as long."""

_COMPLETING: Final = 256
"""Most requests for completions at the server at once, each for up to a whole group; the rest waits here."""

_CLOSE_LIMIT_S: Final = 10.0


class ServerError(EngineEndedError):
    """The server does not answer (``status`` None), or not as agreed; what it was generating is lost."""

    def __init__(self, what: str, *, status: int | None = None) -> None:
        super().__init__(what)
        self.status = status


class VllmServer:
    """One server. ``call`` and ``ask_workers`` are for any thread, ``close`` for one."""

    def __init__(self, options: RemoteOptions, *, api_key: str | None) -> None:
        """Connect to nothing yet."""
        self.address = options.address.rstrip("/")
        self._answer_limit_s = options.answer_limit_s
        self._client = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            timeout=None,
            # The server hangs up after 5 s; a request that it crosses would be lost.
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=_COMPLETING, keepalive_expiry=1.0
            ),
            trust_env=False,  # no proxy is on the way to a server that shares memory with us
        )
        self._places = asyncio.Semaphore(_COMPLETING)
        self._is_starting = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-server", daemon=True)
        self._thread.start()

    def call(self, path: str, body: object = None, *, limit_s: float | None = None) -> Any:
        """Post ``body`` as JSON and return the JSON of the answer; ServerError if there is none in time."""
        posting = self._post(
            path, body, most_bytes=ANSWER_BYTES, limit_s=self._answer_limit_s if limit_s is None else limit_s
        )
        return self._result(posting)

    def ask_workers(self, method: str, *arguments: str, limit_s: float | None = None) -> list[Any]:
        """Call a method of every worker, between two decode steps; ServerError if one says why it refuses."""
        body = {"method": method, "args": list(arguments)}
        answer = self.call("/collective_rpc", body, limit_s=limit_s)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not results:
            what = f"{self.address} answers {method} with {str(answer)[:200]!r}, not with results"
            raise ServerError(what, status=200)
        for result in results:
            if isinstance(result, str):
                raise ServerError(f"a worker of {self.address} refuses {method}: {result[:1000]}", status=200)
        return results

    def gauges(self) -> Mapping[str, float]:
        """Return how many completions run and wait and the share of the cache in use, by vLLM's names.

        Empty where the server does not show its metrics, as with ``--disable-log-stats``; ServerError if it
        does not answer.
        """
        asking = self._said("GET", "/metrics", most_bytes=ANSWER_BYTES, limit_s=self._answer_limit_s)
        try:
            said = self._result(asking)
        except ServerError as error:
            if error.status is None:
                raise
            return {}
        lines = (line for line in said.decode(errors="replace").splitlines() if line.startswith(_GAUGES))
        try:
            read = list(text_string_to_metric_families("".join(f"{line}\n" for line in lines)))
        except ValueError:
            return {}
        samples = (sample for family in read for sample in family.samples)
        return {one.name.removeprefix(_PREFIX): one.value for one in samples if math.isfinite(one.value)}

    async def generate(self, body: Mapping[str, Any], *, most_bytes: int) -> Any:
        """Return completions, once it is their turn and they are finished; only their size is bounded."""
        async with self._places:
            return await self._post(GENERATE, body, most_bytes=most_bytes, limit_s=None)

    def start(self, asking: Coroutine[Any, Any, Answer]) -> "Future[Answer]":
        """Run a coroutine of this server's; raise a ``ServerError`` once it is closed."""
        with self._is_starting:
            if self._is_closed:
                asking.close()
                raise ServerError(f"the connection to {self.address} is closed")
            return asyncio.run_coroutine_threadsafe(asking, self._loop)

    def close(self) -> None:
        """Hang up on what is still asked, and end the thread."""
        hanging_up = self.start(self._hang_up())
        with self._is_starting:
            self._is_closed = True
        hanging_up.result(_CLOSE_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_LIMIT_S)
        self._loop.close()

    async def _hang_up(self) -> None:
        asking = asyncio.all_tasks() - {asyncio.current_task()}
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await self._client.aclose()

    def _result(self, asking: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            return self.start(asking).result()
        except CancelledError:
            raise ServerError(f"the connection to {self.address} was closed") from None

    async def _post(self, path: str, body: object, *, most_bytes: int, limit_s: float | None) -> Any:
        said = await self._said("POST", path, body, most_bytes=most_bytes, limit_s=limit_s)
        try:
            return json.loads(said)
        except (ValueError, RecursionError) as error:
            what = f"{self.address}{path} does not answer with JSON: {said[:200]!r}"
            raise ServerError(what, status=httpx.codes.OK) from error

    async def _said(
        self, method: str, path: str, body: object = None, *, most_bytes: int, limit_s: float | None
    ) -> bytes:
        said = bytearray()
        try:
            async with (
                asyncio.timeout(limit_s),
                self._client.stream(method, self.address + path, json=body) as response,
            ):
                async for chunk in response.aiter_raw():
                    said += chunk
                    if len(said) > most_bytes:
                        what = f"{self.address}{path} answers with more than {most_bytes} bytes"
                        raise ServerError(what, status=response.status_code)
        except TimeoutError:
            raise ServerError(f"{self.address}{path} does not answer within {limit_s} s") from None
        except httpx.HTTPError as error:
            raise ServerError(f"{self.address}{path} cannot be reached: {error!r}") from error
        if response.status_code != httpx.codes.OK:
            what = f"HTTP {response.status_code}: {bytes(said[:300]).decode(errors='replace')}"
            raise ServerError(f"{self.address}{path} refuses: {what}", status=response.status_code)
        return bytes(said)
