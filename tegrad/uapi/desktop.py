"""NVIDIA's desktop driver by name: its ioctls on /dev/nvidia*, and the classes of the objects that they allocate.

Its resource manager has a few ioctls with which objects are allocated and asked. Numbers and layouts: NVIDIA
open-gpu-kernel-modules 570 and 580 (nv_escape.h, nv-ioctl-numbers.h, nvos.h, uvm_ioctl.h, g_allclasses.h, ctrl/*.h);
tested against tinygrad's reading of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ESCAPE_TYPE = ord("F")
"""The ioctl type of /dev/nvidiactl and /dev/nvidiaN; UVM's requests are plain numbers."""

ESCAPES: Mapping[int, str] = MappingProxyType(
    {
        0x27: "NV_ESC_RM_ALLOC_MEMORY",
        0x28: "NV_ESC_RM_ALLOC_OBJECT",
        0x29: "NV_ESC_RM_FREE",
        0x2A: "NV_ESC_RM_CONTROL",
        0x2B: "NV_ESC_RM_ALLOC",
        0x32: "NV_ESC_RM_CONFIG_GET",
        0x33: "NV_ESC_RM_CONFIG_SET",
        0x34: "NV_ESC_RM_DUP_OBJECT",
        0x35: "NV_ESC_RM_SHARE",
        0x37: "NV_ESC_RM_CONFIG_GET_EX",
        0x38: "NV_ESC_RM_CONFIG_SET_EX",
        0x39: "NV_ESC_RM_I2C_ACCESS",
        0x41: "NV_ESC_RM_IDLE_CHANNELS",
        0x4A: "NV_ESC_RM_VID_HEAP_CONTROL",
        0x4D: "NV_ESC_RM_ACCESS_REGISTRY",
        0x4E: "NV_ESC_RM_MAP_MEMORY",
        0x4F: "NV_ESC_RM_UNMAP_MEMORY",
        0x52: "NV_ESC_RM_GET_EVENT_DATA",
        0x54: "NV_ESC_RM_ALLOC_CONTEXT_DMA2",
        0x56: "NV_ESC_RM_ADD_VBLANK_CALLBACK",
        0x57: "NV_ESC_RM_MAP_MEMORY_DMA",
        0x58: "NV_ESC_RM_UNMAP_MEMORY_DMA",
        0x59: "NV_ESC_RM_BIND_CONTEXT_DMA",
        0x5C: "NV_ESC_RM_EXPORT_OBJECT_TO_FD",
        0x5D: "NV_ESC_RM_IMPORT_OBJECT_FROM_FD",
        0x5E: "NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO",
        0x5F: "NV_ESC_RM_LOCKLESS_DIAGNOSTIC",
        200: "NV_ESC_CARD_INFO",
        201: "NV_ESC_REGISTER_FD",
        206: "NV_ESC_ALLOC_OS_EVENT",
        207: "NV_ESC_FREE_OS_EVENT",
        209: "NV_ESC_STATUS_CODE",
        210: "NV_ESC_CHECK_VERSION_STR",
        211: "NV_ESC_IOCTL_XFER_CMD",
        212: "NV_ESC_ATTACH_GPUS_TO_FD",
        213: "NV_ESC_QUERY_DEVICE_INTR",
        214: "NV_ESC_SYS_PARAMS",
        215: "NV_ESC_NUMA_INFO",
        216: "NV_ESC_SET_NUMA_STATUS",
        217: "NV_ESC_EXPORT_TO_DMABUF_FD",
        218: "NV_ESC_WAIT_OPEN_COMPLETE",
    }
)
"""By number."""

