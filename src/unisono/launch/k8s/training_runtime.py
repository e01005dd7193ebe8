"""The same job for Kubeflow Trainer: a TrainingRuntime, and a TrainJob that uses it."""

from typing import Any

from unisono.launch.k8s.cluster_job import ClusterJob
from unisono.launch.k8s.job_set import job_set_spec, metadata
from unisono.launch.k8s.pods import NODE, Manifest

API = "trainer.kubeflow.org/v1alpha1"

NAME = "JOB_SET"
"""The variable with the name of the TrainJob, which its JobSet has, too: a runtime does not know it."""

FROM_LABEL = {
    "name": NAME,
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}},
}


def training_runtime(job: ClusterJob) -> Manifest:
    """The TrainingRuntime: the job's JobSet, for a TrainJob of any name."""
    spec: Any = job_set_spec(job, f"$({NAME})")
    for each in spec["replicatedJobs"]:
        for container in each["template"]["spec"]["template"]["spec"]["containers"]:
            container["env"] = [FROM_LABEL, *container.get("env", ())]
        if each["name"] == NODE:
            each["template"]["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": metadata(job, job.name),
        "spec": {"mlPolicy": {"numNodes": job.pod_count}, "template": {"spec": spec}},
    }


def train_job(job: ClusterJob) -> Manifest:
    """A TrainJob that trains by the runtime of the same name."""
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": metadata(job, job.name),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
            "trainer": {"numNodes": job.pod_count},
        },
    }
