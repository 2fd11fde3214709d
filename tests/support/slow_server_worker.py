"""A worker that takes its time for each token, so that what happens to a server happens amid completions."""

import time
from typing import Any, Final

from sampler.engines.vllm.vllm_worker import SamplerWorker

TOKEN_S: Final = 0.03


class SlowServerWorker(SamplerWorker):
    def begin_session(self, session: str, seed: str) -> dict[str, Any] | str:
        answer = super().begin_session(session, seed)
        sampler = self.model_runner.sampler
        sample = sampler.sample

        def slow(*arguments: Any, **named: Any) -> Any:
            time.sleep(TOKEN_S)
            return sample(*arguments, **named)

        sampler.sample = slow
        return answer
