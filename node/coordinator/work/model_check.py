"""Whether a peer that joins, or a group, has the run's model and tokenizer: those of its learner; pure."""

from dataclasses import dataclass

from node.errors import Reason, RefusedError


@dataclass(frozen=True, slots=True)
class Learner:
    """The learner that may publish, and the model it trains: the run's."""

    node_id: str
    epoch: int
    layout_digest: bytes
    tokenizer_digest: bytes
    vocabulary_size: int
    version: int
    """Newest version it is known to have reached."""
    chat_template_digest: bytes = b""
    """Empty: not known, from older software."""
    context_tokens: int = 0
    """Most tokens of a prompt and a completion together; 0: not known."""


def check_model(
    layout_digest: bytes, tokenizer_digest: bytes, learner: Learner, *, of: str = "this peer"
) -> None:
    """Check that a peer or a group has the run's model.

    Raises:
        RefusedError: LAYOUT_MISMATCH or TOKENIZER_MISMATCH.
    """
    for what, reason, theirs, ours in (
        ("layout", Reason.LAYOUT_MISMATCH, layout_digest, learner.layout_digest),
        ("tokenizer", Reason.TOKENIZER_MISMATCH, tokenizer_digest, learner.tokenizer_digest),
    ):
        if theirs != ours:
            raise RefusedError(
                reason,
                f"{of}'s {what} digest is {theirs.hex() or 'empty'}, the run's is {ours.hex()}",
                fix="give every peer the same model directory",
            )


def check_chat_template(digest: bytes, learner: Learner) -> None:
    """Check that a peer that joins renders chat prompts as the run does.

    Raises:
        RefusedError: TOKENIZER_MISMATCH.
    """
    if learner.chat_template_digest not in (b"", digest):
        raise RefusedError(
            Reason.TOKENIZER_MISMATCH,
            f"this peer's chat template has digest {digest.hex() or 'empty'}, "
            f"the run's {learner.chat_template_digest.hex()}",
            fix="copy chat_template.jinja and tokenizer_config.json from the learner's model directory",
        )