UVM: Mapping[int, str] = MappingProxyType(
    {
        20: "UVM_GET_GPU_UUID_TABLE",
        23: "UVM_CREATE_RANGE_GROUP",
        24: "UVM_DESTROY_RANGE_GROUP",
        25: "UVM_REGISTER_GPU_VASPACE",
        26: "UVM_UNREGISTER_GPU_VASPACE",
        27: "UVM_REGISTER_CHANNEL",
        28: "UVM_UNREGISTER_CHANNEL",
        29: "UVM_ENABLE_PEER_ACCESS",
        30: "UVM_DISABLE_PEER_ACCESS",
        31: "UVM_SET_RANGE_GROUP",
        33: "UVM_MAP_EXTERNAL_ALLOCATION",
        34: "UVM_FREE",
        35: "UVM_MEM_MAP",
        37: "UVM_REGISTER_GPU",
        38: "UVM_UNREGISTER_GPU",
        39: "UVM_PAGEABLE_MEM_ACCESS",
        42: "UVM_SET_PREFERRED_LOCATION",
        43: "UVM_UNSET_PREFERRED_LOCATION",
        44: "UVM_ENABLE_READ_DUPLICATION",
        45: "UVM_DISABLE_READ_DUPLICATION",
        46: "UVM_SET_ACCESSED_BY",
        47: "UVM_UNSET_ACCESSED_BY",
        51: "UVM_MIGRATE",
        53: "UVM_MIGRATE_RANGE_GROUP",
        65: "UVM_MAP_DYNAMIC_PARALLELISM_REGION",
        66: "UVM_UNMAP_EXTERNAL",
        68: "UVM_ALLOC_SEMAPHORE_POOL",
        69: "UVM_CLEAN_UP_ZOMBIE_RESOURCES",
        70: "UVM_PAGEABLE_MEM_ACCESS_ON_GPU",
        71: "UVM_POPULATE_PAGEABLE",
        72: "UVM_VALIDATE_VA_RANGE",
        73: "UVM_CREATE_EXTERNAL_RANGE",
        74: "UVM_MAP_EXTERNAL_SPARSE",
        75: "UVM_MM_INITIALIZE",
        78: "UVM_ALLOC_DEVICE_P2P",
        79: "UVM_CLEAR_ALL_ACCESS_COUNTERS",
        0x30000001: "UVM_INITIALIZE",
        0x30000002: "UVM_DEINITIALIZE",
    }
)
"""By request, those that a compute client makes."""

CLASSES: Mapping[int, str] = MappingProxyType(
    {
        0x0000: "NV01_ROOT",
        0x0005: "NV01_EVENT",
        0x003E: "NV01_MEMORY_SYSTEM",
        0x003F: "NV01_MEMORY_LOCAL_PRIVILEGED",
        0x0040: "NV01_MEMORY_LOCAL_USER",
        0x0041: "NV01_ROOT_CLIENT",
        0x0070: "NV01_MEMORY_VIRTUAL",
        0x0071: "NV01_MEMORY_SYSTEM_OS_DESCRIPTOR",
        0x0079: "NV01_EVENT_OS_EVENT",
        0x0080: "NV01_DEVICE_0",
        0x00DE: "RM_USER_SHARED_DATA",
        0x00F8: "NV_MEMORY_FABRIC",
        0x00FD: "NV_MEMORY_MULTICAST_FABRIC",
        0x00FE: "NV_MEMORY_MAPPER",
        0x2080: "NV20_SUBDEVICE_0",
        0x2081: "NV2081_BINAPI",
        0x503B: "NV50_P2P",
        0x503C: "NV50_THIRD_PARTY_P2P",
        0x5080: "NV50_DEFERRED_API_CLASS",
        0x50A0: "NV50_MEMORY_VIRTUAL",
        0x83DE: "GT200_DEBUGGER",
        0x9067: "FERMI_CONTEXT_SHARE_A",
        0x90E6: "GF100_SUBDEVICE_MASTER",
        0x90F1: "FERMI_VASPACE_A",
        0xA06C: "KEPLER_CHANNEL_GROUP_A",
        0xB2CC: "MAXWELL_PROFILER_DEVICE",
        0xC361: "VOLTA_USERMODE_A",
        0xC461: "TURING_USERMODE_A",
        0xC561: "AMPERE_USERMODE_A",
        0xC661: "HOPPER_USERMODE_A",
        0xC56F: "AMPERE_CHANNEL_GPFIFO_A",
        0xC6B5: "AMPERE_DMA_COPY_A",
        0xC6C0: "AMPERE_COMPUTE_A",
        0xCB33: "NV_CONFIDENTIAL_COMPUTE",
        0xCBA2: "HOPPER_SEC2_WORK_LAUNCH_A",
    }
)
"""By number, beside those that nvgpu has too."""

