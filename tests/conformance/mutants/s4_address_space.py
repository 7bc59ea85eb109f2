"""Mutants of section 4."""

from mutation import Edit, Item, Mutant, Value

AS_FILE = "tegrad.orin.as_file."
CALLS, SPACE, BUDDY = "tegrad.orin.as_calls.", "tegrad.orin.address_space.", "tegrad.orin.buddy."
VM, ALLOCATOR, REMAP = SPACE + "AddressSpace.", BUDDY + "BuddyAllocator.", "tegrad.orin.remap."
BIND, ALLOC, MAP, MODIFY, BATCH = (
    CALLS + name for name in ("bind_channel", "alloc_space", "map_one", "mapping_modify", "map_buffer_batch")
)
FIX, UNMAP, RELEASE = VM + "map_fixed", CALLS + "unmap_one", VM + "release"


def pass_over(target: str, check: str) -> Mutant:
    """One check less."""
    return Edit(target, f"require({check})", "pass")


def placed(old: str, new: str) -> Mutant:
    """Another choice of the allocator."""
    return Edit(ALLOCATOR + "allocate", old, new)


TAKE_LEFT = "piece = self._split(piece)[0]"
TAKE_RIGHT = placed(TAKE_LEFT, "piece = self._split(piece)[1]")
LARGEST_FIRST = placed("range(order, self._max_order + 1)", "range(self._max_order, order - 1, -1)")
OLDEST_FIRST = placed("next(reversed(self._free[have]))", "next(iter(self._free[have]))")
CHECK_OP = REMAP + "_check_op"

