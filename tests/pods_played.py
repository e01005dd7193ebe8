"""Plays a Kubernetes cluster: runs the commands of a JobSet's pods, and does with their ends what its policies say.

The pods have namespaces of their own for processes, mounts and host names, and one network that nobody else is in. What
becomes of a pod is our reading of the documentation of podFailurePolicy, and of JobSet's failurePolicy.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

TOOLS = ("ip", "ss", "unshare", "nsenter", "hostname", "mount")
ADDRESS = "10.81.0.1"
PATIENCE_S = 120.0

NETWORK = f"""
mount --bind hosts /etc/hosts && ip link set lo up && ip address add {ADDRESS} dev lo && echo there && exec cat
"""

POD = 'hostname "$0" && mount -t tmpfs none /dev/shm && exec "$@"'


class NoPods(Exception):
    """They cannot be played here; says why."""


class Network:
    """Where the pods of a JobSet are.

    Args:
        pid: the process that holds its namespaces.
    """

    def __init__(self, pid: int) -> None:
        self._enter = ["nsenter", f"--target={pid}", "--net", "--mount", "--"]

    def start(self, host: str, words: list[str], folder: Path, **how: Any) -> "subprocess.Popen[bytes]":
        """Start a pod's command as its process 1."""
        alone = [
            "unshare",
            "--uts",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            POD,
            host,
        ]
        return subprocess.Popen([*self._enter, *alone, *words], cwd=folder, stdin=subprocess.DEVNULL, **how)

    def listens(self, port: int) -> bool:
        """Whether anybody does there."""
        command = [*self._enter, "ss", "-Hltn", f"sport = :{port}"]
        return bool(subprocess.run(command, capture_output=True, check=True).stdout)


@contextmanager
def network(folder: Path, host: str) -> Iterator[Network]:
    """As long as the context lasts.

    Args:
        folder: a folder for its files.
        host: the name that its name server knows.

    Raises:
        NoPods: not root, a tool is missing, or the kernel cannot do it.
    """
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise NoPods("making namespaces needs Linux, and root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise NoPods(f"{', '.join(missing)} not installed")
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS} {host}\n")
    command = ["unshare", "--net", "--mount", "sh", "-c", NETWORK]
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        if not holder.stdout.readline():  # it answers from inside
            raise NoPods("unshare --net --mount failed: no namespaces here")
        yield Network(holder.pid)


@dataclass(eq=False)
class PlayedPod:
    """A pod that runs.

    Attributes:
        job: the name of its replicated job.
        index: its completion index.
        process: what holds its namespaces.
        log: what it prints.
        evicted: whether its node was taken away.
    """

    job: str
    index: int
    process: "subprocess.Popen[bytes]"
    log: Path
    evicted: bool = False

    def send(self, number: int) -> None:
        """Send its process 1 a signal, as a kubelet does."""
        (first,) = psutil.Process(self.process.pid).children()
        first.send_signal(number)

    def evict(self) -> None:
        """Its node is about to go: it gets a SIGTERM, and the condition DisruptionTarget."""
        self.evicted = True
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        """It is killed, with all that runs in it."""
        self.process.kill()

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait(PATIENCE_S)
        return code if code >= 0 else 128 - code

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")


