"""The promise in a minute: kill a worker, add two, and get the weights of the undisturbed serial run, bit for bit.

python examples/demo.py      (or: make demo)
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DIGITS = [str(Path(__file__).with_name("digits.py")), "--epochs", "24"]
UNISONO = [sys.executable, "-m", "unisono"]


def train(folder, *workers):
    """What a user types: unisono run -n WORKERS examples/digits.py."""
    command = [*UNISONO, "run", *workers, "--run-dir", str(folder), *DIGITS]
    with folder.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def status(folder):
    """Who takes part in a job that runs: unisono status --json."""
    asked = subprocess.run([*UNISONO, "status", "--json", "--run-dir", str(folder)], capture_output=True, check=False)
    return json.loads(asked.stdout) if asked.returncode == 0 else {"members": []}


def await_workers(job, folder, wanted, step=0):
    """Wait until so many workers train together, and are past a step."""
    while job.poll() is None:
        members = status(folder)["members"]
        if len(members) == wanted and members[0]["step"] >= step:
            return members
        time.sleep(0.1)
    sys.exit(f"The job ended before {wanted} workers trained:\n{folder.with_suffix('.log').read_text()}")


def finish(job, folder):
    """Wait for the end, and return what the run folder says."""
    if job.wait():
        sys.exit(folder.with_suffix(".log").read_text())
    return json.loads((folder / "result.json").read_text())


def show_events(folder):
    """What happened, from the journal, with the seconds since the beginning."""
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    begun = time.mktime(time.strptime(lines[0]["time"][:19], "%Y-%m-%dT%H:%M:%S"))
    for line in lines:
        seconds = time.mktime(time.strptime(line["time"][:19], "%Y-%m-%dT%H:%M:%S")) - begun
        if line["event"] == "lost":
            print(f"  {seconds:3.0f} s  {line['worker']} is lost: {line['why']}")
        elif line["event"] == "minted":
            print(f"  {seconds:3.0f} s  generation {line['generation']}: {', '.join(line['workers'])} train")
        elif line["event"] == "formed":
            parts = {name: 1000 * seconds for name, seconds in line["seconds"].items()}
            listed = ", ".join(f"{name} {took:.0f}" for name, took in parts.items())
            print(f"         it stood for {sum(parts.values()):.0f} ms: {listed}")


with tempfile.TemporaryDirectory() as scratch:
    serial, elastic = Path(scratch) / "serial", Path(scratch) / "elastic"
    print("=== the serial run: unisono run -n 1 examples/digits.py", flush=True)
    results = [finish(train(serial, "-n", "1"), serial)]

    print("=== the same job on workers that come, go and die: unisono run -n 1:4 examples/digits.py", flush=True)
    job = train(elastic, "-n", "1:4")
    members = await_workers(job, elastic, wanted=min(2, os.cpu_count() or 1), step=20)
    os.kill(members[-1]["pid"], signal.SIGKILL)
    print(f"    killed {members[-1]['id']} with SIGKILL, in the middle of training", flush=True)
    subprocess.run([*UNISONO, "resize", "4", "--run-dir", str(elastic)], check=True, stdout=subprocess.DEVNULL)
    print("    unisono resize 4", flush=True)
    await_workers(job, elastic, wanted=4)
    results.append(finish(job, elastic))
    show_events(elastic)

print()
for name, result in zip(("serial", "elastic"), results, strict=True):
    print(f"{name:8} {result['steps']} steps: weights sha256 {result['weights_sha256']}")
if len({result["weights_sha256"] for result in results}) > 1:
    sys.exit("The weights DIFFER. This must not happen: please report it with the output of `unisono doctor`.")
print("The weights are identical to the last bit.")
