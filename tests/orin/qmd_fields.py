"""Fields of launch descriptors that the versions name differently: releases and dependents."""

from gpu_rig import Rig

M32 = 0xFFFFFFFF


def release_fields(
    rig: Rig, i: int, va: int, payload: int, *, size: int = 0, wide: int = 0, **more: int
) -> dict[str, int]:
    """QMD fields of release `i`; `more` are `reduction_op` and so on."""
    if rig.chip.qmd == "V3":
        p, s, a, v = f"release{i}_", "", f"release{i}_address_", f"release{i}_payload_"
    else:
        p, s, a, v = "release_", f"_{i}", f"release_semaphore{i}_addr_", f"release_semaphore{i}_payload_"
    fields = {f"{p}enable{s}": 1, f"{p}structure_size{s}": size, f"{p}payload64b{s}": wide}
    fields |= {f"{p}{name}{s}": value for name, value in more.items()}
    fields |= {a + "lower": va & M32, a + "upper": va >> 32, v + "lower": payload & M32, v + "upper": payload >> 32}
    return fields


def dependent_fields(rig: Rig, qmd: int, action: int = 1) -> dict[str, int]:
    """QMD fields that do something to the descriptor at `qmd` after the grid: schedule it, unless told otherwise."""
    if rig.chip.qmd == "V3":
        return {"dependent_qmd0_enable": 1, "dependent_qmd0_action": action, "dependent_qmd0_pointer": qmd >> 8}
    return {"dependent_qmd_enable_0": 1, "dependent_qmd_action_0": action, "dependent_qmd0_pointer": qmd >> 8}
