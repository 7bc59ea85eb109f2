"""Models by name: loaded when asked for, within a budget, and unloaded for others or when nobody uses them."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_llama
from tiny_llama import TYPE, Shape

from tegrad.errors import TegradError
from tegrad.hub.names import ModelNameError
from tegrad.llm.errors import GgufError, OutOfMemory, UnsupportedModelError
from tegrad.llm.footprint import PROCESS, Footprint
from tegrad.llm.gguf import Gguf
from tegrad.llm.service import Service
from tegrad.nv import memory
from tegrad.serve import catalogue
from tegrad.serve.catalogue import Catalogue, Shelf, about
from tegrad.serve.model import About, UnknownModel
from tegrad.serve.plan import LEAST_CONTEXT, USUAL_CONTEXT, Plan, Wanted, plan
from tegrad.serve.wire import EngineError

SHAPE = Shape(layers=1, vocab=301)
MIB = 1 << 20


class Fake:
    """A remote whose process is none."""

    def __init__(self, one: About, made: Plan) -> None:
        self.about, self.plan, self.device, self.busy, self.closed = one, made, "a device", False, False
        self.link = self
        self.error: TegradError | None = None

    async def close(self, *, drain: bool = False) -> None:
        self.closed = True
        await asyncio.sleep(0)


class Loader:
    """In place of `Remote.load`: what was loaded, in order; each load waits until it may go on."""

    def __init__(self) -> None:
        self.made: list[Fake] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.errors: list[Exception] = []

    async def load(self, one: About, made: Plan) -> Fake:
        await self.gate.wait()
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop(0)
        self.made.append(Fake(one, made))
        return self.made[-1]

    @property
    def names(self) -> list[str]:
        return [one.about.name for one in self.made]

    @property
    def there(self) -> list[str]:
        return [one.about.name for one in self.made if not one.closed]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [tiny_llama.write(folder / f"{name}.gguf", SHAPE, TYPE.Q8_0) for name in ("a", "b-Q8_0", "c")]


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def shelf(paths: list[Path], empty_cache: Path) -> Shelf:
    return Shelf([str(path) for path in paths])


@pytest.fixture
def run(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a test in front of a catalogue whose models are fakes; `fit` is how many have room."""

    def go(test: Callable[[Catalogue, Loader], Coroutine[Any, Any, None]], fit: int = 2, **options: Any) -> None:
        async def all_of_it() -> None:
            loader = Loader()
            monkeypatch.setattr(catalogue.Remote, "load", loader.load)
            models = Catalogue(shelf, Wanted(slots=1), memory=fit * (one_bytes() + PROCESS) + MIB, **options)
            await test(models, loader)
            await models.close()
            assert loader.there == []

        asyncio.run(all_of_it())

    def one_bytes() -> int:
        with Gguf.open(shelf.find("a").path) as file:
            return plan(Footprint.of(file), Wanted(slots=1), None).bytes

    return go


async def until(true: Callable[[], object]) -> None:
    """Let others go on until something is so; reading a file takes a thread."""
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.001)


# ---- which there are


def test_a_files_header_says_what_it_is(paths: list[Path]) -> None:
    one = about("b", paths[1])
    assert (one.family, one.quantization, one.context, one.embeds) == ("llama", "Q8_0", 128, False)
    assert one.size == paths[1].stat().st_size
    assert one.parameters == sum(array.size for array in tiny_llama.weights(SHAPE, 0).values())
    assert one.metadata["llama.context_length"] == 128
    assert "tokenizer.ggml.tokens" not in one.metadata
    assert about("a", paths[0]).quantization == "Q8_0"  # by its tensors


def test_numbers_that_json_does_not_have_are_not_told(tmp_path: Path) -> None:
    odd = replace(SHAPE, extra={"odd": math.nan, "even": 2.5})
    one = about("odd", tiny_llama.write(tmp_path / "odd.gguf", odd, TYPE.Q8_0))
    told = {key.split(".")[-1]: value for key, value in one.metadata.items()}
    assert "odd" not in told
    assert told["even"] == 2.5
    json.dumps(dict(one.metadata), allow_nan=False)


