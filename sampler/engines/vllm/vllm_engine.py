"""The vLLM engine: vLLM's own scheduler in this process, its kernels here or in a process for each device.

    add -> vLLM's queue -> its batch, one token per step -> finished

New weights are written over the old ones between two steps (``vllm_worker``). Then either every running
request is preempted and its cache computed again, so that every later logprob is exactly that of the new
weights (``kv_cache = "recompute"``), or running requests go on with the keys and values they have
(``"keep"``): their logprobs are still those the tokens were drawn from, but of no version. No new request is
given a prefix that other weights computed. vLLM names the version of each token.
"""

import gc
import logging
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from node.errors import ConfigError, Reason, RefusedError, StartupError
from node.values.groups.rollout import Completion
from sampler.engines.engine import (
    CPU_ROWS,
    TEXT_PROBE,
    EngineSettings,
    EngineUse,
    GenerationRequest,
    check_fits,
)
from sampler.engines.engine_options import VllmOptions
from sampler.engines.stepping import StepExchange, StepResults, keep_stepping
from sampler.engines.text.model_tokenizer import ModelTokenizer
from sampler.engines.vllm.completions import completion_of, sampling_arguments
from sampler.engines.words.frame_memory import Rooms, make_frame_memory, remove_frame_memory
from sampler.engines.words.model_words import THREADS, LiveWords
from sampler.engines.words.shared_words import SharedWords

# Read by vLLM when it is imported.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # it takes a step when it is told to, and none between
    VLLM_WORKER_MULTIPROC_METHOD="spawn",  # a fork would have half of this process's threads' locks
    VLLM_USE_V2_MODEL_RUNNER="0",  # the sampler of the other one cannot be replaced
    VLLM_CONFIGURE_LOGGING="0",
    VLLM_NO_USAGE_STATS="1",
)
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
logging.getLogger("vllm").setLevel(logging.ERROR)  # its warnings are about choices made here

from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.llm_engine import LLMEngine

from sampler.engines.vllm.model_directory import DeclaredTensors
from sampler.engines.vllm.shared_names import named_here, note_queues, remove_queue_names

CPU_KV_CACHE_BYTES: Final = 1 << 30
"""Keys and values on a CPU unless configured: 40 000 tokens of a model of 135 M parameters."""

note_queues()
_set_num_threads = torch.set_num_threads  # vLLM replaces it for the whole process


class WorkerRefusedError(RuntimeError):
    """A worker cannot do what it is asked; ``str()`` says why."""


