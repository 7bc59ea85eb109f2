"""LLVM: IR text to object code for this host, a cache of objects on disk, and linking into the process.

An object is kept under the hash of its IR, the host's CPU features, the LLVM version and the optimisation level, and is
written to a temporary file first, so that processes may share the cache.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm

from tegrad import kept
from tegrad.ptx import instructions, l2, schedule  # noqa: F401  whose helpers are found by their names
from tegrad.ptx.helpers import writer
from tegrad.ptx.ir import STACK_FLAG, Module

ENGINE_VERSION = 1
_lock = threading.RLock()


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/tegrad/ptx or ~/.cache/tegrad/ptx."""
    return kept.cache_folder() / "tegrad" / "ptx"


@cache
def host() -> tuple[str, str, str]:
    """Target triple, CPU name and features of this machine."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    # 512-bit vectors: LLVM splits them on some CPUs unless told otherwise.
    flat = features.flatten()
    if features.get("avx512f"):
        flat += ",-prefer-256-bit"
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), flat


@cache
def machine(level: int, own_stack: bool = False) -> llvm.TargetMachine:
    """A code generator of an optimisation level. LLVM keeps the stack's alignment with it, not with the module:
    modules that name one of their own (`own_stack`) need a code generator of their own."""
    triple, cpu, features = host()
    target = llvm.Target.from_triple(triple)
    return target.create_target_machine(cpu=cpu, features=features, opt=level, reloc="pic", codemodel="small", jit=True)


def compile_ir(text: str, level: int, passes: bool) -> bytes:
    """Object code of IR text; `passes` runs the middle-end of the same level first."""
    module = llvm.parse_assembly(text)
    module.triple = host()[0]
    tm = machine(level, STACK_FLAG in text)
    module.data_layout = str(tm.target_data)
    if passes:
        options = llvm.create_pipeline_tuning_options(speed_level=max(level, 1))
        options.slp_vectorization = False
        builder = llvm.create_pass_builder(tm, options)
        builder.getModulePassManager().run(module, builder)
    return bytes(tm.emit_object(module))


class Store:
    """Objects on disk. With directory None nothing is kept."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    def key(self, *parts: object) -> str:
        words = [ENGINE_VERSION, *host(), llvm.llvm_version_info, *parts]
        return hashlib.sha256("\0".join(map(str, words)).encode()).hexdigest()

    def get(self, key: str) -> bytes | None:
        return kept.find(self._path(key)) if self.directory else None

    def put(self, key: str, data: bytes) -> None:
        """Keep an object; a cache that cannot be written is not an error."""
        if self.directory:
            kept.keep(self._path(key), data)

    def _path(self, key: str) -> Path:
        assert self.directory is not None
        return self.directory / key[:2] / key

    def object(self, key: str, text: Callable[[], str], level: int, passes: bool) -> bytes:
        """The object under a key, compiled from `text()` if it is not there."""
        data = self.get(key)
        if data is None:
            data = compile_ir(text(), level, passes)
            self.put(key, data)
        return data


class Linked:
    """Code in this process; it stays while this object lives."""

    def __init__(self, tracker: object, addresses: Mapping[str, int]) -> None:
        self.tracker, self.addresses = tracker, addresses


@cache
def _jit() -> llvm.LLJIT:
    host()
    # JITLink keeps an object in one piece; RuntimeDyld may place its constants beyond the 2 GiB that code reaches.
    return llvm.create_lljit_compiler(machine(2), use_jit_link=True, suppress_errors=False)


_serial = 0


def link(data: bytes, exports: Iterable[str], imports: Mapping[str, int]) -> Linked:
    """Put an object into the process; imports give the addresses of the functions it calls."""
    global _serial
    with _lock:
        _serial += 1
        builder = llvm.JITLibraryBuilder().add_object_img(data)
        for name, address in imports.items():
            builder.import_symbol(name, address)
        for name in exports:
            builder.export_symbol(name)
        builder.add_current_process()
        tracker = builder.link(_jit(), f"tgx{_serial}")
        return Linked(tracker, {name: tracker[name] for name in exports})


_helpers: dict[str, Linked] = {}


def helper(name: str, store: Store) -> int:
    """The address of a runtime function; it is compiled (or read from the cache) on first use in the process."""
    with _lock:
        known = _helpers.get(name)
        if known is None:
            module = Module()
            writer(name)(module)
            text = module.text()
            data = store.object(store.key("helper", text), lambda: text, 2, True)
            needs = {n: helper(n, store) for n in sorted(module.imports)}
            known = _helpers[name] = link(data, [name], needs)
        return known.addresses[name]
