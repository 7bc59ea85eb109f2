"""The kernel-log checker: which lines it takes for the GPU's, how it judges them, and what it does about errors."""

import json
import os
import subprocess
import sys

import pytest

from tegrad.diag import klog
from tegrad.diag.klog import KernelLog, KernelLogError, Severity, expect_clean
from tegrad.uapi import kmsg
from tegrad.uapi.errors import DriverError
from tegrad.uapi.kernel import LinuxKernel

ERR = "nvgpu: 17000000.gpu {}:0 [ERR]  {}"
LINES = [
    (
        ERR.format("gv11b_fb_mmu_fault_info_dump", "[MMU FAULT] mmu engine id:  0, ch id:  511, fault addr: 0x7000"),
        "error",
    ),
    (ERR.format("gr_gv11b_handle_sm_exception", "sm hww global 0x4 warp 0xf"), "error"),
    (ERR.format("gr_gp10b_handle_sked_exception", "sked exception: esr 0x01000000"), "error"),
    (ERR.format("ga10b_pbdma_handle_intr_0", "PBDMA intr gpentry Error"), "error"),
    (ERR.format("nvgpu_set_err_notifier_locked", "error notifier set to 31 for ch 511 owned by python3"), "error"),
    (ERR.format("nvgpu_channel_setup_bind", "fail"), "harmless"),
    (ERR.format("nvgpu_ioctl_tsg_dev_ioctl", "unrecognized tsg gpu ioctl cmd: 0x5499"), "harmless"),
    ("nvmap: PID 12: python3: all allocations must have a tag", "harmless"),
    ("nvmap: Unknown NVMAP_IOC = 0xc0084e63", "harmless"),
    (ERR.format("somewhere_new", "never seen before"), "error"),
    ("nvgpu: 17000000.gpu gk20a_pm:0 [INFO]  powered on", "info"),
    ("board: kernel E_4: store to 0x10", "info"),
    ("board: GPU reset (the process died)", "error"),
    ("arm-smmu 17000000.iommu: Unhandled context fault: fsr=0x402", "error"),
    ("usb 1-1: device descriptor read error", None),
]


class LoggingKernel(LinuxKernel):
    """A machine whose kernel log is what a test says."""

    def __init__(self, *texts: str, level: int = 3) -> None:
        self.texts, self.level = list(texts), level

    def open(self, path: str, flags: int = os.O_RDWR) -> int:
        assert path == "/dev/kmsg"
        fd = os.memfd_create("kmsg")
        os.write(
            fd, "".join(f"{self.level},{n},{1000 * n},-;{t}\n SUBSYSTEM=x\n" for n, t in enumerate(self.texts)).encode()
        )
        os.lseek(fd, 0, os.SEEK_SET)
        return fd


@pytest.mark.parametrize(("text", "expected"), LINES)
def test_each_line_is_judged_by_what_it_means(text: str, expected: str | None) -> None:
    line = klog.classify(kmsg.LogRecord(0, 0, 3, text))
    assert (line and str(line.severity)) == expected


def test_an_unmarked_line_is_judged_by_its_level() -> None:
    levels = {level: klog.classify(kmsg.LogRecord(0, 0, level, "nvgpu: odd")) for level in (3, 4, 6)}
    assert [levels[level].severity for level in (3, 4, 6)] == [Severity.ERROR, Severity.WARNING, Severity.INFO]  # type: ignore[union-attr]


def test_a_record_of_kmsg_is_taken_apart() -> None:
    assert kmsg.parse("30,7,1234567,-;nvgpu: a;b") == kmsg.LogRecord(7, 1234567, 6, "nvgpu: a;b")
    assert kmsg.parse(" SUBSYSTEM=platform") is None


def test_a_log_longer_than_one_read_comes_whole() -> None:
    texts = [f"nvgpu: line {n} " + "x" * 300 for n in range(200)]
    assert [record.text for record in kmsg.records(LoggingKernel(*texts))] == texts


def test_reading_the_log_leaves_no_file_open() -> None:
    before = os.listdir("/proc/self/fd")
    KernelLog(LoggingKernel("nvgpu: x")).new()
    assert os.listdir("/proc/self/fd") == before


def test_only_what_came_since_the_last_look_is_new() -> None:
    kernel = LoggingKernel("nvgpu: one", "usb: other")
    log = KernelLog(kernel)
    assert [line.record.text for line in log.new()] == ["nvgpu: one"]
    kernel.texts.append("nvgpu: two")
    assert [line.record.text for line in log.new()] == ["nvgpu: two"]
    assert log.new() == []


