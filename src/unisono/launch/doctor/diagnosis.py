"""The facts about a machine as values, and the problems among them. Nothing here looks at the machine."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

FAILED = "could not be found out"
"""The one fact of a section whose probe failed; its value says why."""

GIB = 2**30
ROOM = {
    "/dev/shm free, GiB": (0.5, "Loader processes need it: in a container raise --shm-size; else remove old files."),  # noqa: S108
    "temporary folder free, GiB": (1.0, "Make room there, or set TMPDIR to another folder."),
    "current folder free, GiB": (1.0, "Run folders and checkpoints go there: make room, or name another by --run-dir."),
}
"""How much room there should be, and what to do if there is not."""

LEAST_MEMORY_GIB = 1.0
LEAST_FILES = 1024
LEAST_PROCESSES = 512

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that will get in the way.

    Attributes:
        what: what is wrong.
        todo: what to do.
        stops: nothing can be trained before it is mended.
    """

    what: str
    todo: str
    stops: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was found.

    Attributes:
        sections: facts by section.
        problems: what is wrong, the worst first.
    """

    sections: Mapping[str, Facts]
    problems: tuple[Problem, ...]

    @classmethod
    def of(cls, sections: Mapping[str, Facts]) -> "Diagnosis":
        """The problems that follow from facts."""
        found = [problem for check in CHECKS for problem in check(sections)]
        return cls(sections, tuple(sorted(found, key=lambda problem: not problem.stops)))

    @property
    def stops(self) -> bool:
        """Whether nothing can be trained here."""
        return any(problem.stops for problem in self.problems)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {"problems": [asdict(problem) for problem in self.problems], **self.sections}

    def as_text(self) -> str:
        """For people, and for a bug report."""
        lines = []
        for problem in self.problems:
            lines += [f"PROBLEM  {problem.what}", f"         {problem.todo}"]
        lines += [] if self.problems else ["No problems found."]
        for name, facts in self.sections.items():
            width = max((len(fact) for fact in facts), default=0)
            lines += ["", name]
            lines += [f"  {fact.ljust(width)}  {_words(value, width + 4)}" for fact, value in facts.items()]
        return "\n".join(lines)


def _words(value: Any, indent: int) -> str:
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
        answer = sections.get("workers", {}).get(backend)
        if isinstance(answer, str) and answer.startswith("fails"):
            yield Problem(f"Workers cannot talk over {backend}: it {answer}", advice, stops=backend == "gloo")


def _graphics(sections: Sections) -> Iterator[Problem]:
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


def _space(sections: Sections) -> Iterator[Problem]:
    for fact, (least, advice) in ROOM.items():
        free = sections.get("disk", {}).get(fact)
        if isinstance(free, float) and free < least:
            yield Problem(f"Little room: {fact} is {free:g}.", advice)


def _limits(sections: Sections) -> Iterator[Problem]:
    limits = sections.get("limits", {})
    least = {"open files (nofile)": (LEAST_FILES, "-n 4096"), "processes (nproc)": (LEAST_PROCESSES, "-u 4096")}
    for fact, (enough, option) in least.items():
        soft = limits.get(f"{fact}, soft")
        if isinstance(soft, int) and soft < enough:
            yield Problem(f"The limit of {fact} is only {soft}.", f"Raise it before starting: ulimit {option}")


def _memory(sections: Sections) -> Iterator[Problem]:
    available = sections.get("memory", {}).get("available, GiB")
    if isinstance(available, float) and available < LEAST_MEMORY_GIB:
        yield Problem(f"Only {available:g} GiB of memory are available.", "End other programs, or train elsewhere.")


def _processors(sections: Sections) -> Iterator[Problem]:
    cpu = sections.get("cpu", {})
    allowed, seen = cpu.get("limit of the control group"), cpu.get("usable by this process")
    if isinstance(allowed, float) and isinstance(seen, int) and allowed < seen:
        yield Problem(
            f"{seen} CPUs are visible, but the container or job may use only {allowed:g} of them at a time.",
            f"Let workers x threads be at most {max(1, int(allowed))}, or raise the limit.",
        )


def _interfaces(sections: Sections) -> Iterator[Problem]:
    present = sections.get("network", {})
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = str(sections.get("environment", {}).get(name, ""))
        # NCCL takes prefixes ("eth"), exact names ("=eth0") and exclusions ("^docker").
        wanted = [] if value.startswith("^") or FAILED in present else value.lstrip("=").split(",")
        missing = [each for each in wanted if each and not any(real.startswith(each) for real in present)]
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
        yield Problem(f"Where a worker stands cannot be told: {why}", "Set these variables rightly, or unset them.")


Check = Callable[[Sections], Iterator[Problem]]

CHECKS: tuple[Check, ...] = (
    _torch,
    _backends,
    _graphics,
    _space,
    _memory,
    _limits,
    _processors,
    _interfaces,
    _allocator,
    _launcher,
)
