"""Options of the remote engine."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from sampler.api_key import api_key_in


class RemoteOptions(BaseModel):
    """Table ``[sampler.engine_options]`` where the engine is remote."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    address: str = Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$")
    """The vLLM server, such as ``http://127.0.0.1:8000``. It serves this sampler only. Its development
    endpoints ask for no key: whoever reaches the address controls it."""

    weights_dir: Path
    """Directory that server and sampler share, in memory best (``/dev/shm/heterorl``). Made here if missing,
    for this user alone. The server is told of it by ``HETERORL_WEIGHTS_DIR``, and may have it elsewhere."""

    api_key_file: Path | None = None
    """File with the server's API key. Unset: none is sent."""

    kv_cache: Literal["recompute", "keep"] = "recompute"
    """What becomes of the keys and values of running completions when a version is swapped in. ``recompute``
    costs one pass over their tokens and makes every logprob that of the version it names. ``keep`` costs
    nothing; logprobs are still those the tokens were drawn from, but of a mixture of versions."""

    requests: int = Field(default=256, ge=1, le=4096)
    """Most HTTP requests at the server at once, each for up to a whole group; the rest waits here."""

    poll_s: float = Field(default=0.1, gt=0, le=10)
    """How long a new version or prompt may have to wait for its turn. Shorter costs CPU time."""

    answer_limit_s: float = Field(default=300.0, gt=0)
    """Longest time for an answer about anything but completions, and longest time in which completions get no
    token. Then the server is taken to hang, and is connected to again. Must have room for the longest decode
    step; keep it below ``sampler.engine_step_limit_s``."""

    start_limit_s: float = Field(default=900.0, gt=0)
    """Longest time to wait for the server to start, or to start again, and for it to verify its model against
    the files. Then the sampler ends."""

    def api_key(self) -> str | None:
        """Return the key; None: none is sent.

        Raises:
            StartupError: the file cannot be read, or holds no single line of ASCII.
        """
        if self.api_key_file is None:
            return None
        return api_key_in(self.api_key_file, setting="api_key_file in sampler.engine_options")
