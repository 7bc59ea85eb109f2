"""Mutants of section 2."""

from mutation import Edit, Item, Mutant, Start, Value

BUFFERS = "tegrad.orin.buffers."
N = "tegrad.orin.nvmap."
CLIENT = "tegrad.orin.client."
ALLOC, RW, MMAP, CACHE = N + "alloc", N + "_rw_checks", N + "mmap_check", N + "cache"
HANDLERS, NO_CHECK = N + "HANDLERS", "pass"
RW_STRIDES = "require(arg.elem_size <= arg.hmem_stride and arg.elem_size <= arg.user_stride)"
RW_SIZE = "require(arg.elem_size <= buffer.length and arg.offset < buffer.length)"
USER_END = "require(arg.user_stride <= (buffer.length - arg.offset) // arg.count)"
RW_END = "require(arg.offset + arg.hmem_stride * (arg.count - 1) + arg.elem_size <= buffer.length)"
CHECK_MEMORY = "require(not buffer.allocated, errno.EEXIST)\n"

OTHER_MEMORY = Start(
    N + "from_fd",
    """made = file.driver.memory.create(4096)
file.driver.memory.allocate(made, 0, 2, k.NVMAP_HEAP_IOVMM)
call.arg.handle = file.add(made.hold())
return""",
)
SAME_HANDLE = Start(
    N + "from_fd",
    """for own in file.client.handles.values():
    if own.buffer is call.files["fd"]:
        call.arg.handle = own.id
        return""",
)
SAME_ID = Start(
    N + "from_fd",
    """for client in file.driver.nvmap.clients.values():
    for handle in client.handles.values():
        if client is not file.client and handle.buffer is call.files["fd"]:
            file.client.handles[handle.id] = Handle(handle.id, handle.buffer.hold())
            call.arg.handle = handle.id
            return""",
)


def _instead(name: str, statement: str) -> Mutant:
    """The handler does this and no more."""
    return Start(N + name, statement)