class VllmEngine:
    """See ``sampler.engines.engine.Engine``."""

    probe: Final = TEXT_PROBE

    def __init__(self, settings: EngineSettings) -> None:
        """Load the base model and verify it against its files; StartupError if vLLM cannot serve it."""
        if settings.apply == "spare":
            raise StartupError(
                "the vllm engine writes new versions over the old one: its parameters cannot move",
                fix='Leave sampler.apply out, or set sampler.apply = "in_place".',
            )
        options = VllmOptions.model_validate(settings.engine_options)
        model_dir = settings.model_dir
        self._threads = settings.threads or torch.get_num_threads()
        self._thread: int | None = None
        self._workers_answer = threading.Lock()
        self._keeps_cache = options.kv_cache == "keep"
        self._running: dict[str, GenerationRequest] = {}
        self._version = 0
        self.use = EngineUse()
        self._changes = 0
        """Changes of the words; a version that was damaged is written again."""
        session = secrets.token_hex(16)
        seed = secrets.randbits(31) if settings.seed is None else settings.seed % (1 << 31)
        try:
            self.tokenizer = ModelTokenizer(model_dir)
            self.layout = DeclaredTensors.of(model_dir).layout
            arguments = _arguments(settings, options, seed=seed)
            self._take_thread()
            with named_here() as directory:
                # Of what is not said, vLLM chooses what draws most tokens, not what answers soonest.
                self._engine: Any = LLMEngine.from_engine_args(
                    arguments, usage_context=UsageContext.LLM_CLASS
                )
                rooms = self._rooms(directory, session, options.tensor_parallel)
                held = self._ask("begin_session", session, str(seed))
                self._ask("end_with_the_sampler")
            remove_queue_names()
        except ConfigError:
            raise
        except WorkerRefusedError as error:
            self.close()
            raise StartupError(str(error), fix="Set sampler.engine = 'torch'.") from error
        except Exception as error:  # of any kind: vLLM raises what its models' code raises
            raise StartupError(
                f"vLLM does not load the model in {model_dir} on {settings.device}: {error}",
                fix="Change sampler.engine_options, sampler.model_dir or sampler.device, "
                'or set sampler.engine = "torch".',
            ) from error
        finally:
            torch.set_num_threads = _set_num_threads
        self.weights: LiveWords
        if rooms is None:
            self.weights = self._engine.model_executor.driver_worker.worker.sampler_words
        else:
            self.weights = SharedWords(
                self.layout,
                rooms,
                move=partial(self._ask, "move_frames", session),
                settle=partial(self._ask, "settle_frames", session),
                elements=[worker["elements"] for worker in held],
            )
        self._most_rows: int = self._engine.vllm_config.scheduler_config.max_num_seqs
        if settings.device == "cpu":
            self._most_rows = min(self._most_rows, CPU_ROWS)
        self._context_tokens: int = self._engine.model_config.max_model_len
        self._engine.set_weight_version("0")

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return sum(not self._has_begun(request_id) for request_id in list(self._running))

    def _has_begun(self, request_id: str) -> bool:
        """Return whether one of the request's completions has a token."""
        outputs = self._engine.output_processor
        states = map(outputs.request_states.get, list(outputs.external_req_ids.get(request_id, ())))
        return any(state is not None and state.detokenizer.num_output_tokens() for state in states)

    def add(self, request: GenerationRequest) -> None:
        larger = "raise context_tokens in sampler.engine_options"
        check_fits(request, self._context_tokens, what="the engine", or_raise=larger)
        try:
            self._engine.add_request(
                request.request_id,
                # Prefixes are shared among requests of one salt only: none outlives the words it is of.
                tokens_input(request.prompt_token_ids.tolist(), cache_salt=str(self._changes)),
                SamplingParams(
                    **sampling_arguments(request, count=request.wanted, end_ids=self.tokenizer.end_ids),
                    flat_logprobs=True,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                ),
            )
        except ValueError as error:
            raise RefusedError(Reason.MALFORMED, f"vLLM refuses the request: {error}") from error
        self._running[request.request_id] = request

    def cancel(self, request_ids: Sequence[str]) -> None:
        known = [request_id for request_id in request_ids if self._running.pop(request_id, None)]
        if known:
            self._engine.abort_request(known)

    def step(self) -> list[GenerationRequest]:
        return self._step() + self._finish_steps()

    def step_on(self, exchange: StepExchange) -> None:
        keep_stepping(self, exchange, step=self._step)
        if finished := self._finish_steps():
            exchange.tell(StepResults(finished))

    def serve(self, version: int) -> None:
        if version < self._version:
            raise ValueError(f"version {version} is older than {self._version}, which is being served")
        self._version = version
        self._changes += 1
        if not self._keeps_cache:
            self._engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.set_weight_version(str(version))

    def close(self) -> None:
        self._running = {}
        self._engine.engine_core.shutdown()
        vars(self).pop("weights", None)
        del self._engine
        gc.collect()
        cleanup_dist_env_and_memory()

    def _step(self) -> list[GenerationRequest]:
        """Take a step, or with async scheduling begin one and end the one before."""
        self._take_thread()
        with self._workers_answer:
            outputs = self._engine.step()
        self.use = self._use()
        return [
            replace(
                request,
                completions=tuple(
                    _completion(completion, request)
                    for completion in sorted(output.outputs, key=lambda completion: completion.index)
                ),
            )
            for output in outputs
            if output.finished and (request := self._running.pop(output.request_id, None)) is not None
        ]

    def _finish_steps(self) -> list[GenerationRequest]:
        """End the steps that have begun, with the words and under the version that they began with."""
        core = self._engine.engine_core.engine_core
        if not core.batch_queue:
            return []
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            return [request for _ in range(len(core.batch_queue)) for request in self._step()]
        finally:
            core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _use(self) -> EngineUse:
        scheduler = self._engine.engine_core.engine_core.scheduler
        drawn, waiting = scheduler.get_request_counts()
        return EngineUse.of(
            places_share=(drawn + waiting) / self._most_rows,
            waiting=waiting,
            wanted=sum(request.wanted for request in self._running.values()),
            cache_share=scheduler.get_kv_cache_usage(),
        )

    def _rooms(self, directory: Path, session: str, workers: int) -> Rooms | None:
        """Share memory with several workers; one is in this process."""
        if workers == 1:
            return None
        memory = f"frames-{session}"
        rooms = make_frame_memory(directory, memory, slots=THREADS, workers=workers)
        self._ask("offer_memory", memory)
        remove_frame_memory(directory, memory)
        return rooms

    def _ask(self, method: str, *arguments: str) -> list[Any]:
        """Call a method of every worker once their step has ended; WorkerRefusedError if one says why not."""
        with self._workers_answer:
            answers: list[Any] = self._engine.collective_rpc(method, args=arguments)
        for answer in answers:
            if isinstance(answer, str):
                raise WorkerRefusedError(answer)
        return answers

    def _take_thread(self) -> None:
        """Set the number of threads for tensor work, which each thread has for itself."""
        if self._thread != threading.get_ident():
            self._thread = threading.get_ident()
            _set_num_threads(self._threads)


