"""The manifests of a job for Kubernetes, and their files. Their template is ``k8s_manifests.yaml``."""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unisono.errors import FIRST_SIGNAL, PREEMPTED, USAGE, JobError
from unisono.host.certificate import NoCertificate, make
from unisono.launch.k8s_job import ClusterJob
from unisono.membership.token import fresh_token

MARK = "# written by unisono k8s"

PLAIN = re.compile(r"[A-Za-z][A-Za-z/.-]+")
"""Text that needs no quotes for any reader of YAML: Kubernetes takes 1e-3 for a number, which PyYAML does not."""

Manifest = dict[str, Any]

TEMPLATE = Path(__file__).with_suffix(".yaml")


def filled(kind: str, values: Mapping[str, Any]) -> Manifest:
    """A manifest of the template, with these values by name; a value of None is left out with its key.

    Raises:
        JobError: there is no PyYAML.
    """
    yaml = _yaml()

    class TemplateLoader(yaml.SafeLoader):  # type: ignore[misc,name-defined]  # _yaml has made sure that it is there
        """Puts a value where the template has ``!of NAME``."""

    TemplateLoader.add_constructor("!of", lambda _, node: values[node.value])
    manifest: Manifest = _without_none(yaml.load(TEMPLATE.read_text("utf-8"), TemplateLoader)[kind])
    return manifest


def _yaml() -> Any:
    if find_spec("yaml") is None:
        raise JobError("manifests are written with PyYAML: pip install '.[k8s]' in a clone of Unisono")
    return import_module("yaml")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return list(_flat(value)) if isinstance(value, list) else value


def _flat(values: list[Any]) -> Iterator[Any]:
    for item in values:
        if isinstance(item, list):
            yield from _flat(item)
        elif item is not None:
            yield _without_none(item)


def text_of(manifests: Sequence[Any], command: str) -> str:
    """Manifests as one file of YAML, whose first line is a comment with the command that wrote them.

    Raises:
        JobError: there is no PyYAML, or a text has characters that YAML cannot hold.
    """
    yaml = _yaml()

    class ManifestDumper(yaml.SafeDumper):  # type: ignore[misc,name-defined]  # _yaml has made sure that it is there
        """Quotes all text that a reader of YAML could take for something else."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

        def text(self, data: str) -> Any:
            style = "|" if "\n" in data else None if PLAIN.fullmatch(data) else '"'
            return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    ManifestDumper.add_representer(str, ManifestDumper.text)
    for manifest in manifests:
        _require_text(manifest)
    body = yaml.dump_all(manifests, Dumper=ManifestDumper, sort_keys=False, width=10**6, allow_unicode=True)
    comment = "".join(letter if letter.isprintable() else "?" for letter in command)
    return f"{MARK}: {comment}\n{body}"


def _require_text(value: Any) -> None:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for item in value:
            _require_text(item)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise JobError(f"{value!a} is no text that a manifest can hold: it is not UTF-8") from None
        if "\0" in value:
            raise JobError(f"{value!a} is no text that a manifest can hold")


def write(text: str, path: Path, *, secret: bool = False) -> None:
    """Write manifests into a file: a new one, or one that an earlier call has written.

    A secret is always written into a new file, which only this user may read.

    Raises:
        JobError: another program wrote the file, it holds keys already, or it cannot be written.
    """
    try:
        if secret:
            _write_new(text, path)
        elif path.exists() and not path.read_bytes().startswith(MARK.encode()):
            raise JobError(f"{path} is there already, and unisono k8s did not write it: name another file")
        else:
            path.write_text(text, encoding="utf-8")
    except FileExistsError:
        raise JobError(f"{path} is there already: keys are written into a new file only") from None
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror}") from error


def _write_new(text: str, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def new_secret(name: str, namespace: str | None) -> Manifest:
    """A Secret with a new token, a new key and its certificate, made before any pod runs.

    Raises:
        JobError: this host has no program that makes a certificate.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="unisono-") as folder:  # only this user may read it
            certificate = make(Path(folder), "unisono coordinator", ["extendedKeyUsage = serverAuth"])
            chain, key = certificate.chain.read_text(encoding="ascii"), certificate.key.read_text(encoding="ascii")
    except (OSError, NoCertificate) as error:
        raise JobError(f"a coordinator on Kubernetes needs a certificate, and {error}: install openssl") from error
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, **({} if namespace is None else {"namespace": namespace})},
        "type": "Opaque",
        "immutable": True,
        "stringData": {"token": fresh_token(), "certificate.pem": chain, "certificate.key": key},
    }


