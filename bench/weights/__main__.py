"""Bytes and speed of weight deltas: ours, what others send, and the bound. One JSON line per codec.

    python -m bench.weights --pair FILE.npz        two versions of your own; the file: bench/weights/pairs.py
    python -m bench.weights                        trains a small model first: some minutes

    codec      ours, pulse, gap_xor, leb128, dense_xor, raw, bound
    bytes      the whole delta; ours with its signed manifest, whose share is container_share
    ratio      bytes of the full bf16 model / bytes
    encode_gb_s_per_core, decode_gb_s_per_core      bytes of the full model per second of one thread's time
    encode_gb_s_all_cores, decode_gb_s_all_cores    the same by the clock with a thread per core, which
               share frames (ours) or tensors (others)
    copy_gb_s_per_core      of copying the new words to another array in the same run: the codecs are bound by
               memory, and this tells what the machine's can do
    encode_of_copy, decode_of_copy                  speed per core over that of the copy
    encode_peak_extra_bytes, decode_peak_extra_bytes    resident memory above that of the versions, with the
               delta and all scratch memory; Linux only

What is timed, of whole models, never of one frame again and again, which a branch predictor learns by heart;
each figure is the best of the repetitions:

    ours, encode   find the changes, code them, xxh3 of the new words, NaN and infinity refused, BLAKE3 of
                   the payloads, the manifest and its root; the base's root is known from its own time
    ours, decode   BLAKE3 of the payloads checked, decode from the base to a second copy, xxh3 of it checked
    others         find the changes, code them, xxh3 of the new words; copy the base, decode into it, xxh3

Not timed: reading files, laying the tensors out (once a run), the signature (once a version, 0.1 ms).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from unittest import mock

import numpy as np
import xxhash

from bench.held_policy import HeldPolicy
from bench.shared.measure import CORES, T, best, peak
from bench.weights.formats import RIVALS, Format, Tensor, bound_bytes
from bench.weights.pairs import Pair, PairError, load_pair, trained_pairs
from bench.whole_versions import EncodedVersion, encode_version
from node.errors import RefusedError
from node.identity.signatures import SigningKey
from node.process.memory import give_back
from node.weights.assembly.apply import make_frame
from node.weights.codec import native
from node.weights.codec.exponent_conditioned import choice, reference
from node.weights.codec.exponent_conditioned.choice import Implementation
from node.weights.format.digests import Words
from node.weights.format.layout import Layout, TensorSpec
from node.weights.format.manifest import sign

IMPLEMENTATIONS: Final = ("best", "AVX2", native.PORTABLE, "numpy")
CODECS: Final = ("ours", *(rival.name for rival in RIVALS), "bound")

_LEARNING_RATE: Final = 1.3e-6
"""Changes about 1 % of the trained weights."""


class Codec(Protocol):
    """Something that moves a pair's words from the base to the new version."""

    name: str

    def encode(self, pool: ThreadPoolExecutor | None) -> Any:
        """Return the delta; on the threads of ``pool``, or on this one."""

    def decode(self, delta: Any, pool: ThreadPoolExecutor | None) -> Words:
        """Return the new words, verified, in an array that is used again."""

    def sizes(self, delta: Any) -> tuple[int, int]:
        """Return the bytes of the whole delta, and how many of them are container."""


class Ours:
    """Our codec, as learner and sampler call it."""

    name = "ours"

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._layout = Layout.of(TensorSpec(tensor.name, tensor.shape) for tensor in pair.tensors)
        self._base = HeldPolicy.of(0, pair.base, layout=self._layout)
        self._spare = np.zeros_like(pair.base)
        self._key = SigningKey.generate()

    def encode(self, pool: ThreadPoolExecutor | None) -> EncodedVersion:
        return encode_version(
            self._pair.words,
            version=1,
            base=self._base,
            layout=self._layout,
            run_id="bench",
            learner_epoch=1,
            published_at_s=0.0,
            executor=pool,
        )

    def decode(self, delta: EncodedVersion, pool: ThreadPoolExecutor | None) -> Words:
        def make(number: int) -> None:
            frame = self._layout.frames[number]
            base, out = self._base.words[frame.slice], self._spare[frame.slice]
            make_frame(number, delta.manifest, delta.payloads[number], base=base, out=out, dtype=frame.dtype)

        list((map if pool is None else pool.map)(make, range(len(delta.payloads))))
        return self._spare

    def sizes(self, delta: EncodedVersion) -> tuple[int, int]:
        container = len(sign(delta.manifest, self._key))
        return container + delta.manifest.size_bytes, container


