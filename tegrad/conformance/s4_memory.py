"""Sections 4 and 8 as the GPU sees them: what lies behind an address, and syncpoints that the GPU increments.

The GPU reads and writes by host semaphores alone: no engine context, no compiler.
"""

from __future__ import annotations

import threading

from tegrad.conformance.engine import PLAIN_RELEASE, READ_ONLY, Block, Gpu, Queue, becomes
from tegrad.conformance.rig import PAGE, Rig
from tegrad.conformance.rule import rule
from tegrad.conformance.s4_address_space import FIXED, SIZE_4K, SPARSE, op, remap_fields
from tegrad.conformance.s8_fences import fence, node, readable
from tegrad.hw.faults import NotifierCode
from tegrad.uapi import constants as k

AREA = 0x40000000
FIRST = AREA // PAGE
SPARSE_SIZE = 32 * PAGE
MMU_FAULT = int(NotifierCode.FIFO_ERROR_MMU_ERR_FLT)
EQUAL, AT_LEAST = 0, 2


def reads(queue: Queue, va: int, value: int, what: str) -> None:
    """The rule: the GPU reads this word."""
    queue.acquire(va, value, EQUAL).fenced()
    queue.rig.wait(lambda: queue.over or queue.dead)
    queue.rig.check(not queue.dead, what, f"notifier {queue.note.info32}")
    queue.rig.check(queue.over, f"{what} as {value:#x}", "something else")


def sparse(rig: Rig) -> tuple[Gpu, Queue]:
    """A GPU with a sparse area, and a channel for host methods."""
    gpu = Gpu(rig)
    rig.reserve(gpu.vm, SPARSE_SIZE, AREA, flags=SPARSE)
    return gpu, gpu.queue(contexts=())


def remapped(rig: Rig, *, offset: int = 0, flags: int = SIZE_4K) -> tuple[Gpu, Queue, Block]:
    """A sparse area whose first page shows a page of a buffer."""
    gpu, queue = sparse(rig)
    block = gpu.memory(4 * PAGE)
    one = op(block.buffer.fd, virt_offset_in_pages=FIRST, mem_offset_in_pages=offset, flags=flags)
    rig.accepts(gpu.vm, "AS_REMAP", remap_fields(rig, [one])[0])
    return gpu, queue, block


# ---- 4.2 areas ------------------------------------------------------------------------------------------------------


@rule("4.2", "ALLOC_SPACE: a sparse area reads as zero, from its first word to its last")
def sparse_reads_zero(rig: Rig) -> None:
    _, queue = sparse(rig)
    for offset in (0, 5 * PAGE + 8, SPARSE_SIZE - 4):
        reads(queue, AREA + offset, 0, f"the word at {offset:#x}")


@rule("4.2", "ALLOC_SPACE: what is written to a sparse area is dropped")
def sparse_drops_writes(rig: Rig) -> None:
    _, queue = sparse(rig)
    queue.release(AREA + PAGE, 7, PLAIN_RELEASE).done("a write to a sparse area")
    reads(queue, AREA + PAGE, 0, "the word that was written")


@rule("4.2", "ALLOC_SPACE: a buffer mapped into a sparse area is seen there, and after UNMAP zeros are")
def buffer_in_sparse_area(rig: Rig) -> None:
    gpu, queue = sparse(rig)
    block = gpu.memory(fixed=AREA + PAGE)
    queue.release(block.va, 7, PLAIN_RELEASE).done()
    becomes(rig, "the buffer's word", 7, block.u32)
    rig.unmap(gpu.vm, block.va)
    reads(queue, block.va, 0, "the word where the buffer was")
    rig.equal("the buffer's word", 7, block.u32())


@rule("4.2", "ALLOC_SPACE: an area that is not sparse faults where nothing is mapped", hazardous=True)
def area_faults(rig: Rig) -> None:
    gpu = Gpu(rig)
    rig.reserve(gpu.vm, SPARSE_SIZE, AREA)
    gpu.queue(contexts=()).acquire(AREA, 0, EQUAL).dies(MMU_FAULT)


@rule("4.2", "FREE_SPACE: the GPU reads zeros where a sparse area was, too, until something is mapped there")
def freed_area_reads_zero(rig: Rig) -> None:
    gpu, queue = sparse(rig)
    block = gpu.memory()
    block.put32(5)
    rig.accepts(gpu.vm, "AS_REMAP", remap_fields(rig, [op(block.buffer.fd, virt_offset_in_pages=FIRST)])[0])
    rig.call(gpu.vm, "AS_FREE_SPACE", offset=AREA)
    reads(queue, AREA, 0, "the first word")


# ---- 4.3 and 4.5 mappings -------------------------------------------------------------------------------------------


