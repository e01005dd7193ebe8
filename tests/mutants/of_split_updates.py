"""Mistakes in split updates, and in what scripts see of them."""

from mutants.mutant import Mutant

HOST_STATE = "train/step/host_state.py"
MEMORY = "train/step/script_memory.py"
SHARED = "train/step/shared_state.py"
UPDATE = "train/step/sharded_update.py"

COPIES = ("tests/unit/test_host_state.py",)
STRUCK = ("tests/unit/test_struck_updates.py",)
SCRIPTS = ("tests/unit/test_split_updates.py",)

MUTANTS = (
    Mutant(
        "a piece is touched before it is marked as begun",
        HOST_STATE,
        "            self._mark(number, 2 * place + 1)\n",
        "",
        COPIES,
    ),
    Mutant(
        "a piece is marked as done before it is updated",
        HOST_STATE,
        "            self._mark(number, 2 * place + 1)\n",
        "            self._mark(number, 2 * place + 2)\n",
        COPIES,
    ),
    Mutant(
        "a piece that is begun is copied from where it lies",
        HOST_STATE,
        "source = self._scratch_of(worker, piece) if stage is PieceStage.BEGUN else places",
        "source = places",
        COPIES,
    ),
    Mutant(
        "a mark is not read again after a piece was copied",
        HOST_STATE,
        "            if self._stage(number, worker, place) is stage:\n",
        "            if stage is not None:\n",
        COPIES,
    ),
    Mutant(
        "marks of the update before count",
        HOST_STATE,
        "        if update != number or place > done:\n",
        "        if place > done:\n",
        COPIES,
    ),
    Mutant(
        "an update begins although not all can finish it",
        UPDATE,
        "        if not self._survives or self._meets():",
        "        if True:",
        STRUCK,
    ),
    Mutant(
        "a survivor leaves out what was not done",
        UPDATE,
        "*(each.piece.slices for each in copied.pieces if not each.is_done)",
        "*(each.piece.slices for each in copied.pieces if each.is_done)",
        STRUCK,
    ),
    Mutant(
        "a survivor goes on from scalars that are updated already",
        UPDATE,
        "shared.shown.tensors, shared.parts.old)",
        "shared.shown.tensors)",
        STRUCK,
    ),
    Mutant(
        "memory moves although the script holds it",
        SHARED,
        "        if tensor.is_shared() or is_held_elsewhere(tensor):\n",
        "        if False:\n",
        SCRIPTS,
    ),
    Mutant(
        "what the script has written is forgotten when workers part",
        UPDATE,
        "self._shared.keep(self._shared.seen() if self._shared.shown.is_written() else rows)",
        "self._shared.keep(rows)",
        SCRIPTS,
    ),
    Mutant(
        "nobody looks for writes of the script",
        UPDATE,
        "        is_written = self._shared.shown.is_found_written()\n",
        "        is_written = False\n",
        SCRIPTS,
    ),
    Mutant(
        "page faults of the script are overlooked",
        MEMORY,
        "        self._may_be_written = self._faults != _page_faults()\n",
        "        self._may_be_written = False\n",
        ("tests/unit/test_script_memory.py",),
    ),
    Mutant(
        "a process that the script forks sees the weights change",
        MEMORY,
        "os.register_at_fork(before=_hold_still)\n",
        "",
        SCRIPTS,
    ),
)
