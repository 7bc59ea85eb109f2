"""A Debian arm64 root in a folder, the project in it, and how to run something there. All of it needs root.

The kernel starts arm64 programs through qemu-user, which is registered so that it is found from inside the root too.
What runs there has mounts and process ids of its own: when its first process ends, nothing of it is left.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
RELEASE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "python3,python3-venv,python3-dev,gcc,libc6-dev,clang,make,git,ca-certificates,procps"
EXTRAS = ".[board,compilers,hub,grammar,chat,serve,dev]"
REGISTERED = Path("/proc/sys/fs/binfmt_misc/qemu-aarch64")
FORMAT = Path("/usr/lib/binfmt.d/qemu-aarch64.conf")
"""What newer packages of qemu bring for systemd to register; older ones bring a file for update-binfmts."""
NEEDED = {"debootstrap": "debootstrap", "qemu-aarch64-static": "qemu-user-static"}
"""Programs that building takes, and Debian's packages of them."""
QEMU_AT_LEAST = 8
"""7.2 takes 6 MB for each GiB that a program reserves (10 takes none); a board reserves 40 bits of addresses."""
CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")
OF_THE_HOST = ("etc/resolv.conf", "etc/hosts", "etc/pip.conf", str(CERTIFICATES))
"""Files that the root has as this machine has them, so that pip works there as here."""
ENVIRONMENT = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PATH": "/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": "/src",
    "HCQDEV_WAIT_TIMEOUT_MS": "1200000",  # a board that compiles under qemu is no GPU that hangs
}
ENTER = """
set -e
root=$1 journals=$2; shift 2
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t sysfs -o ro sysfs "$root/sys"
mount --bind "$journals" "$root/journals"
cd "$root"
exec chroot "$root" /bin/sh -c 'cd /src && "$@"; exit $?' sh "$@"
"""
"""The last shell stays, as the first process: a command that were it would shrug off signals and reap no orphans."""


class RootError(Exception):
    """The root cannot be built or entered; says what to do."""


@dataclass(frozen=True)
class Root:
    """The root below `folder`, with the journals of its shards beside it."""

    folder: Path

    @property
    def path(self) -> Path:
        """Where the root's own `/` is."""
        return self.folder / "root"

    @property
    def journals(self) -> Path:
        """Where its tests write; the root sees the folder as /journals."""
        return self.folder / "journals"

    def command(self, *command: str) -> list[str]:
        """The command line that runs a command in the root's copy of the project."""
        enter = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
        return ["nice", "-n", "5", *enter, "sh", "-c", ENTER, "sh", str(self.path), str(self.journals), *command]

    def run(self, *command: str) -> str:
        """Run a command there and return what it printed. RootError where it fails."""
        done = subprocess.run(
            self.command(*command), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            raise RootError(f"`{' '.join(command)}` failed in {self.path}: {done.stdout[-2000:]}")
        return done.stdout

    def prepare(self) -> str:
        """Build what is not there yet, copy the project in and install it; returns the commit that was copied."""
        register()
        if not (self.folder / "built").exists():
            shutil.rmtree(self.path, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            build = ["debootstrap", "--arch=arm64", "--variant=minbase", f"--include={PACKAGES}"]
            with (self.folder / "debootstrap.log").open("w") as log:
                command = [*build, RELEASE, str(self.path), os.environ.get("DEBIAN_MIRROR", MIRROR)]
                if subprocess.run(command, stdout=log, stderr=log).returncode:
                    raise RootError(f"debootstrap failed; see {log.name}")
            (self.folder / "built").write_text(RELEASE + "\n")
        for folder in (self.journals, self.path / "journals", self.path / "src"):
            folder.mkdir(exist_ok=True)
        for name in OF_THE_HOST:
            if (source := Path("/", name)).exists():
                shutil.copy(source, self.path / name)
        copied = commit()  # what is edited while it is installed is not what runs
        copy_project(self.path / "src")
        wanted = hashlib.sha256((PROJECT / "pyproject.toml").read_bytes()).hexdigest()
        installed = self.folder / "installed"
        if not installed.exists() or installed.read_text().strip() != wanted:
            self.run("python3", "-m", "venv", "/opt/venv")
            self.run("pip", "install", "--quiet", "-e", EXTRAS)
            installed.write_text(wanted + "\n")
        return copied


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a command in the root: its own, and how pip reaches its index from this machine."""
    of_pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_") and name != "PIP_FIND_LINKS"}
    if (Path("/") / CERTIFICATES).exists():
        of_pip |= {"PIP_CERT": f"/{CERTIFICATES}", "SSL_CERT_FILE": f"/{CERTIFICATES}"}
    return {**ENVIRONMENT, **of_pip, **(extra or {})}


def register() -> None:
    """Let the kernel start arm64 programs. RootError names the package that lacks, or that root is needed."""
    if os.geteuid():
        raise RootError("mounting and chroot take root: run it with sudo")
    if lacking := [package for program, package in NEEDED.items() if shutil.which(program) is None]:
        raise RootError(f"apt-get install {' '.join(lacking)}")
    if (major := int(qemu_version().partition(".")[0])) < QEMU_AT_LEAST:
        raise RootError(
            f"qemu-user {major} is too old, {QEMU_AT_LEAST} or newer is needed; Debian's backports have one"
        )
    if not REGISTERED.parent.joinpath("register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", str(REGISTERED.parent)], check=True)
    if not REGISTERED.exists() and FORMAT.exists():
        REGISTERED.with_name("register").write_text(FORMAT.read_text())
    elif not REGISTERED.exists() and shutil.which("update-binfmts") is None:
        raise RootError("apt-get install binfmt-support")
    elif not REGISTERED.exists():
        subprocess.run(["update-binfmts", "--enable", "qemu-aarch64"], check=True)
    if "F" not in REGISTERED.read_text().partition("flags:")[2].split("\n")[0]:
        raise RootError(f"{REGISTERED} lacks flag F, so the root would not find qemu; install qemu-user-static")


def qemu_version() -> str:
    """The version of qemu-user on this machine, as 10.0.2."""
    done = subprocess.run(["qemu-aarch64-static", "--version"], check=True, capture_output=True, text=True)
    return done.stdout.split()[2]


def copy_project(to: Path) -> None:
    """Make `to` hold the project's files as they are now: what git tracks, and what it does not ignore."""
    listed = subprocess.run(
        ["git", "-C", PROJECT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    )
    shutil.rmtree(to, ignore_errors=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (source := PROJECT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name)


def commit() -> str:
    """The project's commit; with a `+` where files differ from it."""
    git = ["git", "-C", str(PROJECT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain"], check=True, capture_output=True, text=True).stdout
    return head + "+" * bool(changed.strip())
