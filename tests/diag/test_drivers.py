"""What the doctor says of a machine's drivers, on machines made of files."""

import errno
import re
from pathlib import Path

import pytest

from tegrad.diag import doctor, drivers
from tegrad.diag.finding import Finding
from tegrad.uapi import releases
from tegrad.uapi.releases import DESKTOP, L4T, State

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
RELEASE_FILE = "# R{} (release), REVISION: {}, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Jan 8 2025\n"
PACKAGES = (
    "Package: nvidia-l4t-3d-core\nVersion: 1.2.3\n\nPackage: nvidia-l4t-core\nStatus: install ok\nVersion: {}\n\n"
)
OPEN_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)\nGCC 12.3.0\n"
)
OLD_MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Nov  9 2023\nGCC version:  gcc version 12.3.0\n"


def machine(root: Path, **files: str) -> Path:
    """A root folder with these files; in their names `_` stands for `/`, and `__` for `_`."""
    for name, text in files.items():
        path = root / name.replace("__", "\0").replace("_", "/").replace("\0", "_")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def orin(root: Path, kernel: str = "", **files: str) -> Path:
    tree = "nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0nvidia,tegra234\0"
    return machine(root, **{"proc_device-tree_compatible": tree, "proc_sys_kernel_osrelease": kernel + "\n", **files})


def one(found: object) -> Finding:
    (finding,) = found  # type: ignore[misc]
    assert isinstance(finding, Finding)
    return finding


@pytest.mark.parametrize(
    ("major", "revision", "state", "says"),
    [
        (32, "7.1", "missing", "knows no Orin"),
        (35, "4.1", "missing", "OPEN_TSG takes 8 bytes, not 24 (so ENOTTY), and MAP_BUFFER_EX wants the flag 0x100"),
        (36, "4.3", "ok", "run on the emulated board only"),
        (38, "2.0", "warn", "not tried"),
        (39, "2", "warn", "r39.2 keeps nvgpu"),
    ],
)
def test_a_release_file_is_read(tmp_path: Path, major: int, revision: str, state: str, says: str) -> None:
    finding = one(drivers.release(orin(tmp_path, etc_nv__tegra__release=RELEASE_FILE.format(major, revision))))
    assert finding.state == state
    assert f"L4T r{major}.{revision} (JetPack" in finding.detail
    assert says in finding.detail
    assert (finding.remedy == "") == (state == "ok")
    assert "JetPack 6" in finding.remedy or "tegrad selftest" in finding.remedy or state == "ok"


def test_without_the_file_the_package_tells_and_then_the_kernel(tmp_path: Path) -> None:
    root = orin(tmp_path, kernel="5.15.148-tegra", var_lib_dpkg_status=PACKAGES.format("36.4.4-20250616085344"))
    assert "L4T r36.4.4" in one(drivers.release(root)).detail
    (root / "var/lib/dpkg/status").unlink()
    by_kernel = one(drivers.release(root))
    assert "L4T r36 " in by_kernel.detail
    assert "5.15.148-tegra" in by_kernel.detail
    assert one(drivers.release(orin(tmp_path, kernel="5.10.216-tegra"))).state == "missing"
    assert one(drivers.release(orin(tmp_path, kernel="6.17.1"))).state == "warn"


def test_a_desktop_with_an_orins_kernel_is_no_jetson(tmp_path: Path) -> None:
    assert list(drivers.release(machine(tmp_path, proc_sys_kernel_osrelease="5.15.0-91-generic"))) == []


def test_another_tegra_is_told_so(tmp_path: Path) -> None:
    root = machine(tmp_path, **{"proc_device-tree_compatible": "nvidia,p3834\0nvidia,tegra264\0"})
    finding = one(drivers.release(root))
    assert (finding.state, "no Orin (tegra264)" in finding.detail) == ("missing", True)


@pytest.mark.parametrize(
    ("version", "state", "says"),
    [
        ("470.256.02", "warn", "before 535"),
        ("535.129.03", "missing", "776 bytes"),
        ("550.54.15", "missing", "776 bytes"),
        ("565.77", "warn", "560 and 565"),
        ("570.133.20", "warn", "own structures"),
        ("575.57.08", "missing", "GPFIFO_SCHEDULE"),
        ("580.159.04", "ok", "580.159.04 was run"),
        ("595.45.04", "warn", "UVM_FREE"),
        ("610.43.03", "warn", "610"),
    ],
)
@pytest.mark.parametrize("form", [OPEN_MODULE, OLD_MODULE])
def test_a_driver_branch_is_read(tmp_path: Path, form: str, version: str, state: str, says: str) -> None:
    finding = one(drivers.driver(machine(tmp_path, proc_driver_nvidia_version=form.format(version))))
    assert finding.state == state
    assert f"NVIDIA's driver {version}" in finding.detail
    assert says in finding.detail
    assert (finding.remedy == "") == (state == "ok")


def test_a_machine_without_a_driver_has_none_to_judge(tmp_path: Path) -> None:
    assert [*drivers.release(tmp_path), *drivers.driver(tmp_path), *drivers.mig(tmp_path)] == []
    assert one(drivers.nvidia(tmp_path)).detail.startswith("no NVIDIA desktop")


def test_mig_stops_a_gpu_that_is_cut(tmp_path: Path) -> None:
    for gpu, instance in (("gpu0", "gi3"), ("gpu1", "gi7")):
        (tmp_path / f"proc/driver/nvidia/capabilities/{gpu}/mig").mkdir(parents=True)
        if gpu == "gpu0":
            (tmp_path / f"proc/driver/nvidia/capabilities/{gpu}/mig/{instance}").mkdir()
    finding = one(drivers.mig(tmp_path))
    assert (finding.state, "gpu0:" in finding.detail) == ("warn", True)
    (tmp_path / "proc/driver/nvidia/capabilities/gpu1/mig/gi1").mkdir()
    finding = one(drivers.mig(tmp_path))
    assert (finding.state, "gpu0, gpu1:" in finding.detail) == ("missing", True)
    assert "-mig 0" in finding.remedy


