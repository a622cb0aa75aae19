"""Keeping the state at a halt: the trainer's own save, sent to another folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kl_guard.paths import unused
from kl_guard_torch.room import why_no_room

COMPLETIONS = "completions"


class HaltedState:
    """Sends the one save at a halt to `<output_dir>/kl_guard/halted/step-N`.

    The trainer itself saves, so that sharded and quantised models come out complete, and its rotation, which looks
    only at the folder it saves to, leaves the run's own checkpoints alone. `output_dir` and `push_to_hub` of the
    training arguments are changed for the time of that save and put back in `finish`, and so is the best checkpoint
    that the trainer remembers: were it the halted state, the trainer would delete all others at the end.
    """

    def __init__(self, args: Any, state: Any) -> None:
        self._args = args
        self._state = state
        self._best = state.best_model_checkpoint
        self._output_dir: str = args.output_dir
        self._push = getattr(args, "push_to_hub", False)
        self.folder = Path(args.output_dir) / "kl_guard" / "halted"
        self.path: Path | None = None
        self._redirected = False
        self.saved = False

    def why_not(self, model: Any) -> str:
        """Make the folder; return why the state cannot be kept there, "" where it can."""
        try:
            if (Path(self._output_dir) / COMPLETIONS).is_dir():
                # TRL writes them after on_log, to where output_dir points by then.
                (self.folder / COMPLETIONS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"{self.folder} cannot be written ({error})"
        return why_no_room(self.folder, model)

    def redirect(self) -> None:
        """Send what the trainer saves next to the folder of halted states."""
        self._redirected = True
        self._args.output_dir = str(self.folder)
        if self._push:
            self._args.push_to_hub = False

    @property
    def pending(self) -> bool:
        """Whether the arguments are changed: the save is to come, or has been and is to be put in its place."""
        return self._redirected

    def restore(self) -> None:
        """Put the training arguments back."""
        if self._redirected:
            self._redirected = False
            self._args.output_dir = self._output_dir
            self._state.best_model_checkpoint = self._best
            if self._push:
                self._args.push_to_hub = True

    def finish(self, step: int, *, renames: bool) -> None:
        """Put the arguments back after the save, and give its folder its name."""
        self.restore()
        saved = self.folder / f"checkpoint-{step}"
        target = self.folder / f"step-{step}"
        if saved.exists():
            target = unused(target)
        if renames:
            if saved.exists():
                saved.rename(target)
                card = self.folder / "README.md"  # TRL writes the model card beside the checkpoint
                if card.is_file() and not (target / card.name).exists():
                    card.rename(target / card.name)
            for log in (self.folder / COMPLETIONS).glob("*"):
                log.replace(Path(self._output_dir) / COMPLETIONS / log.name)
        self.path = target
