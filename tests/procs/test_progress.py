"""The bar of a plain loop in the terminal of unisono run, while workers print and the main one is killed."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from forks.commands import start

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parent / "scripts" / "bar.py"
PATIENCE_S = 120.0


LAST_EPOCH = r"epoch 3/3 [━╌]{10} \d+/10 loss \d+\.\d+ \d+ samples/s \d workers? \d:\d\d:\d\d left"


def on_a_terminal(*words: str, seen: Path) -> str:
    """What a command writes to a terminal of its own. A file is made when the bar of the last epoch is there."""
    screen, terminal = os.openpty()
    written: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(screen, 65536):
                written.append(data)
                if re.search(LAST_EPOCH, b"".join(written).decode(errors="replace")):
                    seen.touch()
        except OSError:  # nobody has the terminal any more
            pass

    reader = threading.Thread(target=read)
    reader.start()
    process = start(*words, stdout=terminal, stderr=terminal)
    os.close(terminal)
    assert process.wait(PATIENCE_S) == 0, b"".join(written)
    reader.join(PATIENCE_S)
    os.close(screen)
    return b"".join(written).decode().replace("\r\n", "\n")


def drawn(text: str) -> tuple[list[str], list[str]]:
    """The lines that stay on the screen, and all bars that were drawn below them."""
    lines, bars = [""], []
    for part in re.split(r"(\r\x1b\[K|\n)", re.sub(r"\x1b\[[0-9;]*m", "", text)):
        if part == "\n":
            lines.append("")
        elif part == "\r\x1b[K":
            bars.append(lines[-1])
            lines[-1] = ""
        else:
            lines[-1] += part
    return lines, bars


def test_a_bar_stays_below_the_lines_of_workers_also_when_the_main_worker_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ("run", "-n", "3", "--max-restarts", "1", "--run-dir", str(run_dir), str(SCRIPT))
    lines, bars = drawn(on_a_terminal(*words, seen=run_dir / "seen"))
    assert all(re.fullmatch(r"epoch [123]/3 [━╌]{10} \d+/10( loss .*)?", bar) for bar in bars if bar)
    assert not any("━" in line or "╌" in line for line in lines)
    assert {f"worker {rank} at step 5" for rank in range(3)} <= {line.partition("] ")[2] for line in lines}
    after = bars[next(number for number, bar in enumerate(bars) if "2 workers" in bar or "epoch 2/3" in bar) :]
    assert any(re.fullmatch(LAST_EPOCH, bar) for bar in after)
    logs = "".join(log.read_text() for log in (run_dir / "logs").glob("w*.log"))
    assert "worker 0 at step 5" in logs
    assert "unisono;" not in logs
    assert "━" not in logs
