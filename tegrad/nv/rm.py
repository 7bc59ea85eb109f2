"""What NVDevice asks of the resource manager, answered by nvgpu and nvmap: one small function per class and control.

`ALLOCS` and `CONTROLS` are the whole repertoire; the engine classes are added per chip by number. A call that is in no
table raises RmError with its name. An alloc function gets the interface, the parent object and the parameters, and
returns what the new object holds (something with `close`, or None); a control function fills the parameters in place.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tegrad.errors import TegradError
from tegrad.nv.channel import Channel, Rings, Tsg
from tegrad.nv.deferred import own_structures
from tegrad.nv.memory import AddressSpace
from tegrad.uapi import constants as c
from tegrad.uapi import ioctls
from tegrad.uapi.structs import AllocAs

if TYPE_CHECKING:
    from tegrad.nv.iface import RmObject, TegraIface

nv: Any = own_structures()
Params = Any
"""A parameter struct of tinygrad's autogen."""
Alloc = Callable[["TegraIface", "RmObject", Params], Any]
Control = Callable[["TegraIface", "RmObject", Params], None]


class RmError(TegradError, RuntimeError):
    """A resource-manager call that the Jetson's drivers have no answer to."""


def _nothing(iface: "TegraIface", parent: "RmObject", params: Params) -> None:
    """What has no counterpart here, such as objects that are but handles: the device, the subdevice, its memory."""


def _address_space(iface: "TegraIface", parent: "RmObject", params: Params) -> AddressSpace:
    """The GPU's address space, with room for the driver's own 4 GiB below 2^40 (see hw.chips)."""
    arg = AllocAs(
        big_page_size=0,
        flags=c.NVGPU_GPU_IOCTL_ALLOC_AS_FLAGS_UNIFIED_VA,
        va_range_start=iface.chip.va_start,
        va_range_end=iface.chip.va_end,
    )
    iface.kernel.ioctl(iface.ctrl, ioctls.NVGPU_GPU_IOCTL_ALLOC_AS, arg)
    return AddressSpace(iface.kernel, arg.as_fd)


def _context_share(iface: "TegraIface", parent: "RmObject", params: Params) -> int:
    """A subcontext: the object is its number in the group."""
    return parent.holds(Tsg).subcontext(iface.objects[params.hVASpace].holds(AddressSpace))


def _channel(iface: "TegraIface", parent: "RmObject", params: Params) -> Channel:
    """A channel on buffers that `hObjectBuffer` (GPFIFO), `hUserdMemory[0]` and `hObjectError` name.

    Offsets go to the driver as they are asked for; it takes 0 only.
    """
    gpfifo = iface.memory[params.hObjectBuffer]
    rings = Rings(
        gpfifo=gpfifo,
        gpfifo_offset=params.gpFifoOffset - gpfifo.va,
        entries=params.gpFifoEntries,
        userd=iface.memory[params.hUserdMemory[0]],
        userd_offset=params.userdOffset[0],
        notifier=iface.memory[params.hObjectError],
    )
    share = iface.objects[params.hContextShare]
    space = next(o for o in iface.objects.values() if isinstance(o.payload, AddressSpace))
    group = parent.holds(Tsg)
    return Channel(iface.kernel, iface.nvmap, iface.ctrl, space.holds(AddressSpace), group, share.holds(int), rings)


def _compute_object(iface: "TegraIface", parent: "RmObject", params: Params) -> None:
    channel = parent.holds(Channel)
    channel.engine(iface.compute_class)
    iface.preemption = channel.preempt(iface.characteristics.compute_preemption_mode_flags)


ALLOCS: Mapping[int, Alloc] = {
    nv.NV01_DEVICE_0: _nothing,
    nv.NV20_SUBDEVICE_0: _nothing,
    nv.NV01_MEMORY_VIRTUAL: _nothing,
    nv.FERMI_VASPACE_A: _address_space,
    nv.KEPLER_CHANNEL_GROUP_A: lambda iface, parent, params: Tsg(iface.kernel, iface.ctrl),
    nv.FERMI_CONTEXT_SHARE_A: _context_share,
}


def allocs(gpfifo_class: int, compute_class: int, dma_class: int) -> Mapping[int, Alloc]:
    """ALLOCS with the class numbers of one chip."""
    return {
        **ALLOCS,
        gpfifo_class: _channel,
        compute_class: _compute_object,
        dma_class: lambda iface, parent, params: parent.holds(Channel).engine(dma_class),
    }


def _work_submit_token(iface: "TegraIface", obj: "RmObject", params: Params) -> None:
    params.workSubmitToken = obj.holds(Channel).token


GR_INFO: Mapping[int, Callable[["TegraIface"], int]] = {
    nv.NV2080_CTRL_GR_INFO_INDEX_LITTER_NUM_GPCS: lambda iface: int(iface.characteristics.num_gpc),
    nv.NV2080_CTRL_GR_INFO_INDEX_LITTER_NUM_TPC_PER_GPC: lambda iface: int(iface.characteristics.num_tpc_per_gpc),
    nv.NV2080_CTRL_GR_INFO_INDEX_LITTER_NUM_SM_PER_TPC: lambda iface: -(-iface.sm_count // iface.tpc_count),
    # The driver's sm_arch_warp_count has been seen as 48 and as 96 (per SM or per TPC), so the chip's row counts.
    nv.NV2080_CTRL_GR_INFO_INDEX_MAX_WARPS_PER_SM: lambda iface: iface.chip.warps_per_sm,
    nv.NV2080_CTRL_GR_INFO_INDEX_SM_VERSION: lambda iface: int(iface.characteristics.sm_arch_sm_version),
}
"""GR info by index. Sizes that scale memory are the architecture's maxima, so that a gated TPC cannot shrink them."""


def _gr_info(iface: "TegraIface", obj: "RmObject", params: Params) -> None:
    entries = (ctypes.c_uint32 * 2 * params.grInfoListSize).from_address(params.grInfoList)
    for entry in entries:
        if entry[0] not in GR_INFO:
            raise RmError(f"GR info index {entry[0]} is not known to tegrad: please report it")
        entry[1] = GR_INFO[entry[0]](iface)


CONTROLS: Mapping[int, Control] = {
    nv.NV2080_CTRL_CMD_PERF_BOOST: lambda iface, obj, params: iface.boost_clock(),
    nv.NVC36F_CTRL_CMD_GPFIFO_GET_WORK_SUBMIT_TOKEN: _work_submit_token,
    nv.NVA06C_CTRL_CMD_GPFIFO_SCHEDULE: _nothing,  # the driver enables a channel when it is set up
    nv.NV2080_CTRL_CMD_GR_GET_INFO: _gr_info,
    nv.NV2080_CTRL_CMD_FB_FLUSH_GPU_CACHE: lambda iface, obj, params: iface.flush_l2(),
}


def call_name(number: int, marker: str = "") -> str:
    """The header's name of a class or control number (names containing `marker`), or the number."""
    names = [name for name, value in vars(nv).items() if value == number and name.isupper() and marker in name]
    return f"{names[0]} ({number:#x})" if names else f"{number:#x}"
