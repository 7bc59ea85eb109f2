"""Fault names and numbers equal the driver's."""

import json
from pathlib import Path

import pytest

from tegrad.hw import faults

DATA = Path(__file__).parents[1] / "data"
HW = json.loads((DATA / "ga10b-hw.json").read_text())
UAPI = json.loads((DATA / "uapi.json").read_text())


def ints(tree: dict) -> dict[int, str]:
    return {int(k): v for k, v in tree["values"].items()}


def test_notifier_codes() -> None:
    driver = HW["error_notifier"]["codes"]
    for name, value in driver.items():
        assert faults.NotifierCode(value), name
    for code in faults.NotifierCode:
        assert driver[code.name] == code
        if code.name not in HW["error_notifier"]["unmapped"]:
            assert UAPI["constants"][f"NVGPU_CHANNEL_{code.name}"] == code
    assert set(faults.NOTIFIER_TEXT) == set(faults.NotifierCode)


def test_notifier_record_is_the_uapi_struct() -> None:
    fields = UAPI["structs"]["nvgpu_notification"]["fields"]
    assert UAPI["structs"]["nvgpu_notification"]["size"] == faults.NOTIFIER_FORMAT.size
    mem = bytearray(16)
    for name, value in (("info32", 31), ("status", 0xFFFF)):
        at = fields[name]["offset"]
        mem[at : at + fields[name]["size"]] = value.to_bytes(fields[name]["size"], "little")
    mem[0:8] = (5_000_000_007).to_bytes(8, "little")
    assert faults.read_notifier(b"xx" + bytes(mem), 2) == faults.Notifier(5_000_000_007, 31, 0, faults.NOTIFIER_ERROR)


def test_a_notifier_that_is_written_meanwhile_has_no_status_without_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that met the code as it was and the status as it is then said "code 0, unknown"."""
    real = faults.NOTIFIER_FORMAT

    class WrittenMeanwhile:
        size = real.size

        def unpack_from(self, memory: bytearray, offset: int) -> tuple[int, ...]:
            first = bytes(memory[:14])
            real.pack_into(memory, offset, 5, 32, 0, faults.NOTIFIER_ERROR)
            return real.unpack(first + memory[14:])

    monkeypatch.setattr(faults, "NOTIFIER_FORMAT", WrittenMeanwhile())
    memory = bytearray(real.size)
    assert faults.read_notifier(memory) == faults.Notifier(0, 0, 0, 0)
    assert faults.read_notifier(memory) == faults.Notifier(5, 32, 0, faults.NOTIFIER_ERROR)


def test_mmu_fault_tables() -> None:
    mmu = HW["mmu_fault"]
    assert dict(faults.MMU_FAULT_TEXT) == ints(mmu["types"])
    assert {t.value for t in faults.MmuFaultType} == set(ints(mmu["types"]))
    for fault in faults.MmuFaultType:
        assert fault.name.replace("_", " ").lower() == faults.MMU_FAULT_TEXT[fault].replace(",", "") or fault.name in (
            "WRITE_RO_VIOLATION",
            "READ_WO_VIOLATION",
        )
    assert dict(faults.MMU_ACCESS_TEXT) == ints(mmu["access_types"])
    for access in faults.MmuAccess:
        assert access.name.replace("_", " ").lower() == faults.MMU_ACCESS_TEXT[access]
    assert dict(faults.MMU_CLIENTS_HUB) == ints(mmu["clients_hub"])
    assert dict(faults.MMU_CLIENTS_GPC) == ints(mmu["clients_gpc"])
    assert {t.value: t.name.lower() for t in faults.MmuClientType} == ints(mmu["client_types"])
    assert dict(faults.MMU_ENGINE_IDS) == {k: v for k, v in mmu["engine_ids"].items() if k != "src"}


def test_sm_errors() -> None:
    sm = HW["sm_errors"]
    assert {e.name.lower(): e.value for e in faults.WarpEsr} == sm["warp_esr_error"]["values"]
    assert {b.name.lower(): b.value for b in faults.GlobalEsrBit} == sm["global_esr_report_mask_bits"]["values"]
    assert sm["warp_esr_report_mask"]["value"] == faults.WARP_ESR_REPORT_MASK
    assert sm["global_esr_report_mask"]["value"] == faults.GLOBAL_ESR_REPORT_MASK


def test_pbdma_interrupts() -> None:
    assert {b.name.lower(): b.value for b in faults.PbdmaIntr0} == HW["pbdma_intr_0_bits"]["values"]
    assert {b.name.lower(): b.value for b in faults.PbdmaIntr1} == HW["pbdma_intr_1_bits"]["values"]
    assert {b.name.lower() for b in faults.PBDMA_INTR_0_FATAL} == set(HW["pbdma_intr_0_channel_fatal"]["names"])


def test_bit_names() -> None:
    """The window exception that unset shader windows raise, and a bit nobody has named."""
    assert faults.bit_names(faults.SkedBit, 0x01000000) == ["MEMORY_WINDOW_OVERLAP"]
    assert faults.bit_names(faults.SkedBit, 1 << 22 | 1) == ["SCG_GOTO_IDLE", "bit22"]
    assert faults.bit_names(faults.SkedBit, 0) == []


def test_sked_bits_of_the_manual() -> None:
    """Every bit, as the GA100 manual numbers them; 22 has no name, 3 and 4 share one."""
    manual = {
        0: "goto idle", 1: "steer", 2: "semaphore", 3: "vspan", 4: "vspan", 5: "throttled", 6: "resume",
        7: "constant buffer size", 8: "underflow", 9: "low size", 10: "high size", 11: "crs size", 12: "total size",
        13: "register count", 14: "outer put", 15: "outer get", 16: "inner put", 17: "inner get", 18: "total threads",
        19: "veid", 20: "program offset", 21: "shared memory size", 23: "zero", 24: "window overlap",
        25: "too small", 26: "register consumption", 27: "too large", 28: "queue size", 29: "invalidate",
    }  # fmt: skip
    assert {bit.value for bit in faults.SkedBit} == set(manual)
    for bit in faults.SkedBit:
        assert manual[bit] in bit.name.replace("_", " ").lower()