MUTANTS: dict[str, Mutant | list[Mutant]] = {
    # 4.1
    "4.1/bind-no-channel": Edit(BIND, "require(channel)", "if not channel: return"),
    "4.1/bind-closed": Edit(BIND, "require(channel)", "if not channel: return"),
    "4.1/bound-elsewhere": Edit(
        BIND, "require(channel.channel.vm is None)", "if channel.channel.vm: channel.channel.vm.drop()"
    ),
    "4.1/bound-twice": Edit(BIND, "require(channel.channel.vm is None)", "if channel.channel.vm is file.vm: return"),
    "4.1/bind-holds": Edit(
        AS_FILE + "AsFile.release",
        "self.vm.drop()",
        "self.vm.end = 0; self.vm.kernel.start = 0; "
        "self.vm.take_kernel = lambda size: 4096; self.vm.kernel.free = lambda va: None; self.vm.drop()",
    ),
    # 4.2
    "4.2/space-64k-pages": Edit(ALLOC, "arg.page_size == PAGE", "arg.page_size in (PAGE, 65536)"),
    "4.2/space-no-page-size": Edit(ALLOC, "arg.page_size == PAGE", "arg.page_size in (PAGE, 0)"),
    "4.2/space-no-pages": placed("if not size:", "if False:"),
    "4.2/space-too-large": placed("else:\n        return None", "else:\n        return self.start"),
    "4.2/space-page-size-first": Edit(
        ALLOC,
        "require(arg.page_size == PAGE)",
        "arg.pages or file.vm.reserve(0, None, sparse=False); require(arg.page_size == PAGE)",
    ),
    "4.2/space-fixed-unaligned": Edit(ALLOC, "arg.o_a.offset if fixed", "arg.o_a.offset // PAGE * PAGE if fixed"),
    "4.2/space-fixed-below": Edit(ALLOC, "arg.o_a.offset if fixed", "max(arg.o_a.offset, file.vm.start) if fixed"),
    "4.2/space-fixed-above": Edit(
        ALLOC, "arg.o_a.offset if fixed", "min(arg.o_a.offset, file.vm.end - 2 * PAGE) if fixed"
    ),
    "4.2/space-fixed-over-end": Edit(
        ALLOC, "arg.o_a.offset if fixed", "min(arg.o_a.offset, file.vm.end - 2 * PAGE) if fixed"
    ),
    "4.2/space-fixed-empty": Edit(ALLOC, "arg.pages * PAGE", "(arg.pages or 1) * PAGE"),
    "4.2/space-taken": Edit(
        VM + "reserve",
        "require(self.user.allocate_fixed(base, size), errno.ENOMEM)",
        "self.user.allocate_fixed(base, size)",
    ),
    "4.2/space-fixed": Edit(VM + "reserve", "if base is None:", "if True:"),
    "4.2/space-align-ignored": Edit(
        ALLOC, "if fixed else None", "if fixed or arg.o_a.offset % PAGE == 0 < arg.o_a.offset else None"
    ),
    "4.2/space-flags": Edit(ALLOC, "arg = call.arg", "arg = call.arg; require(arg.flags < 4)"),
    "4.2/space-sparse": Edit(ALLOC, "arg = call.arg", "arg = call.arg; require(arg.flags < 2)"),
    "4.2/space-short-form": Item(CALLS + "HANDLERS", "io.NVGPU32_AS_IOCTL_ALLOC_SPACE.request", ""),
    "4.2/reserved-is-not-chosen": Edit(
        VM + "reserve", "require(self.user.allocate_fixed(base, size), errno.ENOMEM)", "pass"
    ),
    "4.2/free-inside": Edit(RELEASE, "self.area_at(va)", "self.areas.get(va)"),
    "4.2/free-unknown": [
        Edit(RELEASE, "if area is None:\n        return", "require(area)"),
        Edit(RELEASE, "self.area_at(va)", "next(iter(self.areas.values()))"),
    ],
    "4.2/free-ignores": Edit(CALLS + "free_space", "file.vm", "require(call.arg.page_size == PAGE); file.vm"),
    "4.2/free-unmaps": Edit(RELEASE, "self.unmap(mapping)", "pass"),
    # 4.3
    "4.3/unknown-flags": [
        pass_over(MAP, "not arg.flags & ~KNOWN_MAP_FLAGS"),
        Edit(MAP, "~KNOWN_MAP_FLAGS", "~(KNOWN_MAP_FLAGS | 1 << 31)"),
    ],
    "4.3/volatile": Edit(MAP, "~KNOWN_MAP_FLAGS", "~KNOWN_MAP_FLAGS and arg.flags & 4"),
    **{
        f"4.3/{name}": Edit(MAP, "~KNOWN_MAP_FLAGS", f"~(KNOWN_MAP_FLAGS & ~{flags})")
        for name, flags in (
            ("cacheable", "0x4"),
            ("unmapped-pte", "0x20"),
            ("l3-alloc", "0x80"),
            ("system-coherent", "0x200"),
            ("read-only", "0x400"),
            ("read-write", "0x800"),
        )
    },
    "4.3/mappable-compbits": Edit(MAP, " & ~k.NVGPU_AS_MAP_BUFFER_FLAGS_MAPPABLE_COMPBITS", ""),
    "4.3/access-3": pass_over(MAP, "arg.flags & ACCESS_MASK != ACCESS_MASK"),
    "4.3/tegra-raw": (
        pass_over(MAP, "not arg.flags & k.NVGPU_AS_MAP_BUFFER_FLAGS_TEGRA_RAW"),
        Value(CALLS + "KNOWN_MAP_FLAGS", "KNOWN_MAP_FLAGS | 0x1000"),
    ),
    "4.3/fd-closed": Edit(MAP, "require(found is not None, errno.EBADF)", "pass"),
    "4.3/fd-no-dmabuf": Edit(MAP, "raise Errno(errno.EINVAL)", "raise Errno(errno.EBADF)"),
    "4.3/offset-not-fixed": Edit(MAP, "arg.offset == 0 and ", ""),
    "4.3/part-not-fixed": Edit(MAP, " and arg.buffer_offset == 0", ""),
    "4.3/size-not-fixed": pass_over(MAP, "fixed or arg.mapping_size == 0"),
    "4.3/size-past-buffer": (
        pass_over(MAP, "arg.mapping_size <= found.length and arg.buffer_offset <= found.length - arg.mapping_size"),
        Edit(FIX, "require(size <= buffer.length - offset)", "size = min(size, buffer.length - offset)"),
    ),
    "4.3/part-past-buffer": (
        pass_over(MAP, "arg.mapping_size <= found.length and arg.buffer_offset <= found.length - arg.mapping_size"),
        Edit(FIX, "require(size <= buffer.length - offset)", "size = min(size, buffer.length - offset)"),
    ),
    "4.3/part-wraps": (
        Edit(
            MAP,
            "arg.buffer_offset <= found.length - arg.mapping_size",
            "arg.buffer_offset + arg.mapping_size & U64_MASK <= found.length",
        ),
        Edit(FIX, "require(size <= buffer.length - offset)", "offset = 0"),
    ),
    "4.3/part-without-size": Edit(FIX, "size or buffer.length", "size or buffer.length - offset"),
    "4.3/not-allocated": Edit(MAP, "require(found.allocated, errno.ENOMEM)", "require(found.allocated)"),
    "4.3/no-kind": pass_over(MAP, "arg.compr_kind != k.NV_KIND_INVALID or arg.incompr_kind >= 0"),
    "4.3/no-area": Edit(
        FIX, "needed(self.area_at(va))", "self.area_at(va) or Area(self.start, self.end - self.start, False)"
    ),
    "4.3/before-area": Edit(FIX, "needed(self.area_at(va))", "needed(self.area_at(va) or self.area_at(va + size - 1))"),
    "4.3/over-area": pass_over(FIX, "va + size <= area.end"),
    "4.3/fixed-unaligned": Edit(FIX, "require(va % PAGE == 0)", "va = va // PAGE * PAGE"),
    "4.3/part-unaligned": Edit(FIX, "require(offset % PAGE == 0, errno.ENOMEM)", "require(offset % PAGE == 0)"),
    "4.3/fd-first": Edit(
        MAP,
        "require(found is not None, errno.EBADF)",
        "require(not arg.flags & ~KNOWN_MAP_FLAGS); require(found is not None, errno.EBADF)",
    ),
    "4.3/flags-before-pin": Edit(
        MAP,
        "require(arg.flags & ACCESS_MASK != ACCESS_MASK)",
        "require(found.allocated, errno.ENOMEM); require(arg.flags & ACCESS_MASK != ACCESS_MASK)",
    ),
    "4.3/pin-before-area": Edit(
        MAP,
        "require(found.allocated, errno.ENOMEM)",
        "require(not fixed or vm.area_at(arg.offset)); require(found.allocated, errno.ENOMEM)",
    ),
    "4.3/area-before-part": Edit(
        FIX, "require(va % PAGE == 0)", "require(va % PAGE == 0); require(offset % PAGE == 0, errno.ENOMEM)"
    ),
    "4.3/read-only-buffer": pass_over(MAP, "arg.flags & ACCESS_MASK != READ_WRITE or not read_only"),
    "4.3/fixed-overlap": pass_over(FIX, "not self._overlaps(va, va + size)"),
    "4.3/fixed-place": Edit(FIX, "require(va + size <= area.end)", "require(va + size < area.end)"),
    "4.3/fixed-part": [
        Edit(FIX, "require(va % PAGE == 0)", "require(va % PAGE == 0 and size == buffer.length)"),
        Edit(FIX, "round_up(size or buffer.length)", "buffer.length - offset"),
    ],
    "4.3/no-room": Edit(VM + "map", "errno.ENOMEM", "errno.EINVAL"),
    "4.3/page-size-ignored": Edit(
        CALLS + "map_buffer_ex", "call.arg.offset =", "call.arg.page_size = PAGE; call.arg.offset ="
    ),
    "4.3/only-offset": Edit(
        CALLS + "map_buffer_ex", "call.arg.offset =", "call.arg.mapping_size, call.arg.offset = 4096,"
    ),
    "4.3/rounded-to-pages": placed("order = ((size - 1) >> BLOCK_SHIFT).bit_length()", "order = 4"),
    "4.3/same-buffer": Edit(VM + "map", "self._known(buffer, flags, kind)", "None"),
    "4.3/same-buffer-other-fd": Edit(
        MAP,
        "kind = arg.incompr_kind if arg.compr_kind == k.NV_KIND_INVALID else arg.compr_kind",
        "kind = arg.dmabuf_fd",
    ),
    "4.3/counted": [
        Edit(VM + "map", "known.count += 1", "pass"),
        Edit(VM + "unmap", "mapping.count -= 1", "mapping.count -= mapping.count > 1"),
    ],
    "4.3/other-flags": Edit(VM + "_known", "and first.flags == flags", ""),
    "4.3/other-kind": Edit(
        MAP, "kind = arg.incompr_kind if arg.compr_kind == k.NV_KIND_INVALID else arg.compr_kind", "kind = 0"
    ),
    "4.3/fixed-is-its-own": Edit(
        FIX,
        "known = self.mappings.get(va)",
        "known = self.mappings.get(va) or self._known(buffer, flags & ~1, kind)\n    if known: return known.va",
    ),
    "4.3/mapping-holds": Edit(
        "tegrad.orin.nvmap.free",
        "handle.buffer.drop()",
        "[vm.unmap(m) for vm in file.driver.vms.values() for m in list(vm.mappings.values())"
        " if m.buffer is handle.buffer]; handle.buffer.drop()",
    ),
    # 4.4
    "4.4/seen-4k": LARGEST_FIRST,
    "4.4/seen-4k-again": TAKE_RIGHT,
    "4.4/seen-64k": TAKE_RIGHT,
    "4.4/seen-1m": TAKE_RIGHT,
    "4.4/seen-16m": LARGEST_FIRST,
    "4.4/seen-64m": LARGEST_FIRST,
    "4.4/512m": LARGEST_FIRST,
    "4.4/8g": LARGEST_FIRST,
    "4.4/8m": LARGEST_FIRST,
    "4.4/4g": LARGEST_FIRST,
    "4.4/low-4k": LARGEST_FIRST,
    "4.4/low-4m": LARGEST_FIRST,
    "4.4/low-2g": LARGEST_FIRST,
    "4.4/after-the-window": LARGEST_FIRST,
    "4.4/rounded-up": (placed("order = ((size - 1) >> BLOCK_SHIFT).bit_length()", "order = 0"),),
    "4.4/left-half-first": TAKE_RIGHT,
    "4.4/smallest-piece": LARGEST_FIRST,
    "4.4/freed-is-used": OLDEST_FIRST,
    "4.4/freed-merges": Edit(ALLOCATOR + "_coalesce", 'piece.buddy.state == "free"', "False"),
    "4.4/natural-alignment": Edit(
        ALLOCATOR + "allocate", "return piece.start", "return piece.start + (BLOCK if order > 3 else 0)"
    ),
    "4.4/relative-to-start": Edit(
        ALLOCATOR + "__init__",
        "self._largest_order(base, end)",
        "min(self._largest_order(base, end), ((base & -base) >> BLOCK_SHIFT).bit_length() - 1)",
    ),
    "4.4/fenced-window": Edit(VM + "reserve", "require(self.user.allocate_fixed(base, size), errno.ENOMEM)", "pass"),
    "4.4/kernel-range": Edit(
        VM + "map_syncpoints", "self.take_kernel(pool.size)", "self.take_kernel(pool.size) + (1 << 30)"
    ),
    "4.4/kernel-alignment": Edit(
        VM + "take_kernel",
        "needed(self.kernel.allocate(size), errno.ENOMEM)",
        "needed(self.kernel.allocate(size), errno.ENOMEM) + 4096",
    ),
    # 4.5
    "4.5/unmap-unknown": Edit(
        UNMAP, "if mapping is None:\n        return", "if mapping is None:\n        raise Errno(errno.EINVAL)"
    ),
    "4.5/unmap-inside": Edit(
        UNMAP, "mapping = vm.mappings.get(va)", "va = va // (4 * PAGE) * (4 * PAGE); mapping = vm.mappings.get(va)"
    ),
    "4.5/unmap-frees": Edit(VM + "_remove", "self.user.free(mapping.va)", "pass"),
    "4.5/unmap-fixed": Edit(VM + "_remove", "if not mapping.fixed:", "if True:"),
    "4.5/unmap-fixed-counted": [
        Edit(UNMAP, "mapping.fixed and mapping.count > 1 and time.monotonic() < deadline", "False"),
        Edit(FIX, "known.count += 1", "pass"),
    ],
    # 4.6
    "4.6/va-region": Edit(CALLS + "get_va_regions", "page_size=PAGE", "page_size=65536"),
    "4.6/va-region-room": [
        Edit(CALLS + "get_va_regions", "if arg.buf_size >= size:", "if arg.buf_size:"),
        Edit(CALLS + "get_va_regions", "arg.buf_size = size", "pass"),
        Edit(CALLS + "get_va_regions", "bytes(region)", "bytes(region) * (arg.buf_size // size)"),
    ],
    "4.6/va-region-bad-address": Edit(CALLS + "get_va_regions", "require(left == 0, errno.EFAULT)", "pass"),
    "4.6/batch-unmaps": Edit(BATCH, "arg.num_unmaps <= BATCH_LIMIT and ", ""),
    "4.6/batch-maps": Edit(BATCH, " and arg.num_maps <= BATCH_LIMIT", ""),
    "4.6/batch-order": Edit(BATCH, "yield from unmap_one(file.vm, one.offset)", "pass"),
    "4.6/batch-stops": [
        Edit(
            BATCH,
            "map_one(file.vm, item, found, read_only=asked.unwritable)",
            "found and map_one(file.vm, item, found, read_only=asked.unwritable)",
        ),
        Edit(BATCH, "for i in range(arg.num_maps):", "for i in reversed(range(arg.num_maps)):"),
    ],
    "4.6/batch-tells-nothing": Edit(
        BATCH,
        "map_one(file.vm, item, found, read_only=asked.unwritable)",
        "call.copy_back_always, last, arg.num_maps = True, arg.num_maps, i; "
        "map_one(file.vm, item, found, read_only=asked.unwritable); arg.num_maps = last",
    ),
    "4.6/batch-bad-address": [
        Edit(BATCH, "(yield from copy_in(arg.unmaps + i * size, size))", "bytes(size)"),
        Edit(BATCH, "(yield from copy_in(arg.maps + i * size, size))", "bytes(size)"),
    ],
    "4.6/sync-map": Edit(
        CALLS + "get_sync_ro_map", "arg.sync_size, arg.num_syncpoints =", "arg.num_syncpoints, arg.sync_size ="
    ),
    "4.6/sync-map-once": Edit(VM + "map_syncpoints", "if self.syncpoints_va is None:", "if True:"),
    "4.6/sync-map-ids": Edit(
        VM + "map_syncpoint", "self.take_kernel(self.driver.syncpoints.stride)", "self.map_syncpoints()"
    ),
    "4.6/modify-inside": Edit(
        MODIFY,
        "file.vm.mappings.get(arg.map_address)",
        "next((m for m in file.vm.mappings.values() if m.va <= arg.map_address < m.end), None)",
    ),
    "4.6/modify-offset": pass_over(MODIFY, "arg.buffer_offset % PAGE == 0"),
    "4.6/modify-size": pass_over(MODIFY, "arg.buffer_size % PAGE == 0"),
    "4.6/modify-past-end": Edit(MODIFY, " and arg.buffer_offset <= mapping.size - arg.buffer_size", ""),
    "4.6/modify-too-large": pass_over(
        MODIFY, "arg.buffer_size <= mapping.size and arg.buffer_offset <= mapping.size - arg.buffer_size"
    ),
    "4.6/modify-no-kind": pass_over(MODIFY, "not arg.compr_kind == arg.incompr_kind == k.NV_KIND_INVALID"),
    "4.6/modify-unknown": Edit(MODIFY, "raise Errno(errno.EINVAL)", "return"),
    "4.6/modify": Edit(MODIFY, "require(arg.buffer_offset % PAGE == 0)", "require(arg.buffer_offset == 0)"),
    "4.6/remap-no-page-size": Value(REMAP + "PAGE_SIZES", "PAGE_SIZES | {0: 4096}"),
    "4.6/remap-two-page-sizes": Value(REMAP + "PAGE_SIZES", "PAGE_SIZES | {0x18000: 4096}"),
    "4.6/remap-unknown-flag": Value(REMAP + "MAP_FLAGS", "MAP_FLAGS | 1"),
    "4.6/remap-unmap-flags": Edit(CHECK_OP, "MAP_FLAGS if op.mem_handle else PAGE_SIZE_FLAGS", "MAP_FLAGS"),
    "4.6/remap-unmap-kind": Edit(CHECK_OP, "op.compr_kind == op.incompr_kind == k.NV_KIND_INVALID and ", ""),
    "4.6/remap-unmap-offset": Edit(CHECK_OP, " and op.mem_offset_in_pages == 0", ""),
    "4.6/remap-bad-handle": Edit(REMAP + "_usable", "raise Errno(errno.EINVAL)", "raise Errno(errno.EBADF)"),
    "4.6/remap-no-pages": Edit(CHECK_OP, "and op.num_pages and", "and"),
    "4.6/remap-huge": (
        Edit(CHECK_OP, " and within", ""),
        Edit(REMAP + "_piece", "last <= area.end // PAGE", "(last <= area.end // PAGE or op.num_pages > 1 << 30)"),
        Edit(VM + "_show", "if piece is None:", "if pages > 1 << 30:\n        pass\n    elif piece is None:"),
    ),
    "4.6/remap-64k": Edit(
        REMAP + "_area",
        "require(size == PAGE)",
        "op.virt_offset_in_pages *= size // PAGE; op.num_pages *= size // PAGE; op.flags = 1 << 15",
    ),
    "4.6/remap-128k": Edit(
        REMAP + "_area",
        "require(size == PAGE)",
        "op.virt_offset_in_pages *= size // PAGE; op.num_pages *= size // PAGE; op.flags = 1 << 15",
    ),
    "4.6/remap-past-area": Edit(REMAP + "_piece", " and last <= area.end // PAGE", ""),
    "4.6/remap-past-buffer": pass_over(
        REMAP + "_piece", "mapped <= buffer.length and offset <= buffer.length - mapped"
    ),
    "4.6/remap-no-area": (
        Edit(REMAP + "_area", "needed(vm.area_at(op.virt_offset_in_pages * size))", "next(iter(vm.areas.values()))"),
        pass_over(REMAP + "_piece", "area.start // PAGE <= first and last <= area.end // PAGE"),
    ),
    "4.6/remap-not-sparse": pass_over(REMAP + "_area", "area.sparse"),
    "4.6/remap-nothing": Edit(REMAP + "remap", "if arg.num_ops == 0:\n        return None", "require(arg.num_ops)"),
    "4.6/remap": Edit(REMAP + "remap", "arg.num_ops = len(ops)", "arg.num_ops = 1"),
    "4.6/remap-write-back": Edit(REMAP + "remap", "bytes(ops[-1])", "bytes(op)"),
    "4.6/remap-copies-back": Edit(REMAP + "remap", "call.copy_back_always = True", "pass"),
    "4.6/remap-bad-address": Edit(REMAP + "remap", "(yield from copy_in(arg.ops + i * size, size))", "bytes(size)"),
    "4.6/remap-unallocated": Edit(
        REMAP + "_usable", "require(found.allocated, errno.ENOMEM)", "require(found.allocated)"
    ),
    "4.6/get-buffer-compbits-info": Item(
        CALLS + "HANDLERS", "io.NVGPU_AS_IOCTL_GET_BUFFER_COMPBITS_INFO.request", "lambda file, call: None"
    ),
    "4.6/map-buffer-compbits": Item(
        CALLS + "HANDLERS", "io.NVGPU_AS_IOCTL_MAP_BUFFER_COMPBITS.request", "lambda file, call: None"
    ),
}
