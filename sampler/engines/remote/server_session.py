"""A sampler's hold on a server: from when the server has the base model, until one of the two is gone.

    wait for it -> look at its settings -> share memory -> pause -> begin: base model -> resume
                                                                          |
                                          a version:  pause -> frames -> name it -> resume

A lock on the weights directory keeps a second sampler away, and ends with this process. The server knows the
session by a random name; one that was started again knows none, and is found by that before anything it
wrote is believed.
"""

import logging
import secrets
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from node.errors import StartupError
from node.system.file_lock import FileLock
from node.text.text_rules import differing_rules
from node.values.groups.rollout import Completion
from node.values.groups.sampling_parameters import SamplingParameters
from node.weights.format.layout import Layout
from sampler.engines.engine import GenerationRequest
from sampler.engines.engine_options import RemoteOptions
from sampler.engines.remote.vllm_server import GENERATE, ServerError, VllmServer
from sampler.engines.text.model_tokenizer import ModelTokenizer
from sampler.engines.vllm.completions import (
    completions_in,
    most_answer_bytes,
    sampling_arguments,
    version_label,
)
from sampler.engines.words.frame_memory import DIRECTORY_VARIABLE, make_frame_memory, remove_frame_memory
from sampler.engines.words.model_words import THREADS
from sampler.engines.words.shared_words import SharedWords

logger = logging.getLogger(__name__)

RETRY_S: Final = 1.0
"""Between two attempts to connect to a server that does not answer: it takes seconds to minutes to start."""

REFUSED_S: Final = 30.0
"""For how long a server that answers with HTTP 5xx may be on its way down, to be started again."""

_WORKER: Final = "sampler.engines.vllm.vllm_worker.SamplerWorker"


class ServerSession:
    """One session with one server.

    Attributes:
        is_paused: No token is drawn.
        name: Random, of 32 hexadecimal digits.
        context_tokens: Most tokens of prompt and completion together.
        batch: Most completions that can be asked for in one request.
    """

    def __init__(
        self,
        options: RemoteOptions,
        *,
        layout: Layout,
        tokenizer: ModelTokenizer,
        compute_dtype: str,
        seed: int,
    ) -> None:
        """Wait for the server and have it hold the base model; StartupError if it cannot be used."""
        self._options = options
        self._layout = layout
        self._rules = tokenizer.rules
        self._end_ids = tokenizer.end_ids
        self._compute_dtype = compute_dtype
        self._seed = seed
        self._lost: str | None = None
        self._changes = 0
        """Changes of the words; a version that was damaged is written again."""
        self.is_paused = False
        self.name = secrets.token_hex(16)
        self.words: SharedWords
        self.context_tokens: int
        self.batch: int
        api_key = options.api_key()
        self._lock = _locked(options.weights_dir)
        self.server = VllmServer(options, api_key=api_key)
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def pause(self) -> None:
        """Stop the server from drawing tokens until ``resume``; those that it is drawing come first."""
        if not self.is_paused:
            self.server.call("/pause?mode=keep&clear_cache=false")
            self.is_paused = True

    def resume(self, version: int) -> None:
        """Let the server draw tokens again, which name ``version``."""
        if self._options.kv_cache == "recompute":
            dropped = self.server.call("/reset_prefix_cache?reset_running_requests=true")
            if dropped != {"success": True}:
                raise self._garbled(dropped)
        self._changes += 1
        self.server.call("/update_weight_version", {"new_version": version_label(self.name, version)})
        self.server.call("/resume")
        self.is_paused = False

    def count_tokens(self) -> Mapping[str, int]:
        """Return how many tokens were drawn for each running request, by its number."""
        counts: Mapping[str, int] = self._ask("count_tokens")[0]
        if not isinstance(counts, dict):
            raise self._garbled(counts)
        return counts

    async def completions(self, request: GenerationRequest, *, count: int, number: int) -> list[Completion]:
        """Ask for ``count`` completions of this request; ServerError if the answer is none of its."""
        limit = most_answer_bytes(request, count=count)
        answer = await self.server.generate(self._body(request, count, number), most_bytes=limit)
        return self._read(answer, request, count)

    def _body(self, request: GenerationRequest, count: int, number: int) -> Mapping[str, Any]:
        return {
            "request_id": f"{self.name}.{number}",
            "token_ids": request.prompt_token_ids.tolist(),
            # Requests of one salt share prefixes: another one for other words, so that none outlives them.
            "cache_salt": f"{self.name}.{self._changes}",
            "sampling_params": sampling_arguments(request, count=count, end_ids=self._end_ids),
        }

    def _read(self, answer: Any, request: GenerationRequest, count: int) -> list[Completion]:
        try:
            return completions_in(answer, request, count=count, session=self.name)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise self._garbled(error) from error

    def _garbled(self, what: object) -> ServerError:
        """Return the error for an answer of the wrong form."""
        what = f"{self.server.address} answers otherwise than vLLM 0.32 does: {what!r:.500}"
        return ServerError(what, status=200)

    def close(self) -> None:
        """Hang up. The server keeps its words, until it is connected to again."""
        vars(self).pop("words", None)
        self.server.close()
        self._lock.release()

    def _ask(self, method: str, *arguments: str) -> list[Any]:
        """Ask the workers within this session, which is over once they fail: they may still do it, later."""
        if self._lost is not None:
            raise ServerError(self._lost)
        try:
            return self.server.ask_workers(method, self.name, *arguments)
        except ServerError as error:
            self._lost = str(error)
            raise

    def _connect(self) -> None:
        began_s = time.monotonic()
        is_logged = False
        while True:
            try:
                return self._begin()
            except ServerError as error:
                limit_s = self._options.start_limit_s
                if error.status is not None:
                    limit_s = min(limit_s, REFUSED_S) if error.status >= 500 else 0.0
                if time.monotonic() - began_s >= limit_s:
                    raise StartupError(f"the vLLM server cannot be used: {error}", fix=_fix(error)) from error
                if not is_logged:
                    is_logged = True
                    logger.warning("waiting for the vLLM server", extra={"detail": str(error)})
            time.sleep(RETRY_S)

    def _begin(self) -> None:
        described = self.server.ask_workers("describe_server")
        settings = described[0]
        _check_settings(settings, compute_dtype=self._compute_dtype, workers=len(described))
        directory, memory = self._options.weights_dir, f"frames-{self.name}"
        try:
            rooms = make_frame_memory(directory, memory, slots=THREADS, workers=len(described))
        except OSError as error:
            raise _unusable(directory, error) from error
        try:
            self.server.ask_workers("offer_memory", memory)
        finally:
            remove_frame_memory(directory, memory)
        self.server.call("/pause?mode=abort")  # what runs there is of a session before this one
        self.is_paused = True
        held = self.server.ask_workers(
            "begin_session", self.name, str(self._seed), limit_s=self._options.start_limit_s
        )
        try:
            layouts = {worker["layout"] for worker in held}
            texts = {worker.get("text") for worker in held}
            differs = differing_rules(str(held[0].get("text_summary", "")), self._rules.summary)
            elements = [worker["elements"] for worker in held]
            self.context_tokens, self.batch = int(settings["context_tokens"]), int(settings["batch"])
        except (LookupError, TypeError, ValueError) as error:
            raise self._garbled(error) from error
        if layouts != {self._layout.digest.hex()}:
            raise StartupError(
                f"the vLLM server serves {settings['model']}, another model than sampler.model_dir",
                fix="Serve a copy of the same directory.",
            )
        if texts != {self._rules.digest.hex()}:
            raise StartupError(
                f"the vLLM server, with {settings['model']}, reads texts otherwise than this sampler: "
                f"{differs or 'it does not say how'}",
                fix="Serve a copy of sampler.model_dir, with this sampler's version of heterorl-node.",
            )
        self.words = SharedWords(
            self._layout,
            rooms,
            move=partial(self._ask, "move_frames"),
            settle=partial(self._ask, "settle_frames"),
            elements=elements,
            before_writing=self.pause,
        )
        self.resume(0)
        self._try_out()

    def _try_out(self) -> None:
        """Ask for one token: what stands in the way of completions is found at the start."""
        sampling = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1)
        request = GenerationRequest("", np.zeros(1, np.int32), 1, sampling)
        self._read(self.server.call(GENERATE, self._body(request, 1, 0)), request, 1)


