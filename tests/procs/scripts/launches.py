"""Runs jobs that it reads from its input, a line of JSON each; answers each with a line: how it ended, what it printed.

Torch is loaded once for all of them: their workers are forked from one process, as `unisono verify` does it.
"""

import io
import json
import sys
from pathlib import Path

from unisono.launch.local import Launcher
from unisono.launch.outcome import open_folder
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.terminal import Terminal


def main() -> None:
    """Serve until the input ends."""
    with Launcher(share=True) as launcher:
        for line in sys.stdin:
            asked = json.loads(line)
            script, *arguments = asked["command"]
            settings = LaunchSettings(
                Script(script, tuple(arguments)), workers=asked["workers"], extra_environment=asked["variables"]
            )
            out, err = io.StringIO(), io.StringIO()
            folder = open_folder(Path(asked["folder"]), settings.script.stem)
            outcome = launcher.launch(settings, folder, Terminal(out, err))
            answer = {"code": outcome.exit_code, "out": out.getvalue(), "err": err.getvalue()}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