def test_named_models_come_first_then_those_in_the_cache(shelf: Shelf, empty_cache: Path, paths: list[Path]) -> None:
    files = empty_cache / "models--Owner--Some-GGUF" / "snapshots" / "1"
    files.mkdir(parents=True)
    (files / "some-Q4_K_M.gguf").symlink_to(paths[0])
    assert [one.name for one in shelf.all()] == ["a", "b-Q8_0", "c"]  # it is the same file as one that was named
    (files / "some-Q8_0.gguf").write_bytes(paths[0].read_bytes())
    (files / "some-Q6_K.gguf").write_bytes(b"no model")
    assert [one.name for one in shelf.all()] == ["a", "b-Q8_0", "c", "Owner/Some-GGUF:Q8_0"]
    for name in ("Owner/Some-GGUF:Q8_0", "owner/some-gguf:q8_0", "some:q8_0"):
        assert shelf.find(name).name == "Owner/Some-GGUF:Q8_0"
    assert [shelf.find(name).name for name in (None, "a:latest", "A:latest")] == ["a", "a", "a"]
    for name in ("", "d", "some:q6_k", str(paths[0]), "../a"):
        with pytest.raises(UnknownModel, match="choose one of a, b-Q8_0, c, Owner/Some-GGUF:Q8_0"):
            shelf.find(name)


def test_without_any_model_it_is_the_shipped_one(empty_cache: Path) -> None:
    assert [one.name for one in Shelf([]).all()] == ["small"]
    assert Shelf([]).find(None).name == "small"


def test_wrong_names_are_told_at_once(empty_cache: Path, paths: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ModelNameError, match="tegrad pull"):
        Shelf(["owner/none"])
    with pytest.raises(GgufError):
        Shelf([str(tmp_path / "none.gguf")])
    with pytest.raises(ModelNameError, match="two of the models have the same name"):
        Shelf([str(paths[0]), str(paths[0])])


# ---- which are in memory


def test_one_load_serves_all_who_wait_for_it(run: Any) -> None:
    async def test(models: Catalogue, loader: Loader) -> None:
        loader.gate.clear()
        held = asyncio.Event()

        async def have() -> None:
            async with models.use("a") as model:
                assert model.about.name == "a"
                await held.wait()

        tasks = [asyncio.create_task(have()) for _ in range(3)]
        await until(lambda: [len(place.waiting) for place in models.places] == [3])
        assert models.loads
        tasks.pop().cancel()  # one goes away meanwhile
        loader.gate.set()
        await until(lambda: not models.loads)
        assert [place.users for place in models.places] == [2]
        held.set()
        await asyncio.gather(*tasks)
        async with models.use(None):
            pass
        assert loader.names == ["a"]
        (loaded,) = models.loaded()
        assert (loaded.about.name, loaded.expires, loaded.bytes) == ("a", None, loader.made[0].plan.bytes)

    run(test)


def test_the_least_used_makes_room_once_nobody_uses_it(run: Any) -> None:
    async def test(models: Catalogue, loader: Loader) -> None:
        for name in ("a", "b-Q8_0", "a", "c"):
            async with models.use(name):
                pass
        assert loader.there == ["a", "c"]
        async with models.use("a"), models.use("c"):
            late = asyncio.create_task(models.use("b-Q8_0").__aenter__())
            await until(lambda: models._places["a"].leaving)
            assert loader.there == ["a", "c"]
            again = asyncio.create_task(models.use("a").__aenter__())  # which is to leave: it comes after the other
            await until(lambda: models._places["a"].waiting)
            assert not again.done()
        assert (await late).about.name == "b-Q8_0"
        assert (await again).about.name == "a"
        assert loader.names == ["a", "b-Q8_0", "c", "b-Q8_0", "a"]

    run(test)


def test_a_client_that_does_not_read_keeps_no_other_model_out_for_long(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "PATIENCE_S", 0.05)

    async def test(models: Catalogue, loader: Loader) -> None:
        async with models.use("a"):
            loader.made[0].busy = True
            other = asyncio.create_task(models.use("b-Q8_0").__aenter__())
            await asyncio.sleep(1.2)
            assert not other.done()  # the engine still works for it
            loader.made[0].busy = False
            await asyncio.wait_for(other, 60)
            assert loader.there == ["b-Q8_0"]

    run(test, fit=1)


