"""The models of a server: which there are, and which of them are in memory.

Each has a process of its own (`remote`). One that is asked for is loaded; where the memory does not suffice for it,
those that were used least lately leave first, once nobody uses them. Loads come one after the other, in the order in
which they were asked for, so that nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from tegrad import models
from tegrad.errors import TegradError
from tegrad.hub import cache
from tegrad.hub.names import ModelNameError, quantization
from tegrad.llm.errors import ModelError, OutOfMemory
from tegrad.llm.footprint import PROCESS, gpu_has_memory, machine_room
from tegrad.llm.gguf import Gguf
from tegrad.serve.log import LOG
from tegrad.serve.model import LATEST, About, Loaded, UnknownModel
from tegrad.serve.plan import Wanted, planned
from tegrad.serve.remote import Remote
from tegrad.serve.replicas import Home, Replicated

LONG_LIST: Final = 64
"""Entries of a list in a file's metadata from which on it is left out."""
PATIENCE_S: Final = 30.0
"""Seconds that a client which does not read its answer keeps a model in memory that another one needs."""
Held: TypeAlias = Remote | Replicated
"""A model in memory: an engine's, or several that are asked as one."""


def about(name: str, path: Path) -> About:
    """What a model's file says of it. GgufError, UnsupportedModelError."""
    with Gguf.open(path) as file:
        said, sizes = file.metadata, Counter[str]()
        for info in file.tensors.values():
            sizes[info.type.name] += info.nbytes
        family = str(said.get("general.architecture"))
        context = said.get(f"{family}.context_length")
        return About(
            name=name, path=path, size=file.size, modified=path.stat().st_mtime, family=family,
            quantization=quantization(path.name) or max(sizes, key=sizes.__getitem__, default="none"),
            parameters=sum(info.rows * info.columns for info in file.tensors.values()),
            context=context if isinstance(context, int) else 0,
            embeds=bool(said.get(f"{family}.pooling_type")),
            metadata={key: one for key, one in said.items() if _tellable(one)},
        )  # fmt: skip


def _tellable(value: object) -> bool:
    """Whether a client is told of it: no long list, and no number that JSON does not have."""
    if isinstance(value, list):
        return len(value) < LONG_LIST and all(map(_tellable, value))
    return not isinstance(value, float) or math.isfinite(value)


class Shelf:
    """Which models may be asked for: those that the configuration names, and those in the hub's cache."""

    def __init__(self, named: Sequence[str]) -> None:
        """`named` are paths or names; ModelNameError, GgufError, UnsupportedModelError."""
        self._read: dict[Path, tuple[tuple[float, int], About | None]] = {}
        self._named = [self._named_one(text) for text in named]
        self._known = {one.name: one for one in self._named}
        if len(self._known) < len(self._named):
            raise ModelNameError("two of the models have the same name: give one of the files another name")

    def all(self) -> list[About]:
        """Those that were named first, else those in the cache; the shipped one where there is no other."""
        found, named = {one.name: one for one in self._named}, {one.path.resolve() for one in self._named}
        for each in cache.here():
            if each.path.resolve() not in named:
                one = self._about(each.model.name, each.path)
                found |= {one.name: one} if one is not None else {}
        if not found:
            found = {"small": about("small", models.SMALL)}
        self._known = found
        return list(found.values())

    def find(self, name: str | None) -> About:
        """The one that a request means: by name, in letters of either case, with Ollama's tag or without it, or as
        `tegrad run` takes it; the first one for None. UnknownModel."""
        if name is None:
            return self._named[0] if self._named else self.all()[0]
        if (one := self._known.get(name) or self._known.get(name.removesuffix(LATEST))) is not None:  # from no disk
            return one
        name, every = name.removesuffix(LATEST), self.all()
        if (found := next((one for one in every if one.name.lower() == name.lower()), None)) is not None:
            return found
        try:
            full = cache.find(name)
            return next(one for one in every if one.name == full.model.name or one.path == full.path)
        except (ModelNameError, StopIteration):
            known = ", ".join(one.name for one in every[:5]) + (", ..." if len(every) > 5 else "")
            raise UnknownModel(f"no model {name!r} is served here: choose one of {known}") from None

    def _named_one(self, text: str) -> About:
        path = cache.located(text)
        pulled = next((each for each in cache.here() if each.path == path), None)
        return about(pulled.model.name if pulled else path.name.removesuffix(".gguf"), path)

    def _about(self, name: str, path: Path) -> About | None:
        """Of a file in the cache, which is read once as long as it stays the same; None of one that is not sound."""
        try:
            state = path.stat()
            key = state.st_mtime, state.st_size
            if self._read.get(path, (None,))[0] != key:
                made = None
                try:
                    made = about(name, path)
                finally:
                    self._read[path] = key, made  # not before: other threads look here, too
        except (OSError, ModelError) as error:
            LOG.warning("%s is not served: %s", name, error)
        return self._read.get(path, (None, None))[1]