COMMANDS: Mapping[int, str] = MappingProxyType(
    {
        0x00000101: "NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION",
        0x0000013A: "NV0000_CTRL_CMD_SYSTEM_GET_P2P_CAPS_MATRIX",
        0x0000013E: "NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION_V2",
        0x000001F0: "NV0000_CTRL_CMD_SYSTEM_GET_FEATURES",
        0x00000201: "NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS",
        0x00000202: "NV0000_CTRL_CMD_GPU_GET_ID_INFO",
        0x00000205: "NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2",
        0x00000214: "NV0000_CTRL_CMD_GPU_GET_PROBED_IDS",
        0x00000215: "NV0000_CTRL_CMD_GPU_ATTACH_IDS",
        0x0000027B: "NV0000_CTRL_CMD_GPU_GET_MEMOP_ENABLE",
        0x00000288: "NV0000_CTRL_CMD_GPU_GET_ACTIVE_DEVICE_IDS",
        0x00000A04: "NV0000_CTRL_CMD_SYNC_GPU_BOOST_GROUP_INFO",
        0x00000D01: "NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE",
        0x00000D04: "NV0000_CTRL_CMD_CLIENT_SET_INHERITED_SHARE_POLICY",
        0x00800201: "NV0080_CTRL_CMD_GPU_GET_CLASSLIST",
        0x00800280: "NV0080_CTRL_CMD_GPU_GET_NUM_SUBDEVICES",
        0x00800289: "NV0080_CTRL_CMD_GPU_GET_VIRTUALIZATION_MODE",
        0x00800292: "NV0080_CTRL_CMD_GPU_GET_CLASSLIST_V2",
        0x00801307: "NV0080_CTRL_CMD_FB_GET_CAPS_V2",
        0x00801402: "NV0080_CTRL_CMD_HOST_GET_CAPS_V2",
        0x0080170D: "NV0080_CTRL_CMD_FIFO_GET_CHANNELLIST",
        0x00801909: "NV0080_CTRL_CMD_PERF_CUDA_LIMIT_SET_CONTROL",
        0x20800102: "NV2080_CTRL_CMD_GPU_GET_INFO_V2",
        0x20800110: "NV2080_CTRL_CMD_GPU_GET_NAME_STRING",
        0x20800111: "NV2080_CTRL_CMD_GPU_GET_SHORT_NAME_STRING",
        0x20800119: "NV2080_CTRL_CMD_GPU_GET_SIMULATION_INFO",
        0x2080012F: "NV2080_CTRL_CMD_GPU_QUERY_ECC_STATUS",
        0x20800131: "NV2080_CTRL_CMD_GPU_QUERY_COMPUTE_MODE_RULES",
        0x2080014A: "NV2080_CTRL_CMD_GPU_GET_GID_INFO",
        0x20800170: "NV2080_CTRL_CMD_GPU_GET_ENGINES_V2",
        0x20800195: "NV2080_CTRL_CMD_GPU_GET_COMPUTE_POLICY_CONFIG",
        0x208001A3: "NV2080_CTRL_CMD_GET_GPU_FABRIC_PROBE_INFO",
        0x20801201: "NV2080_CTRL_CMD_GR_GET_INFO",
        0x20801210: "NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE",
        0x20801218: "NV2080_CTRL_CMD_GR_GET_CTX_BUFFER_SIZE",
        0x2080121B: "NV2080_CTRL_CMD_GR_GET_GLOBAL_SM_ORDER",
        0x20801227: "NV2080_CTRL_CMD_GR_GET_CAPS_V2",
        0x2080122A: "NV2080_CTRL_CMD_GR_GET_GPC_MASK",
        0x2080122B: "NV2080_CTRL_CMD_GR_GET_TPC_MASK",
        0x20801230: "NV2080_CTRL_CMD_GR_GET_SM_ISSUE_RATE_MODIFIER",
        0x20801303: "NV2080_CTRL_CMD_FB_GET_INFO_V2",
        0x2080130E: "NV2080_CTRL_CMD_FB_FLUSH_GPU_CACHE",
        0x20801701: "NV2080_CTRL_CMD_MC_GET_ARCH_INFO",
        0x20801801: "NV2080_CTRL_CMD_BUS_GET_PCI_INFO",
        0x20801803: "NV2080_CTRL_CMD_BUS_GET_PCI_BAR_INFO",
        0x20801823: "NV2080_CTRL_CMD_BUS_GET_INFO_V2",
        0x2080182A: "NV2080_CTRL_CMD_BUS_GET_PCIE_SUPPORTED_GPU_ATOMICS",
        0x2080182B: "NV2080_CTRL_CMD_BUS_GET_C2C_INFO",
        0x2080200A: "NV2080_CTRL_CMD_PERF_BOOST",
        0x2080220C: "NV2080_CTRL_CMD_RC_RELEASE_WATCHDOG_REQUESTS",
        0x20802210: "NV2080_CTRL_CMD_RC_SOFT_DISABLE_WATCHDOG",
        0x20802A0A: "NV2080_CTRL_CMD_CE_GET_ALL_CAPS",
        0x20803002: "NV2080_CTRL_CMD_NVLINK_GET_NVLINK_STATUS",
        0x20803601: "NV2080_CTRL_CMD_GSP_GET_FEATURES",
        0x20803801: "NV2080_CTRL_CMD_GRMGR_GET_GR_FS_INFO",
        0x503C0102: "NV503C_CTRL_CMD_REGISTER_VA_SPACE",
        0x503C0104: "NV503C_CTRL_CMD_REGISTER_VIDMEM",
        0x83DE0309: "NV83DE_CTRL_CMD_DEBUG_SET_EXCEPTION_MASK",
        0x83DE030C: "NV83DE_CTRL_CMD_DEBUG_READ_ALL_SM_ERROR_STATES",
        0x83DE0328: "NV83DE_CTRL_CMD_DEBUG_READ_MMU_FAULT_INFO",
        0x906F0101: "NV906F_CTRL_GET_CLASS_ENGINEID",
        0x90E60102: "NV90E6_CTRL_CMD_MASTER_GET_VIRTUAL_FUNCTION_ERROR_CONT_INTR_MASK",
        0xA06C0101: "NVA06C_CTRL_CMD_GPFIFO_SCHEDULE",
        0xA06C0103: "NVA06C_CTRL_CMD_SET_TIMESLICE",
        0xA06F0103: "NVA06F_CTRL_CMD_GPFIFO_SCHEDULE",
        0xA06F0104: "NVA06F_CTRL_CMD_BIND",
        0xC36F0108: "NVC36F_CTRL_CMD_GPFIFO_GET_WORK_SUBMIT_TOKEN",
        0xCB330101: "NV_CONF_COMPUTE_CTRL_CMD_SYSTEM_GET_CAPABILITIES",
    }
)
"""The commands of RM_CONTROL by number: those that CUDA and tinygrad give on an H200, and tinygrad's after a fault."""