class Theirs:
    """A rival's format; with a pool the tensors are dealt out to its threads."""

    def __init__(self, pair: Pair, rival: Format) -> None:
        self.name = rival.name
        self._pair = pair
        self._rival = rival
        self._spare = np.zeros_like(pair.base)

    def encode(self, pool: ThreadPoolExecutor | None) -> list[bytes]:
        shards = _shards(self._pair.tensors, 1 if pool is None else CORES)
        return list((map if pool is None else pool.map)(self._encode, shards))

    def decode(self, delta: list[bytes], pool: ThreadPoolExecutor | None) -> Words:
        shards = _shards(self._pair.tensors, len(delta))
        list((map if pool is None else pool.map)(self._decode, shards, delta))
        return self._spare

    def sizes(self, delta: list[bytes]) -> tuple[int, int]:
        return sum(map(len, delta)), 0

    def _encode(self, shard: "Shard") -> bytes:
        pair = self._pair
        words = pair.words[shard.slice]
        xxhash.xxh3_64_intdigest(words.data)
        return self._rival.encode(words, base=pair.base[shard.slice], tensors=shard.tensors)

    def _decode(self, shard: "Shard", payload: bytes) -> None:
        out = self._spare[shard.slice]
        np.copyto(out, self._pair.base[shard.slice])
        self._rival.apply(payload, out=out, tensors=shard.tensors)
        xxhash.xxh3_64_intdigest(out.data)


@dataclass(frozen=True, slots=True)
class Shard:
    """Some tensors that follow each other, counted from where they begin."""

    slice: slice
    tensors: tuple[Tensor, ...]