@dataclass
class PlayedJobSet:
    """A JobSet whose pods are played.

    Attributes:
        name: the name of the JobSet.
        spec: the specification of the JobSet.
        secret: the entries of the Secret.
        network: where its pods are.
        folder: a folder for its files.
        variables: further variables of all pods.
        pods: the pods that run.
        ended: the ends of pods: the replicated job, and the exit code.
        failures: of each replicated job, how many pods have failed, as its backoffLimit counts.
        restarts: how often all was started again.
        state: ``Running``, ``Completed`` or ``Failed``.
    """

    name: str
    spec: dict[str, Any]
    secret: Mapping[str, str]
    network: Network
    folder: Path
    variables: Mapping[str, str]
    pods: list[PlayedPod] = field(default_factory=list)
    ended: list[tuple[str, int]] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    state: str = "Running"
    _started: int = 0

    def start(self) -> None:
        """Start the pods of all jobs, each once the job that it depends on is ready."""
        self.failures = {}
        for job in self.spec["replicatedJobs"]:
            for other in job.get("dependsOn", ()):
                assert other["status"] == "Ready"
                probe = self._container(self._job(other["name"]))["readinessProbe"]["tcpSocket"]
                self.wait_for(lambda port=probe["port"]: self.network.listens(port), "a ready coordinator")  # type: ignore[misc]
            for index in range(job["template"]["spec"]["parallelism"]):
                self._start(job, index)

    def nodes(self) -> list[PlayedPod]:
        """The pods that run workers."""
        return [pod for pod in self.pods if pod.job != "coordinator"]

    def coordinator(self) -> PlayedPod:
        """The coordinator's pod."""
        (found,) = (pod for pod in self.pods if pod.job == "coordinator")
        return found

    def processes(self) -> list[str]:
        """The command lines of all processes in all pods."""
        found = []
        for pod in self.pods:
            for process in psutil.Process(pod.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    found.append(" ".join(process.cmdline()))
        return found

    def until(self, is_so: Callable[[], bool], words: str) -> None:
        """Do what the controllers do, until something is so."""

        def looked() -> bool:
            self.look()
            return is_so()

        self.wait_for(looked, words)

    def wait_for(self, is_so: Callable[[], bool], words: str) -> None:
        """Wait."""
        begun = time.monotonic()
        while not is_so():
            assert time.monotonic() - begun < PATIENCE_S, (
                f"{words} did not come: {self.state}, {self.ended}\n{self.text}"
            )
            time.sleep(0.05)

    @property
    def text(self) -> str:
        """What all pods have printed."""
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')}" for log in sorted(self.folder.glob("*.log"))
        )

    def look(self) -> None:
        """One look at all pods."""
        for pod in [pod for pod in self.pods if pod.process.poll() is not None]:
            if self.state != "Running" or pod not in self.pods:
                return
            self.pods.remove(pod)
            self.ended.append((pod.job, code := pod.wait()))
            if code == 0:
                if pod.job in self.spec["successPolicy"]["targetReplicatedJobs"]:
                    self._finish("Completed")
            else:
                self._failed(pod, code)

    def close(self) -> None:
        """End all pods, with their grace period."""
        for pod in self.pods:
            with suppress(psutil.NoSuchProcess, ValueError):
                pod.send(signal.SIGTERM)
        for pod in self.pods:
            with suppress(subprocess.TimeoutExpired):
                pod.process.wait(20)
            pod.process.kill()
            pod.process.wait()
        self.pods = []

    def _failed(self, pod: PlayedPod, code: int) -> None:
        job = self._job(pod.job)
        spec = job["template"]["spec"]
        action = next(
            (rule["action"] for rule in spec["podFailurePolicy"]["rules"] if _is_for(rule, pod, code)), "Count"
        )
        if action == "Count":
            self.failures[pod.job] = self.failures.get(pod.job, 0) + 1
        if action == "FailJob":
            self._job_failed(pod.job, "PodFailurePolicy")
        elif self.failures.get(pod.job, 0) > spec["backoffLimit"]:
            self._job_failed(pod.job, "BackoffLimitExceeded")
        else:
            self._start(job, pod.index)

    def _job_failed(self, name: str, reason: str) -> None:
        policy = self.spec["failurePolicy"]
        for rule in policy["rules"]:
            if name in rule["targetReplicatedJobs"] and reason in rule.get("onJobFailureReasons", [reason]):
                assert rule["action"] == "FailJobSet"
                self._finish("Failed")
                return
        if self.restarts == policy["maxRestarts"]:
            self._finish("Failed")
            return
        self.restarts += 1
        assert policy["restartStrategy"] == "BlockingRecreate"
        self.close()
        self.start()

    def _finish(self, state: str) -> None:
        self.state = state
        self.close()

    def _job(self, name: str) -> dict[str, Any]:
        return next(job for job in self.spec["replicatedJobs"] if job["name"] == name)

    def _container(self, job: dict[str, Any]) -> dict[str, Any]:
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        found: dict[str, Any] = container
        return found

    def _start(self, job: dict[str, Any], index: int) -> None:
        self._started += 1
        files = self.folder / f"pod-{self._started}"
        files.mkdir()
        container = self._container(job)
        variables = {each["name"]: self._value(each) for each in container.get("env", ())}
        variables["JOB_COMPLETION_INDEX"] = str(index)
        words = [expanded(word, variables) for word in container["command"]]
        for mount in container["volumeMounts"]:
            words = [word.replace(mount["mountPath"], str(self._mounted(mount, files))) for word in words]
        log = self.folder / f"{job['name']}-{index}-{self._started}.log"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, **self.variables, **variables}
        with log.open("wb") as output:
            host = f"{self.name}-{job['name']}-0-{index}"
            process = self.network.start(
                host, words, self.folder, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        self.pods.append(PlayedPod(job["name"], index, process, log))

    def _value(self, variable: dict[str, Any]) -> str:
        if "value" in variable:
            return expanded(variable["value"], {})
        assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['jobset.sigs.k8s.io/jobset-name']"
        return self.name

    def _mounted(self, mount: dict[str, Any], files: Path) -> Path:
        if mount["name"] == "keys":
            path = files / str(mount["subPath"])
            path.write_text(self.secret[mount["subPath"]])
            path.chmod(0o400)
            return path
        return Path("/dev/shm") if mount["name"] == "shared-memory" else self.folder / "claim"  # noqa: S108


def _is_for(rule: dict[str, Any], pod: PlayedPod, code: int) -> bool:
    if "onPodConditions" in rule:
        assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        return pod.evicted
    codes = rule["onExitCodes"]
    return bool((code in codes["values"]) == (codes["operator"] == "In"))


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """What a container gets: ``$(NAME)`` of a known variable is its value, and ``$$`` is ``$``."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)", lambda found: "$" if found[1] is None else variables.get(found[1], found[0]), text
    )
