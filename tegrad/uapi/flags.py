"""Names for numbers in ioctl arguments: which constants belong to which field, for messages and traces."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tegrad.uapi import constants
from tegrad.uapi.desktop import CLASSES, COMMANDS


def _by_value(prefix: str, exclude: str = "$^") -> Mapping[int, str]:
    named = {
        value: name.removeprefix(prefix)
        for name, value in vars(constants).items()
        if name.startswith(prefix) and not re.search(exclude, name)
    }
    return MappingProxyType(named)


def flags(named: Mapping[int, str]) -> Callable[[int], str]:
    """A formatter for bit masks: known bits by name, the rest in hexadecimal."""

    def text(value: int) -> str:
        names = [name for bit, name in named.items() if bit and value & bit == bit]
        rest = value
        for bit in named:
            rest &= ~bit
        return "|".join(names + ([f"{rest:#x}"] if rest or not names else []))

    return text


def choice(named: Mapping[int, str]) -> Callable[[int], str]:
    """A formatter for enumerations: the name, or the number where none is known."""
    return lambda value: named.get(value, f"{value:#x}")


def _map_flags(value: int) -> str:
    shift = constants.NVGPU_AS_MAP_BUFFER_FLAGS_ACCESS_BITMASK_OFFSET
    access = value >> shift & 3
    text = _MAP_BITS(value & ~(3 << shift))
    return text if not access else f"{text}|{_ACCESS(access)}"


def _nvmap_flags(value: int) -> str:
    tag = value >> 16
    bits = (value & 0xFFFF) >> 2 << 2
    text = _CACHE(value & constants.NVMAP_HANDLE_CACHE_FLAG)
    if bits:
        text += f"|{_HANDLE_BITS(bits)}"
    return text + (f"|tag={tag:#x}" if tag else "")


_MAP_BITS = flags(_by_value("NVGPU_AS_MAP_BUFFER_FLAGS_", "ACCESS_BITMASK"))
_ACCESS = choice(_by_value("NVGPU_AS_MAP_BUFFER_ACCESS_"))
_CACHE = choice(
    MappingProxyType({0: "UNCACHEABLE", 1: "WRITE_COMBINE", 2: "INNER_CACHEABLE", 3: "CACHEABLE"}),
)
_HANDLE_BITS = flags(_by_value("NVMAP_HANDLE_", "PARAM|CACHEABLE|WRITE_COMBINE|CACHE_FLAG"))
_EVENTS = choice(_by_value("NVGPU_IOCTL_CHANNEL_EVENT_ID_", "CMD|MAX"))

_CLASSES = MappingProxyType(
    {
        0x902D: "FERMI_TWOD_A",
        0xA140: "KEPLER_INLINE_TO_MEMORY_B",
        0xC76F: "AMPERE_CHANNEL_GPFIFO_B",
        0xC797: "AMPERE_B",
        0xC7B5: "AMPERE_DMA_COPY_B",
        0xC7C0: "AMPERE_COMPUTE_B",
        0xC86F: "HOPPER_CHANNEL_GPFIFO_A",
        0xC8B5: "HOPPER_DMA_COPY_A",
        0xCB97: "HOPPER_A",
        0xCBC0: "HOPPER_COMPUTE_A",
    }
)

FORMATTERS: Mapping[tuple[str, str], Callable[[int], str]] = MappingProxyType(
    {
        ("GPU_ALLOC_AS", "flags"): flags(_by_value("NVGPU_GPU_IOCTL_ALLOC_AS_FLAGS_")),
        ("GPU_OPEN_TSG", "flags"): flags(_by_value("NVGPU_GPU_IOCTL_OPEN_TSG_FLAGS_")),
        ("GPU_CLK_SET_INFO", "flags"): flags(_by_value("NVGPU_GPU_CLK_FLAG_")),
        ("GPU_CLK_GET_INFO", "clk_type"): choice(_by_value("NVGPU_GPU_CLK_TYPE_")),
        ("GPU_SET_DETERMINISTIC_OPTS", "flags"): flags(_by_value("NVGPU_GPU_SET_DETERMINISTIC_OPTS_FLAGS_")),
        ("GPU_REGISTER_BUFFER", "flags"): flags(_by_value("NVGPU_GPU_REGISTER_BUFFER_FLAGS_")),
        ("AS_ALLOC_SPACE", "flags"): flags(_by_value("NVGPU_AS_ALLOC_SPACE_FLAGS_")),
        ("AS_MAP_BUFFER_EX", "flags"): _map_flags,
        ("TSG_CREATE_SUBCONTEXT", "type"): choice(_by_value("NVGPU_TSG_SUBCONTEXT_TYPE_")),
        ("TSG_SET_RUNLIST_INTERLEAVE", "level"): choice(_by_value("NVGPU_RUNLIST_INTERLEAVE_LEVEL_")),
        ("TSG_EVENT_ID_CTRL", "event_id"): _EVENTS,
        ("CHANNEL_ALLOC_OBJ_CTX", "class_num"): choice(_CLASSES),
        ("NV_ESC_RM_ALLOC", "hClass"): choice(CLASSES | _CLASSES),
        ("NV_ESC_RM_ALLOC_MEMORY", "hClass"): choice(CLASSES),
        ("NV_ESC_RM_CONTROL", "cmd"): choice(COMMANDS),
        ("CHANNEL_ALLOC_OBJ_CTX", "flags"): flags(_by_value("NVGPU_ALLOC_OBJ_FLAGS_")),
        ("CHANNEL_SETUP_BIND", "flags"): flags(_by_value("NVGPU_CHANNEL_SETUP_BIND_FLAGS_")),
        ("CHANNEL_SUBMIT_GPFIFO", "flags"): flags(_by_value("NVGPU_SUBMIT_GPFIFO_FLAGS_")),
        ("CHANNEL_SET_PREEMPTION_MODE", "graphics_preempt_mode"): flags(_by_value("NVGPU_GRAPHICS_PREEMPTION_MODE_")),
        ("CHANNEL_SET_PREEMPTION_MODE", "compute_preempt_mode"): flags(_by_value("NVGPU_COMPUTE_PREEMPTION_MODE_")),
        ("CHANNEL_WAIT", "type"): choice(_by_value("NVGPU_WAIT_TYPE_")),
        ("CHANNEL_WDT", "wdt_status"): flags(_by_value("NVGPU_IOCTL_CHANNEL_", "EVENT_ID|_LAST|MAX_ARG")),
        ("NVMAP_ALLOC", "heap_mask"): flags(_by_value("NVMAP_HEAP_", "CARVEOUT_MASK")),
        ("NVMAP_ALLOC", "flags"): _nvmap_flags,
        ("NVMAP_CACHE", "op"): choice(_by_value("NVMAP_CACHE_OP_")),
        ("NVMAP_CACHE_64", "op"): choice(_by_value("NVMAP_CACHE_OP_")),
        ("NVMAP_PARAM", "param"): choice(_by_value("NVMAP_HANDLE_PARAM_")),
    }
)
"""By (short ioctl name, field): how to write the field's value with names."""


def field_text(ioctl: str, field: str, value: object) -> str:
    """A field's value for a reader: constants by name where they are known."""
    formatter = FORMATTERS.get((ioctl, field))
    if formatter is not None and isinstance(value, int):
        return formatter(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if -4096 < value < 4096 else f"{value:#x}"
    return repr(value) if isinstance(value, str) else str(value)
