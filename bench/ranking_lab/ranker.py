"""The sampler's engine, driven by hand: serves versions, ranks rows and grades the rankings."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from node.kinds.ranking.task import RankingTask
from node.kinds.ranking.values import as_text
from node.values.rollout import Completion, RolloutGroup
from node.values.sampling_parameters import SamplingParameters
from sampler.config import SamplerConfig
from sampler.engines.engine import GenerationRequest
from sampler.engines.engine_registry import load_engine
from sampler.engines.words.model_words import ArrayWords, copy_words
from sampler.tasks.task import CompletionText

Row = Mapping[str, Any]

_SAMPLED: Final = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8)
_GREEDY: Final = replace(_SAMPLED, top_k=1)


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a task."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class Ranker:
    """An engine and the task ``ranking`` with nDCG as its reward."""

    def __init__(self, model_dir: Path, *, seed: int) -> None:
        self._engine = load_engine("auto", SamplerConfig(model_dir=model_dir, threads=1, seed=seed))
        self._task = RankingTask()

    def serve(self, version: int, words: NDArray[np.uint16]) -> None:
        """Rank by a version from now on, which is none older than before."""
        copy_words(ArrayWords(words), self._engine.weights.live, layout=self._engine.layout)
        self._engine.weights.settle()
        self._engine.serve(version)

    def groups(self, rows: Sequence[Row], first: int, *, size: int) -> list[RolloutGroup]:
        """Return ``size`` graded rankings of each row that were drawn; groups are numbered from ``first``."""
        return [
            RolloutGroup(
                run_id="lab",
                group_id=f"{number}.1",
                layout_digest=self._engine.layout.digest,
                tokenizer_digest=self._engine.tokenizer.digest,
                task="ranking",
                prompt_index=number,
                sampling=_SAMPLED,
                sampling_started_at_s=0.0,
                sampling_finished_at_s=0.0,
                graded_at_s=0.0,
                prompt_token_ids=ranked.prompt_token_ids,
                completions=tuple(replace(one, reward=self._reward(row, one)) for one in ranked.completions),
                sampler_id="lab",
            )
            for number, (row, ranked) in enumerate(
                zip(rows, self._ranked(rows, size, _SAMPLED), strict=True), first
            )
        ]

    def score(self, rows: Sequence[Row]) -> float:
        """Return the mean nDCG of each row's likeliest ranking."""
        ranked = self._ranked(rows, 1, _GREEDY)
        return fmean(self._reward(row, *its.completions) for row, its in zip(rows, ranked, strict=True))

    def _ranked(
        self, rows: Sequence[Row], wanted: int, sampling: SamplingParameters
    ) -> list[GenerationRequest]:
        for row in rows:
            prompt = self._engine.tokenizer.encode(as_text(row["query"], row["candidates"]))
            self._engine.add(GenerationRequest("lab", prompt, wanted, sampling))
        ranked: list[GenerationRequest] = []
        while self._engine.running:
            ranked += self._engine.step()
        return ranked

    def _reward(self, row: Row, completion: Completion) -> float:
        text = self._engine.tokenizer.decode(completion.token_ids)
        graded = self._task.grade(0, row, CompletionText(text, len(completion.token_ids), "end"))
        assert isinstance(graded, tuple)
        reward, _ = graded
        assert reward is not None, "a ranking's grader does not abstain"
        return reward