def test_a_whole_h100_is_not_cut(tmp_path: Path) -> None:
    """The folders and nodes of an H100 with driver 580.159.04 and MIG off, as they were seen."""
    root = machine(
        tmp_path,
        proc_driver_nvidia_version=OPEN_MODULE.format("580.159.04"),
        proc_driver_nvidia_capabilities_mig_config="",
        proc_driver_nvidia_capabilities_mig_monitor="",
        **{f"dev_{node}": "" for node in ("nvidia-caps_nvidia-cap1", "nvidia-caps_nvidia-cap2", "nvidiactl")},
        **{f"dev_{node}": "" for node in ("nvidia-uvm", "nvidia-uvm-tools", "nvidia0")},
    )
    (root / "proc/driver/nvidia/capabilities/gpu0/mig").mkdir(parents=True)
    (root / "proc/driver/nvidia/capabilities/fabric-imex-mgmt").touch()
    assert list(drivers.mig(root)) == []
    assert one(drivers.driver(root)).state == "ok"
    assert one(drivers.nvidia(root)).state == "ok"


def test_a_container_that_was_given_an_instance_is_told(tmp_path: Path) -> None:
    caps = {f"dev_nvidia-caps_nvidia-cap{n}": "" for n in (1, 2)}
    assert list(drivers.mig(machine(tmp_path, **caps))) == []
    assert one(drivers.mig(machine(tmp_path, **{"dev_nvidia-caps_nvidia-cap30": ""}))).state == "missing"


def test_a_container_without_nodes_says_how_they_are_handed_in(tmp_path: Path) -> None:
    root = machine(tmp_path, proc_driver_nvidia_version=OPEN_MODULE.format("580.95.05"), proc_1_cgroup="0::/docker/ab")
    finding = one(drivers.container(root))
    assert (finding.state, finding.remedy) == ("warn", "docker run --gpus all (on a Jetson: --runtime nvidia)")
    machine(root, dev_nvidiactl="", **{"dev_nvidia-uvm": "", "dev_nvidia3": ""})
    assert one(drivers.container(root)).state == "ok"
    nodes = one(drivers.nvidia(root))
    assert (nodes.state, "nvidia3" in nodes.detail) == ("ok", True)
    (root / "dev/nvidia-uvm").unlink()
    assert "nvidia-modprobe -u" in one(drivers.nvidia(root)).remedy


@pytest.mark.parametrize("mark", [".dockerenv", "run_.containerenv"])
def test_a_container_is_known_by_its_marks(tmp_path: Path, mark: str) -> None:
    assert not drivers.contained(tmp_path)
    assert drivers.contained(machine(tmp_path, **{mark: ""}))


def test_a_jetson_in_a_container_lacks_what_was_not_handed_in(tmp_path: Path) -> None:
    root = orin(tmp_path, kernel="5.15.148-tegra", dev_nvmap="", **{".dockerenv": ""})
    assert one(drivers.jetson(root)).remedy == "docker run --runtime nvidia"


def test_a_release_that_is_refused_is_not_run_on(tmp_path: Path) -> None:
    for name in ("dev_nvmap", "dev_nvgpu_igpu0_ctrl", "dev_nvidiactl", "dev_nvidia-uvm", "dev_nvidia0"):
        machine(tmp_path, **{name: ""})
    root = orin(tmp_path, etc_nv__tegra__release=RELEASE_FILE.format(36, "4.3"))
    assert doctor.runnable(doctor.findings(root)) == "Jetson"
    machine(root, etc_nv__tegra__release=RELEASE_FILE.format(35, "6.1"))
    assert doctor.runnable(doctor.findings(root)) == "NVIDIA GPU"
    machine(root, proc_driver_nvidia_version=OPEN_MODULE.format("550.54.15"))
    assert doctor.runnable(doctor.findings(root)) in ("emulated board", "")


@pytest.mark.parametrize("table", [L4T, DESKTOP])
def test_a_table_goes_up_and_every_row_that_is_not_supported_has_a_remedy(table: tuple[releases.Release, ...]) -> None:
    firsts = [row.first for row in table]
    assert firsts == sorted(set(firsts))
    assert firsts[0] == 0
    assert all(row.remedy for row in table if row.state is not State.SUPPORTED)


def test_the_readme_has_every_row() -> None:
    for table in (L4T, DESKTOP):
        for row in table:
            line = next((line for line in README.splitlines() if line.startswith(f"| {row.name}")), "")
            assert line, row.name
            assert row.python in line
            assert {"supported": "yes", "untried": "try", "refused": "no"}[row.state] in re.split(r" *\| *", line)


def test_an_enotty_of_open_tsg_tells_of_r35_where_nothing_else_does() -> None:
    known = releases.Found("36.4.3", releases.row(L4T, 36), "")
    newer = releases.Found("39.2", releases.row(L4T, 39), "")
    for found in (None, known):
        assert "JetPack 5" in releases.trouble(found, "GPU_OPEN_TSG", errno.ENOTTY)
        assert releases.trouble(found, "GPU_OPEN_TSG", errno.ENOMEM) == ""
        assert releases.trouble(found, "AS_MAP_BUFFER_EX", errno.EINVAL) == ""
    assert "tegrad selftest" in releases.trouble(newer, "GPU_OPEN_TSG", errno.ENOTTY)
    assert releases.trouble(newer, "NVMAP_ALLOC", errno.ENOMEM) == ""