def test_a_model_that_nobody_used_for_long_is_unloaded(run: Any) -> None:
    async def test(models: Catalogue, loader: Loader) -> None:
        async with models.use("a", keep_alive=math.inf):
            pass
        async with models.use("b-Q8_0"):
            pass
        assert models.loaded()[1].expires is not None
        await asyncio.sleep(0.03)
        async with models.use("b-Q8_0"):
            await asyncio.sleep(0.1)
            assert loader.there == ["a", "b-Q8_0"]
        async with models.use("a", keep_alive=0):
            pass
        await until(lambda: loader.there == [])

    run(test, keep_alive=0.05)


def test_a_model_that_was_used_since_its_time_was_over_stays(run: Any) -> None:
    """Its timer ends while another model loads, for which the unloading waits."""

    async def test(models: Catalogue, loader: Loader) -> None:
        async with models.use("a", keep_alive=math.inf):
            pass
        loader.gate.clear()
        loading = asyncio.create_task(models.use("b-Q8_0").__aenter__())
        await until(models._loading.locked)
        async with models.use("a", keep_alive=0):
            pass
        await until(lambda: len(models._tasks) == 2)  # the load, and what is to unload
        async with models.use("a", keep_alive=3600):
            pass
        loader.gate.set()
        await loading
        await until(lambda: not models._tasks)
        assert loader.there == ["a", "b-Q8_0"]

    run(test)


