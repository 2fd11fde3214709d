"""Numbers that peers report: which of them an operator should look at."""

import pytest

from heterorl.v1 import membership_pb2
from node.values.peer_figures import FIGURES, MachineFigures, SamplerFigures, reported, text_of
from node.wire.mapping import from_wire, to_wire


@pytest.mark.parametrize(
    ("machine", "sampler", "text"),
    [
        (None, None, ""),
        (MachineFigures(), SamplerFigures(), ""),
        (MachineFigures(0.5, 1e7, 0, 0), SamplerFigures(5.0), ""),
        (MachineFigures(0.05, mended_frames=2), None, "5.0% of its disk free, 2 damaged frames in memory"),
        (None, SamplerFigures(90.0, 41.4), "no version taken for 90 s, 41 tokens/s"),
    ],
)
def test_a_number_is_shown_where_it_is_known_and_beyond_its_alarm(
    machine: MachineFigures | None, sampler: SamplerFigures | None, text: str
) -> None:
    assert text_of(machine, sampler) == text
    assert "tokens/s" not in text_of(machine, sampler, is_brief=True)


def test_the_messages_have_the_same_fields_and_unknown_ones_stay_unknown() -> None:
    known = MachineFigures(0.5, mended_frames=0)
    assert dict(reported(known, SamplerFigures())) == {"disk_free_ratio": 0.5, "mended_frames": 0.0}
    machine, sampler = membership_pb2.MachineFigures, membership_pb2.SamplerFigures
    fields = {*machine.DESCRIPTOR.fields_by_name, *sampler.DESCRIPTOR.fields_by_name}
    assert fields == FIGURES.keys()
    assert from_wire(MachineFigures, to_wire(machine, MachineFigures())) == MachineFigures()
    assert from_wire(SamplerFigures, to_wire(sampler, SamplerFigures())) == SamplerFigures()
