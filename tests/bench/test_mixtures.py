"""A mixture has the formats that files of published models have."""

from collections import Counter
from dataclasses import replace

import pytest

from tegrad.bench.models import MIXTURES, SHAPES, ModelShape, Place, _matrices, format_of
from tegrad.llm.formats import IQ4_XS, Q6_K

GEMMA_270M = replace(SHAPES["gemma3-1b"], dim=640, ffn=2048, layers=18)
SMOLLM2_135M = ModelShape("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 0)


def formats(shape: ModelShape, mixture: str) -> Counter[str]:
    """How many matrices have which format."""
    return Counter(
        format_of(
            MIXTURES[mixture],
            Place(
                spec.name,
                shape.config.size(spec.shape[1]),
                layer or 0,
                shape.layers,
                shape.heads // shape.kv_heads,
                spec.name == ("token_embd" if shape.tied else "output"),
            ),
        )
        for spec, layer in _matrices(shape)
    )


@pytest.mark.parametrize(
    ("shape", "mixture", "published"),
    [
        (SHAPES["gemma3-4b"], "q4km", {"q4k": 204, "q6k": 35}),
        (GEMMA_270M, "q4km", {"q5_0": 81, "q4k": 27, "q8_0": 10, "q6k": 9}),
        (SMOLLM2_135M, "q4_1", {"q4_1": 210, "q8_0": 1}),
        (SHAPES["1b"], "q4km", {"q4k": 96, "q6k": 17}),
        (SHAPES["8b"], "q4km", {"q4k": 193, "q6k": 33}),
    ],
)  # the first from a log of llama.cpp, the next two counted in the files on PyPI, the last two in logs
def test_a_mixture_is_that_of_published_files(shape: ModelShape, mixture: str, published: dict[str, int]) -> None:
    assert formats(shape, mixture) == published


def test_layers_that_are_worth_more_are_the_first_and_last_eighths_and_every_third_between() -> None:
    more = [layer for layer in range(16) if format_of(MIXTURES["q4km"], Place("ffn_down", 8192, layer, 16)) == "q6k"]
    assert more == [0, 1, 4, 7, 10, 13, 14, 15]


def test_rows_that_are_no_multiple_of_256_have_blocks_of_32() -> None:
    for mixture in MIXTURES.values():
        for name in ("attn_q", "attn_v", "attn_output", "ffn_down", "token_embd"):
            place = Place(name, 896, output=name == "token_embd")
            assert format_of(mixture, place) in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl")


def test_matrices_of_values_that_no_layer_reads_are_counted_as_llama_quantize_counts_them() -> None:
    """A published file has those of layers that take an earlier one's values; a small group is the first layer's."""
    for name, more in {"gemma4-e2b": [0, 1, 2, 3, 6, 9, 12], "gemma4-e4b": [*range(5), 7, 10, 13, 16, 19, 22]}.items():
        values = [(spec, layer) for spec, layer in _matrices(SHAPES[name]) if spec.name == "attn_v"]
        assert [layer for spec, layer in values if SHAPES[name].format("q4km", spec, layer) is Q6_K] == more
    large = SHAPES["gemma4-31b"]
    kinds = {large.format("iq4xs", spec, layer) for spec, layer in _matrices(large) if spec.name == "attn_v"}
    assert kinds == {IQ4_XS}
