"""The error of ranks that cannot go on together."""

from node.errors import HeteroRLError


class RankLostError(HeteroRLError):
    """A rank ended, or did not answer in time; all others end with it, and the next start resumes the run."""
