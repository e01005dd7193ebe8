"""Portable numerics on processors of several makers, which qemu emulates beside this machine's own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from training import Trained, control_of, whole_lines
from unisono.host.machine import numerics_variables
from unisono.launch.elastic.address import WHERE

QEMU = "qemu-x86_64"
PROCESSORS = ("Haswell", "EPYC", "Skylake-Client")
"""None has AVX-512, and they are of two makers: whatever this machine is, one of them is another."""

pytestmark = [
    pytest.mark.procs,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which(QEMU) is None, reason="NO QEMU: make qemu installs it, as root on Debian"),
]

JOBS = Path(__file__).parent / "scripts" / "exact_jobs.py"
MATRIX = (
    *("batch_norm_dropout_tied_unused", "a_batch_that_shards_do_not_divide", "thirteen_shards"),
    *("a_last_batch_smaller_than_the_number_of_shards", "a_dropped_last_batch", "adamw_clipped_by_norm"),
    *("momentum_and_groups_with_a_frozen_parameter", "bf16_parameters"),
)
"""Without torch's fused SGD without momentum, in which Debian's qemu-x86_64 crashes."""

BITS = """
import json, sys, torch
from unisono.train.config.bits import bits_of
from unisono.train.config.bits import KERNELS, require_portable
torch.set_num_threads(int(sys.argv[1]))
require_portable(torch.device("cpu"))
KERNELS.put(True)
print("BITS", json.dumps(dict(bits_of(torch.device("cpu")))))
"""

JOIN = """
import sys
import time
sys.executable, *sys.argv = sys.argv[1:]
from unisono.cli.app import main
main()
"""


def computed(command: Sequence[str], processor: str | None, **variables: str) -> str:
    """What a program prints on an emulated processor, or on this machine's own."""
    emulated = [] if processor is None else [QEMU, "-cpu", processor]
    own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **numerics_variables("portable"), **variables}
    done = subprocess.run(
        [*emulated, sys.executable, *command], env={**os.environ, **own}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("threads", ["1", "2", "3"])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_an_emulated_processor_computes_every_operation_as_this_one(processor: str, threads: str) -> None:
    told = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    here, there = (
        json.loads(computed(("-c", BITS, threads), each, **told).split("BITS ")[1]) for each in (None, processor)
    )
    assert there == here


@pytest.mark.parametrize("processor", ["Nehalem", "IvyBridge"])
def test_a_processor_without_avx2_is_refused_by_name(processor: str) -> None:
    own = {**os.environ, **numerics_variables("portable")}
    command = [QEMU, "-cpu", processor, sys.executable, "-c", BITS, "1"]
    refused = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "numerics='portable' needs x86 processors with AVX2 on all hosts, and host " in refused.stderr


@pytest.mark.parametrize("processor", PROCESSORS)
def test_small_jobs_end_in_the_same_bits_on_an_emulated_processor(processor: str, tmp_path: Path) -> None:
    shards = {"UNISONO_SHARDS": "8"}
    found = [
        computed((str(JOBS), *MATRIX), each, UNISONO_RUN_DIR=str(tmp_path / f"{each}"), **shards)
        for each in (None, processor)
    ]
    here, there = ([line for line in text.splitlines() if "RESULT" in line] for text in found)
    assert len(here) == len(MATRIX)
    assert there == here


def emulated_python(folder: Path, processor: str) -> Path:
    """Python on an emulated processor, as a program."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {QEMU} -cpu {processor} {sys.executable} "$@"\n')
    python.chmod(0o700)
    return python


SLOWLY = """
import os
import sys
import time
sys.path.insert(0, {folder!r})
from exact_jobs import Net, cross_entropy, images
import torch, unisono
def loss(model, batch):
    time.sleep(0 if os.path.exists({hurry!r}) else 1.0)
    return cross_entropy(model, batch)
run = unisono.init(batch_size=64, shards=4, seed=3)
model = Net()
run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
for step in run.steps(images(256), epochs=6):
    step.run(loss)
run.finish()
"""


def test_beside_an_emulated_processor_a_worker_is_killed_and_another_joins_and_no_bit_changes(tmp_path: Path) -> None:
    script, hurry = tmp_path / "train.py", tmp_path / "hurry"
    script.write_text(SLOWLY.format(folder=str(JOBS.parent), hurry=str(hurry)))
    python = emulated_python(tmp_path, PROCESSORS[0])
    hurry.touch()
    serial = computed((str(script),), None, UNISONO_RUN_DIR=str(tmp_path / "serial"))
    hurry.unlink()
    job = Trained(tmp_path / "run")

    def trained() -> list[str]:
        """The workers that have trained a step together last."""
        found = [line for line in whole_lines(job.run_dir / "metrics.jsonl") if "loss" in line]
        minted = {one["generation"]: one["workers"] for one in job.journal("minted")}
        return minted[found[-1]["generation"]] if found else []

    def until(is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert started[0].poll() is None, "it has ended too soon"
            time.sleep(0.1)

    def start(*command: str) -> None:
        started.append(opened.enter_context(subprocess.Popen(command)))
        opened.callback(started[-1].kill)

    started: list[subprocess.Popen[bytes]] = []
    unisono = (sys.executable, "-m", "unisono")
    here = ("--numerics", "portable", "--run-dir", str(job.run_dir))
    with ExitStack() as opened:
        start(*unisono, "run", *here, "-n", "2:3", "--coordinator", "127.0.0.1:0", "--here", "1", str(script))
        until((job.run_dir / WHERE).exists)
        how = ("join", *here, "--no-warm-start", str(script))
        start(sys.executable, "-c", JOIN, str(python), "unisono", *how)
        until(lambda: trained() == ["w1", "w2"])
        (native,) = (one["pid"] for one in control_of(job.run_dir).status()["members"] if one["id"] == "w1")
        os.kill(native, signal.SIGKILL)
        until(lambda: len(trained()) == 2 and "w1" not in trained())
        start(*unisono, "join", *here, str(script))
        until(lambda: len(trained()) == 3)
        hurry.touch()
        assert [one.wait(600) for one in started] == [0, 0, 0]
    assert job.end() == serial.split("weights sha256 ")[1].split()[0]
    assert job.steps == list(range(24))
