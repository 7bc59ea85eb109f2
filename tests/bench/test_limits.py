"""The byte limit counts what a step reads of a real file's header, and the kernel reads all that it is said to."""

import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from tegrad.bench import models
from tegrad.bench.limits import Rate, bandwidth, decode_limit, read_bandwidth, readers, step_bytes
from tegrad.bench.quality import small
from tegrad.bench.record import RecordError

sys.path.append(str(Path(__file__).parents[1] / "nv"))

from boards import use_board


def written(folder: Path, name: str) -> tuple[Path, models.ModelShape, dict[str, int]]:
    """A small model of a family, and its tensors' bytes as the reader of another program has them."""
    shape, kind = models.parse(name)
    models.write(path := folder / f"{name}.gguf", made := small(shape), kind)
    return path, made, {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(path).tensors}


def test_a_tied_model_reads_every_tensor_but_the_rope_table(tmp_path: Path) -> None:
    path, _, sizes = written(tmp_path, "1b-q6k")
    assert "output.weight" not in sizes
    assert step_bytes(path) == sum(sizes.values()) - sizes["rope_freqs.weight"]


def test_an_untied_model_reads_one_row_of_its_embedding(tmp_path: Path) -> None:
    path, shape, sizes = written(tmp_path, "8b-q4k")
    row = sizes["token_embd.weight"] // shape.vocab
    unread = sizes["rope_freqs.weight"] + sizes["token_embd.weight"] - row
    assert step_bytes(path) == sum(sizes.values()) - unread


def test_learned_positions_are_read_a_row_at_a_time(tmp_path: Path) -> None:
    path, shape, sizes = written(tmp_path, "gpt2-f16")
    positions = sizes["position_embd.weight"]
    assert step_bytes(path) == sum(sizes.values()) - positions + positions // shape.context


def test_depth_adds_the_halves_of_keys_and_values(tmp_path: Path) -> None:
    path, shape, _ = written(tmp_path, "qwen3-0.6b-q8_0")
    cache = 1000 * shape.layers * shape.kv_heads * shape.head_dim * 2 * 2
    assert step_bytes(path, 1000) - step_bytes(path) == cache
    limit = decode_limit(path, 1000, Rate(1e12, "1000 GB/s"))
    assert limit is not None
    assert limit.rate == pytest.approx(1e12 / step_bytes(path, 1000))
    assert "1000 tokens' keys and values" in limit.note
    assert decode_limit(path, 0, Rate(0.0, "")) is None


def test_depth_beyond_a_window_adds_nothing_to_its_layers(tmp_path: Path) -> None:
    path, shape, _ = written(tmp_path, "gemma3-1b-q8_0")
    [window] = {op.window for op in shape.config.network.attends} - {None}
    local = sum(op.window is not None for op in shape.config.network.attends)
    assert 0 < local < shape.layers
    position = shape.kv_heads * shape.head_dim * 2 * 2
    beyond = (step_bytes(path, 3 * window) - step_bytes(path)) / position
    assert beyond == (window - 1) * local + 3 * window * (shape.layers - local)
    assert step_bytes(path, 7) - step_bytes(path) == 7 * shape.layers * position


def test_the_baselines_bytes_are_those_of_the_tensors() -> None:
    """1,017 MB of Llama 3.2 1B in Q6_K are its file; the tensors are 1,013.8 MB of it."""
    shape, _ = models.parse("1b-q6k")
    config = shape.config
    weights = sum(
        config.size(spec.shape[0]) * config.size(spec.shape[1])
        for spec, _ in config.specs()
        if len(spec.shape) == 2 and spec is not config.arch.output
    )
    assert weights / 256 * 210 == pytest.approx(1013.7e6, rel=1e-4)


@pytest.mark.board
def test_each_form_reads_up_to_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tegrad.bench.gpu.PASSES", 1)
    with use_board("agx-orin-64gb"):
        from tinygrad import Device
        from tinygrad.device import BufferSpec

        device: Any = Device["NV"]
        size = 1 << 20
        buffer = device.allocator.alloc(size, BufferSpec(cpu_access=True, nolru=True))
        view = buffer.cpu_view()
        forms = 0
        for _, launch, count in readers(device, buffer):
            assert count == size
            view[0:size] = bytes(size)
            view[size - 16 : size] = (1).to_bytes(16, "little")
            launch.program(
                *launch.buffers, global_size=launch.grid, local_size=launch.block, vals=launch.values, wait=True
            )
            assert int.from_bytes(bytes(view[0:4]), "little") == 1
            forms += 1
        assert forms == 6
        monkeypatch.setattr("tegrad.bench.limits.READ_BYTES", size)
        assert "over 1 MiB" in read_bandwidth(device).note


def test_shares_of_a_bandwidth_that_the_clock_does_not_tell_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([Rate(2e12, ""), Rate(0.0, "not measured")])
    monkeypatch.setattr("tegrad.bench.limits.read_bandwidth", lambda device: next(rates))
    assert bandwidth(None) == 2e12  # type: ignore[arg-type]
    with pytest.raises(RecordError, match="the bandwidth cannot be measured"):
        bandwidth(None)  # type: ignore[arg-type]
