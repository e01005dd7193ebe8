"""Whatever ends the process that writes, a whole checkpoint is there afterwards."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.procs

SIZE = 200_000  # numbers per tensor: writing one checkpoint takes a few milliseconds


# --- the tests: each runs a function of the second half of this file in a process of its own


def run(scenario: str, folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, __file__, scenario, str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # torch's threads do not survive a fork
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_writer_killed_at_any_moment_leaves_the_newest_checkpoint_whole(tmp_path: Path) -> None:
    deaths = run("kill_at_random_moments", tmp_path)
    assert len(deaths) == 40 < deaths[-1]["found"]
    for death in deaths:
        assert death["signal"] == signal.SIGKILL
        assert death["found"] >= death["announced"], "a checkpoint that was said to be written is gone"
        assert death["whole"]
        assert death["unfinished"] == 0, "the next start removes what the dead writer left"
    assert any(death["left"] for death in deaths), "at least one was killed while it wrote"


@pytest.mark.parametrize("scenario", ["die_at_each_step_of_a_new_one", "die_at_each_step_of_a_replacement"])
def test_a_writer_that_dies_between_any_two_steps_of_its_work_loses_nothing(scenario: str, tmp_path: Path) -> None:
    deaths = run(scenario, tmp_path)
    assert len(deaths) >= 10
    assert not any(death["completed"] for death in deaths[:-1])
    assert deaths[-1]["completed"]
    for death in deaths:
        assert death["whole"]
        assert death["unfinished"] == 0
    contents = [death["content"] for death in deaths]
    moment = contents.index("new")
    assert contents == ["old"] * moment + ["new"] * (len(deaths) - moment), "the new one appears at one moment"
    assert moment > 6


def test_a_file_that_cannot_grow_any_more_fails_the_checkpoint_and_not_the_training(tmp_path: Path) -> None:
    (seen,) = run("reach_the_limit_of_file_sizes", tmp_path)
    assert seen["warnings"] == 1
    assert "could not be written" in seen["warning"]
    assert "File too large" in seen["warning"]
    assert seen["after the failure"] == ["step-00000001"]
    assert seen["with more room"] == ["step-00000001", "step-00000003"]
    assert seen["events"] == ["checkpoint", "checkpoint failed", "checkpoint"]
    assert seen["whole"]


def test_a_script_that_ends_without_closing_has_written_its_last_checkpoint(tmp_path: Path) -> None:
    run("end_without_closing", tmp_path)
    assert (tmp_path / "step-00000001" / "manifest.json").stat().st_size


def test_the_run_folder_is_there_before_torch(tmp_path: Path) -> None:
    source = "import sys, unisono.checkpoint.folder; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], check=False, timeout=60).returncode == 0


# --- the processes


def kill_at_random_moments(folder: Path) -> Iterator[dict[str, Any]]:
    chance = random.Random(0)
    for _ in range(40):
        reading, writing = os.pipe()
        child = fork(save_for_ever, folder, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            announced = [int(pipe.readline()) for _ in range(chance.randint(1, 3))]
            time.sleep(chance.uniform(0, 0.01))
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            announced += map(int, pipe)
        left = len(list(folder.glob(".tmp-*")))
        yield {"signal": os.WTERMSIG(status), "announced": announced[-1], "left": left, **what_is_there(folder)}


def save_for_ever(folder: Path, writing: int) -> None:
    def announce(event: str, **fields: Any) -> None:
        os.write(writing, b"%d\n" % fields["step"])

    with_events = store(folder, announce)
    step = max([0, *with_events.steps()])
    os.write(writing, b"%d\n" % step)  # as many as there are, and it has begun
    while True:
        step += 1
        with_events.save(at(step))


def die_at_each_step_of_a_new_one(folder: Path) -> Iterator[dict[str, Any]]:
    return die_at_each_step(folder, 1, 2)


def die_at_each_step_of_a_replacement(folder: Path) -> Iterator[dict[str, Any]]:
    return die_at_each_step(folder, 1, 1)


def die_at_each_step(base: Path, old: int, new: int) -> Iterator[dict[str, Any]]:
    completed, moment = False, 0
    while not completed:
        moment += 1
        folder = base / str(moment)
        save(folder, at(old, content=0.0))
        child = fork(save_and_die, folder, new, moment)
        completed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        yield {"completed": completed, **what_is_there(folder)}


def save_and_die(folder: Path, step: int, moment: int) -> None:
    """End without notice before the system call with the number ``moment`` that changes the disk."""
    calls = [0]

    def mortal(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == moment:
                os._exit(9)
            return call(*args, **options)

        return counted

    for name in ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink"):
        setattr(os, name, mortal(getattr(os, name)))
    save(folder, at(step, content=1.0))


def reach_the_limit_of_file_sizes(folder: Path) -> Iterator[dict[str, Any]]:
    import warnings

    events: list[str] = []
    limited = store(folder, lambda event, **fields: events.append(event))
    limited.save(at(1))
    limited.wait()
    seen: dict[str, Any] = {}
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, most))
        limited.save(at(2))
        limited.wait()
        seen["after the failure"] = sorted(path.name for path in folder.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        limited.save(at(3))
        limited.close()
    seen["with more room"] = sorted(path.name for path in folder.iterdir())
    yield {
        **seen,
        "warnings": len(caught),
        "warning": str(caught[0].message),
        "events": events,
        **what_is_there(folder),
    }


def end_without_closing(folder: Path) -> Iterator[dict[str, Any]]:
    store(folder).save(at(1))
    return iter(())


def what_is_there(folder: Path) -> dict[str, Any]:
    """As the next start finds it."""
    from contextlib import closing

    with closing(store(folder)) as opened:
        found = opened.newest()
    values = (
        {float(value) for tensor in found.model.values() for value in (tensor.min(), tensor.max())} if found else {}
    )
    return {
        "found": found.step if found else 0,
        "whole": found is None or len(values) == 1,
        "content": "new" if values == {1.0} else "old",
        "unfinished": len([path for path in folder.iterdir() if path.name.startswith(".")]) if folder.exists() else 0,
    }


def at(step: int, content: float | None = None) -> Any:
    import torch

    from unisono.checkpoint.store import Snapshot

    value = float(step) if content is None else content
    model = {name: torch.full((SIZE,), value) for name in ("a", "b")}
    return Snapshot(step, model, [{"state": {0: {"exp_avg": torch.full((SIZE,), value)}}}], {"position": step})


def store(folder: Path, on_event: Callable[..., None] = lambda event, **fields: None) -> Any:
    from unisono.checkpoint.store import CheckpointStore

    return CheckpointStore(folder, keep=2, on_event=on_event)


def save(folder: Path, snapshot: Any) -> None:
    from contextlib import closing

    with closing(store(folder)) as opened:
        opened.save(snapshot)


def fork(work: Callable[..., None], *args: Any) -> int:
    # A fork has torch already: a new interpreter would take seconds, forty times.
    child = os.fork()
    if child == 0:
        try:
            work(*args)
        finally:
            os._exit(0 if sys.exception() is None else 1)
    return child


if __name__ == "__main__":
    for line in globals()[sys.argv[1]](Path(sys.argv[2])):
        sys.stdout.write(json.dumps(line) + "\n")