@rule("4.3", "MAP_BUFFER_EX: UNMAPPED_PTE leaves nothing behind the address: the GPU faults there", hazardous=True)
def unmapped_pte_faults(rig: Rig) -> None:
    gpu = Gpu(rig)
    va = rig.map(gpu.vm, rig.buffer().fd, flags=k.NVGPU_AS_MAP_BUFFER_FLAGS_UNMAPPED_PTE)
    gpu.queue(contexts=()).acquire(va, 0, EQUAL).dies(MMU_FAULT)


@rule("4.3", "MAP_BUFFER_EX: read-only access lets the GPU read")
def read_only_reads(rig: Rig) -> None:
    gpu = Gpu(rig)
    block = gpu.memory(read_only=True)
    block.put32(5)
    reads(gpu.queue(contexts=()), block.va, 5, "a word of a read-only mapping")


@rule("4.3", "MAP_BUFFER_EX: read-only access makes a store of the GPU fault", hazardous=True)
def read_only_faults(rig: Rig) -> None:
    gpu = Gpu(rig)
    block = gpu.memory(read_only=True)
    gpu.queue(contexts=()).release(block.va, 5, PLAIN_RELEASE).dies(MMU_FAULT)
    rig.equal("the word", 0, block.u32())


@rule("4.3", "MAP_BUFFER_EX: two mappings of a buffer show the same memory, each with its own access", hazardous=True)
def two_mappings(rig: Rig) -> None:
    gpu = Gpu(rig)
    block = gpu.memory()
    other = rig.map(gpu.vm, block.buffer.fd, flags=READ_ONLY)
    queue = gpu.queue(contexts=()).release(block.va, 9, PLAIN_RELEASE).done()
    reads(queue, other, 9, "the word through the other mapping")
    queue.release(other, 1, PLAIN_RELEASE).dies(MMU_FAULT)


@rule("4.3", "MAP_BUFFER_EX: a part that is mapped at a fixed address begins at buffer_offset", hazardous=True)
def part_shows(rig: Rig) -> None:
    gpu = Gpu(rig)
    rig.reserve(gpu.vm, SPARSE_SIZE, AREA)
    block = gpu.memory(4 * PAGE)
    fields = {"flags": FIXED, "offset": AREA, "buffer_offset": 2 * PAGE, "mapping_size": PAGE}
    rig.map(gpu.vm, block.buffer.fd, **fields)
    queue = gpu.queue(contexts=()).release(AREA + 8, 7, PLAIN_RELEASE).done()
    becomes(rig, "the word at buffer_offset + 8", 7, lambda: block.u32(2 * PAGE + 8))
    queue.acquire(AREA + PAGE, 0, EQUAL).dies(MMU_FAULT)


@rule("4.3", "a mapping is the address space's: the GPU faults there in another one", hazardous=True)
def address_spaces_are_apart(rig: Rig) -> None:
    there, here = Gpu(rig), rig.address_space()
    for vm in (here, there.vm):
        rig.reserve(vm, SPARSE_SIZE, AREA)
    rig.map(here, rig.buffer().fd, flags=FIXED, offset=AREA)
    there.queue(contexts=()).acquire(AREA, 0, EQUAL).dies(MMU_FAULT)


@rule("4.5", "UNMAP_BUFFER: the GPU faults at an address that was unmapped", hazardous=True)
def unmapped_faults(rig: Rig) -> None:
    gpu = Gpu(rig)
    block = gpu.memory()
    queue = gpu.queue(contexts=()).release(block.va, 1, PLAIN_RELEASE).done()
    rig.unmap(gpu.vm, block.va)
    queue.release(block.va, 2, PLAIN_RELEASE).dies(MMU_FAULT)
    rig.equal("the buffer's word", 1, block.u32())


@rule("4.5", "UNMAP_BUFFER: a counted mapping stays for the GPU until the last UNMAP")
def counted_stays(rig: Rig) -> None:
    gpu = Gpu(rig)
    block = gpu.memory()
    rig.map(gpu.vm, block.buffer.fd)
    rig.unmap(gpu.vm, block.va)
    gpu.queue(contexts=()).release(block.va, 3, PLAIN_RELEASE).done("a store after one of two UNMAPs")
    becomes(rig, "the word", 3, block.u32)


# ---- 4.6 REMAP and the map of syncpoints ----------------------------------------------------------------------------


@rule("4.6", "REMAP: the GPU reads and writes the buffer behind a page")
def remap_shows(rig: Rig) -> None:
    _, queue, block = remapped(rig)
    block.put32(5, 16)
    reads(queue, AREA + 16, 5, "the buffer's word")
    queue.release(AREA, 7, PLAIN_RELEASE).done()
    becomes(rig, "the buffer's word", 7, block.u32)


