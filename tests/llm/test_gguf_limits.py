"""What a file claims to hold is refused before memory is taken for it, however large the file itself claims to be."""

import os
import re
import struct
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from tiny_llama import TYPE, Shape, finish, letters, rewritten, write

from tegrad.bench import plans
from tegrad.hw.chips import CHIPS
from tegrad.llm import programs
from tegrad.llm.cache import KvCache
from tegrad.llm.config import Config
from tegrad.llm.errors import GgufError, ModelError
from tegrad.llm.formats import F32
from tegrad.llm.gguf import Gguf, shown
from tegrad.llm.plan import DecodePlan
from tegrad.llm.rope import POSITIONS_AT_ONCE, Rope
from tegrad.llm.state import States
from tegrad.llm.tokenizer import Tokenizer

SMALL = Shape(dim=32, ffn=32, heads=1, kv_heads=1, layers=1)
SPARSE = 1 << 42
"""A file's length of which next to nothing is there."""
U8, STRING, ARRAY = 0, 8, 9


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("limits") / "small.gguf", SMALL, TYPE.F32)


def header(tensors: int, values: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, values) + rest


def text(size: int, data: bytes = b"") -> bytes:
    return struct.pack("<Q", size) + data


def array(kind: int, count: int) -> bytes:
    return text(1, b"k") + struct.pack("<IIQ", ARRAY, kind, count)


