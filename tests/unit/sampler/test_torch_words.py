"""A model computes with views of its words: whatever is done to the words is done to the model."""

import numpy as np
import pytest
import torch
from torch import nn

from node.weights.format.layout import FrameSpan, Layout, TensorSpec
from sampler.engines.words.model_words import ArrayWords, copy_words
from sampler.engines.words.torch_words import LiveTensors, TorchWords, aliases
from support.model_words import words_of
from support.refusals import cannot_start

CPU = torch.device("cpu")
EVERY_WORD = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_word_there_is_comes_back(dtype: torch.dtype) -> None:
    layout = Layout.of([TensorSpec("a", (EVERY_WORD.size,))])
    words = TorchWords(layout, dtype=dtype, device=CPU)
    frames = [FrameSpan(0, 1), FrameSpan(1, 999), FrameSpan(1000, EVERY_WORD.size - 1000)]
    for frame in frames:
        words.write(frame, EVERY_WORD[frame.slice])
    for frame in frames:
        np.testing.assert_array_equal(words.read(frame), EVERY_WORD[frame.slice])
    finite = (EVERY_WORD & 0x7F80) != 0x7F80
    expected = (EVERY_WORD.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(words.flat.float().numpy()[finite], expected[finite])


def test_words_that_cannot_be_written_to_can_be_taken() -> None:
    words = TorchWords(Layout.of([TensorSpec("a", (8,))]), dtype=torch.bfloat16, device=CPU)
    read_only = np.frombuffer(bytes(range(16)), np.uint16)
    words.write(FrameSpan(0, 8), read_only)
    np.testing.assert_array_equal(words.read(FrameSpan(0, 8)), read_only)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(4, 3))
        self.head = nn.Linear(3, 4, bias=True)
        self.head.weight = self.embed
        self.register_buffer("scale", torch.randn(2))
        self.alias = nn.Parameter(self.embed.detach())


LAYOUT = Layout.of([TensorSpec("alias", (4, 3)), TensorSpec("head.bias", (4,)), TensorSpec("scale", (2,))])


def live_tensors(model: nn.Module, dtype: torch.dtype) -> LiveTensors:
    same = aliases(model)
    tensors = {
        "alias": same[model.get_parameter("embed").data_ptr()],
        "head.bias": same[model.get_parameter("head.bias").data_ptr()],
        "scale": same[model.get_buffer("scale").data_ptr()],
    }
    return LiveTensors(tensors, layout=LAYOUT, dtype=dtype, device=CPU)


def test_after_a_swap_every_tensor_tied_ones_and_buffers_too_is_the_new_version() -> None:
    model = Tied()
    before = model.embed.detach().clone()
    live = live_tensors(model, torch.float32)
    assert torch.equal(model.embed, before.bfloat16().float())
    spare = live.new_spare()
    spare.flat.copy_(torch.arange(18.0))
    old = live.swap(spare)
    for tensor in (model.embed, model.head.weight, model.alias):
        assert torch.equal(tensor, torch.arange(12.0).view(4, 3))
    assert torch.equal(model.head.bias, torch.arange(12.0, 16.0))
    assert torch.equal(model.get_buffer("scale"), torch.tensor([16.0, 17.0]))
    assert live.live is spare
    assert torch.equal(old.flat[:12].view(4, 3), before.bfloat16().float())
    # Nothing was copied.
    assert model.embed.data_ptr() == model.head.weight.data_ptr() == spare.flat.data_ptr()


def test_words_written_into_the_live_ones_reach_the_model_and_its_tensors_of_other_types() -> None:
    model = Tied().to(torch.bfloat16)
    model.head.bias.data = model.head.bias.data.float()
    live = live_tensors(model, torch.bfloat16)
    assert model.head.bias.dtype is torch.float32
    words = (np.arange(18, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    copy_words(ArrayWords(words), live.live, layout=LAYOUT)
    live.settle()
    assert torch.equal(model.embed, torch.arange(12.0).view(4, 3).bfloat16())
    assert torch.equal(model.head.bias, torch.arange(12.0, 16.0))
    np.testing.assert_array_equal(words_of(live.live, layout=LAYOUT), words)


def test_tensors_tied_under_two_shapes_are_refused() -> None:
    model = Tied()
    model.alias.data = model.embed.data.view(3, 4)
    with cannot_start("'alias'", "(4, 3)", "(3, 4)"):
        live_tensors(model, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_words_of_any_dtype_come_back_and_their_tensors_are_what_they_say(dtype: torch.dtype) -> None:
    layout = Layout.of(
        [
            TensorSpec("bias", (3,), "float32"),
            TensorSpec("count", (2,), "int64"),
            TensorSpec("half", (3,), "float16"),
            TensorSpec("norm", (5,)),
            TensorSpec("scale", (3,), "float8_e4m3fn"),
        ],
        frame_words=8,
    )
    held = {
        "bias": torch.zeros(3, dtype=torch.float32),
        "count": torch.zeros(2, dtype=torch.int64),
        **{name: torch.zeros(size, dtype=dtype) for name, size in (("half", 3), ("norm", 5), ("scale", 3))},
    }
    live = LiveTensors({name: [t] for name, t in held.items()}, layout=layout, dtype=dtype, device=CPU)
    assert not words_of(live.live, layout=layout).any()
    words = np.random.default_rng(0).integers(0x3000, 0x3C00, layout.words).astype(np.uint16)
    words[-1] &= 0xFF  # Half a word that belongs to no element.
    spare = live.new_spare()
    copy_words(ArrayWords(words), spare, layout=layout)
    live.swap(spare)
    np.testing.assert_array_equal(words_of(live.live, layout=layout), words)
    for span in layout.tensors:
        part = torch.from_numpy(words[span.start_word :][: span.words].copy())
        published = part.view(getattr(torch, span.dtype.name))[: span.elements]
        assert torch.equal(held[span.name], published.to(held[span.name].dtype)), span.name
