"""Which process runs which test: files are distributed test by test, unless their tests share something."""

from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any, TypeVar

from xdist.scheduler import LoadScopeScheduling

KINDS = ("procs", "cluster", "unit")

TOGETHER = {
    "test_accelerators.py": "the jobs of one device, and of three that speak with each other",
    "test_accelerate.py": "the serial run",
    "test_adaptive.py": "the serial runs",
    "test_exact.py": "the jobs on 1, 2, 3, 5 and 8 workers",
    "test_examples.py": "three steps of all examples",
    "test_extending.py": "the package of the page",
    "test_evaluated_streams.py": "the serial runs",
    "test_finer_batches.py": "the serial run",
    "test_hosts.py": "the two hosts",
    "test_keras.py": "the serial runs",
    "test_layers.py": "the syntax of all modules",
    "test_library_streams.py": "the files, and the serial runs over them",
    "test_lightning.py": "the serial run",
    "test_loaders.py": "the serial runs",
    "test_scripts_of_clusters.py": "the serial runs",
    "test_slurm.py": "the cluster",
    "test_slurm_cluster.py": "the cluster",
    "test_ssh.py": "the two hosts",
    "test_sliced.py": "the models that one device has trained",
    "test_staged.py": "the models that one device has trained",
    "test_stream_jobs.py": "the serial runs",
    "test_parallel.py": "what one worker of two devices has trained",
    "test_study_engines.py": "the cluster",
    "test_study.py": "the study that was killed and started again",
    "test_fork_server.py": "the template",
    "test_transformers.py": "the serial run",
    "test_workers.py": "what three workers have found",
}
"""Files that stay whole, and what their tests share."""


Test = TypeVar("Test")


def in_order(tests: Sequence[Test], file_of: Callable[[Test], str], kind_of: Callable[[Test], str]) -> list[Test]:
    """Tests in the order in which they are handed out: what takes longest first, so that nobody waits for the last one.

    Files that stay whole come first, and unit tests last. Tests with processes wait for half of their time, and those
    of whole jobs on threads never do: they come in turns.

    Args:
        tests: the tests.
        file_of: the name of a test's file.
        kind_of: its kind: procs, cluster or unit.
    """
    whole = [each for each in tests if file_of(each) in TOGETHER]
    others = {
        kind: [each for each in tests if file_of(each) not in TOGETHER and kind_of(each) == kind] for kind in KINDS
    }
    turns = [
        (number / len(others[kind]), each) for kind in ("procs", "cluster") for number, each in enumerate(others[kind])
    ]
    return [*whole, *(each for _, each in sorted(turns, key=lambda turn: turn[0])), *others["unit"]]


class Together(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Hands out files that stay whole, and all other tests one by one, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if PurePath(file).name in TOGETHER else nodeid

    # A process begins a test when it knows the next one, or that there is none. xdist gives a process that takes the
    # place of a crashed one a single test, for which the whole run then waits; or fails, if it has not collected yet.

    def schedule(self) -> None:
        if self.collection is None:
            super().schedule()
        self._fill()

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        self._fill()

    def _fill(self) -> None:
        for node in self.nodes:
            while (
                node in self.registered_collections
                and not node.shutting_down
                and self._pending_of(self.assigned_work[node]) < 2
            ):
                self._reschedule(node)  # which gives it a test, or tells it that there is none

    def remove_node(self, node: Any) -> str | None:
        """The test in which it crashed. Others do what it had yet to do; xdist would have them crash as well."""
        work = self.assigned_work.pop(node)
        pending = [(scope, test) for scope, tests in work.items() for test, is_done in tests.items() if not is_done]
        if not pending:
            return None
        scope, crashed = pending[0]
        work[scope][crashed] = True
        self.workqueue.update({scope: tests for scope, tests in work.items() if not all(tests.values())})
        self._fill()
        return str(crashed)
