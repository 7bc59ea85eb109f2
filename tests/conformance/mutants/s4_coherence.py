"""Mutants of what holds whatever the L2 keeps."""

from mutation import Edit, Mutant

MUTANTS: dict[str, Mutant | list[Mutant]] = {
    "4.3/volatile-is-read-anew": Edit(
        "tegrad.orin.address_space.AddressSpace._write_ptes", "m.writable, m.cached", "m.writable, True"
    ),
    "3.5/flush-invalidates": Edit("tegrad.orin.ctrl.flush_l2", "bool(arg.l2_invalidate)", "False"),
    "4.5/unmap-empties-l2": Edit("tegrad.orin.gpu.Gpu.unmap", "self.l2.flush()", "pass"),
    "6.2/sysmem-invalidate": Edit("tegrad.orin.host.HostChannel._mem_op_d", "self.vm.l2.invalidate()", "pass"),
}
