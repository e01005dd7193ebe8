"""What is checked, part by part."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from benchmarks.gpu_check.parts import Deadline, Found, Part, Result
from benchmarks.gpu_check.processes import Ended, Setting
from benchmarks.gpu_check.service import NoService, multi_process_service
from unisono_lab.faults.faults import Faults

MOST_WAITS = 10.0
"""For the device, in a step."""

AIM = 1.05
"""How many times as long as with deterministic torch a step may take."""

SHARE = "50"
"""Percent of the device."""

NCCL = {
    "UNISONO_TRANSPORT": "nccl",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""Variables with which workers that share a device speak over NCCL, if it lets them."""

REFUSALS = ("transport='nccl' cannot be used", "Duplicate GPU", "Multiple Ranks", "ncclInvalidUsage")

VARYING = (*NCCL, "NCCL_HOSTID", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
"""Variables in which jobs differ; nothing reads them while torch is loaded."""


class Checks:
    """The parts of the check.

    Args:
        setting: on what is checked.
        models: whose digests are compared.
        workers: their numbers, the serial run's first.
        steps: of the jobs that are counted.
        patience: how many times as long as on a machine with a GPU parts may take.
    """

    def __init__(
        self,
        setting: Setting,
        models: tuple[str, ...] = ("mlp", "resnet", "gpt"),
        workers: tuple[int, ...] = (1, 2, 3, 5),
        steps: int = 200,
        patience: float = 1.0,
    ) -> None:
        self._setting, self._models, self._workers, self._steps = setting, models, workers, steps
        self._patience = patience
        self._serial: dict[str, str | None] = {}
        self._whole: dict[str, str] = {}
        self._device = "cuda"

    def parts(self) -> list[Part]:
        """They come by their worth."""
        parts = [
            Part("operations", 70, True, self.operations),
            Part("digests", 120, True, self.digests),
            Part("a worker is killed", 60, True, self.killed),
            Part("waits and memory", 90, False, self.counted),
            Part("speed of gpt", 60, False, lambda deadline: self.speed("gpt", deadline)),
            Part("speed of resnet", 60, False, lambda deadline: self.speed("resnet", deadline)),
            Part("a share of the device", 60, True, self.shares),
            Part("NCCL", 60, True, self.nccl),
        ]
        return [replace(part, most_s=part.most_s * self._patience) for part in parts]

    def operations(self, deadline: Deadline) -> Iterator[Found]:
        """Each operation gives the same bits in each process and round."""
        ended = self._setting.program("operations", *self._few(), deadline=deadline)
        for told in ended.told:
            if "check" in told:
                self._whole = self._whole or told["digests"]
                note = f"{len(told['digests'])} operations; cannot be computed: {_listed(told['missing'])}"
                yield told["check"], *_compared(told["differing"], note)
            else:
                self._device = told["facts"]["device"]
                is_meant = self._device != "cpu" or self._setting.device == "cpu"
                note = ", ".join(f"{name} {value}" for name, value in told["facts"].items())
                yield "the device", "ok" if is_meant else "failed", note
        if ended.code != 0:
            yield "", "failed", ended.why

    def _few(self) -> list[str]:
        return ["--processes", "2", "--rounds", "1"] if self._setting.small else []

    def digests(self, deadline: Deadline) -> Iterator[Found]:
        """Jobs end with the same weights on any number of workers."""
        with ThreadPoolExecutor(1 if self._setting.small else len(self._workers)) as pool:
            for model in self._models:
                jobs = [pool.submit(self._job, model, count, deadline) for count in self._workers]
                ended = [each.result() for each in jobs]
                self._serial[model] = ended[0].digest
                workers = ", ".join(map(str, self._workers))
                yield f"{model} on {workers} workers", *_alike(ended)

    def _job(self, model: str, workers: int, deadline: Deadline) -> Ended:
        return self._setting.job(f"{model}-{workers}", model, workers=workers, deadline=deadline)

    def killed(self, deadline: Deadline) -> Iterator[Found]:
        """Whoever is killed changes no bit."""
        plan = self._setting.folder / "killed.toml"
        plan.parent.mkdir(parents=True, exist_ok=True)
        plan.write_text(Faults().kill(rank=1, at_step=5, after_s=0.01).to_toml())
        options = ("--max-restarts", "3", "--faults", str(plan))
        ended = self._setting.job("killed", "mlp", workers=3, deadline=deadline, options=options)
        if not self._setting.journal("killed", "lost"):
            yield "mlp on 3 workers", "failed", f"nobody was lost: {ended.why}"
            return
        if "mlp" not in self._serial:
            self._serial["mlp"] = self._job("mlp", 1, deadline).digest
        result, note = _beside(self._serial["mlp"], ended)
        yield "mlp on 3 workers", result, note

    def counted(self, deadline: Deadline) -> Iterator[Found]:
        """A step leaves nothing on the device, and the host waits little for it."""
        for workers in (1, 2):
            words = ("gpt", "--counted", "--steps", str(self._steps))
            ended = self._setting.job(f"counted-{workers}", *words, workers=workers, deadline=deadline)
            on = f"{workers} worker{'s' if workers > 1 else ''}"
            if ended.code != 0:
                yield on, "failed", ended.why
            elif not ended.told:
                yield on, "skipped", f"nobody counts on {ended.device}"
            else:
                waits = max(each["host waits"] for each in ended.told)
                yield f"host waits per step, {on}", "ok" if waits <= MOST_WAITS else "over", f"{waits:.1f}"
                grown = [each["live bytes"] - each["live bytes at first"] for each in ended.told]
                note = f"{ended.told[0]['live bytes']:.0f} after {self._steps} steps; more than after 10: {grown}"
                yield f"live bytes, {on}", "ok" if not any(grown) else "over", note

    def speed(self, model: str, deadline: Deadline) -> Iterator[Found]:
        """A step of one worker takes little longer than with deterministic torch."""
        few = ("--rounds", "2", "--steps", "2") if self._setting.small else ()
        ended = self._setting.program("speed", model, *few, deadline=deadline)
        if ended.code != 0:
            yield model, "failed", ended.why
            return
        [told] = ended.told
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in told["ms"].items())
        ratios = ", ".join(f"{ratio:.3f} times {name}" for name, ratio in told["ratios"].items())
        is_near = told["ratios"]["deterministic torch"] <= AIM
        yield f"{model} on 1 worker", "ok" if is_near else "over", f"{ratios}; {times}"

    def shares(self, deadline: Deadline) -> Iterator[Found]:
        """Processes with equal shares of the device compute the same; who has the whole may compute otherwise."""
        try:
            with multi_process_service() as variables:
                share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": SHARE}
                ended = self._setting.program("operations", "--share", deadline=deadline, **variables, **share)
                yield f"{SHARE} percent, by MPS", *self._shared(ended)
        except NoService as why:
            yield f"{SHARE} percent, by MPS", "skipped", str(why)
        if self._device.startswith("cuda"):
            ended = self._setting.program("operations", "--share", "--green", deadline=deadline)
            yield "half of it, by a green context", *self._shared(ended)
        else:
            yield "half of it, by a green context", "skipped", f"{self._device} has none"

    def _shared(self, ended: Ended) -> tuple[Result, str]:
        if ended.code != 0:
            return "skipped", ended.why
        told = ended.told[0]
        others = [name for name, digest in told["digests"].items() if self._whole.get(name) != digest]
        beside = f"other bits than with the whole device: {_listed(others)}" if self._whole else ""
        return _compared(told["differing"], beside)

    def nccl(self, deadline: Deadline) -> Iterator[Found]:
        """Workers that share the device speak over NCCL, where it lets them, and end with the same weights."""
        try:
            with multi_process_service() as variables:
                yield from self._over_nccl(deadline, {**NCCL, **variables}, "with MPS")
        except NoService:
            yield from self._over_nccl(deadline, NCCL, "without MPS")

    def _over_nccl(self, deadline: Deadline, variables: dict[str, str], how: str) -> Iterator[Found]:
        for model in self._models:
            ended = self._setting.job(f"nccl-{model}", model, workers=2, deadline=deadline, variables=variables)
            check = f"{model} on 2 workers, {how}"
            refusals = [line.strip() for line in ended.said.splitlines() if any(each in line for each in REFUSALS)]
            if ended.code is None or (ended.code != 0 and refusals):
                yield check, "skipped", [ended.why, *refusals][-1][:300]
                return
            result, note = _beside(self._serial.get(model), ended)
            yield check, result, note


def _compared(differing: list[str], note: str) -> tuple[Result, str]:
    return ("different", _listed(differing)) if differing else ("same", note)


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _alike(ended: list[Ended]) -> tuple[Result, str]:
    """Whether jobs have ended with the same weights."""
    for each in ended:
        if each.digest is None:
            return "failed", each.why
    digests = [str(each.digest) for each in ended]
    if len({*digests}) > 1:
        return "different", " ".join(digests)
    return "same", f"{digests[0]} on {ended[0].device}"


def _beside(serial: str | None, ended: Ended) -> tuple[Result, str]:
    """Whether a job has ended with the weights of the serial run."""
    if ended.digest is None or serial is None:
        return "failed", ended.why if ended.digest is None else "the serial run has no digest"
    return ("same", serial) if ended.digest == serial else ("different", f"{ended.digest}, and {serial} alone")