def test_a_model_is_there_while_another_thread_reads_it_for_the_first_time(
    empty_cache: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = empty_cache / "models--Owner--Some-GGUF/snapshots/1"
    folder.mkdir(parents=True)
    (folder / "some-Q8_0.gguf").symlink_to(paths[0])
    shelf, reads, reading, enough = Shelf([str(paths[1])]), catalogue.about, threading.Event(), threading.Event()

    def slow(name: str, path: Path) -> About:
        if threading.current_thread() is other:
            reading.set()
            assert enough.wait(30)
        return reads(name, path)

    monkeypatch.setattr(catalogue, "about", slow)
    other = threading.Thread(target=shelf.all)
    other.start()
    assert reading.wait(30)
    assert [one.name for one in shelf.all()] == ["b-Q8_0", "Owner/Some-GGUF:Q8_0"]
    enough.set()
    other.join()


def test_a_load_that_fails_is_told_to_all_and_tried_again(run: Any) -> None:
    async def test(models: Catalogue, loader: Loader) -> None:
        loader.errors = [EngineError("no")]

        async def have() -> None:
            async with models.use("a"):
                pass

        found = await asyncio.gather(have(), have(), return_exceptions=True)
        assert [str(error) for error in found] == ["no", "no"]
        await have()
        assert loader.names == ["a"]
        assert models.places[0].failures == 1

    run(test)


def test_without_known_memory_others_leave_when_the_device_has_none(run: Any) -> None:
    async def test(models: Catalogue, loader: Loader) -> None:
        for name in ("a", "b-Q8_0"):
            async with models.use(name):
                pass
        loader.errors = [OutOfMemory("none left")]
        async with models.use("c"):
            assert loader.there == ["b-Q8_0", "c"]
        loader.errors = [OutOfMemory("none left") for _ in range(9)]
        with pytest.raises(OutOfMemory):
            await models.use("a").__aenter__()
        assert loader.there == []

    run(test, fit=9)


def test_a_model_whose_process_ended_is_loaded_again(run: Any) -> None:
    async def test(models: Catalogue, loader: Loader) -> None:
        async with models.use("a"):
            loader.made[0].error = EngineError("gone")
            async with models.use("a") as model:
                assert model is loader.made[1]
        assert loader.there == ["a"]
        assert models.places[0].users == 0

    run(test)


UNSERVED: dict[str, tuple[Shape, dict[str, TYPE], str]] = {
    "f32": (SHAPE, {"": TYPE.F32}, "F32 matrices are not run, .*: convert the model to F16"),
    "one": (SHAPE, {"attn_k": TYPE.F32}, "F32 matrices are not run, .*: convert the model to F16"),
    "tied": (replace(SHAPE, tied=True), {"token_embd": TYPE.F32}, "F32 matrices are not run"),
    "narrow": (replace(SHAPE, arch="gpt2", dim=96, heads=3, kv_heads=3), {}, "rows of 96 weights"),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_a_model_whose_batches_are_not_run_is_refused_before_a_process_is_started(
    name: str, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tegrad run` runs such files. Before, the model was there and every request to it failed."""
    shape, kinds, said = UNSERVED[name]
    path = tiny_llama.write(tmp_path / "m.gguf", shape, TYPE.Q8_0, kinds=kinds)
    loader = Loader()
    monkeypatch.setattr(catalogue.Remote, "load", loader.load)

    async def ask() -> None:
        models = Catalogue(Shelf([str(path)]), Wanted(slots=1))
        with pytest.raises(UnsupportedModelError, match=said):
            async with models.use("m"):
                pass
        await models.close()

    asyncio.run(ask())
    assert loader.made == []
    with pytest.raises(UnsupportedModelError, match=said):
        Service(path, "NV:7")  # a device that there is not


# ---- their places in memory


def test_a_plan_follows_memory() -> None:
    from tegrad.bench.models import SHAPES

    said = Footprint(SHAPES["8b"].config, 5 << 30)
    most = plan(said, Wanted(), None)
    assert (most.context, most.slots, most.blocks) == (USUAL_CONTEXT, 8, 8 * USUAL_CONTEXT // 64)
    assert plan(said, Wanted(), 1 << 40) == most
    rooms = [plan(said, Wanted(), gib << 30) for gib in (7, 8, 12, 16, 24)]
    assert [each.context for each in rooms] == sorted(each.context for each in rooms)
    for each, gib in zip(rooms, (7, 8, 12, 16, 24), strict=True):
        assert each.bytes <= gib << 30
        assert LEAST_CONTEXT <= each.context <= 64 * each.blocks <= 8 * each.context
    assert rooms[0].blocks < 8 * LEAST_CONTEXT // 64  # sequences share what does not suffice for all of them
    assert rooms[-1].context > LEAST_CONTEXT
    asked = plan(said, Wanted(context=32768, slots=64, q8=True), 12 << 30)
    assert (asked.context, asked.slots, asked.q8) == (32768, 64, True)
    assert asked.bytes <= 12 << 30 < asked.bytes + (1 << 24)
    with pytest.raises(OutOfMemory, match=r"with a context of 2048 tokens needs .* ask for a shorter context"):
        plan(said, Wanted(), 5 << 30)
    assert plan(said, Wanted(context=1 << 30), None).context == said.config.longest
    assert plan(said, Wanted(), None, embeds=True).bytes == said.at(USUAL_CONTEXT)


def test_without_a_limit_a_context_follows_the_memory_that_linux_has_free(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_llama.write(tmp_path / "long.gguf", replace(SHAPE, dim=512, kv_heads=4, context=8192), TYPE.Q8_0)
    with Gguf.open(path) as file:
        said = Footprint.of(file)
    meminfo, loader = tmp_path / "meminfo", Loader()
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(catalogue.Remote, "load", loader.load)

    async def loaded(room: int) -> Plan:
        meminfo.write_text(f"MemAvailable: {(room + PROCESS + memory.RESERVE_BYTES) >> 10} kB\n")
        models = Catalogue(Shelf([str(path)]), Wanted())
        async with models.use("long") as held:
            made = held.plan
        await models.close()
        return made

    least, most = (said.batch(context, 8, 8 * context // 64) for context in (LEAST_CONTEXT, USUAL_CONTEXT))
    plans = [asyncio.run(loaded(least + step * (most - least) // 4)) for step in (0, 4, 16)]
    contexts = [made.context for made in plans]
    assert contexts[0] == LEAST_CONTEXT < contexts[1] < contexts[2] == USUAL_CONTEXT
