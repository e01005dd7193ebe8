"""The promise in half a minute: train on real handwritten digits with 1 and with 3 workers, and compare the weights.

python examples/demo.py      (or: make demo)
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

DIGITS = Path(__file__).with_name("digits.py")


def train(workers, folder):
    """What a user types: unisono run -n WORKERS examples/digits.py. Returns what the run folder says at the end."""
    print(f"\n=== {workers} worker{'s' if workers > 1 else ''}", flush=True)
    command = [sys.executable, "-m", "unisono", "run", "-n", str(workers), "--run-dir", str(folder)]
    subprocess.run([*command, str(DIGITS), "--epochs", "6"], check=True)
    return json.loads((folder / "result.json").read_text())


with tempfile.TemporaryDirectory() as scratch:
    results = [train(workers, Path(scratch) / f"{workers}-workers") for workers in (1, 3)]

print()
for result in results:
    print(f"{result['world_size']} worker(s), {result['steps']} steps: weights sha256 {result['weights_sha256']}")
if len({result["weights_sha256"] for result in results}) > 1:
    sys.exit("The weights DIFFER. This must not happen: please report it with the output of `unisono doctor`.")
print("The weights are identical to the last bit.")
