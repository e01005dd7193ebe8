"""Who shows, logs and reports: the main worker alone, whichever that is."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from unisono.train.run import Run


class MainWorker(TrainerCallback):  # type: ignore[misc]  # optional: it may be missing
    """Comes before all other callbacks, and tells them whether they are on the main worker now.

    Transformers' callbacks that write do so where the state says that this is the main process. One that becomes so in
    the middle of a training hears of its beginning.

    Args:
        run: the run.
        callbacks: the trainer's callbacks.
    """

    def __init__(self, run: Run, callbacks: Any) -> None:
        self._run, self._callbacks = run, callbacks
        self._has_begun: bool | None = None  # there, on the main worker; None outside of trainings

    def _hear(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        is_main = self._run.is_main
        state.is_world_process_zero = state.is_local_process_zero = is_main
        if self._has_begun is False and is_main:
            self._has_begun = True
            for one in writers(self._callbacks.callbacks):
                one.on_train_begin(args, state, control, **parts)

    on_epoch_begin = on_epoch_end = on_step_begin = on_step_end = on_pre_optimizer_step = on_optimizer_step = _hear
    on_evaluate = on_predict = on_prediction_step = on_save = on_log = on_push_begin = on_init_end = _hear

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The others hear of it next."""
        self._has_begun = self._run.is_main
        self._hear(args, state, control, **parts)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The training is over."""
        self._hear(args, state, control, **parts)
        self._has_begun = None


def writers(callbacks: Any) -> list[Any]:
    """Those of Transformers' own callbacks that write or show."""
    return [one for one in callbacks if type(one).__module__.startswith("transformers.") and not decides(one)]


def decides(callback: Any) -> bool:
    """Whether a callback keeps a state that decides something, as far as Transformers knows."""
    return hasattr(callback, "state") or not type(callback).__module__.startswith("transformers.")
