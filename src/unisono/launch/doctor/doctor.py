"""Looking at this machine: each probe gives one section of facts, and says why when it cannot."""

import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from unisono.host.cgroup import processor, read_limits
from unisono.host.processor_paths import LEVEL, numerics_variables
from unisono.launch.doctor.diagnosis import FAILED, GIB, Diagnosis, Facts
from unisono.launch.ending.result import open_folder
from unisono.launch.local import launch
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.terminal.terminal import SilentTerminal
from unisono.launch.tuning import Tuning, assignments
from unisono.membership.environment import recognise
from unisono.received import parse_object

Probe = Callable[[], Facts]

PACKAGES = ("unisono", "torch", "numpy", "safetensors", "pydantic", "typer", "rich", "psutil", "scikit-learn")

RELEVANT = re.compile(
    r"(OMP|MKL|KMP|GOMP|OPENBLAS|NCCL|GLOO|CUDA|CUBLAS|NVIDIA|SLURM|SLURMD|UNISONO|TORCH|TORCHELASTIC|PYTORCH|MASTER|MALLOC)_"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|TMPDIR|LD_PRELOAD|GLIBC_TUNABLES|PYTHONPATH|PYTHONHASHSEED)$"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|KEY|AUTH|JWT|COOKIE|PRIVATE", re.IGNORECASE)
PASSWORD_IN_ADDRESS = re.compile(r"://[^/@\s]+@")
HIDDEN = "(hidden)"

LOADING_TORCH_S = 120.0


def examine() -> Diagnosis:
    """Look at everything. Main thread only; takes some seconds. Raises nothing."""
    sections = {name: attempt(probe) for name, probe in PROBES.items()}
    devices = sections["torch"].get("devices", [])
    sections["workers"] = attempt(lambda: workers(len(devices)))
    return Diagnosis.of(sections)


def attempt(probe: Probe) -> Facts:
    """The facts of a probe, or why it failed."""
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 (a doctor who falls ill helps nobody; the reason is the finding)
        return {FAILED: f"{type(error).__name__}: {error}"}


def versions() -> Facts:
    """Python and the packages that matter."""
    python = f"{platform.python_version()} ({sys.executable})"
    return {"python": python, **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def system() -> Facts:
    """The operating system."""
    return {
        "system": platform.platform(),
        "c library": " ".join(platform.libc_ver()).strip() or "unknown",
        "host": platform.node(),
        "container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
    }


def cpu() -> Facts:
    """The processors, and how many of them this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": processor(),
        "cores": psutil.cpu_count(logical=False),
        "hardware threads": os.cpu_count(),
        "usable by this process": usable,
        "limit of the control group": read_limits().cpus,
        "load (1 min)": round(os.getloadavg()[0], 2),
    }


def memory() -> Facts:
    """Memory of the machine, and what the container or the job may use of it."""
    whole, limit = psutil.virtual_memory(), read_limits().memory_bytes
    return {
        "total, GiB": _gib(whole.total),
        "available, GiB": _gib(whole.available),
        "limit of the control group, GiB": None if limit is None else _gib(limit),
        "swap, GiB": _gib(psutil.swap_memory().total),
    }


def limits() -> Facts:
    """The limits of this process that training comes up against."""
    names = {
        "open files (nofile)": resource.RLIMIT_NOFILE,
        "processes (nproc)": resource.RLIMIT_NPROC,
        "locked memory (memlock), bytes": resource.RLIMIT_MEMLOCK,
    }
    facts: dict[str, Any] = {}
    for name, number in names.items():
        soft, hard = (_limit(value) for value in resource.getrlimit(number))
        facts |= {f"{name}, soft": soft, f"{name}, hard": hard}
    return facts


def _limit(value: int) -> int | str:
    return "unlimited" if value == resource.RLIM_INFINITY else value


def disk() -> Facts:
    """Free space where workers write."""
    folders = {"/dev/shm": Path("/dev/shm"), "temporary folder": Path(tempfile.gettempdir()), "current folder": Path()}  # noqa: S108
    return {f"{name} free, GiB": _gib(shutil.disk_usage(path).free) for name, path in folders.items() if path.exists()}


def network() -> Facts:
    """The interfaces that are up, with their addresses."""
    states = psutil.net_if_stats()
    return {
        name: ", ".join(each.address for each in addresses if each.family.name in ("AF_INET", "AF_INET6"))
        or "no address"
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }


def driver() -> Facts:
    """The driver of graphics processors, if there is one."""
    table = Path("/proc/driver/nvidia/version")
    return {"nvidia": table.read_text().splitlines()[0] if table.exists() else None}


def torch() -> Facts:
    """What PyTorch says, in a process of its own."""
    command = [sys.executable, "-m", "unisono.launch.doctor.torch_facts"]
    told = {**os.environ, **numerics_variables(os.environ.get(LEVEL))}
    found = subprocess.run(command, capture_output=True, text=True, timeout=LOADING_TORCH_S, check=False, env=told)
    if found.returncode == 0:
        return parse_object(found.stdout.splitlines()[-1])
    said = found.stderr.strip().splitlines()
    raise RuntimeError(f"{_ended(found.returncode)}: {said[-1] if said else 'it said nothing'}")


def _ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def environment(environ: Mapping[str, str] | None = None) -> Facts:
    """The variables that change how workers run; what could be a secret is hidden."""
    variables = os.environ if environ is None else environ
    return {name: _shown(name, variables[name]) for name in sorted(variables) if RELEVANT.match(name)}


def _shown(name: str, value: str) -> str:
    return HIDDEN if SECRET.search(name) or PASSWORD_IN_ADDRESS.search(value) else value


def launcher() -> Facts:
    """Where a worker that is started here would stand."""
    return {"recognised": recognise(os.environ).describe()}


def allocator() -> Facts:
    """How workers' memory should be handled, for those whom `unisono run` does not start."""
    tuning = Tuning.of_this_process()
    by_hand = f"export {assignments(tuning.variables)}" if tuning.variables else f"set nothing: {tuning.missing}"
    return {"for torchrun, srun or python": by_hand, "kept as you set it": assignments(tuning.kept) or None}


def workers(devices: int) -> Facts:
    """Whether workers really reach each other: they are started, and do one all-reduce."""
    facts = {"gloo": handshake("gloo", 2)}
    if devices:
        # NCCL wants a GPU for each worker.
        facts["nccl"] = handshake("nccl", min(2, devices))
    return facts


def handshake(backend: str, count: int) -> str:
    """``works, with 2 workers``, or ``fails: why``."""
    script = Script("unisono.launch.doctor.handshake", (backend,), is_module=True)
    with tempfile.TemporaryDirectory(prefix="unisono-doctor-") as folder:
        opened = open_folder(Path(folder), script.stem)
        outcome = launch(LaunchSettings(script, workers=count), opened, SilentTerminal())
    if outcome.exit_code == 0:
        return f"works, with {count} worker{'s' if count > 1 else ''}, {outcome.seconds:.1f} s with start"
    return f"fails: {outcome.summary()}"


def _gib(number: int) -> float:
    return round(number / GIB, 2)


PROBES: Mapping[str, Probe] = {
    "versions": versions,
    "system": system,
    "cpu": cpu,
    "memory": memory,
    "limits": limits,
    "disk": disk,
    "network": network,
    "gpu driver": driver,
    "torch": torch,
    "launcher": launcher,
    "allocator": allocator,
    "environment": environment,
}
