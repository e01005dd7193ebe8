"""The same job for Kubeflow Trainer: a TrainingRuntime, and a TrainJob that uses it."""

from unisono.launch.k8s.cluster_job import ClusterJob
from unisono.launch.k8s.job_set import values_of
from unisono.launch.k8s.manifests import Manifest, filled

NAME = "JOB_SET"
"""The variable with the name of the TrainJob, which its JobSet has, too: a runtime does not know it."""

FROM_LABEL = {
    "name": NAME,
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}},
}
TRAINER = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}


def training_runtime(job: ClusterJob) -> Manifest:
    """The TrainingRuntime: the job's JobSet, for a TrainJob of any name."""
    values = values_of(job, f"$({NAME})")
    return filled("TrainingRuntime", {**values, "env": [FROM_LABEL, *(values["env"] or ())], "node_metadata": TRAINER})


def train_job(job: ClusterJob) -> Manifest:
    """A TrainJob that trains by the runtime of the same name."""
    return filled("TrainJob", values_of(job))