def test_a_log_is_followed_without_being_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)  # as /dev/kmsg has nothing yet, where a copy of a log would end

    class Piped(LoggingKernel):
        def open(self, path: str, flags: int = os.O_RDWR) -> int:
            return read

    def say(number: int) -> None:
        os.write(write, f"3,{number},0,-;nvgpu: line {number}\n".encode())

    waits = []

    def waiting(*_: object) -> None:
        waits.append(len(waits))
        say(len(waits))

    monkeypatch.setattr("tegrad.uapi.kmsg.select.select", waiting)
    say(0)
    lines = KernelLog(Piped()).watch()
    assert [next(lines).record.sequence for _ in range(4)] == [0, 1, 2, 3]
    assert waits == [0, 1, 2]
    lines.close()  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(read)
    os.close(write)


def test_a_copy_of_a_log_is_followed_by_the_next_copy() -> None:
    kernel = LoggingKernel("nvgpu: one")
    lines = KernelLog(kernel).watch()
    assert next(lines).record.text == "nvgpu: one"
    kernel.texts.append("nvgpu: two")
    assert next(lines).record.text == "nvgpu: two"


def test_an_old_error_is_not_held_against_a_block() -> None:
    with expect_clean(LoggingKernel(LINES[0][0])):
        pass


def test_an_error_line_fails_the_block_and_says_what_it_means() -> None:
    kernel = LoggingKernel()
    with pytest.raises(KernelLogError, match=r"sked exception.*launch descriptor"), expect_clean(kernel):
        kernel.texts.append(LINES[2][0])


def test_harmless_lines_pass() -> None:
    kernel = LoggingKernel()
    with expect_clean(kernel) as check:
        kernel.texts += [text for text, kind in LINES if kind == "harmless"]
    assert {line.severity for line in check.lines} == {Severity.HARMLESS}


def test_an_allowed_error_passes_and_another_does_not() -> None:
    kernel = LoggingKernel()
    with expect_clean(kernel, allow="sked exception"):
        kernel.texts.append(LINES[2][0])
    with pytest.raises(KernelLogError, match="MMU FAULT"), expect_clean(kernel, allow="sked exception"):
        kernel.texts += [LINES[2][0], LINES[0][0]]


def test_an_exception_of_the_block_is_kept_and_gets_the_lines_as_a_note() -> None:
    kernel = LoggingKernel()

    @expect_clean(kernel)
    def fail() -> None:
        kernel.texts.append(LINES[2][0])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        fail()
    assert "sked exception" in raised.value.__notes__[0]


def test_as_a_decorator_each_call_is_checked_by_itself() -> None:
    kernel = LoggingKernel()

    @expect_clean(kernel)
    def step(text: str) -> None:
        kernel.texts.append(text)

    with pytest.raises(KernelLogError):
        step(LINES[1][0])
    step("nvgpu: 17000000.gpu x:0 [INFO]  fine")


def test_a_log_that_may_not_be_read_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "open", closed)
    with pytest.raises(DriverError, match="dmesg_restrict"):
        KernelLog(LinuxKernel()).new()


@pytest.mark.board
def test_the_command_reads_the_log_of_a_board() -> None:
    from tegrad.orin.client import BoardKernel, board_stop
    from tegrad.uapi.constants import NVMAP_HEAP_IOVMM
    from tegrad.uapi.ioctls import BY_NAME
    from tegrad.uapi.structs import AllocHandle, CreateHandle

    name = f"klog-{os.getpid()}"
    tegrad = [sys.executable, "-m", "tegrad"]
    subprocess.run([*tegrad, "board", "start", name], check=True, stdout=subprocess.DEVNULL)
    try:
        kernel = BoardKernel(name)
        fd = kernel.open("/dev/nvmap")
        create = CreateHandle(size=4096)
        kernel.ioctl(fd, BY_NAME["NVMAP_CREATE"], create)
        kernel.ioctl(fd, BY_NAME["NVMAP_ALLOC"], AllocHandle(handle=create.handle, heap_mask=NVMAP_HEAP_IOVMM))
        environment = {**os.environ, "TEGRAD_BOARD": name}
        done = subprocess.run(
            [*tegrad, "klog", "--json", "--count", "1"], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        line = json.loads(done.stdout)
        assert (line["class"], "tag" in line["text"]) == ("harmless", True)
        kernel.close(fd)
    finally:
        board_stop(name)