@dataclass(eq=False)
class Place:
    """A model that was asked for."""

    about: About
    remote: Held | None = None
    users: int = 0
    used: float = 0.0
    """When somebody last had it."""
    leaving: bool = False
    """It makes room: whoever asks for it now has it loaded again."""
    expires: asyncio.TimerHandle | None = None
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    """Those for whom it is loaded, or will be."""
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    failures: int = 0
    """How often its process ended, or could not load it."""

    @property
    def here(self) -> Held | None:
        """The model, where it may be used."""
        return self.remote if self.remote and not self.leaving and self.remote.error is None else None


class Catalogue:
    """A `model.Models`. To be made and used in the event loop; close it."""

    def __init__(
        self, shelf: Shelf, wanted: Wanted, *, own: Mapping[str, Wanted] = {}, memory: int | None = None,
        keep_alive: float = math.inf, home: Home | None = None,
    ) -> None:  # fmt: skip
        """`own` are what some models, by name, are wanted with. `memory` is what all may take together, in bytes; if
        None, what this machine has free where its GPU uses the system's memory, else as much as the GPU gives. With a
        `home` each model has replicas there, and `memory` is for each of them."""
        self._shelf, self._wanted, self._own = shelf, wanted, own
        self._memory, self._keep, self.home = memory, keep_alive, home
        self._places: dict[str, Place] = {}
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    # ---- a Models

    def names(self) -> Sequence[About]:
        """See `model.Models`."""
        return self._shelf.all()

    def find(self, name: str | None) -> About:
        """See `model.Models`."""
        return self._shelf.find(name)

    def loaded(self) -> Sequence[Loaded]:
        """See `model.Models`."""
        now, ticks = time.time(), asyncio.get_running_loop().time()
        return [
            Loaded(
                place.about, remote.plan.bytes, remote.plan.context,
                now + place.expires.when() - ticks if place.expires else None,
            )
            for place in self._places.values() if (remote := place.here)
        ]  # fmt: skip

    @asynccontextmanager
    async def use(self, name: str | None, keep_alive: float | None = None) -> AsyncIterator[Held]:
        """See `model.Models`."""
        one = self._shelf.find(name)
        place = self._places.setdefault(one.name, Place(one))
        remote = await self._had(place)
        try:
            yield remote
        finally:
            self._left(place, self._keep if keep_alive is None else keep_alive)

    # ---- what else a server asks

    @property
    def places(self) -> Sequence[Place]:
        """The models that were asked for."""
        return list(self._places.values())

    @property
    def loads(self) -> bool:
        """Whether somebody waits for a model that is not there yet."""
        return any(place.waiting for place in self._places.values())

    async def close(self) -> None:
        """Unload all; what still runs ends."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._unload(place) for place in self.places))

    # ---- having and leaving

    async def _had(self, place: Place) -> Held:
        """The place's model, of which there is one user more. What a load raises."""
        if (remote := place.here) is None:
            waiter = asyncio.get_running_loop().create_future()
            place.waiting.append(waiter)
            if len(place.waiting) == 1:
                self._begin(self._load(place))
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                    self._left(place, self._keep)  # it came, and nobody is there any more
                raise
            remote = place.remote
            assert remote is not None
            return remote
        self._take(place, 1)
        return remote

    def _take(self, place: Place, users: int) -> None:
        place.users += users
        place.unused.clear()
        if place.expires is not None:
            place.expires.cancel()
            place.expires = None

    def _left(self, place: Place, keep_alive: float) -> None:
        place.users -= 1
        place.used = time.monotonic()
        if not place.users:
            place.unused.set()
            if not math.isinf(keep_alive) and not self._closed:
                loop = asyncio.get_running_loop()
                place.expires = loop.call_later(keep_alive, lambda: self._begin(self._expire(place, place.expires)))

    async def _expire(self, place: Place, timer: asyncio.TimerHandle | None) -> None:
        """Unload a model, unless it was used since its timer ended, which others' loads may keep waiting."""
        async with self._loading:
            if timer is not None and place.expires is timer and not place.users:
                place.expires = None
                LOG.info("%s is unloaded: nobody used it", place.about.name)
                await self._unload(place)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- loading and unloading

    async def _load(self, place: Place) -> None:
        """Load a place's model and hand it to all who wait for it, or tell them why not."""
        error: BaseException | None = None
        try:
            async with self._loading:
                if place.remote is not None:  # it left, or its process is gone
                    await self._unload(place)
                place.remote = await self._placed(place.about)
                self._hand(place)
        except TegradError as raised:
            error = raised
            place.failures += 1
            LOG.error("%s cannot be loaded: %s", place.about.name, error)
        except BaseException as raised:
            error = TegradError("the server is ending: ask another one") if self._closed else raised
            raise
        finally:
            for waiter in place.waiting:
                if error is not None and not waiter.done():
                    waiter.set_exception(error)
            place.waiting.clear()

    def _hand(self, place: Place) -> None:
        waiting = [waiter for waiter in place.waiting if not waiter.done()]
        self._take(place, len(waiting))
        for waiter in waiting:
            waiter.set_result(None)
        place.waiting.clear()
        if not waiting:
            self._take(place, 1)
            self._left(place, self._keep)

    async def _placed(self, one: About) -> Held:
        """A model in memory, others having left for it if need be."""
        begun = time.monotonic()
        LOG.info("loading %s: kernels that are new to this machine are compiled first", one.name)
        wanted = self._own.get(one.name, self._wanted)
        load = await self._planned(one, wanted) if self.home is None else partial(
            Replicated.load, one, wanted, self.home, self._memory
        )  # fmt: skip
        while True:
            try:
                remote = await load()
            except OutOfMemory:
                if not await self._make_room():
                    raise
            else:
                seconds, made = time.monotonic() - begun, remote.plan
                LOG.info("%s is loaded on %s: context %d, %d at once, %.0f MiB, %.1f s", one.name, remote.device,
                          made.context, made.slots, made.bytes / 2**20, seconds)  # fmt: skip
                return remote

    async def _planned(self, one: About, wanted: Wanted) -> Callable[[], Coroutine[Any, Any, Held]]:
        """What loads a model into this machine's memory, where there is room for it now."""
        made = await asyncio.to_thread(planned, one.path, wanted, self._room(), embeds=one.embeds)
        while (room := self._room(self._taken)) is not None and made.bytes > room and await self._make_room():
            pass
        return partial(Remote.load, one, made)

    @property
    def _taken(self) -> int:
        return sum(place.remote.plan.bytes + PROCESS for place in self._places.values() if place.remote)

    def _room(self, taken: int = 0) -> int | None:
        """Bytes for a model beside those that take so much, or None where nobody knows."""
        if self._memory is not None:
            return self._memory - taken - PROCESS
        return None if gpu_has_memory() else machine_room() + self._taken - taken

    async def _make_room(self) -> bool:
        """Unload the model that was used least lately, once nobody uses it; those that nobody uses now go first."""
        there = [place for place in self._places.values() if place.remote is not None]
        if not there:
            return False
        place = min(there, key=lambda place: (place.users > 0, place.used))
        place.leaving = True
        try:
            await self._unused(place)
            LOG.info("%s is unloaded: another model needs its memory", place.about.name)
            await self._unload(place)
        finally:
            place.leaving = False
        return True

    async def _unused(self, place: Place) -> None:
        """Wait until nobody uses a model any more, nor has it for long without a request that runs."""
        begun = time.monotonic()
        while place.users and (place.remote is None or place.remote.busy or time.monotonic() - begun < PATIENCE_S):
            begun = time.monotonic() if place.remote is not None and place.remote.busy else begun
            with suppress(TimeoutError):
                await asyncio.wait_for(place.unused.wait(), 1.0)

    async def _unload(self, place: Place) -> None:
        remote, place.remote = place.remote, None
        if remote is not None:
            await remote.close()
