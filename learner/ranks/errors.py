"""How ranks fail: the error where they cannot go on together, and the exit code of one without memory."""

import errno
import re
from typing import Final

from node.errors import HeteroRLError

OUT_OF_MEMORY: Final = 12
"""Exit code of a rank other than the first: ENOMEM, as any other would do."""

MEMORY_FIX: Final = (
    "lower learner.micro_batch_tokens, share the model out over more ranks (dp_shard), or use a "
    "machine with more memory"
)

_NO_MEMORY: Final = re.compile("out of memory|allocate memory|bad_alloc", re.IGNORECASE)
"""Parts of torch's own errors, on CPUs and on GPUs; all are RuntimeErrors."""


class RankLostError(HeteroRLError):
    """A rank ended, or did not answer in time; all others end with it, and the next start resumes the run."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
    )
