"""What a script may change after `pipeline()`. It is noted, and looked at before each step: a change is followed, or refused.

the script changes                      in modules that stages call whole,     in modules that were traced through
                                        and in the loss
────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
training flags, `requires_grad`         followed                               followed
an attribute: a number, a tensor, ...   followed: it is sent with the step     refused if tracing has read it
an attribute: something else            refused if it may be read              refused if tracing has read it
a child, a parameter, a buffer          refused (a buffer of the loss:         refused
                                          followed)
hooks                                   refused: make the driver again         refused: call pipeline() again
globals and closures that code reads    followed in a loss function            refused: call pipeline() again
                                          whose code is sent; else refused
numbers of parameters and buffers       the driver compares them with those of the workers; of the loss: followed

What forward itself assigns is left alone. Nothing is looked at inside of lists, and of objects that attributes refer to.

Whoever is switched to training or evaluation, the others follow (`TrainingFlags`). A Pipe shares the modules that its stages
call. A module that tracing took apart is there several times:

    model.encoder             the user's own, unless the Pipe was made from a copy
    pipe.encoder              a container
    submod_0.encoder, ...     a container in each stage that has a part of it

`train()` and `eval()` of each of them changes its own flag and those below it. Before a Pipe runs, a flag that was changed
anywhere is set everywhere.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from pippy.ir.base.errors import ModeError
from pippy.ir.base.names import LOSS, named_state
from pippy.ir.base.trees import describe
from pippy.ir.record.code_reads import (
    GONE,
    Read,
    assigned_attributes,
    code_reads,
    is_plain_value,
    noting_numbers,
    reached_methods,
)
from pippy.ir.record.compiled import Compiled, ModelModes
from pippy.ir.record.reached import HOOK_ATTRIBUTES


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


_TENSORS = ("_parameters", "_buffers")
_TABLES = (*_TENSORS, "_modules", *HOOK_ATTRIBUTES)
_OF_TORCH = {*vars(nn.Module()), "_compiled_call_impl"}  # attributes that are no option of a module
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # whose children are called, whatever their names are
_AGAIN = "call pipeline() again, and make the driver of what it gives"
_KEEP = "driver.copy_to(model) first keeps what was trained"
_COPY = "To keep what was trained, call driver.copy_to(model) before something is replaced"

Place = tuple[str, int, nn.Module]
"""Where a stage has a module: the stage, the number among its modules, and the module there, which may be a copy."""


def hooks_of(module: nn.Module) -> list[str]:
    """The kinds of hooks that a module has.

    >>> linear = nn.Linear(2, 2)
    >>> handle = linear.register_forward_pre_hook(lambda module, args: None)
    >>> hooks_of(linear)
    ['forward_pre_hooks']
    """
    return [kind.strip("_") for kind in HOOK_ATTRIBUTES if getattr(module, kind)]


@dataclass(eq=False)
class _Part:
    """A module of the script, with what was in its tables. ``places`` are those where stages call it whole; else ``reads`` has
    the attributes that tracing has read."""

    path: str
    module: nn.Module
    places: list[Place]
    reads: set[str]
    of_loss: bool = False
    before: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        kind = type(self.module).__name__
        return f"{self.path!r} ({kind})" if self.path else f"the {'loss' if self.of_loss else kind} itself"

    @property
    def is_shared(self) -> bool:
        """Whether the stages of this process have the module itself."""
        return bool(self.places) and all(each is self.module for _, _, each in self.places)

    def tables(self) -> dict[str, dict[str, Any]]:
        """The dictionaries of the module: its attributes under the empty name."""
        own = vars(self.module)
        return {"": own, **{name: own[name] for name in _TABLES if isinstance(own.get(name), dict)}}

    def note(self) -> None:
        self.before = {name: dict(table) for name, table in self.tables().items()}

    def changes(self) -> Iterator[tuple[str, str, Any, Any]]:
        """What is not as it was noted: the table, the name in it, what was there, and what is there now."""
        for table, now in self.tables().items():
            before = self.before.get(table, {})
            for name in {**before, **now} if _differ(now, before) else ():
                old, new = before.get(name, GONE), now.get(name, GONE)
                if old is not new and not (table == "" and name in _OF_TORCH):
                    yield table, name, old, new

    def may_read(self, name: str) -> bool:
        """Whether a forward may read an attribute of this name."""
        if not self.places:
            return name in self.reads
        return hasattr(type(self.module), name) or any(
            name in method.__code__.co_names for kind in type(self.module).__mro__ for method in _methods(kind)
        )

    def assigns(self, name: str) -> bool:
        """Whether forward, or a hook of the module, assigns this attribute: the workers have their own."""
        hooks = [
            getattr(each, "__func__", each) for kind in HOOK_ATTRIBUTES for each in vars(self.module)[kind].values()
        ]
        return name in assigned_attributes([*reached_methods(type(self.module)), *hooks])


def _methods(kind: type) -> Iterator[Any]:
    if kind not in (nn.Module, object):
        yield from (each for each in vars(kind).values() if hasattr(each, "__code__"))


class ModelWatch:
    """What a script may change of a Pipe's model and loss, as it was when it was noted last.

    ``settings`` has what was followed since: the values of attributes, by their stage, the number of the module there, and the
    name. A copy of a Pipe has no model to follow: a pickled or copied object of this class knows of no module.
    """

    def __init__(self) -> None:
        self.flags = TrainingFlags()
        self.settings: dict[str, dict[tuple[int, str], Any]] = {}
        self._parts: list[_Part] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._in_stages: set[int] = set()  # their ids, of those of the model that stages have
        self._loss: Any = None
        self._traced: list[Read] = []  # of code that was traced
        self._sent: list[Read] = []  # of code that the workers have

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelWatch, ()

    def begin(
        self, pipe: nn.Module, compiled: Compiled, model: nn.Module, loss: Any, reads: Iterable[tuple[type, str]]
    ) -> None:
        """Note the modules of the Pipe, of its model and of the loss. ``reads`` is that of the traced model."""
        self.flags.note(pipe, compiled, model)
        places = _called_whole(compiled)
        modules = {id(each): (path, each) for root in (pipe, model) for path, each in root.named_modules()}
        names: dict[type, set[str]] = {}
        for kind, name in reads:
            names.setdefault(kind, set()).add(name)
        self._parts = [
            _Part(path, each, [] if each is pipe else places.get(path, []), names.get(type(each), set()))
            for path, each in modules.values()
        ]
        self._tensors, self._loss = dict(named_state(model)), loss
        of_model = compiled.qualnames
        self._in_stages = {
            id(each) for name, each in self._tensors.items() if of_model.places.get(of_model.canonical.get(name, name))
        }
        if isinstance(loss, nn.Module):
            of_loss, known = _places_of_loss(compiled, loss), set(map(id, self._tensors.values()))
            own = [(path, each) for path, each in loss.named_modules() if id(each) not in modules]
            self._parts += [_Part(path, each, of_loss.get(path, []), set(), True) for path, each in own]
            self._tensors |= {f"{LOSS}.{name}": each for name, each in named_state(loss) if id(each) not in known}
        self._tensors = {
            name: each for name, each in self._tensors.items() if not isinstance(each, UninitializedTensorMixin)
        }
        self._versioned = [each for each in self._tensors.values() if not each.is_inference()]
        self._in_memory = [each for each in self._tensors.values() if _has_memory(each)]
        self._versions, self._memory = self._numbers_now()
        self._read_code()
        self.note()

    def _read_code(self) -> None:
        """Note what the code of modules and of the loss reads."""
        known = {id(each.module) for each in self._parts}
        traced, whole = ([each for each in self._parts if bool(each.places) is is_whole] for is_whole in (False, True))
        held = [vars(each.module).get(name) for each in traced for name in each.reads]
        functions = [each for each in held if callable(each) and not isinstance(each, nn.Module)]
        self._traced = code_reads([*(type(each.module) for each in traced), *functions], known)
        self._sent = code_reads([type(each.module) for each in whole], known) + self._reads_of_loss()

    def _reads_of_loss(self) -> list[Read]:
        """What the loss reads. The numbers of tensors that no stage has are noted: those of stages are compared otherwise."""
        in_stages = {
            id(each.module)
            for each in self._parts
            if each.places or any(id(own) in self._in_stages for _, own in named_state(each.module))
        }
        reads = code_reads(self._loss_functions, in_stages)
        others = noting_numbers(each for each in reads if id(each.value) not in self._in_stages)
        return [each for each in reads if id(each.value) in self._in_stages] + others

    @property
    def _loss_functions(self) -> list[Any]:
        return [] if self._loss is None or isinstance(self._loss, nn.Module) else [self._loss]

    def for_driver(self) -> "ModelWatch":
        """Another, for a driver that sends the workers now what there is in the modules that stages share."""
        watch = ModelWatch()
        vars(watch).update(vars(self), settings={})
        watch._parts = [replace(each) for each in self._parts]
        watch._sent = _looked_again(self._sent)
        watch._note([each for each in watch._parts if each.is_shared])
        return watch

    def note(self) -> None:
        """Note what there is now."""
        self._traced, self._sent = map(_looked_again, (self._traced, self._sent))
        self._note(self._parts)

    def _note(self, parts: Iterable[_Part]) -> None:
        for part in parts:
            part.note()
        pairs = [(table, part.before.get(name, {})) for part in self._parts for name, table in part.tables().items()]
        self._filled = [table for table, before in pairs if table or before]
        self._values = [value for table, before in pairs if table or before for value in before.values()]
        self._empty = [table for table, before in pairs if not (table or before)]
        self._switched = self.flags.modules()
        self._training = [each.training for each in self._switched]
        self._trained = [each.requires_grad for each in self._tensors.values()]
        self.note_numbers()

    def note_numbers(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Note the numbers of parameters and buffers, or of these among them: the workers have them."""
        ids = set(map(id, self._tensors.values() if tensors is None else tensors))
        versions, memory = self._numbers_now()
        self._versions = _where(ids, self._versioned, versions, self._versions)
        self._memory = _where(ids, self._in_memory, memory, self._memory)

    def _numbers_now(self) -> tuple[list[int], list[int]]:
        return [each._version for each in self._versioned], [each.data_ptr() for each in self._in_memory]

    def has_changed(self) -> bool:
        """Whether something may have changed since it was noted. This is asked before each step."""
        return (
            any(self._empty)
            or sum(map(len, self._filled)) != len(self._values)
            or not all(map(is_, chain.from_iterable(map(dict.values, self._filled)), self._values))
            or self._numbers_now() != (self._versions, self._memory)
            or [each.requires_grad for each in self._tensors.values()] != self._trained
            or [each.training for each in self._switched] != self._training
            or True in [each.may_have_changed() for each in (*self._traced, *self._sent)]
        )

    def written(self) -> list[str]:
        """The names of the parameters and buffers that were written, without the buffers of the loss, which are settings."""
        versions, memory = self._numbers_now()
        pairs = [*zip(self._versioned, versions, self._versions), *zip(self._in_memory, memory, self._memory)]
        ids = {id(each) for each, now, before in pairs if now != before}
        return [name for name, each in self._tensors.items() if id(each) in ids and not _is_setting(name, each)]

    def follow(self, pipe: nn.Module, compiled: Compiled, in_process: bool = False) -> None:
        """Follow what was changed, or raise. A Pipe that runs ``in_process`` calls the modules that its stages share."""
        self.flags.follow(pipe, compiled)
        self.flags.check(compiled.modes)
        for part in self._parts:
            for change in () if in_process and part.is_shared else part.changes():
                if not (in_process and part.module is pipe and change[0] in HOOK_ATTRIBUTES):
                    self._follow(compiled, part, *change)
        for read in self._traced:
            if read.has_changed():
                raise ModeError(
                    f"{_became(read)}, and what forward read became a constant of the stages; {_AGAIN}; {_KEEP}"
                )
        if not in_process:
            self._follow_code()
            self._follow_buffers_of_loss()

    def _follow(self, compiled: Compiled, part: _Part, table: str, name: str, old: Any, new: Any) -> None:
        path = f"{part.path}.{name}".lstrip(".")
        if table in HOOK_ATTRIBUTES:
            raise ModeError(_hooks_changed(part))
        if part.assigns(name) or (
            isinstance(new, torch.Tensor) and not new.is_leaf
        ):  # a weight norm computes its weight
            return
        if table == "_modules":
            is_called = isinstance(part.module, _CONTAINERS) or part.may_read(name)
            if self._is_used(old) if old is not GONE else is_called:
                raise ModeError(
                    f"{path!r} is another module now ({_shown(new)} in place of {_shown(old)}), and the stages have that of "
                    f"before; {_AGAIN}. {_COPY}"
                )
        elif table == "_parameters" or (table == "_buffers" and not part.of_loss):
            if part.may_read(name) if old is GONE or old is None else path in compiled.qualnames.places:
                raise ModeError(
                    f"{path!r} of the model is another tensor now, {_shown(new)} in place of {_shown(old)} (by "
                    "functional_call, or by assigning one), but the stages still have that of before; change the tensor in "
                    f"place, under torch.no_grad(), or {_AGAIN}. {_COPY}"
                )
        elif part.places and _can_be_sent(new):
            self._set(part, name, new)
        elif part.may_read(name):
            why = (
                "the workers have the module as it was when the driver was made"
                if part.places
                else "tracing has read it"
            )
            raise ModeError(
                f"{path!r} is {_shown(new)} now in place of {_shown(old)}, and the stages do not follow: {why}; "
                f"{'make the driver again' if part.places else _AGAIN}; {_KEEP}"
            )

    def _is_used(self, module: Any) -> bool:
        inside = set(map(id, module.modules())) if isinstance(module, nn.Module) else set()
        return any(id(each.module) in inside and (each.places or each.reads) for each in self._parts)

    def _set(self, part: _Part, name: str, value: Any) -> None:
        for stage, number, module in part.places:
            if module is not part.module:
                setattr(module, name, value)
            self.settings.setdefault(stage, {})[number, name] = value

    def _follow_code(self) -> None:
        """A loss function is sent again if what it reads was changed."""
        changed = [each for each in self._sent if each.has_changed()]
        for read in changed:
            if not read.travels:
                raise ModeError(
                    f"{_became(read)}, but the workers import that module for themselves, and do not see it; give the value to "
                    "the loss, as an attribute of a module that is the loss_fn, or by functools.partial(loss_fn, ...)"
                )
            if not self._loss_functions or any(map(_holds_model, self._sent)):
                raise ModeError(f"{_became(read)}, and the workers have that of before; make the driver again; {_KEEP}")
        if changed:
            self.settings.setdefault(LOSS, {})[0, "function"] = self._loss
            self._read_code()  # which may read other places now

    def _follow_buffers_of_loss(self) -> None:
        before = dict(zip(map(id, self._versioned), self._versions))
        for part in self._parts if isinstance(self._loss, nn.Module) else ():
            for name, buffer in part.module._buffers.items() if part.of_loss else ():
                if buffer is not None and before.get(id(buffer), buffer._version) != buffer._version:
                    self._set(part, name, buffer)


