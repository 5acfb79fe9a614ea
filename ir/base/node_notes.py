"""The notes at the nodes of a graph, in `node.meta`: each key, the type of its value, and its meaning.

Nothing else reads or writes `node.meta` (tests/ir/test_node_notes.py). The nodes of a stage keep SOURCE and MODULE_PATH only.

    note             noted by                    read by
    ───────────────────────────────────────────────────────────────────────────────────────────────
    SOURCE           the tracer                  errors and drawings
    MODULE_PATH      the tracer                  errors, reports, names of draws
    GRADIENTS_OFF    the tracer                  split, profile, comparison of graphs
    MODULE_CALLS     torch.fx                    the balancer
    ADDED            the tracer                  comparison of graphs
    IS_LAYER         `Pipe.from_sequential`      the balancer
    ROW_SIZES        the tracer, of an example   split, buffers that forward assigns
    BYTES            the tracer, of an example   split
    NO_GRADIENT      the tracer, of an example   split
    IS_TENSOR        an exported program         split
    NAMED_DEVICE     an exported program         split
    DRAWS            `name_draws`                split
    STAGE            `make_plan`                 the passes that cut
    FAKE_VALUE       torch.export, `make_fx`     the front end of exported programs, the pieces of stages
    STACK_TRACE      torch.export                the front end of exported programs
"""

import linecache
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import fx

NoteContent = TypeVar("NoteContent")


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's code.

    >>> str(SourceLine("net.py", 3, "forward"))
    'net.py:3, in forward'
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}"

    @property
    def code(self) -> str:
        """The text of the line; empty if it cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def excerpt(self) -> str:
        """Two lines for an error message: the place and the code."""
        return f"  {self}" + (f"\n    {self.code}" if self.code else "")


class NodeNote(Generic[NoteContent]):
    """A key of `node.meta`, and the default value for nodes without it, if there is a default.

    >>> node = fx.Graph().placeholder("x")
    >>> GRADIENTS_OFF.of(node), STAGE.get(node)
    (False, None)
    >>> STAGE.put(node, 1)
    >>> STAGE.of(node)
    1
    """

    def __init__(self, key: str, *default: NoteContent) -> None:
        self.key, self.default = key, default

    def of(self, node: fx.Node) -> NoteContent:
        """The value at a node, or the default. Raises a `KeyError` if there is neither."""
        found: NoteContent = node.meta[self.key] if self.key in node.meta or not self.default else self.default[0]
        return found

    def get(self, node: fx.Node) -> NoteContent | None:
        """The value at a node, or None."""
        return node.meta.get(self.key)

    def is_at(self, node: fx.Node) -> bool:
        """Whether a node has the note."""
        return self.key in node.meta

    def put(self, node: fx.Node, value: NoteContent) -> None:
        """Give a node the note."""
        node.meta[self.key] = value


SOURCE = NodeNote[SourceLine | None]("source", None)  # the user's line
MODULE_PATH = NodeNote[str]("module_path", "")  # the module whose forward calls the operation
GRADIENTS_OFF = NodeNote[bool]("no_grad", False)  # as in `torch.no_grad()`
# The calls of modules around the node: each one's module and class.
MODULE_CALLS = NodeNote[Mapping[str, tuple[str, Any]]]("nn_module_stack", {})
ADDED = NodeNote[bool]("added", False)  # a check that forward does not have, which a comparison leaves out
IS_LAYER = NodeNote[bool]("layer", False)  # one layer for the balancer, with or without parameters
ROW_SIZES = NodeNote[Any]("row_sizes")  # how the value depends on the number of rows (`compare_rows`), or None
BYTES = NodeNote[int]("bytes")  # those of the value, for the example
NO_GRADIENT = NodeNote[bool]("no_gradient", False)  # the value can have none
IS_TENSOR = NodeNote[bool]("is_tensor", False)  # the value is a tensor, not a number or a tuple
NAMED_DEVICE = NodeNote[torch.device]("names_device")  # the device of the program, which is among the arguments
DRAWS = NodeNote[tuple[str, bool]]("draws")  # its name as it draws random numbers, and whether it draws Python's too
STAGE = NodeNote[int]("stage")  # the number of the stage that an operation is in
FAKE_VALUE = NodeNote[Any]("val")  # a tensor without data
STACK_TRACE = NodeNote[str | None]("stack_trace", None)  # as text, with all lines

_PLACE: tuple[NodeNote[Any], ...] = (SOURCE, MODULE_PATH)


def place_of(node: fx.Node) -> dict[str, Any]:
    """The place of a node in the user's model, as plain data: the notes that nodes of a stage have, also after pickling."""
    return {note.key: note.of(node) for note in _PLACE if note.of(node)}


def put_place(node: fx.Node, place: Mapping[str, Any]) -> None:
    """Give a node a place, and no other note."""
    node.meta = dict(place)


def copy_place(made: fx.Node, node: fx.Node) -> None:
    """Give a node the place of another, and no other note."""
    put_place(made, place_of(node))


def copy_notes(made: fx.Node, node: fx.Node) -> None:
    """Give a node all the notes of another, and no others."""
    made.meta = dict(node.meta)