def _shards(tensors: Sequence[Tensor], count: int) -> list[Shard]:
    total = sum(tensor.words for tensor in tensors)
    share = [min(count - 1, tensor.start * count // total) for tensor in tensors]
    shards = []
    for number in sorted(set(share)):
        mine = [tensor for tensor, owner in zip(tensors, share, strict=True) if owner == number]
        start, end = mine[0].start, mine[-1].start + mine[-1].words
        moved = (Tensor(tensor.name, tensor.start - start, tensor.shape) for tensor in mine)
        shards.append(Shard(slice(start, end), tuple(moved)))
    return shards


def compare(
    pair: Pair, *, only: Sequence[str] | None, repetitions: int, implementations: Sequence[str] = ("best",)
) -> Iterator[dict[str, Any]]:
    """Return a line for every codec, or for ``only`` some; for ours one for each of ``implementations``."""
    bound = bound_bytes(pair.words, base=pair.base, tensors=pair.tensors)
    for implementation in map(_implementation, implementations if not only or "ours" in only else ()):
        # A plain function: a mock would be called for every frame, and cost a twentieth of its time.
        with mock.patch.object(choice, "implementation", lambda found=implementation: found):
            line = measure(pair, Ours(pair), repetitions=repetitions, bound=bound)
        yield {**line, "implementation": implementation.name}
    for rival in RIVALS:
        if not only or rival.name in only:
            yield measure(pair, Theirs(pair, rival), repetitions=repetitions, bound=bound)
    if not only or "bound" in only:
        speed = 2 * pair.words.size / 1e9 / _copy_s(pair, np.zeros_like(pair.words), repetitions)
        fields = _size_fields("bound", bound, pair, bound=bound)
        yield {**fields, "copy_gb_s_per_core": round(speed, 3)}


def measure(pair: Pair, candidate: Codec, *, repetitions: int, bound: float) -> dict[str, Any]:
    """Return the line of one codec.

    Raises:
        AssertionError: the words that came out are not those that went in.
    """
    encode_peak, delta = _peak(lambda: candidate.encode(None))
    decode_peak, made = _peak(lambda: candidate.decode(delta, None))
    assert np.array_equal(made, pair.words), candidate.name
    size, container = candidate.sizes(delta)
    full = 2 * pair.words.size / 1e9
    encode_s = best(lambda: candidate.encode(None), time.thread_time, repetitions)
    copy_s = _copy_s(pair, made, repetitions)
    decode_s = best(lambda: candidate.decode(delta, None), time.thread_time, repetitions)
    with ThreadPoolExecutor(CORES) as pool:
        shared = candidate.encode(pool)
        encode_all_s = best(lambda: candidate.encode(pool), time.perf_counter, repetitions)
        decode_all_s = best(lambda: candidate.decode(shared, pool), time.perf_counter, repetitions)
    return {
        **_size_fields(candidate.name, size, pair, bound=bound),
        "container_share": round(container / size, 5),
        "encode_gb_s_per_core": round(full / encode_s, 3),
        "decode_gb_s_per_core": round(full / decode_s, 3),
        "encode_gb_s_all_cores": round(full / encode_all_s, 3),
        "decode_gb_s_all_cores": round(full / decode_all_s, 3),
        "cores": CORES,
        "copy_gb_s_per_core": round(full / copy_s, 3),
        "encode_of_copy": round(copy_s / encode_s, 3),
        "decode_of_copy": round(copy_s / decode_s, 3),
        "encode_peak_extra_bytes": encode_peak,
        "decode_peak_extra_bytes": decode_peak,
    }


def _size_fields(name: str, size: float, pair: Pair, *, bound: float) -> dict[str, Any]:
    return {
        "codec": name,
        "bytes": round(size),
        "ratio": round(2 * pair.words.size / size, 2) if size else None,
        "bits_per_change": round(8 * size / pair.changes, 3),
        "over_bound": round(size / bound, 4) if bound else None,
        "pair": pair.name,
        "words": pair.words.size,
        "density": round(pair.changes / pair.words.size, 6),
    }


def _copy_s(pair: Pair, out: Words, repetitions: int) -> float:
    return best(lambda: np.copyto(out, pair.words), time.thread_time, repetitions)


def _peak(run: Callable[[], T]) -> tuple[int | None, T]:
    """Run in a new thread, which has no scratch memory of another run, and give how far memory rose."""
    give_back()
    with ThreadPoolExecutor(1) as pool:
        return peak(lambda: pool.submit(run).result())


def _implementation(name: str) -> Implementation:
    if name == "numpy":
        return reference
    if name in native.PATHS:
        kernel = native.load(native.PATHS.index(name))
        if kernel is None:
            raise PairError(f"the C kernel is not installed, or this processor has no {name}")
        return kernel
    return choice.implementation()


def main(arguments: Sequence[str]) -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pair", type=Path, help="an .npz; without it a pair is trained")
    parser.add_argument(
        "--implementation",
        choices=(*IMPLEMENTATIONS, "all"),
        default="best",
        help="of ours; all: a line for each",
    )
    parser.add_argument("--only", action="append", choices=CODECS, help="a codec; may be given several times")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args(arguments)
    implementations = IMPLEMENTATIONS if options.implementation == "all" else (options.implementation,)
    try:
        lines = compare(
            _pair(options.pair),
            only=options.only,
            repetitions=options.repetitions,
            implementations=implementations,
        )
        for line in lines:
            print(json.dumps(line), flush=True)
    except (PairError, RefusedError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _pair(path: Path | None) -> Pair:
    (pair,) = trained_pairs([_LEARNING_RATE]) if path is None else (load_pair(path),)
    if pair.changes == 0:
        raise PairError(f"{pair.name}: nothing changed, so there is nothing to compare")
    return pair


if __name__ == "__main__":
    main(sys.argv[1:])
