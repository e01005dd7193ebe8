"""Training from a cell of a notebook: ``unisono.notebook.run(function, workers=(1, 4))``."""

from unisono.launch.notebook.cell import NotebookEnd, run

__all__ = ["NotebookEnd", "run"]
