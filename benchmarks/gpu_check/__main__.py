"""The command line: ``python -m benchmarks.gpu_check``."""

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.checks import VARYING, Checks
from benchmarks.gpu_check.parts import Row, done, exit_code, table
from benchmarks.gpu_check.processes import Setting
from forks.commands import warm_jobs

ROOT = Path(__file__).parents[2]
SEES_ONE = "import torch; assert torch.accelerator.current_accelerator(check_available=True)"
"""In a process of its own: whoever has looked can fork nobody that uses a device."""


def main() -> int:
    """Do all parts, print the table, and write it as JSON after each row; returns the exit code."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what runs is ended
    os.environ.update(_variables(simulated=options.simulated))
    if options.device is None and subprocess.run([sys.executable, "-c", SEES_ONE], check=False).returncode:
        print("torch sees no accelerator here (a dry run: --device cpu --small)", file=sys.stderr)
        return 1
    output = options.output.resolve()
    setting = Setting(options.device, options.small, output)
    small: dict[str, Any] = {"workers": (1, 3), "steps": 40} if options.small else {}
    checks = Checks(setting, patience=options.patience, **small)
    parts = [part for part in checks.parts() if not options.only or part.name in options.only]
    output.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with warm_jobs(varying=VARYING):
        for row in done(parts, options.budget_s * options.patience):
            rows.append(row)
            (output / "gpu-check.json").write_text(json.dumps([asdict(each) for each in rows], indent=1))
            print(f"{row.part}: {row.check}: {row.result} {row.note}", flush=True)
    print(f"\n{table(rows)}")
    return exit_code(parts, rows)


def _variables(*, simulated: bool) -> dict[str, str]:
    """Those of all processes, which find this package from any folder."""
    found = dict(os.environ)
    if simulated:
        from simulated_accelerator import built, environment

        found = environment(built(), nccl=True)
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [found.get("PYTHONPATH")])]
    return {**found, "PYTHONPATH": os.pathsep.join(paths)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--budget-s", type=float, default=460, help="seconds; parts that may take longer are skipped")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="all may take so many times as long: a slow machine"
    )
    parser.add_argument("--only", action="append", help="the name of a part; repeat for more")
    parser.add_argument("--device", help="as torch names it; by default the accelerator that there is")
    parser.add_argument("--small", action="store_true", help="small models, few steps: a dry run")
    parser.add_argument("--simulated", action="store_true", help="on the simulated accelerator of the tests; needs g++")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu-check", help="a folder")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
