"""Looking at this machine: each probe gives a section of facts, or why it cannot; and what of them is a problem."""

import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from unisono.host.machine import LEVEL, numerics_variables, processor, read_limits
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.trial import Trial
from unisono.launch.tuning import Tuning, assignments
from unisono.membership.environment import recognise
from unisono.received import parse_object

FAILED = "could not be found out"
"""The one fact of a section whose probe failed; its value says why."""

GIB = 2**30

LEAST = Path(__file__).with_name("least.toml")
"""How much there should be of what."""

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that will get in the way of training.

    Attributes:
        stops: whether nothing can be trained before it is mended.
    """

    what: str
    todo: str
    stops: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The facts about this machine, and the problems that follow from them, the worst first."""

    sections: Mapping[str, Facts]
    problems: tuple[Problem, ...]

    @classmethod
    def of(cls, sections: Mapping[str, Facts]) -> "Diagnosis":
        """The problems that follow from facts."""
        problems = [problem for check in CHECKS for problem in check(sections)]
        return cls(sections, tuple(sorted(problems, key=lambda problem: not problem.stops)))

    @property
    def stops(self) -> bool:
        """Whether nothing can be trained here."""
        return any(problem.stops for problem in self.problems)

    def as_json(self) -> dict[str, Any]:
        """The diagnosis for programs."""
        return {"problems": [asdict(problem) for problem in self.problems], **self.sections}

    def as_text(self) -> str:
        """The diagnosis for people, and for a bug report."""
        lines = []
        for problem in self.problems:
            lines += [f"PROBLEM  {problem.what}", f"         {problem.todo}"]
        lines += [] if self.problems else ["No problems found."]
        for name, facts in self.sections.items():
            width = max((len(fact) for fact in facts), default=0)
            lines += ["", name]
            lines += [f"  {fact.ljust(width)}  {_text_of(value, width + 4)}" for fact, value in facts.items()]
        return "\n".join(lines)


def _text_of(value: Any, indent: int) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            return f"\n{' ' * indent}".join(str(item) for item in value) or "none"
    return f"\n{' ' * indent}".join(str(value).splitlines()) or "(empty)"


Sections = Mapping[str, Facts]


def _torch(sections: Sections) -> Iterator[Problem]:
    if (why := sections.get("torch", {}).get(FAILED)) is not None:
        yield Problem(
            f"PyTorch cannot be loaded: {why}",
            "Install it again (pip install --force-reinstall torch); see https://pytorch.org for other builds.",
            stops=True,
        )


def _backends(sections: Sections) -> Iterator[Problem]:
    todo = {
        "gloo": "Look for a firewall or a container without a loopback interface (network section below).",
        "nccl": "Run with NCCL_DEBUG=INFO; in a container, give it more /dev/shm (--shm-size) and --ipc=host.",
    }
    for backend, advice in todo.items():
        result = sections.get("workers", {}).get(backend)
        if isinstance(result, str) and result.startswith("fails"):
            yield Problem(f"Workers cannot talk over {backend}: it {result}", advice, stops=backend == "gloo")


def _gpus(sections: Sections) -> Iterator[Problem]:
    torch, driver = sections.get("torch", {}), sections.get("gpu driver", {}).get("nvidia")
    if driver is None or FAILED in torch or torch.get("devices"):
        return
    if torch.get("cuda build") is None:
        yield Problem(
            "There is an NVIDIA driver, but this PyTorch is built without CUDA: training uses the CPU.",
            "Install a CUDA build of PyTorch, see https://pytorch.org/get-started.",
        )
    else:
        yield Problem(
            "There is an NVIDIA driver, but PyTorch sees no GPU.",
            "See nvidia-smi, CUDA_VISIBLE_DEVICES, and whether the driver is new enough for this CUDA build.",
        )


def _too_little(sections: Sections) -> Iterator[Problem]:
    for row in tomllib.loads(LEAST.read_text("utf-8"))["fact"]:
        amount = sections.get(row["section"], {}).get(row["name"])
        if isinstance(amount, int | float) and amount < row["least"]:
            yield Problem(row["what"].format(amount), row["todo"])


def _processors(sections: Sections) -> Iterator[Problem]:
    cpu = sections.get("cpu", {})
    allowed, visible = cpu.get("limit of the control group"), cpu.get("usable by this process")
    if isinstance(allowed, float) and isinstance(visible, int) and allowed < visible:
        yield Problem(
            f"{visible} CPUs are visible, but the container or job may use only {allowed:g} of them at a time.",
            f"Let workers x threads be at most {max(1, int(allowed))}, or raise the limit.",
        )