CLAIMS = {
    "tensors": (header(1 << 32, 0), "4,294,967,296 tensors, of which we read 65,536"),
    "values": (header(0, 1 << 32), "4,294,967,296 values, of which we read 65,536"),
    "the same value": (header(0, 1 << 16), "two values named ''"),
    "a key": (header(0, 1, text(1 << 40)), "the name of a value has 1,099,511,627,776 bytes, 65,535 at most"),
    "a tensor's name": (header(1, 0, text(1 << 20)), "the name of a tensor has 1,048,576 bytes, 64 at most"),
    "a text": (header(0, 1, text(1, b"k") + struct.pack("<I", STRING) + text(1 << 40)), "metadata takes at least 1,"),
    "bytes": (
        header(0, 1, array(U8, 1 << 40)),
        "metadata takes at least 1,099,511,627,825 bytes, of which we read 67,",
    ),
    "texts": (header(0, 1, array(STRING, 1 << 36)), "metadata takes at least 549,755,"),
    "entries": (header(0, 1, array(U8, 1 << 24)), "its lists have 16,777,216 entries, of which we read 8,388,608"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_sparse_file_is_refused_for_what_it_claims(claim: str, tmp_path: Path) -> None:
    data, said = CLAIMS[claim]
    path = tmp_path / "sparse.gguf"
    path.write_bytes(data)
    os.truncate(path, SPARSE)
    tracemalloc.start()
    with pytest.raises(GgufError, match=re.escape(said)):
        Gguf.open(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16 << 20


@pytest.mark.parametrize(
    "claim", [name for name in CLAIMS if name not in ("the same value", "a key", "a tensor's name")]
)
def test_a_short_file_that_claims_as_much_is_truncated(claim: str, tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(CLAIMS[claim][0] + bytes(50))
    with pytest.raises(GgufError, match="truncated"):
        Gguf.open(path)


def test_tensors_that_share_bytes_are_refused(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    name = b"blk.0.attn_k.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8 + 4
    path = tmp_path / "shared.gguf"
    path.write_bytes(data[:at] + bytes(8) + data[at + 8 :])
    with pytest.raises(GgufError, match=r"the tensors '.*' and '.*' overlap"):
        Gguf.open(path)


FORGED = "\x1b[31m" + "x" * 225_339


@pytest.mark.parametrize(
    "changes",
    [
        {"arch": FORGED},
        {"general.type": FORGED},
        {"general.alignment": FORGED},
        {"llama.block_count": FORGED},
        {"llama.context_length": [1, 2] * 99_999},
        {"llama.embedding_length": [FORGED]},
        {"llama.rope.scaling.type": FORGED},
        {"llama.rope.freq_base": FORGED},
        {"tokenizer.ggml.model": FORGED},
        {"tokenizer.ggml.pre": FORGED},
        {"tokenizer.ggml.add_bos_token": FORGED},
        {"tokenizer.ggml.merges": [b"\xff" + f"{FORGED} {FORGED}".encode()]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_a_file_says_of_itself_is_cut_and_escaped_in_errors(
    changes: dict[str, object], small: Path, tmp_path: Path
) -> None:
    changes = dict(changes)
    path = tmp_path / "forged.gguf"
    if (arch := changes.pop("arch", None)) is not None:
        write(path, replace(SMALL, arch=str(arch), extra={}), TYPE.F32)
    else:
        write(path, SMALL, TYPE.F32)
        other(path, changes)
    with pytest.raises(ModelError) as refused:
        open_all(path)
    said = str(refused.value).replace(str(path), "")
    assert said.isprintable()
    assert len(said) < 350


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("llama", "'llama'"),
        ("a" * 60, "'" + "a" * 60 + "'"),
        ("a" * 61, "'" + "a" * 59 + "..."),
        ("\udcff" * 64, "'" + "\\udcff" * 9 + "\\udcf..."),
        ("\x1b[2J\n", r"'\x1b[2J\n'"),
        ([1, 2], "a list of 2"),
        (2**64 - 1, "18446744073709551615"),
        (True, "True"),
    ],
)
def test_a_value_is_shown_in_a_line(value: object, text: str) -> None:
    assert shown(value) == text


def open_all(path: Path) -> None:
    with Gguf.open(path) as file:
        Config.read(file)
        Tokenizer(file).encode("x" * 1000)


def other(path: Path, changes: Mapping[str, object]) -> None:
    """Change values of a file, whatever their types were."""
    reader = GGUFReader(path)
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    writer = GGUFWriter(path, values.pop("general.architecture"))
    for key, value in (values | changes).items():
        kind = GGUFValueType.get_type(value)
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, GGUFValueType.UINT32 if kind == GGUFValueType.INT32 else kind)
    tensors = {tensor.name: (np.array(tensor.data), tensor.tensor_type) for tensor in reader.tensors}
    for name, (data, raw) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=raw)
    finish(writer)


@pytest.mark.parametrize("value", [1 << 31, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize(
    "key",
    [
        "context_length", "block_count", "embedding_length", "feed_forward_length", "rope.dimension_count",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    ],
)  # fmt: skip
def test_a_size_beyond_what_kernels_count_is_refused(key: str, value: int, small: Path, tmp_path: Path) -> None:
    data = bytearray(small.read_bytes())
    path = tmp_path / "large.gguf"
    whole = f"llama.{key}".encode()
    if (at := data.find(text(len(whole), whole))) >= 0:  # rename what the file has, to keep the rest in place
        at += 8 + len(whole)
        data[at : at + 8] = struct.pack("<I", 10) + struct.pack("<Q", value)[:4]
        data[at + 8 : at + 8] = struct.pack("<Q", value)[4:]
        path.write_bytes(data)
    else:
        count = struct.unpack_from("<Q", data, 16)[0] + 1
        extra = text(len(whole), whole) + struct.pack("<IQ", 10, value)
        path.write_bytes(data[:16] + struct.pack("<Q", count) + extra + data[24:])
    with pytest.raises(GgufError, match=f"llama.{key} = {value}, at most 2147483647 expected"):
        open_all(path)


@pytest.mark.parametrize(("heads", "said"), [(33, "33 heads, 33 key heads of 0"), (1 << 30, "heads")])
def test_more_heads_than_elements_are_refused(heads: int, said: str, small: Path, tmp_path: Path) -> None:
    changes = {f"llama.attention.head_count{kv}": heads for kv in ("", "_kv")}
    path = rewritten(small, tmp_path / "heads.gguf", **changes, **{"llama.rope.dimension_count": None})
    with Gguf.open(path) as file, pytest.raises(GgufError, match=said):
        Config.read(file)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-38])
def test_divisors_that_nothing_is_divided_by_are_refused(value: float, tmp_path: Path) -> None:
    path = write(tmp_path / "divisors.gguf", replace(SMALL, rope_freqs=True), TYPE.F32)
    with Gguf.open(path) as file:
        config, info = Config.read(file), file.tensor("rope_freqs.weight")
        assert config.rope_divisors(file) is not None
        with path.open("r+b") as out:
            out.seek(info.offset + 4)
            out.write(struct.pack("<f", value))
        with pytest.raises(GgufError, match=r"rope_freqs\.weight' has values that nothing is divided by"):
            config.rope_divisors(file)


@pytest.mark.parametrize("factor", [1e-38, 1e31])
def test_a_number_that_would_leave_floats_is_refused(factor: float, small: Path, tmp_path: Path) -> None:
    path = rewritten(small, tmp_path / "factor.gguf", **{"llama.rope.scaling.factor": factor})
    with Gguf.open(path) as file, pytest.raises(GgufError, match=r"llama\.rope\.scaling\.factor = "):
        Config.read(file)


def test_the_trained_context_takes_no_memory(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "compile_kernel", lambda *_, **__: b"")
    taken = []
    with Gguf.open(small) as file:
        config = Config.read(file)
    for context in (128, (1 << 31) - 1):
        device = plans.DryDevice(CHIPS["agx-orin-64gb"])
        made = plans.model(replace(config, context=context), F32, device)
        assert made.config.positions() == min(context, 4096)
        with DecodePlan(made, States(device), KvCache(device, made.config, 128)):
            taken.append(device.taken)
    assert taken[0] == taken[1]


def test_angles_are_those_of_one_table_however_many_are_computed_at_once() -> None:
    rope = Rope(8, 10000.0)
    tables = rope.tables(POSITIONS_AT_ONCE + 7)
    angle = np.arange(POSITIONS_AT_ONCE + 7)[:, None] * 10000.0 ** (-2 * np.arange(4) / 8)
    assert np.array_equal(tables, np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32))
    assert rope.tables(0).shape == (2, 0, 4)


def test_the_largest_vocabularies_are_far_from_the_limits(tmp_path: Path) -> None:
    wide = letters(300)
    many = replace(wide, merges=["e t"] * 600_000)
    path = write(tmp_path / "merges.gguf", SMALL, TYPE.F32, vocabulary=many)
    with Gguf.open(path) as file:
        assert len(file.metadata["tokenizer.ggml.merges"]) == 600_000  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_tokens_that_take_long_to_cut_are_refused(model: str, tmp_path: Path) -> None:
    plain = letters(300)
    tokens = [*plain.tokens, *("a" * 9900 + f"{at:0100}" for at in range(100))]
    long = replace(
        plain, tokens=tokens, kinds=[*plain.kinds, *[1] * 100], model=model, scores=[float(-at) for at in range(400)]
    )
    path = write(tmp_path / "long.gguf", replace(SMALL, vocab=400), TYPE.F32, vocabulary=long)
    with pytest.raises(GgufError, match="its 400 tokens, the longest of 10,000 letters, are too long"):
        Tokenizer.load(path)


def test_one_long_token_costs_a_short_text_nothing(tmp_path: Path) -> None:
    plain = letters(300)
    long = replace(plain, tokens=[*plain.tokens[:-1], "e" * 9000])
    path = write(tmp_path / "long.gguf", SMALL, TYPE.F32, vocabulary=long)
    tracemalloc.start()
    tokens = Tokenizer.load(path).encode("e" * 500)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(tokens) == 251
    assert most < 4 << 20


def test_a_text_with_half_characters_has_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "model.gguf", SMALL, TYPE.F32))
    assert tokenizer.encode("a\udcffb\ud800") == tokenizer.encode("a?b?")


def test_tokens_that_are_no_characters_are_refused(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "bytes.gguf"
    path.write_bytes(small.read_bytes().replace(b"<|bos|>", b"<|b\xffs|>"))
    with pytest.raises(GgufError, match="its tokens are not UTF-8"):
        Tokenizer.load(path)
