"""The hooks of modules: what tracing has made of them is in the graph, so a later change of them is refused.

a hook of a module that is traced through     its operations are in the graph
of a module that stages call as a whole       called there; a worker has those that were there when a driver was made
of the model itself                           refused, as no stage calls the model
of all modules (`register_module_...`)        refused: ir/base/surroundings.py
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from pippy.ir.base.errors import ModeError
from pippy.ir.record.compiled import Compiled

HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_Hooks = tuple[tuple[Callable[..., Any], ...], ...]


def hooks_of(module: nn.Module) -> list[str]:
    """The kinds of hooks that a module has.

    >>> linear = nn.Linear(2, 2)
    >>> handle = linear.register_forward_pre_hook(lambda module, args: None)
    >>> hooks_of(linear)
    ['forward_pre_hooks']
    """
    return [kind.strip("_") for kind in HOOK_ATTRIBUTES if getattr(module, kind)]


class ModuleHooks:
    """The hooks that the modules of a Pipe and of its model had when it was made, or when they were noted last.

    A copy of a Pipe has no model to follow: a pickled or copied object of this class knows of no module.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[str, weakref.ref[nn.Module], bool, _Hooks]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHooks, ()

    def note(self, pipe: nn.Module, compiled: Compiled, model: nn.Module) -> None:
        """Note the hooks of all modules that there are."""
        stages = _called_whole(compiled)
        roots = {id(each): (path, each) for root in (pipe, model) for path, each in root.named_modules()}
        for path, module in roots.values():
            whole = path in stages and all(each is module for each in stages[path])
            self._noted.append((path, weakref.ref(module), whole, _hooks(module)))

    def again(self) -> "ModuleHooks":
        """What was noted, with the hooks that modules have now which stages call as a whole."""
        hooks = ModuleHooks()
        for path, reference, whole, before in self._noted:
            module = reference()
            if module is not None:
                hooks._noted.append((path, reference, whole, _hooks(module) if whole else before))
        return hooks

    def check(self, pipe: nn.Module | None = None) -> None:
        """Raise if some hooks have changed that would not be followed. A ``pipe`` that runs in this process calls its own, and
        those of the modules that its stages call."""
        for path, reference, whole, before in self._noted:
            module = reference()
            follows = pipe is not None and (whole or module is pipe)
            if module is not None and not follows and _hooks(module) != before:
                name = f"{path!r} ({type(module).__name__})" if path else f"the {type(module).__name__} itself"
                remedy = "make the driver again" if whole else "call pipeline() again" if path else "take it off"
                raise ModeError(
                    f"the hooks of {name} are not those of before ({', '.join(hooks_of(module)) or 'none'} now), and stages do "
                    f"not follow: {_why(whole, path)}; {remedy}"
                )


def _why(whole: bool, path: str) -> str:
    if not path:
        return "no stage calls the model"
    if whole:
        return "the workers have the module as it was when the driver was made"
    return "what the module and its hooks do became operations of the stages when it was traced"


def _hooks(module: nn.Module) -> _Hooks:
    own = vars(module)
    return tuple([tuple(own[kind].values()) for kind in HOOK_ATTRIBUTES])


def _called_whole(compiled: Compiled) -> dict[str, list[nn.Module]]:
    """By the path in the user's model, the modules of stages that are called as a whole, or are inside of one."""
    modules: dict[str, list[nn.Module]] = {}
    for name, stage in compiled.stages():
        for target in dict.fromkeys(_targets(stage)):
            for path, module in stage.get_submodule(target).named_modules(prefix=target, remove_duplicate=False):
                modules.setdefault(compiled.remap_qualname(f"{name}.{path}"), []).append(module)
    return modules


def _targets(stage: nn.Module) -> Iterator[str]:
    graph: Any = getattr(stage, "graph", None)
    for node in graph.nodes if graph is not None else ():
        if node.op == "call_module":
            yield str(node.target)
