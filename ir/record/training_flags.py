"""The training flags of a model and of all that stands for it: whoever is switched, the others follow.

A Pipe shares the modules that its stages call. A module that tracing took apart is there several times:

    model.encoder             the user's own, unless the Pipe was made from a copy
    pipe.encoder              a container
    submod_0.encoder, ...     a container in each stage that has a part of it

`train()` and `eval()` of each of them changes its own flag and those below it. Before a Pipe runs, a flag that was changed
anywhere is set everywhere.
"""

import weakref
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from pippy.ir.base.errors import ModeError
from pippy.ir.base.modes import ModelModes
from pippy.ir.record.compiled import Compiled


class TrainingFlags:
    """The modules that stand for each module of a user's model, and the flag that they had last.

    A copy of a Pipe has no user's model to follow: a pickled or copied object of this class knows of no module.
    """

    def __init__(self) -> None:
        self._flags: dict[str, bool] = {}  # by the path in the user's model
        self._members: list[tuple[str, weakref.ref[nn.Module]]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainingFlags, ()

    def note(self, pipe: nn.Module, compiled: Compiled, model: nn.Module | None = None) -> None:
        """Note all modules that there are. Their flags become those of ``model``, or else of ``pipe``."""
        root = pipe if model is None else model
        self._flags = {path: module.training for path, module in root.named_modules(remove_duplicate=False)}
        by_path: dict[str, dict[int, nn.Module]] = {path: {} for path in self._flags}
        for path, module in _all_modules(pipe, compiled, model):
            if path in by_path:
                by_path[path][id(module)] = module
        several = {path: modules for path, modules in by_path.items() if len(modules) > 1}
        self._members = [(path, weakref.ref(each)) for path, modules in several.items() for each in modules.values()]
        self._set_all()

    def follow(self, pipe: nn.Module, compiled: Compiled) -> None:
        """Set each flag that was changed in one place in all places."""
        if not self._flags:
            self.note(pipe, compiled)
        flags, changed = self._flags, set()
        for path, reference in self._members:
            module = reference()
            if module is not None and module.training != flags[path]:
                changed.add(path)
        if changed:
            flags.update({path: not flags[path] for path in changed})
            self._set_all()

    def set_mode(self, pipe: nn.Module, compiled: Compiled, mode: bool) -> None:
        """Set all flags to what `train(mode)` of the user's model sets them to."""
        if not self._flags:
            self.note(pipe, compiled)
        self._flags = {path: compiled.modes.flag(path, mode) for path in self._flags}
        self._set_all()

    def modules(self) -> list[nn.Module]:
        """The modules that stand for the same module of the user's model as another does."""
        return [module for _, reference in self._members if (module := reference()) is not None]

    def models(self) -> list[nn.Module]:
        """The user's model, and the Pipe, but no stage."""
        roots = [reference() for path, reference in self._members if path == ""]
        return [each for each in roots if each is not None and not isinstance(each, fx.GraphModule)]

    def _set_all(self) -> None:
        for path, reference in self._members:
            module = reference()
            if module is not None:
                module.training = self._flags[path]

    def check(self, modes: ModelModes) -> None:
        """Raise if the graph is not known to be right in the modes that the modules are in."""
        if modes.is_as_traced(self._flags):
            return
        mode = modes.mode_of(self._flags)
        if mode is None:
            raise ModeError(self._mixed(modes))
        if mode in modes.refused:
            now, other = ("train", "eval") if mode else ("eval", "train")
            instead = f", or call pipe.{other}()" if (not mode) not in modes.refused else ""
            raise ModeError(
                f"this Pipe was not traced in {now} mode, in which the model does something else from here on:\n"
                f"{modes.refused[mode]}\nWhat to do: make another Pipe from the model in {now} mode{instead}"
            )

    def _mixed(self, modes: ModelModes) -> str:
        """What is wrong if some modules were switched and others were not."""
        flags = {path or "the model": self._flags[path] for path, flag in modes.traced.items()}
        training, evaluating = ([path for path, flag in flags.items() if flag is mode] for mode in (True, False))
        return (
            f"some modules whose forward reads `training` are in train mode ({', '.join(training)}) and some in eval mode "
            f"({', '.join(evaluating)}), which they were not when the Pipe was made, so it is not known what the model does. "
            "What to do: make another Pipe from the model as it is now, or call pipe.train() or pipe.eval()"
        )


def _all_modules(pipe: nn.Module, compiled: Compiled, model: nn.Module | None) -> Iterator[tuple[str, nn.Module]]:
    """All modules that stand for one of the user's model, with its path there."""
    for root in (pipe,) if model is None else (model, pipe):
        yield from root.named_modules(remove_duplicate=False)
    for name, stage in compiled.stages():
        for path, module in stage.named_modules(remove_duplicate=False):
            yield compiled.remap_qualname(f"{name}.{path}") if path else "", module
