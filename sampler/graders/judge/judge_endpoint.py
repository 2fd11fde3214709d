"""Which judge a sampler asks, and with which key: its owner's to say, never the run's."""

import os
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sampler.api_key import api_key_in, checked_key


class JudgeEndpoint(BaseModel):
    """Section ``[sampler.judge]`` or ``[verifier.judge]``. Without it this peer asks no judge, whatever the
    run wants."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    url: str = Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$")
    """Base of an OpenAI-compatible API, such as ``https://api.example.org/v1``; ``/chat/completions`` is
    appended. Redirects are not followed."""

    models: tuple[str, ...] = Field(min_length=1)
    """Models that a run may ask for. Each completion costs a request, at this sampler's expense."""

    api_key_file: Path | None = None
    """File with the API key. Unset, and ``api_key_env`` too: none is sent."""

    api_key_env: str | None = None
    """Environment variable with the API key."""

    timeout_s: float = Field(default=20.0, gt=0, le=600)
    """Longest time for one request, from asking to the end of the answer."""

    concurrency: int = Field(default=8, ge=1, le=256)
    """Requests at once, of each grader process; ``grader_processes`` bounds these."""

    attempts: int = Field(default=4, ge=1, le=20)
    """Requests for one completion at most. After the last the group is given back."""

    @model_validator(mode="after")
    def _has_one_key(self) -> Self:
        if self.api_key_file is not None and self.api_key_env is not None:
            raise ValueError("api_key_file and api_key_env are both set: leave one out")
        return self

    def api_key(self) -> str | None:
        """Return the key; None: none is sent. StartupError if there is none where the configuration says."""
        if self.api_key_file is not None:
            return api_key_in(self.api_key_file, setting="judge.api_key_file")
        if self.api_key_env is not None:
            return checked_key(
                os.environ.get(self.api_key_env, ""),
                where=f"The variable {self.api_key_env}",
                fix="Set it, or correct judge.api_key_env.",
            )
        return None