SIGNALS = (6, 7, 8, 9, 11, 15)
"""The signals that may end a coordinator without a fault of the script: its memory ran out, say."""

GPU = "nvidia.com/gpu"

LEFT_OVER_S = 15
"""The time for a pod's other processes to end, after that of the workers."""

NAME = "JOB_SET"
"""The variable that holds the name of a TrainJob and of its JobSet, which a TrainingRuntime does not know."""

FROM_LABEL = {
    "name": NAME,
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}},
}
TRAINER = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}


def job_set(job: ClusterJob) -> Manifest:
    """The JobSet: a coordinator, nodes that run workers, and the rules for when their pods end."""
    return filled("JobSet", values_of(job, job.name))


def for_kubeflow(job: ClusterJob) -> tuple[Manifest, Manifest]:
    """A TrainingRuntime, which is the job's JobSet for a TrainJob of any name, and a TrainJob that uses it."""
    values = values_of(job, f"$({NAME})")
    values |= {"env": [FROM_LABEL, *(values["env"] or ())], "node_metadata": TRAINER}
    return filled("TrainingRuntime", values), filled("TrainJob", values)


def escaped(words: Sequence[str]) -> list[str]:
    """Words that Kubernetes does not expand: it takes ``$(NAME)`` for a variable, and ``$$`` for ``$``."""
    return [word.replace("$", "$$") for word in words]


def values_of(job: ClusterJob, name: str) -> dict[str, Any]:
    """The values of a job for the template; None for those that it leaves out.

    The name may be a reference to a variable of the pods.
    """
    settings, pods = job.settings, job.pods
    memory = {} if pods.memory is None else {"memory": pods.memory}
    gpus = {GPU: str(pods.gpus)} if pods.gpus else {}
    gpu_tolerations = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}] if gpus else []
    host = f"{name}-coordinator-0-0.{name}"  # the DNS name of the coordinator's pod
    has_user = None if job.user is None else True
    return {
        "name": job.name,
        "namespace": job.namespace,
        "restarts": job.restarts,
        "goes_on": sorted([PREEMPTED, *(FIRST_SIGNAL + number for number in SIGNALS)]),
        "preempted": PREEMPTED,
        "usage": USAGE,
        "grace_s": int(settings.launch.options.launch.grace_s) + LEFT_OVER_S,
        "has_user": has_user,
        "user": job.user,
        "capabilities": has_user and {"drop": ["ALL"]},
        "image": job.image,
        "env": [{"name": variable, "value": escaped([value])[0]} for variable, value in job.variables.items()] or None,
        "secret": job.secret,
        "no_claim": {} if job.claim is None else None,
        "claim": None if job.claim is None else {"claimName": job.claim},
        "workers": str(settings.workers),
        "max_restarts": str(settings.max_restarts),
        "restart_on_error": "--restart-on-error" if settings.restart_on_error else None,
        "job_words": [*settings.devices_words, *escaped(settings.words())],
        "host": host,
        "url": f"https://{host}:7777",
        "run_dir": f"/unisono/runs/{name}",
        "pods": job.pod_count,
        "pod_restarts": settings.max_restarts * job.pod_count,
        "workers_per_pod": str(job.workers_per_pod),
        "node_metadata": None,
        "requests": {"cpu": job.cores, **memory, **gpus},
        "limits": {**memory, **gpus} or None,
        "shared_memory": pods.shared_memory,
        "node_selector": dict(pods.selector) or None,
        "tolerations": [*pods.tolerations, *gpu_tolerations] or None,
    }
