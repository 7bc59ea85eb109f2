"""Mutants of sections 4 and 8 as the GPU sees them."""

from mutation import Edit, Mutant

VM, MEMORY, GPU = "tegrad.orin.address_space.AddressSpace.", "tegrad.orin.memory.AddressSpace.", "tegrad.orin.gpu.Gpu."
NOT_SPARSE = Edit(VM + "reserve", "if sparse:", "if False:")
STAY = Edit(VM + "_clear_ptes", "elif mapping.backed:", "elif False:")

MUTANTS: dict[str, Mutant | list[Mutant]] = {
    "4.2/sparse-reads-zero": NOT_SPARSE,
    "4.2/sparse-drops-writes": Edit(MEMORY + "_empty", "in self._sparse:", "in ():"),
    "4.2/buffer-in-sparse-area": Edit(
        VM + "_clear_ptes", "if mapping.area is not None and mapping.area.sparse:", "if False:"
    ),
    "4.2/area-faults": Edit(VM + "reserve", "if sparse:", "if True:"),
    "4.2/freed-area-reads-zero": [
        Edit(VM + "release", 'self.driver.tell_gpu("sparse", self.id, area.start, area.size, True)', "pass"),
        Edit(
            VM + "release", '"sparse", self.id, area.start, area.size, True', '"unmap", self.id, area.start, area.size'
        ),
    ],
    "4.3/unmapped-pte-faults": Edit(VM + "_add", "pte.read_only, pte.valid", "pte.read_only, True"),
    "4.3/read-only-reads": Edit(VM + "_add", ", pte.valid", ", pte.valid and not pte.read_only"),
    "4.3/read-only-faults": Edit(VM + "_add", "not pte.read_only, ", "True, "),
    "4.3/two-mappings": Edit(VM + "_known", "and first.flags == flags", ""),
    "4.3/part-shows": [
        Edit(VM + "map_fixed", "Mapping(va, size, buffer, offset,", "Mapping(va, size, buffer, 0,"),
        Edit(VM + "map_fixed", "Mapping(va, size, buffer, offset,", "Mapping(va, size + PAGE, buffer, offset,"),
    ],
    "4.3/address-spaces-are-apart": Edit(
        GPU + "map",
        "space.map(va, within, fd, offset, writable, cached, label)",
        "[one.map(va, within, fd, offset, writable, cached, label) for one in self._vms.values()]",
    ),
    "4.5/unmapped-faults": STAY,
    "4.5/counted-stays": Edit(VM + "unmap", "mapping.count -= 1", "mapping.count -= 1; self._clear_ptes(mapping)"),
    "4.6/remap-shows": Edit(VM + "_show", "if piece is None:", "if True:"),
    "4.6/remap-offset": Edit(VM + "_show", "piece.offset * PAGE", "0"),
    "4.6/remap-no-write": Edit(VM + "_show", "piece.writable", "True"),
    "4.6/remap-unmapped": Edit(
        VM + "put_behind", "self._show(piece, first, pages)", "piece and self._show(piece, first, pages)"
    ),
    "4.6/remap-all-or-none": Edit(
        "tegrad.orin.remap.remap",
        "pieces.append(_piece(area, op, buffer))",
        "pieces.append(_piece(area, op, buffer)); "
        "vm.put_behind(area, pieces[-1], op.virt_offset_in_pages, op.num_pages)",
    ),
    "4.6/sync-map-reads": [
        Edit(VM + "_tell_of_syncpoints", "pool.size, 0, False", "pool.stride, 0, False"),
        Edit(VM + "map_syncpoints", "self._tell_of_syncpoints()", "pass"),
    ],
    "4.6/sync-map-read-only": Edit(VM + "_tell_of_syncpoints", "pool.size, 0, False", "pool.size, 0, True"),
    "8/gpu-wakes-poll": Edit("tegrad.orin.recovery.handle", "driver.syncpoints.advance(event.syncpt)", "pass"),
    "8/one-increment-each": [
        Edit(
            "tegrad.orin.recovery.handle",
            "driver.syncpoints.advance(event.syncpt)",
            "driver.syncpoints.advance(event.syncpt, 2)",
        ),
        Edit(
            "tegrad.orin.semaphore.release",
            "channel.stored(syncpt)",
            "channel.stored(syncpt if payload else None)",
        ),
    ],
}