MUTANTS: dict[str, Mutant | list[Mutant]] = {
    # 2.2
    "2.2/create-size-0": Edit(N + "create", "require(call.arg.size)", NO_CHECK),
    "2.2/create-64-size-0": Edit(N + "create_64", "require(call.arg.size64)", NO_CHECK),
    "2.2/create-in-second-word": Edit(N + "create", "call.arg.handle =", "call.arg.handle64 ="),
    "2.2/create-64-in-first-word": Edit(N + "create_64", "create(call.arg.size64)", "create(call.arg.size)"),
    "2.2/size-is-rounded-up": Edit(BUFFERS + "Memory.create", "round_up(size)", "size"),
    "2.2/new-handle-is-write-combined": Edit(
        BUFFERS + "Buffer.__init__", "k.NVMAP_HANDLE_WRITE_COMBINE", "k.NVMAP_HANDLE_INNER_CACHEABLE"
    ),
    "2.2/handles-rise": [
        Edit(N + "NvmapFile.add", "next(self.driver.nvmap.next_id)", "max([5, *self.client.handles]) + 1"),
        Edit(
            N + "NvmapFile.add",
            "next(self.driver.nvmap.next_id)",
            "max([FIRST_HANDLE, *self.client.handles]) + 1",
        ),
    ],
    "2.2/handle-index-is-global": Edit(
        N + "NvmapFile.add", "next(self.driver.nvmap.next_id)", "max([FIRST_HANDLE, *self.client.handles]) + 1"
    ),
    "2.2/handles-are-per-process": Edit(
        N + "NvmapFile.handle",
        "self.client.handles.get(number)",
        "{n: h for c in self.driver.nvmap.clients.values() for n, h in c.handles.items()}.get(number)",
    ),
    "2.2/get-fd-before-alloc": Edit(
        N + "get_fd", "    call.install", "    require(handle.buffer.allocated)\n    call.install"
    ),
    "2.2/read-write-before-alloc": Edit(RW, "require(buffer.allocated, errno.EPERM)", NO_CHECK),
    "2.2/gpu-map-before-alloc": Start(
        "tegrad.orin.as_calls.map_buffer_ex", "require(call.files['dmabuf_fd'].allocated, errno.EINVAL)"
    ),
    # 2.3
    "2.3/align-not-power-of-two": Edit(ALLOC, "require(arg.align & (arg.align - 1) == 0)", NO_CHECK),
    "2.3/align-0": Edit(ALLOC, "arg.align & (arg.align - 1) == 0", "arg.align.bit_count() == 1"),
    "2.3/handle-0": Edit(ALLOC, "require(arg.handle)", "require(arg.handle, errno.ENOENT)"),
    "2.3/numa-node-too-large": Edit(ALLOC, "0 <= arg.numa_nid < MAX_NUMNODES", "0 <= arg.numa_nid"),
    "2.3/numa-node-negative": Edit(ALLOC, "0 <= arg.numa_nid < MAX_NUMNODES", "arg.numa_nid < MAX_NUMNODES"),
    "2.3/numa-node-0": Edit(ALLOC, "0 <= arg.numa_nid", "0 < arg.numa_nid"),
    "2.3/numa-node-any": Edit(ALLOC, "arg.numa_nid == -1 or 0", "0"),
    "2.3/unknown-handle": Edit(ALLOC, "file.handle(arg.handle)", "file.handle(arg.handle, errno.ENOENT)"),
    "2.3/no-heap": Edit(ALLOC, "require(arg.heap_mask, errno.ENOMEM)", "require(arg.heap_mask)"),
    "2.3/sysmem-heap": Edit(ALLOC, "arg.heap_mask & USABLE_HEAPS", "arg.heap_mask & (USABLE_HEAPS | 1 << 31)"),
    "2.3/absent-heap": Edit(ALLOC, "arg.heap_mask & USABLE_HEAPS", "arg.heap_mask & ~(1 << 31)"),
    "2.3/ivm-and-another": Edit(ALLOC, "arg.heap_mask & LONE_HEAPS", "arg.heap_mask & k.NVMAP_HEAP_CARVEOUT_VIDMEM"),
    "2.3/vidmem-and-another": Edit(ALLOC, "arg.heap_mask & LONE_HEAPS", "arg.heap_mask & k.NVMAP_HEAP_CARVEOUT_IVM"),
    "2.3/more-than-all-memory": Edit(
        BUFFERS + "Memory.allocate", "require(self.taken + buffer.length <= self.limit, errno.ENOMEM)", NO_CHECK
    ),
    "2.3/alloc-twice": Edit(ALLOC, "errno.EEXIST", "errno.EINVAL"),
    "2.3/arguments-before-memory": Edit(
        ALLOC,
        "    arg = call.arg\n",
        "    arg = call.arg\n    require(not file.handle(arg.handle).buffer.allocated, 17)\n",
    ),
    "2.3/handle-before-heap": Edit(
        ALLOC, "    arg = call.arg\n", "    arg = call.arg\n    require(arg.heap_mask, 12)\n"
    ),
    "2.3/memory-before-heap": Edit(
        ALLOC, "    require(not buffer.allocated", "    require(arg.heap_mask, 12)\n    require(not buffer.allocated"
    ),
    "2.3/alloc-after-failure": Edit(ALLOC, CHECK_MEMORY, CHECK_MEMORY + "    buffer.allocated = not arg.heap_mask\n"),
    "2.3/no-tag-is-logged-once": [
        Edit(ALLOC, "file.client.warned_of_tag = True", NO_CHECK),
        Edit(ALLOC, "arg.flags >> 16 == 0", "False"),
        Edit(ALLOC, "file.client.warned_of_tag = True", "raise Errno(errno.EINVAL)"),
    ],
    "2.3/a-tag-is-not-logged": Edit(ALLOC, "arg.flags >> 16 == 0", "arg.flags >> 16 < 2"),
    "2.3/generic-falls-back": Value(N + "USABLE_HEAPS", "k.NVMAP_HEAP_IOVMM"),
    "2.3/cache-attribute": Edit(
        BUFFERS + "Memory.allocate",
        "max(align, PAGE), flags, heap",
        "max(align, PAGE), flags | (3 if flags & 4 else 0), heap",
    ),
    "2.3/alignment": Edit(BUFFERS + "Memory.allocate", "max(align, PAGE)", "align"),
    "2.3/memory-is-zeroed": Edit(
        BUFFERS + "Memory.allocate",
        "    self.taken += buffer.length",
        "    os.pwrite(buffer.fd, b'x', 5)\n    self.taken += buffer.length",
    ),
    # 2.4
    "2.4/get-fd-is-new": Edit(
        CLIENT + "_take_fds",
        "set_field(arg, name, lowest(made))",
        "set_field(arg, name, vars(_take_fds).setdefault(1, made) if row.name == 'NVMAP_GET_FD' else lowest(made))",
    ),
    "2.4/get-fd-is-cloexec": Edit(
        CLIENT + "_take_fds", "lowest(made))", "lowest(made))\n        os.set_inheritable(get_field(arg, name), True)"
    ),
    "2.4/get-fd-of-nothing": Edit(N + "get_fd", "errno.EBADF if found is None else errno.EINVAL", "errno.EINVAL"),
    "2.4/get-fd-of-another-fd": Edit(
        N + "get_fd", "else errno.EINVAL", "else errno.EINVAL if isinstance(found, Buffer) else errno.EBADF"
    ),
    "2.4/get-fd-of-own-dmabuf": Edit(
        N + "get_fd", "else errno.EINVAL", "else errno.EBADF if isinstance(found, Buffer) else errno.EINVAL"
    ),
    "2.4/get-fd-at-the-limit": Item(CLIENT + "_DEVICE_ERRNO", "errno.EMFILE", "errno.EIO"),
    "2.4/from-fd-same-memory": OTHER_MEMORY,
    "2.4/from-fd-before-alloc": Edit(N + "from_fd", "require(buffer.allocated)", NO_CHECK),
    "2.4/from-fd-elsewhere": [SAME_ID, OTHER_MEMORY],
    # 2.5
    "2.5/mmap-past-the-end": Edit(MMAP, "require(round_up(length) + offset <= buffer.length)", NO_CHECK),
    "2.5/mmap-of-the-rounded-size": Edit(MMAP, "<= buffer.length", "< buffer.length"),
    "2.5/mmap-at-an-odd-offset": Edit(
        MMAP, "length > 0 and offset % PAGE == 0", "length > 0 and offset % PAGE == 0, 6"
    ),
    "2.5/mmap-before-alloc": Edit(MMAP, "require(buffer.allocated, errno.EPERM)", NO_CHECK),
    "2.5/mmap-of-read-only-memory": [
        Edit(MMAP, "errno.EACCES", "errno.EPERM"),
        Edit(MMAP, "write and read_only(fd)", "write and (read_only(fd) or buffer.flags & k.NVMAP_HANDLE_RO)"),
    ],
    "2.5/mmap-for-reading-of-read-only-memory": Edit(MMAP, "write and read_only(fd)", "read_only(fd)"),
    "2.5/mapping-is-not-inherited": Edit(CLIENT + "BoardKernel.mmap", "libc.madvise(result", "0 and (result"),
    "2.5/map-private-is-shared": Edit(
        CLIENT + "BoardKernel.mmap", "flags = flags & ~_MAP_TYPE | mmap_module.MAP_SHARED", NO_CHECK
    ),
    "2.5/map-fixed": Edit(
        CLIENT + "BoardKernel.mmap", "addr or None, size, prot, flags,", "addr or None, size, prot, flags & ~16,"
    ),
    "2.5/mappings-alias": Edit(CLIENT + "BoardKernel.mmap", "| mmap_module.MAP_SHARED", "| mmap_module.MAP_PRIVATE"),
    "2.5/msync": Edit(CLIENT + "BoardKernel.msync", "if is_buffer(find_vma(addr)):", "if False:"),
    "2.5/mapping-outlives-fd-and-handle": Edit(
        BUFFERS + "Buffer.drop",
        "    if self.holders == 0:",
        "    if self.holders == 0:\n        os.pwrite(self.fd, b'gone', 0)",
    ),
    # 2.6
    "2.6/free-0": _instead("free", "require(call.value)"),
    "2.6/free-unknown": [
        _instead("free", "require(call.value != 0x8FFFFFFF)"),
        _instead("free", "require(call.value != 987654)"),
    ],
    "2.6/free-drops": _instead("free", "if call.value >= FIRST_HANDLE: return None"),
    "2.6/free-of-an-fd": Edit(N + "free", "isinstance(found, Buffer)", "False"),
    "2.6/free-is-counted": [
        SAME_HANDLE,
        Edit(
            N + "free",
            "del file.client.handles[handle.id]",
            "same = [one.id for one in file.client.handles.values() if one.buffer is handle.buffer]\n"
            "        file.client.handles = {i: h for i, h in file.client.handles.items() if i not in same}",
        ),
        Edit(N + "free", "del file.client.handles[handle.id]\n        handle.buffer.drop()", "pass"),
    ],
    # 2.7
    "2.7/addr-0": Edit(RW, "arg.addr and arg.count", "arg.count"),
    "2.7/count-0": Edit(RW, "arg.count and arg.elem_size", "arg.elem_size"),
    "2.7/elem-size-0": Edit(RW, "arg.count and arg.elem_size", "arg.count"),
    "2.7/unknown-handle": Edit(RW, "file.handle(arg.handle)", "file.handle(arg.handle, errno.ENODEV)"),
    "2.7/element-past-the-size": Edit(
        RW,
        f"{RW_SIZE}\n    {RW_STRIDES}\n    {USER_END}\n    {RW_END}",
        NO_CHECK,
    ),
    "2.7/offset-at-the-end": Edit(RW, "arg.offset < buffer.length", "arg.offset < buffer.length, errno.EFAULT"),
    "2.7/element-past-the-buffers-stride": Edit(RW, "arg.elem_size <= arg.hmem_stride and", ""),
    "2.7/element-past-the-users-stride": Edit(RW, "and arg.elem_size <= arg.user_stride", ""),
    "2.7/end-past-the-size": Edit(RW, RW_END, NO_CHECK),
    "2.7/write-to-read-only-memory": [
        Edit(RW, "write and handle", "False and handle"),
        Edit(RW, "write and handle.read_only", "write and (handle.read_only or buffer.flags & k.NVMAP_HANDLE_RO)"),
    ],
    "2.7/read-of-read-only-memory": Edit(RW, "write and handle.read_only", "handle.read_only"),
    "2.7/read-to-a-bad-address": [
        Edit(N + "_moved", "errno.EINTR", "errno.EFAULT"),
        Edit(N + "read", "_moved(call, left or", "_moved(call, left and arg.elem_size - left or"),
    ],
    "2.7/write-from-a-bad-address": [
        Edit(N + "_moved", "errno.EINTR", "errno.EFAULT"),
        Edit(N + "write", "_moved(call, left or", "_moved(call, left and arg.elem_size - left or"),
    ],
    "2.7/count-is-bytes-moved": [
        Edit(N + "_moved", "call.copy_back, call.copy_back_always = size, True, True", "call.copy_back = size, False"),
        Edit(N + "_moved", "call.copy_back_always = size,", "call.copy_back_always = call.arg.count,"),
    ],
    "2.7/strides": [
        Edit(N + "write", "arg.addr + i * arg.user_stride", "arg.addr + i * arg.hmem_stride"),
        Edit(N + "write", "arg.offset + i * arg.hmem_stride", "arg.offset + i * arg.user_stride"),
    ],
    # 2.8
    "2.8/addr-0": Edit(CACHE, "arg.addr and 0 <=", "0 <="),
    "2.8/op-past-2": Edit(CACHE, "arg.addr and 0 <= arg.op <= k.NVMAP_CACHE_OP_WB_INV", "arg.addr"),
    "2.8/unknown-handle": Edit(CACHE, "file.handle(arg.handle)", "file.handle(arg.handle, errno.ENODEV)"),
    "2.8/no-nvmap-memory": Edit(CACHE, "require(not foreign, errno.EADDRNOTAVAIL)", NO_CHECK),
    "2.8/past-the-mapping": Edit(CACHE, "and arg.addr + arg.len <= area.end", ""),
    "2.8/another-handle": Edit(CACHE, "area.inode == buffer.key[1] and ", ""),
    "2.8/cache-ops": [
        Item(HANDLERS, "io.NVMAP_IOC_CACHE_64.request", ""),
        Edit(CACHE, "0 <= arg.op <= k.NVMAP_CACHE_OP_WB_INV", "0 <= arg.op <= 1"),
    ],
    "2.8/invalidate-cleans": Edit(CACHE, "    return None", "    os.pwrite(buffer.fd, bytes(8), 0)\n    return None"),
    "2.8/cache-of-uncached-memory": Edit(CACHE, "area = yield", "require(buffer.cached)\n    area = yield"),
    "2.8/cache-list": Item(HANDLERS, "io.NVMAP_IOC_CACHE_LIST.request", ""),
    "2.8/cache-list-senseless": Edit(N + "cache_list", "arg.sizes and arg.nr", "arg.sizes"),
    # 2.9
    "2.9/available-heaps-are-carveouts": Value(N + "CARVEOUTS", "k.NVMAP_HEAP_IOVMM | k.NVMAP_HEAP_CARVEOUT_VPR"),
    "2.9/available-heaps-of-agx-orin": Value(N + "CARVEOUTS", "k.NVMAP_HEAP_CARVEOUT_VPR"),
    "2.9/heap-size-of-system-memory": _instead("get_heap_size", "if call.arg.heap == k.NVMAP_HEAP_IOVMM: return"),
    "2.9/heap-size-of-an-absent-carveout": Edit(
        N + "get_heap_size", "require(call.arg.heap & CARVEOUTS, errno.ENODEV)", "require(call.arg.heap < 1 << 30, 19)"
    ),
    "2.9/heap-size-of-a-carveout": [
        _instead("get_heap_size", "raise Errno(errno.ENODEV)"),
        Edit(N + "get_heap_size", "call.arg.size = CARVEOUT_BYTES", NO_CHECK),
    ],
    "2.9/heap-params-of-system-memory": [
        Edit(N + "query_heap_params", "arg.largest_free_block = PAGE", NO_CHECK),
        Edit(N + "query_heap_params", "arg.free = max(", "arg.free = arg.total + max("),
    ],
    "2.9/heap-params-total": Edit(N + "query_heap_params", "arg.total = memory.limit", "arg.total = memory.limit // 2"),
    "2.9/heap-params-of-an-absent-carveout": Edit(
        N + "query_heap_params", "require(mask & CARVEOUTS, errno.ENODEV)", NO_CHECK
    ),
    "2.9/heap-params-of-nothing": [
        Edit(N + "query_heap_params", "    if mask == 0:\n        return\n", ""),
        Edit(N + "query_heap_params", "    if mask == 0:", "    if mask == 0:\n        arg.total = 1"),
    ],
    "2.9/parameters-of-an-unknown-handle": Edit(N + "parameters", "(arg.handle, errno.ENODEV)", "(arg.handle)"),
    "2.9/parameters-of-a-buffer": [
        Edit(N + "parameters", "buffer.heap, 0", "buffer.heap, 1"),
        Edit(N + "parameters", "arg.size, arg.align", "arg.import_id = handle.id; arg.size, arg.align"),
        Edit(N + "parameters", "NO_PEER", "0"),
    ],
    "2.9/param": Item(HANDLERS, "io.NVMAP_IOC_PARAM.request", "cache_list"),
    "2.9/from-id": Item(HANDLERS, "io.NVMAP_IOC_FROM_ID.request", "create"),
    "2.9/get-id": Item(HANDLERS, "io.NVMAP_IOC_GET_ID.request", "create"),
    "2.9/queries-read-their-block": Edit("tegrad.orin.files.reads_caller", 'row.fd_kind == "nvmap" or ', ""),
}
