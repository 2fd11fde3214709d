"""Queries with candidates, of which one is of the query's topic, and a small encoder that knows no topic yet.

Query and candidates have no word in common: which words go together is all there is to learn.
"""

import json
import random
from pathlib import Path
from typing import Final

SEED: Final = 0

TOPICS: Final = (
    "bread flour oven dough yeast | crust loaf butter slice toast",
    "ship harbour anchor sail deck | captain wave storm mast rope",
    "rain cloud thunder fog hail | umbrella puddle drizzle gutter boots",
    "horse saddle stable hoof mane | rider gallop bridle hay jockey",
    "piano violin flute drum harp | melody chord rhythm concert opera",
    "planet comet orbit star moon | telescope astronomer gravity eclipse rocket",
    "garden seed soil rose hedge | spade watering weed gardener bloom",
    "doctor nurse fever pill clinic | patient bandage surgery symptom vaccine",
    "judge court lawyer trial verdict | witness jury prison appeal crime",
    "train rail station tunnel ticket | conductor platform wagon engine track",
    "snow ski slope sledge glacier | mountain avalanche frost summit alpine",
    "coin bank loan interest debt | money credit savings broker market",
)
"""Words of queries, and of candidates, by topic."""

ROWS: Final = 2000
CANDIDATES: Final = 8
QUERY_WORDS: Final = 2
CANDIDATE_WORDS: Final = 3


def write_topics(path: Path) -> None:
    """Write the rows of the task, as JSON lines."""
    draw = random.Random(SEED)
    words = [[half.split() for half in topic.split("|")] for topic in TOPICS]
    lines = []
    for _ in range(ROWS):
        drawn = draw.sample(words, CANDIDATES)
        right = draw.randrange(CANDIDATES)
        lines.append(
            json.dumps(
                {
                    "query": " ".join(draw.sample(drawn[right][0], QUERY_WORDS)),
                    "candidates": [" ".join(draw.sample(of_topic[1], CANDIDATE_WORDS)) for of_topic in drawn],
                    "relevance": [int(number == right) for number in range(CANDIDATES)],
                }
            )
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def encoder_directory(directory: Path, *, seed: int = SEED) -> Path:
    """Save a two-layer encoder with one score and random weights, with a tokenizer of whole words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    known = ["<pad>", "<sep>", *sorted({word for topic in TOPICS for word in topic.split() if word != "|"})]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<sep>"
    ).save_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=len(known),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            pad_token_id=0,
            eos_token_id=1,
            # With transformers' own .02 all scores are equal, and hundreds of steps find no direction.
            initializer_range=0.1,
        )
        config.num_labels = 1
        BertForSequenceClassification(config).save_pretrained(directory)
    return directory
