"""The simulated accelerator of ``fakegpu``: compiled once; a Python that has its folder on its path finds it."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from contextlib import suppress
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).parent / "fakegpu" / "fakedev"
BUILT = Path(__file__).parents[1] / ".fakegpu"
LIBRARIES = ("torch", "torch_cpu", "c10", "torch_python")


class NoCompiler(Exception):
    """This machine cannot compile it."""


def built() -> Path:
    """The folder that goes on PYTHONPATH; compiled if that was not done before, which takes about a minute.

    Raises:
        NoCompiler: there is no g++.
    """
    text = b"".join(path.read_bytes() for path in sorted(SOURCE.glob("*.*")))
    name = hashlib.sha256(text + torch.__version__.encode() + str(sysconfig.get_config_var("EXT_SUFFIX")).encode())
    folder = BUILT / name.hexdigest()[:16]
    BUILT.mkdir(exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(SOURCE, folder / "fakedev", ignore=shutil.ignore_patterns("__pycache__"))
            _compile(folder)
            (folder / "done").touch()
    return folder


def _compile(folder: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoCompiler("there is no g++: apt-get install g++")
    lib = Path(torch.__file__).parent / "lib"
    headers = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    subprocess.run(
        [
            *(compiler, "-O1", "-std=c++20", "-fPIC", "-shared", "-w"),
            *(word for path in headers for word in ("-isystem", path)),
            *("-DTORCH_EXTENSION_NAME=_C", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"),
            *(str(folder / "fakedev" / "_C.cpp"), "-o", f"{folder}/fakedev/_C{sysconfig.get_config_var('EXT_SUFFIX')}"),
            *(f"-L{lib}", *(f"-l{each}" for each in LIBRARIES), f"-Wl,-rpath,{lib}"),
        ],
        check=True,
    )
    about = folder / "fakedev-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fakedev\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nfakegpu = fakedev:load\n")


def environment(folder: Path, log: Path | None = None, *, devices: int = 1, nccl: bool = False) -> dict[str, str]:
    """The variables with which a process sees the accelerator, and has written down in a folder what it saw.

    Args:
        folder: where it was built.
        log: the folder in which each process writes what it has seen.
        devices: the number of devices of this host.
        nccl: whether they speak with each other over NCCL's semantics.
    """
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    seen = {} if log is None else {"FAKEGPU_LOG": str(log)}
    return {**os.environ, **seen, "PYTHONPATH": path, "FAKEGPU_DEVICES": str(devices), "FAKEGPU_NCCL": str(int(nccl))}


if __name__ == "__main__":
    with suppress(NoCompiler):
        built()