HANDLES = MappingProxyType({"hRoot": 0, "hObjectParent": 4, "hObjectNew": 8})
BLOCKS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "NV_ESC_RM_ALLOC": HANDLES | {"hClass": 12},
        "NV_ESC_RM_ALLOC_MEMORY": HANDLES | {"hClass": 12},
        "NV_ESC_RM_CONTROL": {"hClient": 0, "hObject": 4, "cmd": 8, "paramsSize": 24},
        "NV_ESC_RM_FREE": {"hRoot": 0, "hObjectParent": 4, "hObjectOld": 8},
        "NV_ESC_RM_MAP_MEMORY": {"hClient": 0, "hDevice": 4, "hMemory": 8},
        "NV_ESC_RM_MAP_MEMORY_DMA": {"hClient": 0, "hDevice": 4, "hDma": 8, "hMemory": 12},
        "NV_ESC_RM_DUP_OBJECT": {"hClient": 0, "hParent": 4, "hObject": 8, "hClientSrc": 12, "hObjectSrc": 16},
        "NV_ESC_REGISTER_FD": {"ctl_fd": 0},
    }
)
"""Where the fields that matter lie in an ioctl's block: 32-bit words by offset. RM_ALLOC's two forms begin alike."""

STATUS: Mapping[tuple[str, int], int] = MappingProxyType(
    {
        ("NV_ESC_RM_ALLOC", 32): 28,
        ("NV_ESC_RM_ALLOC", 48): 40,
        ("NV_ESC_RM_ALLOC_MEMORY", 56): 40,
        ("NV_ESC_RM_CONTROL", 32): 28,
        ("NV_ESC_RM_FREE", 16): 12,
        ("NV_ESC_RM_DUP_OBJECT", 28): 24,
        ("NV_ESC_RM_VID_HEAP_CONTROL", 184): 20,
        ("NV_ESC_RM_MAP_MEMORY", 56): 40,
        ("NV_ESC_RM_UNMAP_MEMORY", 32): 24,
        ("NV_ESC_RM_MAP_MEMORY_DMA", 56): 48,
        ("NV_ESC_RM_MAP_MEMORY_DMA", 64): 56,
        ("NV_ESC_RM_UNMAP_MEMORY_DMA", 48): 40,
        ("NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO", 40): 32,
        ("NV_ESC_ALLOC_OS_EVENT", 16): 12,
    }
)
"""Where the resource manager's own status lies, by name and size: the ioctl succeeds when that is an error."""


def name(request: int) -> str:
    """The name of a request on /dev/nvidia*; `ioctl` if it is not known."""
    if not request >> 8 & 0xFF:
        return UVM.get(request, "ioctl")
    return ESCAPES.get(request & 0xFF, "ioctl") if request >> 8 & 0xFF == ESCAPE_TYPE else "ioctl"


def fields(escape: str, block: bytes) -> dict[str, int]:
    """The fields of a block that are known."""
    return {
        field: int.from_bytes(block[at : at + 4], "little")
        for field, at in BLOCKS.get(escape, {}).items()
        if at + 4 <= len(block)
    }


def status(escape: str, block: bytes) -> int:
    """The resource manager's status in a block that came back; 0 where there is none."""
    at = STATUS.get((escape, len(block)))
    return 0 if at is None else int.from_bytes(block[at : at + 4], "little")