def _looked_again(reads: list[Read]) -> list[Read]:
    return [each.looked_again() for each in reads]


def _where(ids: set[int], tensors: list[torch.Tensor], now: list[int], before: list[int]) -> list[int]:
    return [new if id(each) in ids else old for each, new, old in zip(tensors, now, before)]


def _differ(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return len(now) != len(before) or not all(map(is_, now.values(), before.values()))


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() >= 0
    except RuntimeError:  # a sparse one, a fake one, one that wraps others
        return False


def _is_setting(name: str, tensor: torch.Tensor) -> bool:
    return name.startswith(f"{LOSS}.") and not isinstance(tensor, nn.Parameter)


def _can_be_sent(value: Any) -> bool:
    """Whether the value of an attribute can go with a step."""
    if isinstance(value, torch.Tensor):
        return not isinstance(value, nn.Parameter) and not value.requires_grad
    return is_plain_value(value) or isinstance(value, (torch.dtype, torch.device))


def _holds_model(read: Read) -> bool:
    value = read.value
    return any(True for _ in value.parameters()) if isinstance(value, nn.Module) else isinstance(value, nn.Parameter)


def _shown(value: Any) -> str:
    return "nothing" if value is GONE else describe(value)


def _became(read: Read) -> str:
    return f"{read.name} is {_shown(read.look())} now in place of {_shown(read.value)}"


def _hooks_changed(part: _Part) -> str:
    remedy = "make the driver again" if part.is_shared else "call pipeline() again" if part.path else "take it off"
    if not (part.path or part.of_loss or part.places):
        why = "no stage calls the model"
    elif part.is_shared:
        why = "the workers have the module as it was when the driver was made"
    else:
        why = "what the module and its hooks do became operations of the stages when it was traced"
    now = ", ".join(hooks_of(part.module)) or "none"
    return f"the hooks of {part} are not those of before ({now} now), and stages do not follow: {why}; {remedy}"


def _called_whole(compiled: Compiled) -> dict[str, list[Place]]:
    """By the path in the user's model, the modules of stages that are called as a whole, or are inside of one."""
    places: dict[str, list[Place]] = {}
    for name, stage in compiled.stages():
        numbers = {id(each): number for number, each in enumerate(stage.modules())}
        for target in dict.fromkeys(_targets(stage)):
            for path, module in stage.get_submodule(target).named_modules(prefix=target, remove_duplicate=False):
                found = places.setdefault(compiled.remap_qualname(f"{name}.{path}"), [])
                found.append((name, numbers[id(module)], module))
    return places


def _places_of_loss(compiled: Compiled, loss: nn.Module) -> dict[str, list[Place]]:
    """By the path in the user's loss, its module in `_loss`, which is the loss, a copy of it, or a module that calls one."""
    held = compiled.loss_module
    numbers = {id(each): number for number, each in enumerate(held.modules())}
    inner = held if type(held) is type(loss) else held.function
    return {path: [(LOSS, numbers[id(each)], each)] for path, each in inner.named_modules()}


def _targets(stage: nn.Module) -> Iterator[str]:
    graph: Any = getattr(stage, "graph", None)
    for node in graph.nodes if graph is not None else ():
        if node.op == "call_module":
            yield str(node.target)
