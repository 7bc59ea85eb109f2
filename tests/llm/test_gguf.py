"""The GGUF reader agrees with the format's own library, and refuses everything unsound with one clear sentence."""

import contextlib
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_llama import TYPE, Shape, rewritten, write

from tegrad.llm.config import Config
from tegrad.llm.errors import ContextError, GgufError, ModelError, UnsupportedModelError
from tegrad.llm.formats import BLOCK_TYPES
from tegrad.llm.gguf import Gguf, _Header
from tegrad.llm.tokenizer import Tokenizer

SMALL = Shape(dim=32, ffn=32, heads=1, kv_heads=1, layers=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf", SMALL, TYPE.Q8_0)


def open_all(path: Path) -> None:
    """Everything that is read before a device is touched."""
    with Gguf.open(path) as file:
        Config.read(file)
        Tokenizer(file)


def test_the_block_formats_are_ggmls() -> None:
    for number, block in BLOCK_TYPES.items():
        kind = GGMLQuantizationType(number)
        assert (kind.name, *GGML_QUANT_SIZES[kind]) == (block.name, block.elements, block.size)


def test_values_of_every_type_are_read(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "values.gguf", "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -2)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -3)
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüß 漢字")
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [1.5, 2.5])
    writer.add_array("texts", ["a", "", "漢"])
    writer.add_array("bools", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with Gguf.open(tmp_path / "values.gguf") as file:
        expected = {
            "u8": 255, "i8": -128, "u16": 65535, "i16": -2, "u32": 2**32 - 1, "i32": -3, "u64": 2**64 - 1,
            "i64": -(2**63), "f32": 0.5, "f64": 0.1, "yes": True, "text": "grüß 漢字", "ints": [1, -2, 3],
            "floats": [1.5, 2.5], "texts": ["a", "", "漢"], "bools": [True, False], "general.architecture": "llama",
        }  # fmt: skip
        assert dict(file.metadata) == expected


@pytest.mark.parametrize("window", [1, 8, 9, 31, 64, 1 << 20])
def test_a_list_of_strings_is_read_whatever_part_of_the_file_is_at_hand(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["", "a", "漢字" * 9, *map(str, range(300)), ""]
    writer = GGUFWriter(tmp_path / "texts.gguf", "llama")
    writer.add_array("texts", texts)
    writer.add_uint32("after", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(_Header, "WINDOW", window)
    with Gguf.open(tmp_path / "texts.gguf") as file:
        assert (file.metadata["texts"], file.metadata["after"]) == (texts, 7)


def test_tensors_are_where_the_librarys_reader_finds_them(small: Path) -> None:
    with Gguf.open(small) as file:
        library = {tensor.name: tensor for tensor in GGUFReader(small).tensors}
        assert file.tensors.keys() == library.keys()
        for name, info in file.tensors.items():
            assert info.shape == tuple(reversed(library[name].shape.tolist()))
            data = bytearray(info.nbytes)
            file.read_into(info.offset, memoryview(data))
            assert bytes(data) == library[name].data.tobytes()


def test_a_file_cut_anywhere_is_called_truncated(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    cut = tmp_path / "cut.gguf"
    header = len(whole) - sum(tensor.n_bytes for tensor in GGUFReader(small).tensors)
    for size in [*range(0, header, 97), *range(header, len(whole), 997), *range(len(whole) - 33, len(whole))]:
        cut.write_bytes(whole[:size])
        with pytest.raises(GgufError, match=r"truncated|not a GGUF"):
            open_all(cut)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 12_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_is_an_error_of_ours_or_none(
    small: Path, tmp_path: Path, damage: list[tuple[int, int]]
) -> None:
    data = bytearray(small.read_bytes())
    for at, value in damage:
        data[at] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with contextlib.suppress(ModelError):
        open_all(path)


def test_what_is_no_model_file_is_said_so(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("once upon a time")
    with pytest.raises(GgufError, match="not a GGUF file"):
        Gguf.open(text)
    with pytest.raises(GgufError, match="No such file"):
        Gguf.open(tmp_path / "missing.gguf")
    with pytest.raises(GgufError, match="directory"):
        Gguf.open(tmp_path)


def test_an_unknown_quantization_is_named(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    name = b"blk.0.attn_k.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    for number, said in ((GGMLQuantizationType.IQ1_S, "IQ1_S"), (31, "Q4_0_4_4"), (201, "type 201")):
        path = tmp_path / "quantized.gguf"
        path.write_bytes(data[:at] + int(number).to_bytes(4, "little") + data[at + 4 :])
        with pytest.raises(UnsupportedModelError, match=said):
            Gguf.open(path)


def test_another_version_is_refused(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + small.read_bytes()[8:])
    with pytest.raises(UnsupportedModelError, match="version 1"):
        Gguf.open(path)


def test_failures_leave_no_file_open(small: Path, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small.read_bytes()[:500])
    for _ in range(20):
        for path in (cut, tmp_path, tmp_path / "missing"):
            with pytest.raises(GgufError):
                Gguf.open(path)
        with Gguf.open(small):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"arch": "mamba"}, UnsupportedModelError, "'mamba'; we run llama"),
        ({"llama.expert_count": 8}, UnsupportedModelError, "mixture of experts"),
        ({"llama.rope.scaling.type": "longrope"}, UnsupportedModelError, "longrope"),
        ({"llama.block_count": 2**31 - 1}, GgufError, "block_count = 2147483647, at most 4096 expected"),
        ({"llama.block_count": None}, GgufError, "lacks the value 'llama.block_count'"),
        ({"llama.embedding_length": 0}, GgufError, "embedding_length = 0"),
        ({"llama.feed_forward_length": 64}, GgufError, r"shape \(32, 32\), \(64, 32\) expected"),
        ({"llama.attention.head_count": 3}, GgufError, "heads|shape"),
        ({"tensor": "blk.0.ffn_up.weight"}, GgufError, "lacks the tensor 'blk.0.ffn_up.weight'"),
        ({"tensor": "token_embd.weight"}, GgufError, "lacks the tensor 'token_embd.weight'"),
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModelError, "'bert' tokenizer"),
        ({"tokenizer.ggml.pre": "poro"}, UnsupportedModelError, "'poro'"),
        ({"tokenizer.ggml.tokens": None}, GgufError, "vocabulary"),
    ],
)
def test_what_we_do_not_run_and_what_is_missing_are_named(
    small: Path, tmp_path: Path, changes: dict[str, object], error: type[ModelError], said: str
) -> None:
    changes = dict(changes)
    path = rewritten(small, tmp_path / "changed.gguf", str(changes.pop("arch", "llama")), **changes)
    with pytest.raises(error, match=said):
        open_all(path)


def test_a_context_is_bounded_by_the_model(small: Path) -> None:
    with Gguf.open(small) as file:
        config = Config.read(file)
    assert config.positions() == SMALL.context
    assert config.positions(64, prompt=64) == 64
    for asked, prompt in ((SMALL.context + 1, 1), (None, SMALL.context + 1), (8, 9)):
        with pytest.raises(ContextError):
            config.positions(asked, prompt)


@pytest.mark.parametrize(
    ("asked", "prompt", "said"),
    [
        (None, 5000, "exceed the context of 4096, our default: ask for a longer one (--context, up to 131072), or"),
        (64, 65, "65 tokens exceed the context of 64: ask for a longer one (--context, up to 131072)"),
        (None, 200_000, "200000 tokens exceed the context of 131072: shorten the prompt"),
        (0, 1, "a context of 0 tokens was asked for: give 1 to 131072"),
        (-3, 1, "a context of -3 tokens was asked for: give 1 to 131072"),
        (131_073, 1, "the model has 131072: ask for less"),
    ],
)
def test_a_refused_context_says_what_would_do(small: Path, asked: int | None, prompt: int, said: str) -> None:
    with Gguf.open(small) as file:
        config = replace(Config.read(file), context=131_072)
    with pytest.raises(ContextError, match=re.escape(said)):
        config.positions(asked, prompt)
