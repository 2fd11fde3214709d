"""The image's wheel is built of what .dockerignore and COPY let through, and of nothing else."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from deploy.check import DEPLOY, wheel_complaints
from deploy.image_context import is_ignored, lay_out, let_through
from support.byte_tokenizer import make_byte_tokenizer

DOCKERFILE: Final = DEPLOY / "Dockerfile"


def copy_without(to: Path, *, copied: str = "", let: str = "") -> Path:
    """Copy the Dockerfile and its .dockerignore without one line of each."""
    for name, line in (("Dockerfile", copied), ("Dockerfile.dockerignore", let)):
        text = (DEPLOY / name).read_text()
        assert f"{line}\n" in text
        (to / name).write_text(text.replace(f"{line}\n", "", 1) if line else text)
    return to / "Dockerfile"


def test_the_image_has_all_that_its_wheel_needs() -> None:
    assert wheel_complaints(DEPLOY.parent, DOCKERFILE) == []


@pytest.mark.parametrize(
    ("copied", "let", "said"),
    [
        ("", "!deploy/systemd", "COPY deploy/systemd: .dockerignore lets nothing"),
        ("COPY deploy/constraints.txt deploy/hatch_build.py deploy/", "", "does not build .*hatch_build.py"),
        ("COPY node node", "", "does not build|does not start"),
        ("", "*", "lets .venv/ through"),
    ],
)
def test_a_file_that_is_left_out_is_a_complaint(copied: str, let: str, said: str, tmp_path: Path) -> None:
    dockerfile = copy_without(tmp_path, copied=copied, let=let)
    complaints = wheel_complaints(DEPLOY.parent, dockerfile)
    assert any(re.search(said, each) for each in complaints), complaints


@pytest.mark.parametrize(
    ("patterns", "path", "ignored"),
    [
        (["*", "!node"], "node/wire/x.py", False),
        (["*", "!node"], "deploy/x", True),
        (["*", "!node", "**/__pycache__"], "node/a/__pycache__/x.pyc", True),
        (["*", "!deploy/systemd"], "deploy/systemd/a@.service", False),
        (["*", "!deploy/systemd"], "deploy/systemd-old/a", True),
        (["*", "!node", "node/*.md"], "node/a.md", True),
        (["*", "!node", "node/*.md"], "node/a/b.md", False),
        (["node", "!node/a.py"], "node/a.py", False),
        (["?.py"], "a.py", True),
        (["?.py"], "ab.py", False),
        ([], "anything", False),
    ],
)
def test_a_dockerignore_is_read_as_docker_reads_it(patterns: list[str], path: str, ignored: bool) -> None:
    assert is_ignored(path, patterns) is ignored


def test_copy_takes_what_is_in_a_folder_and_files_by_name_or_pattern(tmp_path: Path) -> None:
    context, workdir = tmp_path / "context", tmp_path / "workdir"
    for name in ("a/b/c.py", "d.txt", "e.txt", "f@.service"):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text(name)
    dockerfile = """\
FROM x AS build
COPY --chown=1:1 a z
COPY d.txt \\
     e.txt ./here/
COPY f@* other
COPY missing.txt .
FROM y
COPY --from=build /z /z
COPY never.txt .
"""
    assert lay_out(dockerfile, context, workdir) == [
        "COPY missing.txt: .dockerignore lets nothing of that name through"
    ]
    made = {str(path) for path in let_through(workdir, [])}
    assert made == {"z/b/c.py", "here/d.txt", "here/e.txt", "other"}


def test_a_verifier_needs_no_torch(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path)
    without_torch = (
        "import sys; sys.modules['torch'] = None; from pathlib import Path; import sampler.verifier_role;"
        "from sampler.engines.text.model_tokenizer import tokenizer_of;"
        "tokenizer = tokenizer_of(Path(sys.argv[1])); print(len(tokenizer.decode(tokenizer.encode('1+2='))))"
    )
    command = [sys.executable, "-c", without_torch, str(tmp_path)]
    read = subprocess.run(command, capture_output=True, text=True, cwd=DEPLOY.parent)
    assert read.stdout == "4\n", read.stderr
