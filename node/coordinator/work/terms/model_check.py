"""Whether a peer that joins, or a group, has the run's model, tokenizer and task; pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Final

from node.errors import Reason, RefusedError
from node.text.text_rules import FILES, differing_rules
from node.values.fact import Fact
from node.values.policy import BASE_PART_BYTES, BaseModel

_SAME_DIRECTORY: Final = "give every peer the same model directory"
_NAMES_SHOWN: Final = 3
_NAME_CHARACTERS: Final = 80


@dataclass(frozen=True, slots=True)
class Learner(Fact):
    """The learner that may publish, and the model it trains: the run's."""

    kind: ClassVar[str] = "learner"

    node_id: str
    epoch: int
    layout_digest: bytes
    tokenizer_digest: bytes
    vocabulary_size: int
    version: int
    """Newest version it is known to have reached."""
    chat_template_digest: bytes = b""
    """Empty: not known."""
    base_root: bytes = b""
    """Root of version 0, where every chain starts; empty if unknown."""
    base_parts: bytes = b""
    layout_summary: str = ""
    """The layout in words: "layers 30, parameters 134515008, ..."."""
    context_tokens: int = 0
    """Most tokens of a prompt and a completion together; 0: not known."""
    text_digest: bytes = b""
    """Digest of the rules in ``node.text.text_rules``; empty: older software, which does not say."""
    text_summary: str = ""

    @property
    def text(self) -> "StatedText":
        return StatedText(
            self.tokenizer_digest, self.chat_template_digest, self.text_digest, self.text_summary
        )


@dataclass(frozen=True, slots=True)
class StatedText:
    """How a peer makes tokens of prompts and text of tokens, by its own account."""

    tokenizer_digest: bytes
    chat_template_digest: bytes = b""
    text_digest: bytes = b""
    text_summary: str = ""

    def check(self, learner: Learner) -> None:
        """Check that it does so as the run does.

        Raises:
            RefusedError: TOKENIZER_MISMATCH; in what it differs.
        """
        check_tokenizer(self.tokenizer_digest, learner)
        check_chat_template(self.chat_template_digest, learner)
        if self.text_digest and learner.text_digest not in (b"", self.text_digest):
            differs = differing_rules(self.text_summary, learner.text_summary)
            raise RefusedError(
                Reason.TOKENIZER_MISMATCH,
                f"this peer reads prompts or completions otherwise than the run: "
                f"{differs or 'in a rule that it did not name'}",
                fix=f"copy {FILES} from the learner's model directory, and install its version of "
                "heterorl-node",
            )


@dataclass(frozen=True, slots=True)
class SamplerModel:
    """A sampler's or contributor's model by its own account; empty: not known, or older software."""

    layout_digest: bytes
    text: StatedText
    base: BaseModel = field(default_factory=BaseModel)
    layout_summary: str = ""

    def check(self, learner: Learner) -> None:
        """Check that it is the run's. Raises RefusedError: in what it differs."""
        check_layout(self.layout_digest, learner, layout_summary=self.layout_summary)
        self.text.check(learner)
        if self.base.root:
            check_base(self.base, learner)


@dataclass(frozen=True, slots=True)
class VerifierModel:
    """The files by which a verifier tells prompts and texts: with others it would accuse honest samplers."""

    text: StatedText

    def check(self, learner: Learner) -> None:
        """Check that they are the run's. Raises RefusedError: in what they differ."""
        self.text.check(learner)
        if learner.text_digest and not self.text.text_digest:
            raise RefusedError(
                Reason.TOKENIZER_MISMATCH,
                "this verifier does not say by which rules it reads prompts and completions: its software is "
                "older than the learner's",
                fix="install the learner's version of heterorl-node",
            )


def check_model(
    layout_digest: bytes,
    tokenizer_digest: bytes,
    learner: Learner,
    *,
    of: str = "this peer",
    layout_summary: str = "",
) -> None:
    """Check that a peer or a group has the run's model.

    Raises:
        RefusedError: LAYOUT_MISMATCH or TOKENIZER_MISMATCH.
    """
    check_layout(layout_digest, learner, of=of, layout_summary=layout_summary)
    check_tokenizer(tokenizer_digest, learner, of=of)


def check_layout(digest: bytes, learner: Learner, *, of: str = "this peer", layout_summary: str = "") -> None:
    """Check that a peer or a group has the run's layout. Raises RefusedError: LAYOUT_MISMATCH."""
    if digest != learner.layout_digest:
        differs = _differing(layout_summary, learner.layout_summary)
        raise RefusedError(
            Reason.LAYOUT_MISMATCH,
            f"{of}'s layout digest is {digest.hex() or 'empty'}, the run's is "
            f"{learner.layout_digest.hex()}{differs}",
            fix=_SAME_DIRECTORY,
        )


def check_tokenizer(digest: bytes, learner: Learner, *, of: str = "this peer") -> None:
    """Check that a peer or a group has the run's tokenizer. Raises RefusedError: TOKENIZER_MISMATCH."""
    if digest != learner.tokenizer_digest:
        raise RefusedError(
            Reason.TOKENIZER_MISMATCH,
            f"{of}'s tokenizer digest is {digest.hex() or 'empty'}, the run's is "
            f"{learner.tokenizer_digest.hex()}",
            fix=_SAME_DIRECTORY,
        )


def _differing(theirs: str, ours: str) -> str:
    """Return in which numbers two summaries of layouts differ; empty where one is not known."""
    if not theirs or not ours:
        return ""
    runs = set(ours.split(", "))
    pairs = zip(theirs.split(", "), ours.split(", "), strict=False)
    different = [f"{here} (the run has {there})" for here, there in pairs if here not in runs]
    return f": it has {', '.join(different) or 'tensors of other names or shapes'}"


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


def check_base(base: BaseModel, learner: Learner, *, of: str = "this peer") -> None:
    """Check that a peer that joins has the very words of the run's version 0.

    Layout, tokenizer and template are the same for a base model and for each of its fine-tunes.

    Raises:
        RefusedError: BASE_MISMATCH, with the share of the model that differs and where.
    """
    if learner.base_root in (b"", base.root):
        return
    differing = list(_differing_parts(base, learner))
    parts = len(base.parts) // BASE_PART_BYTES
    tensors = ", ".join(differing[:_NAMES_SHOWN])
    where = f"; {len(differing)} of {parts} parts differ, which begin with the tensors {tensors}"
    raise RefusedError(
        Reason.BASE_MISMATCH,
        f"your model_dir is not the run's base: its version 0 has root {base.root.hex() or 'unknown'}, "
        f"the run's has {learner.base_root.hex()}{where if differing else ''}",
        fix=f"give {of} the model directory that the learner began with; base and fine-tunes look alike",
    )


def _differing_parts(base: BaseModel, learner: Learner) -> Iterator[str]:
    for number, name in enumerate(base.part_names):
        part = slice(number * BASE_PART_BYTES, (number + 1) * BASE_PART_BYTES)
        if base.parts[part] != learner.base_parts[part]:
            yield name[:_NAME_CHARACTERS]


def check_prompts(found: int, *, runs: int, task: str, sampler_id: str) -> None:
    """Check that a sampler found as many prompts in its task as the run has, held-out ones included.

    Raises RefusedError: TASK_MISMATCH.
    """
    if found != runs:
        raise RefusedError(
            Reason.TASK_MISMATCH,
            f"task {task!r} of sampler {sampler_id} has {found} prompts, the run has {runs}",
            fix="give this sampler the run's task and data (sampler.custom_tasks), or set "
            f"coordinator.prompts = {found} and restart the coordinator",
        )