def _locked(directory: Path) -> FileLock:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(directory, error) from error
    return FileLock.take(
        directory / "lock",
        of=f"the vLLM server of {directory}",
        fix="Give each sampler a server and a weights_dir of its own.",
    )


def _unusable(directory: Path, error: OSError) -> StartupError:
    return StartupError(
        f"weights_dir = {directory} cannot be used: {error}",
        fix="Make room there, or let this user own it with mode 0700, or set another, in "
        f"sampler.engine_options and in the server's {DIRECTORY_VARIABLE}.",
    )


def _check_settings(settings: Any, *, compute_dtype: str, workers: int) -> None:
    """Raise a StartupError unless the server was started as a sampler needs it."""
    replica = "Start a server, with a sampler, for each replica of the model."
    needed: Mapping[str, tuple[object, str]] = {
        "data_parallel": (1, replica),
        "workers": (workers, replica),
        "pipeline_parallel": (1, "Share the model by --tensor-parallel-size."),
        "async_scheduling": (False, "Start it with --no-async-scheduling."),
        "v2_model_runner": (False, "Start it with VLLM_USE_V2_MODEL_RUNNER=0."),
        "speculative_decoding": (False, "Start it without --speculative-config."),
        "dtype": (compute_dtype, f"Start it with --dtype {compute_dtype}, or set sampler.compute_dtype."),
    }
    for name, (value, fix) in needed.items():
        found = settings.get(name) if isinstance(settings, dict) else settings
        if found != value:
            raise StartupError(f"the vLLM server has {name} = {found!r}, needed is {value!r}", fix=fix)


def _fix(error: ServerError) -> str:
    match error.status:
        case None:
            return "Start it, or correct address or start_limit_s in sampler.engine_options."
        case 401:
            return "Set api_key_file in sampler.engine_options."
        case 403:
            return "Start it with --enable-scale-out."
        case 404:
            return "Start it with VLLM_SERVER_DEV_MODE=1; it must be vLLM 0.32."
        case 500:
            return f"Start it with --worker-extension-cls {_WORKER}, and see what it logged."
        case _:
            return "See what it logged, and how it is to be started: deploy/config/recipes/own-server."
