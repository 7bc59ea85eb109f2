"""What is installed beside the package: units, udev rules, the performance mode's script, a container's recipe."""

import fnmatch
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tegrad.diag.drivers import JETSON_NODES
from tegrad.nv.waits import FENCE_NODE
from tegrad.serve.config import Config

PACKAGING = Path(__file__).resolve().parents[1] / "packaging"
UNITS = ("tegrad.service", "tegrad-performance.service")
SERVICE = (PACKAGING / "tegrad.service").read_text()
OPENED = {*(f"/{name}" for name in JETSON_NODES), FENCE_NODE}

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def settings(text: str, name: str) -> list[str]:
    """All values of a unit's setting."""
    return re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system in which the units are installed as docs/install.md has it."""
    units, programs = tmp_path / "etc/systemd/system", tmp_path / "opt/tegrad/bin"
    units.mkdir(parents=True)
    programs.mkdir(parents=True)
    shutil.copy(PACKAGING / "tegrad-performance", programs)
    shutil.copy(PACKAGING / "tegrad-performance", programs / "tegrad")
    for name in UNITS:
        (units / name).write_text((PACKAGING / name).read_text().replace("/opt/", f"{tmp_path}/opt/"))
    return tmp_path


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_systemd_takes_each_unit_without_a_word(name: str, root: Path) -> None:
    unit = root / "etc/systemd/system" / name
    done = analyze("verify", unit)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    unit.write_text(unit.read_text().replace("Type=", "Typ="))
    assert "Typ" in analyze("verify", unit).stderr


@needs_systemd
def test_the_server_is_exposed_to_little(root: Path) -> None:
    done = analyze("security", "--offline=yes", "--no-pager", "--threshold=20", f"--root={root}", "tegrad.service")
    if "unrecognized option" in done.stderr:
        pytest.skip("needs systemd 250")
    assert done.returncode == 0, done.stdout[-200:] + done.stderr
    service = root / "etc/systemd/system/tegrad.service"
    service.write_text(service.read_text().replace("ProtectSystem=strict", "").replace("CapabilityBoundingSet=", ""))
    assert analyze("security", "--offline=yes", "--threshold=20", f"--root={root}", "tegrad.service").returncode == 1


def test_the_server_may_open_what_tegrad_opens_and_nothing_else() -> None:
    assert {value.removesuffix(" rw") for value in settings(SERVICE, "DeviceAllow")} == OPENED
    waited = {name.replace("/", "-").removeprefix("-").replace("host1x-", "host1x\\x2d") for name in OPENED}
    assert {unit for value in settings(SERVICE, "After") for unit in value.split() if unit.endswith(".device")} == {
        f"{name}.device" for name in waited
    }


# ---- udev: the subsystems are the classes that nvgpu's os/linux/ioctl.c makes, nvmap's is a misc device

NODES = {
    "misc": ["nvmap", "fuse"],
    "host1x-fence": ["host1x-fence"],
    "nvidia-gpu-v2": [
        "as",
        "channel",
        "ctrl",
        "ctxsw",
        "dbg",
        "prof",
        "prof-ctx",
        "prof-dev",
        "sched",
        "nvsched",
        "tsg",
    ],
    "nvidia-gpu-v2-power": ["power"],
    "nvidia-gpu": ["nvhost-gpu", "nvhost-ctrl-gpu", "nvhost-as-gpu", "nvhost-tsg-gpu", "nvhost-dbg-gpu"],
}
RULE = re.compile(r'([A-Z]+)\s*(==|=|\+=)\s*"([^"]*)"(?:,\s*|$)')


def granted(subsystem: str, kernel: str) -> dict[str, str]:
    """What the rules assign to a node."""
    found: dict[str, str] = {}
    for line in (PACKAGING / "70-tegrad.rules").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        assert RULE.sub("", line) == "", line
        terms = RULE.findall(line)
        node = {"SUBSYSTEM": subsystem, "KERNEL": kernel}
        asked = [(node[key], value) for key, operator, value in terms if operator == "=="]
        if all(any(fnmatch.fnmatchcase(name, each) for each in value.split("|")) for name, value in asked):
            found |= {key: value for key, operator, value in terms if operator != "=="}
    return found


def test_the_group_video_gets_the_nodes_of_programs_and_no_others() -> None:
    given = {(subsystem, name): granted(subsystem, name) for subsystem in NODES for name in NODES[subsystem]}
    opened = {name for (_, name), rule in given.items() if rule}
    assert opened == {
        "nvmap", "host1x-fence", "as", "channel", "ctrl", "tsg",
        "nvhost-gpu", "nvhost-ctrl-gpu", "nvhost-as-gpu", "nvhost-tsg-gpu",
    }  # fmt: skip
    assert {(rule["GROUP"], rule["MODE"]) for rule in given.values() if rule} == {("video", "0660")}
    waited = {name.rpartition("/")[2] for name in OPENED}
    assert waited <= {name for (_, name), rule in given.items() if rule.get("TAG") == "systemd"}


def test_udev_takes_the_rules() -> None:
    udevadm = shutil.which("udevadm")
    if udevadm is None or "verify" not in subprocess.run([udevadm, "--help"], capture_output=True, text=True).stdout:
        pytest.skip("needs `udevadm verify` (systemd 254)")
    command = [udevadm, "verify", "--resolve-names=never", str(PACKAGING / "70-tegrad.rules")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- the performance mode, with programs in the place of NVIDIA's that keep a mode and a log

NVPMODEL = """#!/bin/sh
case $1 in
-q) printf 'NV Power Mode: X\\n%s\\n' "$(cat "$STATE/mode")" ;;
-m) echo "mode $2" >>"$STATE/log"; [ -e "$STATE/reboot" ] || echo "$2" >"$STATE/mode" ;;
esac
"""
CLOCKS = """#!/bin/sh
echo clocks ${1:-high} >>"$STATE/log"
[ "${1:-}" != --store ] || echo "at mode $(cat "$STATE/mode")" >"$2"
[ "${1:-}" != --restore ] || cat "$2" >>"$STATE/log"
"""
MODES = "< PM_CONFIG DEFAULT=1 >\n< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=1 NAME=25W >\n"
FASTEST = "< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n"


class Jetson:
    """The script between fakes; `log` has what they were asked."""

    def __init__(self, folder: Path, modes: str) -> None:
        self.folder = folder
        for name, text in (("nvpmodel", NVPMODEL), ("jetson_clocks", CLOCKS)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "mode").write_text("1\n")
        (folder / "conf").write_text(modes)

    def performance(self, *words: str, mode: str = "") -> subprocess.CompletedProcess[str]:
        """Run the script."""
        environment = {
            "PATH": f"{self.folder}:/usr/bin:/bin", "STATE": str(self.folder),
            "NVPMODEL_CONF": str(self.folder / "conf"), "RUNTIME_DIRECTORY": str(self.folder / "run"),
        } | ({"TEGRAD_POWER_MODE": mode} if mode else {})  # fmt: skip
        command = [str(PACKAGING / "tegrad-performance"), *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def log(self) -> list[str]:
        """What was asked since the last call."""
        lines = (self.folder / "log").read_text().splitlines()
        (self.folder / "log").unlink()
        return lines


def test_the_fastest_mode_is_taken_and_what_was_before_comes_back(tmp_path: Path) -> None:
    jetson = Jetson(tmp_path, MODES + FASTEST)
    assert jetson.performance("start").returncode == 0
    assert jetson.log() == ["clocks --store", "mode 2", "clocks high"]
    assert jetson.performance("start").returncode == 0  # again: what was before is not forgotten
    assert jetson.log() == ["clocks high"]
    assert jetson.performance("stop").returncode == 0
    assert jetson.log() == ["mode 1", "clocks --restore", "at mode 1"]
    assert jetson.performance("stop").returncode == 0
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(("modes", "asked", "taken"), [(MODES, "", "0"), (MODES + FASTEST, "0", "0")])
def test_without_a_fastest_mode_it_is_0_and_a_number_chooses_another(
    modes: str, asked: str, taken: str, tmp_path: Path
) -> None:
    jetson = Jetson(tmp_path, modes)
    assert jetson.performance("start", mode=asked).returncode == 0
    assert jetson.log()[1] == f"mode {taken}"


def test_a_mode_that_needs_a_reboot_is_told_and_clocks_rise_all_the_same(tmp_path: Path) -> None:
    jetson = Jetson(tmp_path, MODES + FASTEST)
    (tmp_path / "reboot").touch()
    done = jetson.performance("start")
    assert done.returncode == 0
    assert done.stderr == "power mode 2 needs a reboot: sudo nvpmodel -m 2\n"
    assert jetson.log() == ["clocks --store", "mode 2", "clocks high"]
    assert jetson.performance().returncode == 2


# ---- the server's configuration


def test_the_configuration_is_one_with_every_line_as_well() -> None:
    text = (PACKAGING / "serve.toml").read_text()
    assert Config.of({}, PACKAGING / "serve.toml").local
    assert settings(SERVICE, "ExecStart")[0].endswith("serve --config /etc/tegrad/serve.toml")
    for line in re.findall(r"^# (\S+ = .*)$", text, re.MULTILINE):
        given = tomllib.loads(line)
        if "api-key-file" not in given:
            Config.of({name.replace("-", "_"): value for name, value in given.items()})


# ---- the container

INSTALL = (PACKAGING.parent / "docs" / "install.md").read_text()
DOCKERFILE = (PACKAGING / "Dockerfile").read_text()


def test_the_container_is_given_the_nodes_that_tegrad_opens() -> None:
    assert set(re.findall(r"--device (\S+)", INSTALL)) == OPENED


def test_the_container_keeps_models_and_kernels_in_its_volume() -> None:
    kept = dict(re.findall(r"(HOME|HF_HOME|XDG_CACHE_HOME)=(\S+)", DOCKERFILE))
    assert set(kept) == {"HOME", "HF_HOME", "XDG_CACHE_HOME"}
    assert {name for name in kept if name in settings(SERVICE, "Environment")[0]} == set(kept)
    assert all(Path("/data") in (Path(folder), *Path(folder).parents) for folder in kept.values())
    assert "VOLUME /data\n" in DOCKERFILE


def test_what_docker_copies_is_what_the_package_is_built_from() -> None:
    copied = {
        line[1:] for line in (PACKAGING / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    assert copied == {
        "pyproject.toml", "setup.py", "tegrad.pth", "tegrad", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE",
    }  # fmt: skip
    extras = re.search(r"'/src\[(.*)\]'", DOCKERFILE)
    declared = tomllib.loads((PACKAGING.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras is not None
    assert set(extras[1].split(",")) <= set(declared)


def test_every_file_that_is_to_be_installed_is_there() -> None:
    told = set(re.findall(r"packaging/([\w*][\w.*-]+)", INSTALL))
    there = {path.name for path in PACKAGING.iterdir()}
    assert all(fnmatch.filter(there, name) for name in told)
    assert {name for name in there if not any(fnmatch.fnmatch(name, each) for each in told)} == {
        "Dockerfile.dockerignore"
    }
