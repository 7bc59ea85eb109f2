"""A model in several files is the model that it was in one, whichever of them is given; what is wrong is said."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from tiny_llama import TYPE, Shape, write

from tegrad.llm.config import Config
from tegrad.llm.errors import GgufError
from tegrad.llm.gguf import Gguf
from tegrad.llm.reference import Reference
from tegrad.llm.tokenizer import Tokenizer

SMALL = Shape(dim=256, ffn=256, heads=2, kv_heads=1, layers=2)
PROMPT = [5, 9, 200, 31]


def split(whole: Path, folder: Path, most: int = 5) -> list[Path]:
    """A model cut by the `gguf` package: so many tensors in a part."""
    folder.mkdir(exist_ok=True)
    reader = GGUFReader(whole)
    writer = GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=most)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), *field.types[:2])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whole") / "whole.gguf", SMALL, TYPE.Q4_0)


@pytest.fixture(scope="module")
def parts(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = split(whole, tmp_path_factory.mktemp("parts"))
    assert [path.name for path in found] == [f"model-{at:05}-of-00005.gguf" for at in range(1, 6)]
    return found


def part(path: Path, number: Any, count: Any, tensors: Any, names: Sequence[str] = ()) -> Path:
    """A part with hardly anything in it; a value that is None is left out."""
    writer = GGUFWriter(path, "llama")
    for key, value in (("split.no", number), ("split.count", count), ("split.tensors.count", tensors)):
        if isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_int32(key, value)
    for name in names:
        writer.add_tensor(name, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_any_part_is_the_whole_model(whole: Path, parts: list[Path]) -> None:
    with Gguf.open(whole) as one:
        for path in parts:
            with Gguf.open(path) as file:
                assert file.size == sum(part.stat().st_size for part in parts)
                metadata = {key: value for key, value in file.metadata.items() if not key.startswith("split.")}
                assert metadata == dict(one.metadata)
                assert file.tensors.keys() == one.tensors.keys()
                assert Config.read(file) == Config.read(one)
                assert Tokenizer(file).tokens == Tokenizer(one).tokens
                for name, info in one.tensors.items():
                    other, data = file.tensors[name], bytearray(info.nbytes)
                    file.read_into(other.offset, memoryview(data))
                    assert bytes(data) == file.read(other.offset, info.nbytes) == one.read(info.offset, info.nbytes)
    logits = [Reference(path).logits(PROMPT) for path in (whole, parts[2])]
    assert np.array_equal(*logits)


def test_a_read_goes_on_in_the_next_part_and_ends_with_the_last(parts: list[Path]) -> None:
    """A stream asks for neighbouring tensors at once, whichever files they lie in."""
    joined = b"".join(path.read_bytes() for path in parts)
    with Gguf.open(parts[0]) as file:
        for begin, end in ((0, len(joined)), (len(joined) - 7, len(joined))):
            assert file.read(begin, end - begin) == joined[begin:end]
        assert file.read(len(joined) - 7, 100) == joined[-7:]
        edge = parts[0].stat().st_size
        target = bytearray(64)
        file.read_into(edge - 20, memoryview(target))
        assert bytes(target) == joined[edge - 20 : edge + 44]
        with pytest.raises(GgufError, match=r"model-00005-of-00005\.gguf became shorter"):
            file.read_into(len(joined) - 7, memoryview(target))


def test_a_model_in_parts_runs_on_the_device(device: str, whole: Path, parts: list[Path]) -> None:
    from tegrad.llm.engine import Engine
    from tegrad.llm.sampler import Sampler

    said = []
    for path in (whole, parts[1]):
        with Gguf.open(path) as file, Engine(file, 16, device=device) as engine:
            said.append(list(engine.generate(PROMPT, Sampler(0.0), 4, frozenset())))
    assert said[0] == said[1]


def test_a_part_that_is_missing_is_named(parts: list[Path], tmp_path: Path) -> None:
    for path in parts[:3]:
        shutil.copy(path, tmp_path)
    with pytest.raises(GgufError, match=r"is part 2 of 5, and model-00004-of-00005\.gguf is not beside it"):
        Gguf.open(tmp_path / parts[1].name)


def test_a_part_with_another_name_is_told_its_own(parts: list[Path], tmp_path: Path) -> None:
    shutil.copy(parts[1], tmp_path / "second.gguf")
    with pytest.raises(GgufError, match=r"is part 2 of 5, but its name does not end in -00002-of-00005\.gguf"):
        Gguf.open(tmp_path / "second.gguf")


@pytest.mark.parametrize(
    ("fellow", "said"),
    [
        ((0, 2, 2), "says of itself that it is part 1 of 2"),
        ((1, 3, 2), "says of itself that it is part 2 of 3"),
        ((1, 2, 9), "says of itself that it is part 2 of 2 of a model of 9 tensors, not 2"),
        ((None, None, None), "says of itself that it is a whole model"),
        ((1, None, 2), "says of itself that it is a whole model"),
        ((None, 2, 2), "split.no is no number"),
        ((1, 2, None), "split.tensors.count is no number"),
        ((-1, 2, 2), "split.no is no number"),
        (("1", 2, 2), "split.no is no number"),
        ((2, 2, 2), "it is part 3 of 2"),
    ],
)
def test_a_part_that_does_not_belong_there_says_what_it_is(tmp_path: Path, fellow: Any, said: str) -> None:
    part(tmp_path / "m-00001-of-00002.gguf", 0, 2, 2, ["a"])
    part(tmp_path / "m-00002-of-00002.gguf", *fellow, ["b"])
    with pytest.raises(GgufError, match=said):
        Gguf.open(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["b", "c"], "its 2 parts have 3 tensors, not 2"),
        ([], "its 2 parts have 1 tensors, not 2"),
        (["a"], "another part has the tensor 'a', too"),
    ],
)
def test_tensors_too_many_too_few_or_twice_are_refused(tmp_path: Path, names: list[str], said: str) -> None:
    part(tmp_path / "m-00001-of-00002.gguf", 0, 2, 2, ["a"])
    part(tmp_path / "m-00002-of-00002.gguf", 1, 2, 2, names)
    with pytest.raises(GgufError, match=said):
        Gguf.open(tmp_path / "m-00002-of-00002.gguf")


def test_a_damaged_part_is_named_and_no_failure_leaves_a_file_open(parts: list[Path], tmp_path: Path) -> None:
    copies = [Path(shutil.copy(path, tmp_path)) for path in parts]
    copies[3].write_bytes(copies[3].read_bytes()[:-40])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(GgufError, match=r"model-00004-of-00005\.gguf is truncated"):
        Gguf.open(copies[0])
    copies[3].write_bytes(b"nothing")
    with pytest.raises(GgufError, match=r"model-00004-of-00005\.gguf is not a GGUF file"):
        Gguf.open(copies[4])
    with Gguf.open(parts[0]):
        assert len(os.listdir("/proc/self/fd")) == before + len(parts)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_its_only_part_is_a_whole_model(tmp_path: Path) -> None:
    with Gguf.open(part(tmp_path / "any.gguf", 0, 1, 1, ["a"])) as file:
        assert list(file.tensors) == ["a"]
