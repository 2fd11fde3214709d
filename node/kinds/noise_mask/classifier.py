"""``python -m node.kinds.noise_mask.classifier``: drop an exported policy, fine-tune its classifier.

exported directory of both --> classifier alone --> epochs on clean images --> directory of the classifier
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from node.kinds.noise_mask.network import NoiseMaskClassifier, read_prompts
from node.kinds.noise_mask.row import NoiseMaskOptions
from node.kinds.noise_mask.values import read_row
from node.questions.data_row import column_of

IMAGES_AT_ONCE: Final = 32


def fine_tune(
    classifier: NoiseMaskClassifier, images: Tensor, labels: Tensor, *, epochs: int, rate: float, seed: int
) -> None:
    """Train in place on clean images, with AdamW and the images in a new order each epoch."""
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=rate, weight_decay=0.0, fused=True)
    for _ in range(epochs):
        for chosen in torch.split(torch.randperm(len(images), generator=order), IMAGES_AT_ONCE):
            loss = functional.cross_entropy(classifier(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


@torch.no_grad()
def error(classifier: NoiseMaskClassifier, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that it names wrongly."""
    found = [classifier(part).argmax(dim=1) for part in torch.split(images, 16 * IMAGES_AT_ONCE)]
    return float((torch.cat(found) != labels).double().mean())


def main() -> int:
    """Fine-tune and save; print the error on the same images before and after."""
    options = NoiseMaskOptions()
    parser = argparse.ArgumentParser(
        prog="python -m node.kinds.noise_mask.classifier", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("export", type=Path, help="what `heterorl-node export` wrote")
    add("rows", type=Path, help="JSON lines with clean images and labels")
    add("out", type=Path, help="where the classifier goes")
    add("--image", default=options.image, help="column; default: %(default)s")
    add("--label", default=options.label, help="column; default: %(default)s")
    add("--epochs", type=int, default=10, help="default: %(default)s")
    add("--rate", type=float, default=1e-3, help="learning rate; default: %(default)g")
    add("--seed", type=int, default=0, help="of the order of images; default: %(default)s")
    arguments = parser.parse_args()
    classifier = NoiseMaskClassifier.from_pretrained(
        arguments.export, dtype=torch.float32, local_files_only=True
    )
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines() if line.strip()]
    read = [read_row(column_of(row, arguments.image), column_of(row, arguments.label)) for row in rows]
    prompts = torch.from_numpy(np.array([[label, *pixels] for label, pixels in read]))
    images, labels = read_prompts(prompts, classifier.config)
    before = error(classifier, images, labels)
    fine_tune(classifier, images, labels, epochs=arguments.epochs, rate=arguments.rate, seed=arguments.seed)
    classifier.save_pretrained(arguments.out)
    after = error(classifier, images, labels)
    print(f"{len(images)} images: {before:.2%} wrong before {arguments.epochs} epochs, {after:.2%} after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