@rule("4.6", "REMAP: mem_offset says which page of the buffer")
def remap_offset(rig: Rig) -> None:
    _, queue, block = remapped(rig, offset=2)
    queue.release(AREA, 7, PLAIN_RELEASE).done()
    becomes(rig, "the word in the buffer's third page", 7, lambda: block.u32(2 * PAGE))


@rule("4.6", "REMAP: with NO_WRITE a store of the GPU faults", hazardous=True)
def remap_no_write(rig: Rig) -> None:
    _, queue, block = remapped(rig, flags=SIZE_4K | k.NVGPU_AS_REMAP_OP_FLAGS_ACCESS_NO_WRITE)
    queue.release(AREA, 7, PLAIN_RELEASE).dies(MMU_FAULT)
    rig.equal("the buffer's word", 0, block.u32())


@rule("4.6", "REMAP: pages that are unmapped read as zero again")
def remap_unmapped(rig: Rig) -> None:
    gpu, queue, block = remapped(rig)
    block.put32(5)
    reads(queue, AREA, 5, "the buffer's word")
    rig.accepts(gpu.vm, "AS_REMAP", remap_fields(rig, [op(virt_offset_in_pages=FIRST, num_pages=32)])[0])
    reads(queue, AREA, 0, "the page after it was unmapped")
    rig.equal("the buffer's word", 5, block.u32())


@rule("4.6", "REMAP: an operation that is refused leaves those before it undone")
def remap_all_or_none(rig: Rig) -> None:
    gpu, queue = sparse(rig)
    block = gpu.memory()
    block.put32(5)
    ops = [op(block.buffer.fd, virt_offset_in_pages=FIRST), op(virt_offset_in_pages=FIRST + 32)]
    rig.refuses(22, gpu.vm, "AS_REMAP", remap_fields(rig, ops)[0])
    reads(queue, AREA, 0, "the page of the first operation")


def incrementing(rig: Rig) -> tuple[Queue, int, int, int]:
    """A channel, its syncpoint's id and value, and the address that a release increments it at."""
    queue = Gpu(rig).queue(contexts=())
    found = rig.call(queue.channel.fd, "CHANNEL_GET_USER_SYNCPOINT")
    return queue, int(found.syncpoint_id), int(found.syncpoint_max), int(found.gpu_va)


@rule("4.6", "GET_SYNC_RO_MAP: the GPU reads the syncpoint's value at id times the size of one")
def sync_map_reads(rig: Rig) -> None:
    queue, number, value, va = incrementing(rig)
    found = rig.call(queue.gpu.vm, "AS_GET_SYNC_RO_MAP")
    at = found.base_gpuva + number * found.sync_size
    reads(queue, at, value, "the syncpoint")
    queue.release(va, 0, PLAIN_RELEASE).acquire(at, value + 1, AT_LEAST)
    queue.done("an acquire of the value that the release before it makes")


@rule("4.6", "GET_SYNC_RO_MAP: a store of the GPU to it faults", hazardous=True)
def sync_map_read_only(rig: Rig) -> None:
    queue, number, _, _ = incrementing(rig)
    found = rig.call(queue.gpu.vm, "AS_GET_SYNC_RO_MAP")
    queue.release(found.base_gpuva + number * found.sync_size, 1, PLAIN_RELEASE).dies(MMU_FAULT)


# ---- 8 fences -------------------------------------------------------------------------------------------------------


@rule("8", "CREATE_FENCE: poll wakes when the GPU increments the syncpoint to the threshold")
def gpu_wakes_poll(rig: Rig) -> None:
    queue, number, value, va = incrementing(rig)
    fd = fence(rig, node(rig), number, value + 1)
    woken: list[bool] = []
    sleeper = threading.Thread(target=lambda: woken.append(readable(fd, rig.patience)), daemon=True)
    sleeper.start()
    rig.check(not readable(fd), "nothing before", "POLLIN")
    queue.release(va, 0, PLAIN_RELEASE).done()
    sleeper.join()
    rig.equal("poll", [True], woken)


@rule("8", "CREATE_FENCE: each release of the GPU is one increment, whatever its payload")
def one_increment_each(rig: Rig) -> None:
    queue, number, value, va = incrementing(rig)
    fd = node(rig)
    third, fourth = fence(rig, fd, number, value + 3), fence(rig, fd, number, value + 4)
    for payload in (0, 77, 0xFFFFFFFF):
        queue.release(va, payload, PLAIN_RELEASE)
    queue.done()
    rig.check(readable(third, rig.patience), "POLLIN for the third", "nothing in time")
    rig.check(not readable(fourth, 0.05), "nothing for the fourth", "POLLIN")
