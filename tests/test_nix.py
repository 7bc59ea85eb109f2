"""The flake, evaluated with stubs in nixpkgs' place (tests/nix), says what pyproject.toml and packaging/ say."""

import configparser
import json
import os
import re
import shutil
import subprocess
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import tegrad
from tegrad.nv import TINYGRAD
from tegrad.serve.config import Config

ROOT = Path(__file__).resolve().parents[1]
PACKAGING = ROOT / "packaging"
FILES = sorted(
    path.relative_to(ROOT) for pattern in ("*.nix", "nix/*.nix", "tests/nix/**/*.nix") for path in ROOT.glob(pattern)
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

pytestmark = pytest.mark.skipif(shutil.which("nix-instantiate") is None, reason="needs Nix (Debian's nix-bin)")


def nix(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run nix-instantiate with a store of its own."""
    (folder / "etc").mkdir(exist_ok=True)
    (folder / "etc" / "nix.conf").write_text("build-users-group =\n")
    places = {"STORE_DIR": "store", "LOCALSTATE_DIR": "var", "STATE_DIR": "state", "LOG_DIR": "log", "CONF_DIR": "etc"}
    environment = {**os.environ, **{f"NIX_{name}": str(folder / place) for name, place in places.items()}}
    command = ["nix-instantiate", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def evaluated(folder: Path, expression: str) -> subprocess.CompletedProcess[str]:
    return nix(folder, "--eval", "--strict", "--json", "--read-write-mode", "-E", expression)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What tests/nix/eval.nix comes to."""
    done = evaluated(tmp_path_factory.mktemp("nix"), "import ./tests/nix/eval.nix { }")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def section(unit: str, name: str) -> dict[str, Any]:
    """Settings of a unit, a setting that comes several times as a list."""
    lines = (PACKAGING / unit).read_text().split(f"[{name}]\n")[1].split("\n[")[0].splitlines()
    told: dict[str, Any] = {}
    for key, value in (line.split("=", 1) for line in lines if line and not line.startswith("#")):
        told.setdefault(key, []).append(value)
    return {key: values[0] if len(values) == 1 else values for key, values in told.items()}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_is_nix(file: Path, tmp_path: Path) -> None:
    done = nix(tmp_path, "--parse", file)
    assert done.returncode == 0, done.stderr


def test_the_package_is_what_pyproject_declares(found: Any) -> None:
    package = found["package"]
    assert (package["pname"], package["version"], package["program"]) == ("tegrad", tegrad.__version__, "tegrad")

    def names(needs: list[str]) -> list[str]:
        return [re.split(r"[=<>\[; ]", need)[0].replace("_", "-") for need in needs]

    extras = {extra: names(needs) for extra, needs in PROJECT["optional-dependencies"].items()}
    assert package["optional"] == {extra: extras[extra] for extra in ("board", "chat", "grammar", "hub", "serve")}
    assert set(package["dependencies"]) == {*names(PROJECT["dependencies"]), *chain(*package["optional"].values())}


def test_the_package_has_the_release_of_tinygrad_that_tegrad_drives(found: Any) -> None:
    made = found["package"]["tinygrad"]
    assert made["version"] == made["src"]["version"] == TINYGRAD
    assert re.fullmatch(r"sha256-[\w+/]{43}=", made["src"]["hash"])


def test_the_source_is_the_package_and_what_builds_it(found: Any) -> None:
    ignored = (PACKAGING / "Dockerfile.dockerignore").read_text()
    assert found["package"]["source"] == sorted(re.findall(r"^!(.*)$", ignored, re.MULTILINE))
    assert found["package"]["kernels"] == sorted(path.name for path in (ROOT / "tegrad/llm/kernels").iterdir())


def test_the_compilers_are_one_toolkit_that_the_program_is_given(found: Any) -> None:
    assert set(found["package"]["compilers"]) == {"cuda_nvrtc", "libnvjitlink", "cuda_nvcc", "cuda_cudart"}
    assert found["package"]["cuda"] == ["--set-default", "CUDA_HOME", "/stub/tegrad-compilers"]


def test_llama_cpp_is_built_for_an_orin(found: Any) -> None:
    assert found["llama"] == {"overridden": {"cudaSupport": True}, "cmakeFlags": ["-DCMAKE_CUDA_ARCHITECTURES=87"]}


def test_both_systems_have_packages_and_a_shell(found: Any) -> None:
    packages = ["default", "llama-cpp-orin", "tegrad"]
    assert found["systems"] == {"aarch64-linux": packages, "x86_64-linux": packages}
    assert {"python-env", "ruff", "mypy", "nix"} <= set(found["shell"])
    assert found["modules"] == [str(ROOT / "nix/module.nix")]


def test_a_module_that_is_off_does_nothing(found: Any) -> None:
    off = found["off"]
    assert (off["systemd"], off["users"], off["environment"], off["services"]["udev"]) == ({}, {}, {}, {})


def test_the_service_is_the_unit_of_packaging(found: Any) -> None:
    service = found["plain"]
    own = {"ExecStart": "/stub/python-env/bin/tegrad serve --config /stub/serve.toml"}
    assert service["serviceConfig"] == section("tegrad.service", "Service") | own
    assert service["serviceConfig"]["NoNewPrivileges"] == "yes"
    unit = section("tegrad.service", "Unit")
    assert service["description"] == unit.pop("Description")
    assert service["unitConfig"] == unit
    parser = configparser.ConfigParser(strict=False, interpolation=None, allow_no_value=True)
    parser.read(PACKAGING / "tegrad.service")
    assert {name.lower() for name in service["serviceConfig"]} == set(parser["Service"])


def test_options_reach_the_server(found: Any) -> None:
    assert found["settings"] == {"host": "127.0.0.1", "port": 8080}
    serve = found["serve"]
    assert serve["file"] == {"host": "127.0.0.1", "memory": 6, "port": 9000}
    assert Config.of(serve["file"]).local
    assert serve["tegrad"]["serviceConfig"]["LoadCredential"] == "keys:/etc/keys"
    assert serve["ports"] == [9000]
    assert serve["prometheus"]["scrapeConfigs"][0]["static_configs"] == [{"targets": ["127.0.0.1:9000"]}]


def test_the_nodes_are_for_the_group_of_the_service(found: Any) -> None:
    assert found["serve"]["udev"] == (PACKAGING / "70-tegrad.rules").read_text()
    assert found["serve"]["user"] == {"group": "tegrad", "home": "/var/lib/tegrad", "isSystemUser": True}


def test_the_performance_mode_is_that_of_packaging(found: Any) -> None:
    (service,) = found["performance"].values()
    script = service["serviceConfig"].pop("ExecStart").removesuffix(" start")
    assert service["serviceConfig"].pop("ExecStop") == f"{script} stop"
    assert Path(script).read_text() == (PACKAGING / "tegrad-performance").read_text()
    assert os.access(script, os.X_OK)
    wanted = section("tegrad-performance.service", "Service")
    assert service["serviceConfig"] == {k: v for k, v in wanted.items() if not k.startswith("Exec")}
    assert service["path"] == ["/stub/l4t-nvpmodel", "/stub/l4t-tools"]


def test_the_page_has_every_option_and_its_example_is_nix(found: Any, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "nixos.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(found["off"]["services"]["tegrad"])
    (example,) = re.findall(r"```nix\n(.*?)```", page, re.DOTALL)
    (tmp_path / "flake.nix").write_text(example)
    assert nix(tmp_path, "--parse", tmp_path / "flake.nix").returncode == 0
