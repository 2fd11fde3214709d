"""The torch engine: a transformers causal language model, each running completion one row of a batch.

    add -> pending -> prefilled once per prompt, repeated per completion -> rows -> finished

A row is its tokens. The cache covers all but the last, which is the input of the next step. So new weights in
mid-generation cost one more prefill: ``serve`` discards the cache and computes it again from prompt and
generated tokens, and every later logprob is exactly that of the new weights. The price is one forward pass
over all running tokens per version, as much as decoding them once as a batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from node.errors import Reason, RefusedError, StartupError
from node.rollout import Finish
from node.tokenizer import tokenizer_digest
from node.weights.format.dtypes import BFLOAT16
from node.weights.format.layout import Layout
from node.weights.format.model_files import StoredDtypes
from node.weights.format.model_tensors import canonical_tensors, tensor_specs
from sampler.engines.engine import EngineSettings, FinishedRequest, GenerationRequest, SampledCompletion
from sampler.engines.kv_cache import KeyValueCache
from sampler.engines.prompt_encoding import encode_prompt
from sampler.engines.sampling_distribution import RowSampling, sampling_distribution
from sampler.engines.torch_words import LiveTensors, aliases


@dataclass(slots=True, eq=False)
class _Running:
    """A request with what is finished of it, by completion."""

    request: GenerationRequest
    done: dict[int, SampledCompletion] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Row:
    """One unfinished completion."""

    running: _Running
    number: int
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    kept_masses: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def completion(self, finish: Finish) -> SampledCompletion:
        generated = len(self.logprobs)
        is_truncated = self.running.request.sampling.is_truncated
        return SampledCompletion(
            token_ids=np.array(self.tokens[-generated:], np.int32),
            behaviour_logprob=np.array(self.logprobs, np.float32),
            policy_version=np.array(self.versions, np.int32),
            finish=finish,
            kept_mass=np.array(self.kept_masses, np.float32) if is_truncated else None,
        )


def load(settings: EngineSettings) -> "TorchEngine":
    """Load the engine that ``sampler.engine = "torch"`` names; see ``TorchEngine``."""
    return TorchEngine(
        settings.model_dir,
        device=settings.device,
        compute_dtype=torch.float32 if settings.compute_dtype == "float32" else torch.bfloat16,
        threads=settings.threads,
        seed=settings.seed,
    )


class TorchEngine:
    """See ``sampler.engines.engine.Engine``."""

    def __init__(
        self, model_dir: Path, *, device: str, compute_dtype: torch.dtype, threads: int, seed: int | None
    ) -> None:
        """Load the base model, rounded to the dtypes of its files, as version 0.

        Args:
            model_dir: Holds safetensors weights and a fast tokenizer.
            compute_dtype: bfloat16 or float32; float32 holds published floats exactly.
            threads: For tensor work of the whole process; 0 leaves the choice to torch.
            seed: Of the sampling; None: a random one.

        Raises:
            StartupError: the directory holds no such model, or this machine lacks the device.
        """
        if threads:
            torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._digest = tokenizer_digest(model_dir)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
            stored = StoredDtypes.of(model_dir)
            self._model = _load_model(model_dir, compute_dtype)
            self._model.to(device)  # type: ignore[arg-type]  # transformers' wrapper hides the signature
            self._generator = torch.Generator(device)
        except (OSError, ValueError, RuntimeError) as error:
            raise StartupError(
                f"the model in {model_dir} does not load on {device}: {error}",
                fix="Set sampler.model_dir to a model saved as safetensors, sampler.device to a device here",
            ) from error
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._model.requires_grad_(False).train(False)
        same, state = aliases(self._model), self._model.state_dict()
        tensors = {name: same[tensor.data_ptr()] for name, tensor in canonical_tensors(state).items()}
        self._layout = Layout.of(tensor_specs(state, stored))
        del state
        self._weights = LiveTensors(
            tensors,
            layout=self._layout,
            dtype=compute_dtype,
            device=torch.device(device),
            exact={} if compute_dtype is torch.float32 else _exact(model_dir, self._layout),
        )
        self._end_ids = _end_ids(self._model, self._tokenizer)
        self._version = 0
        self._pending: list[_Running] = []
        self._rows: list[_Row] = []
        self._cache: KeyValueCache | None = None

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def weights(self) -> LiveTensors:
        return self._weights

    @property
    def tokenizer_digest(self) -> bytes:
        return self._digest

    @property
    def running(self) -> int:
        return len(self._pending) + len({id(row.running) for row in self._rows})

    @property
    def waiting(self) -> int:
        return len(self._pending)

    def encode(self, prompt: str | Sequence[Mapping[str, str]]) -> NDArray[np.int32]:
        return encode_prompt(self._tokenizer, prompt)

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def add(self, request: GenerationRequest) -> None:
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        tokens = len(request.prompt_token_ids) + request.sampling.max_new_tokens
        if not len(request.prompt_token_ids) or (limit is not None and tokens > limit):
            raise RefusedError(
                Reason.OVER_LIMIT,
                f"a prompt of {len(request.prompt_token_ids)} tokens and completions of up to "
                f"{request.sampling.max_new_tokens} do not fit the model, which takes {limit} together",
                fix="lower coordinator.max_new_tokens or choose a task with shorter prompts",
            )
        self._pending.append(_Running(request))

    def cancel(self, request_ids: Sequence[str]) -> None:
        gone = frozenset(request_ids)
        self._pending = [r for r in self._pending if r.request.request_id not in gone]
        self._keep([row.running.request.request_id not in gone for row in self._rows])

    @torch.inference_mode()
    def step(self) -> list[FinishedRequest]:
        self._take_pending()
        if self._cache is None:
            return []
        device = self._cache.mask.device
        logits = self._model(
            input_ids=torch.tensor([[row.tokens[-1]] for row in self._rows], device=device),
            position_ids=self._cache.lengths().unsqueeze(-1),
            attention_mask=self._cache.mask_with_next().long(),
            past_key_values=self._cache.past,
            use_cache=True,
        ).logits[:, -1]
        self._cache.take_appended()
        sampling = RowSampling.of([row.running.request.sampling for row in self._rows], device=device)
        logprob, kept_mass = sampling_distribution(logits, sampling)
        drawn = torch.multinomial(logprob.exp(), 1, generator=self._generator)
        drawn_logprob = logprob.gather(-1, drawn).clamp(max=0.0)
        return self._append(
            drawn.squeeze(-1).tolist(), drawn_logprob.squeeze(-1).tolist(), kept_mass.tolist()
        )

    @torch.inference_mode()
    def serve(self, version: int) -> None:
        if version < self._version:
            raise ValueError(f"version {version} is older than {self._version}, which is being served")
        self._version = version
        if self._rows:
            self._cache = self._prefilled([row.tokens for row in self._rows])

    def close(self) -> None:
        self._pending, self._rows, self._cache = [], [], None

    def _take_pending(self) -> None:
        if not self._pending:
            return
        rows: list[_Row] = []
        repeats: list[int] = []
        prompts = [running.request.prompt_token_ids.tolist() for running in self._pending]
        for number, (running, prompt) in enumerate(zip(self._pending, prompts, strict=True)):
            rows += [_Row(running, n, list(prompt)) for n in range(running.request.completions)]
            repeats += [number] * running.request.completions
        cache = self._prefilled(prompts).rows(repeats)
        self._pending = []
        self._rows += rows
        self._cache = cache if self._cache is None else self._cache.joined(cache)

    def _prefilled(self, rows: Sequence[Sequence[int]]) -> KeyValueCache:
        """Return the cache of all but the last token of each row."""
        device = self._model.device
        width = max(1, max(len(tokens) for tokens in rows) - 1)
        ids = torch.zeros((len(rows), width), dtype=torch.long, device=device)
        mask = torch.zeros((len(rows), width), dtype=torch.bool, device=device)
        for number, tokens in enumerate(rows):
            if len(tokens) > 1:
                ids[number, 1 - len(tokens) :] = torch.tensor(tokens[:-1], device=device)
                mask[number, 1 - len(tokens) :] = True
        past = DynamicCache()
        self._model.base_model(
            input_ids=ids,
            position_ids=(mask.cumsum(dim=-1) - 1).clamp(min=0),
            attention_mask=mask.long(),
            past_key_values=past,
            use_cache=True,
        )
        return KeyValueCache(past, mask)

    def _append(
        self, tokens: Sequence[int], logprobs: Sequence[float], kept_masses: Sequence[float]
    ) -> list[FinishedRequest]:
        finished: list[FinishedRequest] = []
        unfinished: list[bool] = []
        drawn = zip(self._rows, tokens, logprobs, kept_masses, strict=True)
        for row, token, logprob, kept_mass in drawn:
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.kept_masses.append(kept_mass)
            row.versions.append(self._version)
            ended = token in self._end_ids
            unfinished.append(not ended and len(row.logprobs) < row.running.request.sampling.max_new_tokens)
            if not unfinished[-1]:
                running = row.running
                running.done[row.number] = row.completion(Finish.END if ended else Finish.LENGTH)
                if len(running.done) == running.request.completions:
                    completions = tuple(running.done[n] for n in range(running.request.completions))
                    finished.append(FinishedRequest(running.request.request_id, completions))
        self._keep(unfinished)
        return finished

    @torch.inference_mode()
    def _keep(self, wanted: Sequence[bool]) -> None:
        """Drop the rows that are not wanted. Costs a copy of the cache, as every decode step does."""
        if all(wanted):
            return
        kept = [number for number, is_wanted in enumerate(wanted) if is_wanted]
        self._rows = [self._rows[number] for number in kept]
        self._cache = self._cache.rows(kept) if self._cache is not None and kept else None


def _exact(model_dir: Path, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors that bfloat16 does not hold exactly; the model is read again if there are any."""
    names = {span.name for span in layout.tensors if span.dtype.is_floating and span.dtype is not BFLOAT16}
    if not names:
        return {}
    state = canonical_tensors(_load_model(model_dir, torch.float32).state_dict())
    return {name: tensor for name, tensor in state.items() if name in names}


def _load_model(model_dir: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    model: transformers.PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model_dir, local_files_only=True, use_safetensors=True, dtype=dtype
    )
    return model


def _end_ids(
    model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase
) -> frozenset[int]:
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = tokenizer.eos_token_id if configured is None else configured
    return frozenset([ids] if isinstance(ids, int) else ids or ())
