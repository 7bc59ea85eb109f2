"""Builds nvgpu for user space in the profile that Linux uses, and our programs against it, all outside the repository.

The sources are a clone of the public repository OE4T/linux-nvgpu. Its user-space build is made for unit tests of the
safety profile, which leaves out CILP, GFXP, timeslices and rings filled by the driver; here it is given the profile of
the kernel module. An assertion is a warning, as in Linux, where the unit tests end the process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

BRANCH = "l4t/l4t-r36.4.2"
HERE = Path(__file__).parent
ABSENT = "drivers/gpu/nvgpu/os/posix/mock-registers.c"
"""Registers as read on some board, which a partial clone lacks; `main.c` has its own."""
PROFILE = ("NVGPU_FORCE_SAFETY_PROFILE=0", "NV_BUILD_CONFIGURATION_IS_SAFETY=0")


def commit(clone: Path) -> str:
    """The commit that the clone's branch is at."""
    done = subprocess.run(["git", "-C", clone, "rev-parse", BRANCH], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _unpack(clone: Path, tree: Path) -> None:
    tree.mkdir(parents=True)
    exclude = f":(exclude){ABSENT}"
    archive = subprocess.Popen(
        ["git", "-C", clone, "archive", BRANCH, "--", ".", exclude], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    subprocess.run(["tar", "x", "-C", tree], stdin=archive.stdout, check=True)
    archive.wait()  # it complains of the absent file, excluded or not
    next_chip = tree.parent / "nvgpu-next/drivers/gpu/nvgpu"  # the next chip's sources are not public
    next_chip.mkdir(parents=True, exist_ok=True)
    (next_chip / "Makefile.sources").write_text("")
    header = tree / "drivers/gpu/nvgpu/include/nvgpu/bug.h"
    text = header.read_text()
    assert text.count("#if defined(__KERNEL__)") == 1
    header.write_text(text.replace("#if defined(__KERNEL__)", "#if 1"))


def library(clone: Path, out: Path) -> Path:
    """The folder with libnvgpu.so and the flags to compile against it (`cflags`); built unless it is there."""
    made = out / "nvgpu" / "userspace" / "build"
    if (made / "libnvgpu.so").exists():
        return made
    shutil.rmtree(out, ignore_errors=True)
    _unpack(clone, out / "nvgpu")
    made.mkdir(parents=True)
    compiler = f"CC=gcc -w -Wno-error -I{out}/nvgpu/drivers/gpu/nvgpu/common"
    with (made / "make.log").open("w") as log:  # -k: the absent file's object cannot be made
        command = ["make", "-k", f"-j{os.cpu_count()}", "libnvgpu", compiler, *PROFILE]
        subprocess.run(command, cwd=made.parent, stdout=log, stderr=log, check=False)
    log_text = (made / "make.log").read_text()
    line = next(line for line in log_text.splitlines() if " -c -o " in line)
    (made / "cflags").write_text(" ".join(re.findall(r"-[ID]\S+", line)))
    objects = [str(path) for path in (made / "libnvgpu").rglob("*.o")]
    print(f"{len(objects)} objects of {commit(clone)}")
    subprocess.run(
        ["gcc", "-shared", "-rdynamic", "-o", made / "libnvgpu.so", *objects, "-lgcov", "-lpthread", "-lrt"], check=True
    )
    return made


def program(made: Path, out: Path) -> Path:
    """Our program that answers cases, linked with the library: what it defines itself replaces the library's."""
    target = out / "oracle"
    flags = (made / "cflags").read_text().split()
    sources = [str(path) for path in sorted(HERE.glob("*.c"))]
    libraries = [f"-L{made}", "-lnvgpu", f"-Wl,-rpath,{made}", "-rdynamic", "-lpthread"]
    subprocess.run(["gcc", "-O1", "-w", *flags, "-o", target, *sources, *libraries], check=True)
    return target