def _completion(drawn: Any, request: GenerationRequest) -> Completion:
    return completion_of(
        request,
        token_ids=drawn.token_ids,
        logprobs=drawn.logprobs.logprobs,
        ranks=drawn.logprobs.ranks,
        versions=[(span.start, span.end, int(span.version)) for span in drawn.weight_versions],
        reasons=(drawn.finish_reason, drawn.stop_reason),
    )


def _arguments(settings: EngineSettings, options: VllmOptions, *, seed: int) -> EngineArgs:
    is_cpu = settings.device == "cpu"
    try:
        return EngineArgs(
            **{
                "model": str(settings.model_dir),
                "trust_remote_code": False,
                "dtype": settings.compute_dtype,
                "seed": seed,
                # -1: as much as the memory holds of what the model allows.
                "max_model_len": options.context_tokens or -1,
                "max_num_seqs": options.batch,
                "gpu_memory_utilization": options.memory_share,
                "kv_cache_memory_bytes": options.kv_cache_bytes or (CPU_KV_CACHE_BYTES if is_cpu else None),
                "enforce_eager": is_cpu,
                # Other kernels for GPUs permute the words of experts.
                "moe_backend": "auto" if is_cpu else "triton",
                "logprobs_mode": "processed_logprobs",
                "async_scheduling": options.async_scheduling,
                "device_ids": options.device_ids(settings.device),
                "tensor_parallel_size": options.tensor_parallel,
                "distributed_executor_backend": "uni" if options.tensor_parallel == 1 else "mp",
                "worker_extension_cls": "sampler.engines.vllm.vllm_worker.SamplerWorker",
                "disable_log_stats": True,
                **options.extra_arguments,
            }
        )
    except TypeError as error:
        raise ConfigError(
            key="sampler.engine_options.extra_arguments",
            value=dict(options.extra_arguments),
            source="the configuration",
            rule=f"are not arguments of vLLM's engine: {error}",
            fix="Correct them; vLLM's documentation lists its engine arguments.",
        ) from error
