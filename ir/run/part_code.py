"""The code of a graph with checkpointed parts: each part is a function, which `torch.utils.checkpoint` calls.

torch.fx writes a line for each node. What lies between the two nodes of a part becomes the body of a function:

    def part(x, *, mask = mask):                       the arguments of the call, and what else the part uses from outside
        linear = self.linear(x);  x = None
        add = linear + mask;  linear = mask = None
        return add
    add = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False);  part = x = mask = None

What the part uses from outside is bound where the function is made: what has that name later may be another value.
"""

import re
from collections.abc import Iterator, Sequence

from torch import fx

from pippy.ir.run.checkpointed_parts import BeginPart, Part, parts_of

_COUNTER = re.compile(r"# COUNTER: (\d+)")  # torch.fx writes one before the code of each node, and removes it later
_CALLED = re.compile(r"= ([\w.]+)\(")


def with_parts_as_functions(nodes: Sequence[fx.Node], body: Sequence[str]) -> list[str]:
    """The code of ``nodes`` as torch.fx writes it, with a function for each checkpointed part."""
    lines: list[list[str]] = [[] for _ in nodes]
    at = 0
    for line in body:
        counter = _COUNTER.match(line)
        at = int(counter[1]) if counter else at
        lines[at].append(line)
    return list(_Writer(nodes, lines).all(0, len(nodes)))


class _Writer:
    def __init__(self, nodes: Sequence[fx.Node], lines: Sequence[Sequence[str]]) -> None:
        self.nodes, self.lines = nodes, lines
        self.order = {node: index for index, node in enumerate(nodes)}
        self.parts = {part.begin: part for part in parts_of(nodes)}

    def all(self, first: int, end: int) -> Iterator[str]:
        at = first
        while at < end:
            part = self.parts.get(self.nodes[at])
            if part is None:
                yield "".join(self.lines[at])
                at += 1
            else:
                yield from self._function(part)
                yield from self._call(part)
                at = self.order[part.end] + 1

    def _function(self, part: Part) -> Iterator[str]:
        captured = [f"{value} = {value}" for value in part.captured()]
        parameters = [*map(str, part.inputs), *(["*"] if captured else []), *captured]
        yield from self._counter(part.begin)
        yield f"def {part.begin}({', '.join(parameters)}):\n"
        for code in self.all(self.order[part.begin] + 1, self.order[part.end]):
            yield "".join(f"    {line}\n" for line in code.splitlines())
        yield from self._counter(part.end)
        yield f"    return {part.end.args[1]!r}\n" if part.is_reentrant else f"    return {_joined(part.outputs())}\n"

    def _call(self, part: Part) -> Iterator[str]:
        options = [f"{name}={value!r}" for name, value in part.begin.kwargs.items()]
        if isinstance(part.begin.target, BeginPart):
            written = _CALLED.search("".join(self.lines[self.order[part.begin]]))
            assert written is not None
            options.append(f"context_fn={written[1]}.context_fn")
        results = [part.end] if part.is_reentrant else part.outputs()
        arguments = ", ".join([str(part.begin), *map(str, part.inputs), *options])
        free = " = ".join([str(part.begin), *map(str, self._last_used_in(part)), "None"])
        yield f"{f'{_joined(results)} = ' if results else ''}torch.utils.checkpoint.checkpoint({arguments});  {free}\n"

    def _last_used_in(self, part: Part) -> Iterator[fx.Node]:
        given = dict.fromkeys([*part.begin.all_input_nodes, *part.captured()])
        end = self.order[part.end]
        yield from (value for value in given if all(self.order[user] <= end for user in value.users))

    def _counter(self, node: fx.Node) -> Iterator[str]:
        yield f"# COUNTER: {self.order[node]}\n"


def _joined(nodes: Sequence[fx.Node]) -> str:
    return ", ".join(map(str, nodes)) or "None"