def _interfaces(sections: Sections) -> Iterator[Problem]:
    present = sections.get("network", {})
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = str(sections.get("environment", {}).get(name, ""))
        # NCCL takes prefixes ("eth"), exact names ("=eth0") and exclusions ("^docker").
        prefixes = [] if value.startswith("^") or FAILED in present else value.lstrip("=").split(",")
        missing = [prefix for prefix in prefixes if prefix and not any(name.startswith(prefix) for name in present)]
        if missing:
            yield Problem(
                f"{name}={value}, but this host has no network interface {', '.join(missing)}.",
                f"It has {', '.join(present)}: set {name} to one of them, or unset it.",
            )


def _allocator(sections: Sections) -> Iterator[Problem]:
    environment = sections.get("environment", {})
    alone = [name for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_") if name in environment]
    if alone and not {"MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_"} & set(environment):
        yield Problem(
            f"With {alone[0]} alone, glibc fetches each block of 128 KiB or more from the system anew: steps get slow.",
            "Set MALLOC_MMAP_MAX_=0 as well, or unset it.",
        )


def _launcher(sections: Sections) -> Iterator[Problem]:
    if (why := sections.get("launcher", {}).get(FAILED)) is not None:
        yield Problem(f"The rank of a worker cannot be read: {why}", "Correct these variables, or unset them.")


Check = Callable[[Sections], Iterator[Problem]]

CHECKS: tuple[Check, ...] = (*(_torch, _backends, _gpus, _too_little, _processors, _interfaces, _allocator, _launcher),)


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
    """Run all probes. Main thread only; takes some seconds. Raises nothing."""
    sections = {name: attempt(probe) for name, probe in PROBES.items()}
    devices = sections["torch"].get("devices", [])
    sections["workers"] = attempt(lambda: workers(len(devices)))
    return Diagnosis.of(sections)


def attempt(probe: Probe) -> Facts:
    """The facts of a probe, or why it failed."""
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 (the other probes go on, and the reason is a fact, too)
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
        name: ", ".join(address.address for address in addresses if address.family.name in ("AF_INET", "AF_INET6"))
        or "no address"
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }


def driver() -> Facts:
    """The driver of NVIDIA GPUs, if there is one."""
    version = Path("/proc/driver/nvidia/version")
    return {"nvidia": version.read_text().splitlines()[0] if version.exists() else None}


def torch() -> Facts:
    """The facts about PyTorch, found out in a process of its own, since loading torch may crash."""
    command = [sys.executable, "-m", "unisono.launch.doctor_probe", "facts"]
    environ = {**os.environ, **numerics_variables(os.environ.get(LEVEL))}
    result = subprocess.run(command, capture_output=True, text=True, timeout=LOADING_TORCH_S, check=False, env=environ)
    if result.returncode == 0:
        return parse_object(result.stdout.splitlines()[-1])
    errors = result.stderr.strip().splitlines()
    raise RuntimeError(f"{_end_text(result.returncode)}: {errors[-1] if errors else 'it wrote no error'}")


def _end_text(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def environment(environ: Mapping[str, str] | None = None) -> Facts:
    """The variables that change how workers run; a value that could be a secret is hidden."""
    variables = os.environ if environ is None else environ
    return {name: _hide_secret(name, variables[name]) for name in sorted(variables) if RELEVANT.match(name)}


def _hide_secret(name: str, value: str) -> str:
    return HIDDEN if SECRET.search(name) or PASSWORD_IN_ADDRESS.search(value) else value


def launcher() -> Facts:
    """The rank and world size that a worker started here would read from its environment."""
    return {"recognised": recognise(os.environ).describe()}


def allocator() -> Facts:
    """The variables that tune the allocator of workers which `unisono run` does not start."""
    tuning = Tuning.of_this_process()
    advice = f"export {assignments(tuning.variables)}" if tuning.variables else f"set nothing: {tuning.missing}"
    return {"for torchrun, srun or python": advice, "kept as you set it": assignments(tuning.kept) or None}


def workers(devices: int) -> Facts:
    """Whether workers reach each other: two are started for each backend, and do one all-reduce."""
    facts = {"gloo": handshake("gloo", 2)}
    if devices:
        facts["nccl"] = handshake("nccl", min(2, devices))  # NCCL needs a GPU for each worker
    return facts


def handshake(backend: str, count: int) -> str:
    """The result of one all-reduce: ``works, with 2 workers``, or ``fails: why``."""
    script = Script("unisono.launch.doctor_probe", (backend,), is_module=True)
    with tempfile.TemporaryDirectory(prefix="unisono-doctor-") as folder:
        outcome = Trial.run(LaunchSettings(script, workers=count), Path(folder)).outcome
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
