"""Mutants of section 0."""

from mutation import Edit, Item, Mutant, Start, Value

from tegrad.uapi.ioctls import LAST_NR, MAGIC, MAX_ARG_SIZE

ROW, CHECK, FINISH = (
    "tegrad.orin.driver.Driver.row",
    "tegrad.orin.files.Decoder.check",
    "tegrad.orin.calls.Calls._finish",
)
DECODERS, COPY_BACK = "tegrad.orin.files.DECODERS", "tegrad.orin.client.COPY_BACK_EFAULT"
KINDS = tuple(LAST_NR)


def _decoder(kind: str, first: int = 1, last: int = 0, size: int | None = 0) -> Item:
    """The decoder of a kind with something of it changed."""
    last, size = last or LAST_NR[kind], MAX_ARG_SIZE[kind] if size == 0 else size
    return Item(DECODERS, repr(kind), f"Decoder({MAGIC[kind]!r}, {first}, {last}, {size}, errno.EINVAL)")


def _inner(name: str) -> Mutant:
    """The call's positive count is lost."""
    return Edit(
        FINISH,
        "answer = Message(Op.DONE, code, value)",
        f"""if call.row.name == {name!r}:
        value = 0
    answer = Message(Op.DONE, code, value)""",
    )


MUTANTS: dict[str, Mutant | list[Mutant]] = {
    "0.1/nvmap-nr-0": Item(DECODERS, "'nvmap'", "Decoder('N', 1, 107, None, errno.ENOTTY)"),
    "0.1/tsg-unknown-is-logged": Edit(ROW, 'if file.kind == "tsg":', "if False:"),
    "0.1/nvmap-unknown-is-logged": Edit(ROW, 'elif file.kind == "nvmap":', "elif False:"),
    "0.1/read-only-commands-start-zeroed": Edit(
        "tegrad.orin.files.reads_caller", "bool(row.request >> 30 & 1)", "True"
    ),
    "0.1/failed-commands-leave-the-block": Edit(
        "tegrad.orin.client._ioctl",
        "    if answer.code:\n",
        "    if answer.code and arg is not None:\n"
        "        ctypes.memset(ctypes.addressof(arg), 0, ctypes.sizeof(arg))\n"
        "    if answer.code:\n",
    ),
    "0.1/as-unstorable-block": Value(COPY_BACK, "frozenset()"),
    "0.1/gpu_get_characteristics-bad-buffer": _inner("GPU_GET_CHARACTERISTICS"),
    "0.1/gpu_get_tpc_masks-bad-buffer": _inner("GPU_GET_TPC_MASKS"),
    "0.1/gpu_get_fbp_l2_masks-bad-buffer": _inner("GPU_GET_FBP_L2_MASKS"),
    "0.1/gpu_get_engine_info-bad-buffer": _inner("GPU_GET_ENGINE_INFO"),
    "0.1/gpu_vsms_mapping-bad-buffer": _inner("GPU_VSMS_MAPPING"),
    "0.1/alloc-as-ignores-flags": Start("tegrad.orin.ctrl.alloc_as", "require(not call.arg.flags & ~2)"),
    "0.1/alloc-space-ignores-flags": Start("tegrad.orin.as_calls.alloc_space", "require(call.arg.flags < 4)"),
    "0.1/setup-bind-ignores-flags": Start("tegrad.orin.channel_calls.setup_bind", "require(call.arg.flags < 32)"),
    "0.1/wdt-ignores-flags": Start("tegrad.orin.channel_calls.wdt", "require(call.arg.wdt_status < 16)"),
    "0.1/alloc-as-ignores-reserved": Start("tegrad.orin.ctrl.alloc_as", "require(not call.arg.padding[5])"),
    "0.1/bind-channel-ex-ignores-reserved": Start(
        "tegrad.orin.tsg_calls.bind_channel_ex", "require(not any(call.arg.reserved))"
    ),
    "0.1/a-command-on-another-fd": Start(CHECK, "if request >> 8 & 0xFF == ord('A'): return"),
}

for _kind in KINDS:
    _own_magic = f"(self.magic != {MAGIC[_kind]!r} and chr(request >> 8 & 0xFF) != self.magic)"
    MUTANTS[f"0.1/{_kind}-wrong-magic"] = Edit(CHECK, "chr(request >> 8 & 0xFF) != self.magic", _own_magic)
    MUTANTS[f"0.1/{_kind}-past-last-nr"] = _decoder(_kind, last=255) if _kind in MAX_ARG_SIZE else ()
    MUTANTS[f"0.1/{_kind}-wrong-size"] = Edit(
        ROW,
        "    raise Errno(errno.ENOTTY)\n    require(not reads",
        f"    raise Errno(errno.ENODEV if file.kind == {_kind!r} else errno.ENOTTY)\n    require(not reads",
    )
    MUTANTS[f"0.1/{_kind}-bad-block"] = Edit(
        "tegrad.orin.calls.Calls.begin",
        "len(message.payload))",
        f"1 << 20 if file.kind == {_kind!r} else len(message.payload))",
    )
    if _kind in MAX_ARG_SIZE:
        MUTANTS[f"0.1/{_kind}-nr-0"] = _decoder(_kind, first=0)
        MUTANTS[f"0.1/{_kind}-block-too-large"] = _decoder(_kind, size=None)

for _kind in ("ctrl", "tsg", "channel"):
    MUTANTS[f"0.1/{_kind}-unstorable-block"] = Value(COPY_BACK, f"COPY_BACK_EFAULT | {{{_kind!r}}}")

# What nvmap does not know is ENOTTY wherever it is found out: its mutants answer like nvgpu.
MUTANTS["0.1/nvmap-wrong-magic"] = Edit(
    CHECK, "raise Errno(self.outside)", "raise Errno(errno.EINVAL if request >> 8 & 0xFF == ord('Z') else self.outside)"
)
MUTANTS["0.1/nvmap-past-last-nr"] = Edit(
    CHECK, "raise Errno(self.outside)", "raise Errno(errno.EINVAL if number > self.last else self.outside)"
)
