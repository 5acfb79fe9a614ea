"""The verifier accepts every Pipe that the compiler makes, and rejects every way of breaking one."""

import copy
import operator
import pickle
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from pippy import MultiUseParameterConfig, Pipe, pipe_split, pipeline, verify
from pippy.ir.base.errors import VerificationError
from pippy.ir.record.compiled import Loss
from pippy.ir.run.stage_backward import stage_backward
from tests.zoo import exhibits

LOSS = nn.MSELoss()
MOST = 150  # mutants of a Pipe that are tried


class SumLoss(nn.Module):
    def forward(self, output, target):
        return sum(each.sum() for each in output)


BASES = {
    "ExampleCode": ("TRANSMIT", LOSS),
    "UsedThrice": ("TRANSMIT", LOSS),
    "SharedByNested": ("REPLICATE", LOSS),
    "TiedInsideAndElsewhere": ("REPLICATE", LOSS),
    "UnusedOutputs": ("TRANSMIT", SumLoss()),
    "InputsWithGradients": ("TRANSMIT", None),
    "TupleLoss": ("TRANSMIT", None),
    "EarlyLoss": ("TRANSMIT", None),
    "DictLoss": ("TRANSMIT", None),
    "CountingBuffer": ("TRANSMIT", LOSS),
    "ReadBuffers": ("TRANSMIT", LOSS),
}


def base(name: str) -> bytes:
    config, loss_fn = BASES[name]
    model = exhibits[name]()
    return pickle.dumps(
        pipeline(
            model,
            loss_fn,
            multi_use_param_spec=MultiUseParameterConfig[config],
            output_loss_value_spec=model.output_loss_value_spec,
        )
    )


def text(pipe: Pipe) -> str:
    """Everything that a mutant may have changed."""
    modules = [pipe.split_gm, *(stage for _, stage in pipe.stages())]
    graphs = [module.graph if isinstance(module, fx.GraphModule) else fx.Graph() for module in modules]
    names = pipe.qualnames
    return repr((
        [[(node.op, node.name, str(node.target), node.args, node.kwargs) for node in graph.nodes] for graph in graphs],
        [pipe.replicated_params, names.places, list(names.unused), names.saved, pipe.wiring, pipe.loss, pipe.target_name],
        [[name, id(parameter)] for name, parameter in pipe.split_gm.named_parameters(remove_duplicate=False)],
        list(pipe.split_gm._modules),
    ))  # fmt: skip


def nodes_of(pipe: Pipe) -> list[fx.Node]:
    return list(pipe.split_gm.graph.nodes)


def operands(node: fx.Node) -> int:
    """How many places for operands a node has, counting inside lists."""
    count = 0
    for arg in (*node.args, *node.kwargs.values()):
        count += len(arg) if isinstance(arg, (list, tuple)) else 1
    return count


def with_operands(node: fx.Node, change: Callable[[list[Any]], None]) -> None:
    """Change a node's operands as one flat list."""
    flat: list[Any] = []
    for arg in (*node.args, *node.kwargs.values()):
        flat += arg if isinstance(arg, (list, tuple)) else [arg]
    change(flat)
    rest = iter(flat)

    def take(arg):
        return [next(rest) for _ in arg] if isinstance(arg, (list, tuple)) else next(rest)

    node.args = tuple(take(arg) for arg in node.args)
    node.kwargs = {name: take(arg) for name, arg in node.kwargs.items()}


def top_level_mutants(pipe):
    dice = random.Random(0)
    names = [node.name for node in nodes_of(pipe)]
    for index, node in enumerate(nodes_of(pipe)):
        if node.op != "output":
            yield f"drop {node.name}", lambda p, i=index: drop(p, i)
            yield f"duplicate {node.name}", lambda p, i=index: duplicate(p, i)
        if node.op in ("placeholder", "call_module"):
            yield f"rename {node.name}", lambda p, i=index: forge_name(nodes_of(p)[i])
        yield f"empty {node.name}", lambda p, i=index: setattr(nodes_of(p)[i], "args", ())
        if node.op == "call_module":
            for name in (*pipe.split_gm._modules, "nothing"):
                yield f"call {name} in {node.name}", lambda p, i=index, n=name: setattr(nodes_of(p)[i], "target", n)
            yield f"keyword in {node.name}", lambda p, i=index: setattr(nodes_of(p)[i], "kwargs", {"training": True})
        if node.op == "call_function":
            for target in (operator.add, torch.relu, operator.getitem, torch.add, stage_backward, pipe_split):
                yield f"{target} in {node.name}", lambda p, i=index, t=target: setattr(nodes_of(p)[i], "target", t)
            for keyword in node.kwargs:
                yield f"{node.name} without {keyword}", lambda p, i=index, k=keyword: without_keyword(nodes_of(p)[i], k)
        for one in range(operands(node)):
            for other in range(one):
                yield (
                    f"swap {one} {other} of {node.name}",
                    lambda p, i=index, a=one, b=other: swap(nodes_of(p)[i], a, b),
                )
            for replacement in (*dice.sample(range(len(names)), 2), None, 1.0, 77):
                yield (
                    f"operand {one} of {node.name} by {replacement}",
                    lambda p, i=index, a=one, r=replacement: replace_operand(p, i, a, r),
                )
        for op, target in (("call_method", "relu"), ("get_attr", "submod_0"), ("call_function", torch.relu)):
            yield f"{op} before {node.name}", lambda p, i=index, o=op, t=target: foreign(p, i, o, t)
    yield "another input", lambda p: another_input(p)


def drop(pipe, index):
    node = nodes_of(pipe)[index]
    before = list(nodes_of(pipe)[:index]) or [None]
    for user in list(node.users):
        user.replace_input_with(node, node.all_input_nodes[0] if node.all_input_nodes else before[-1])
    pipe.split_gm.graph.erase_node(node)


def duplicate(pipe, index):
    node, graph = nodes_of(pipe)[index], pipe.split_gm.graph
    with graph.inserting_after(node):
        graph.node_copy(node)


def forge_name(node):
    node.name = "forged"


def without_keyword(node, keyword):
    node.kwargs = {name: value for name, value in node.kwargs.items() if name != keyword}


def swap(node, one, other):
    def change(flat):
        flat[one], flat[other] = flat[other], flat[one]

    with_operands(node, change)


def replace_operand(pipe, index, place, replacement):
    value = (
        nodes_of(pipe)[replacement]
        if isinstance(replacement, int) and replacement < len(nodes_of(pipe))
        else replacement
    )

    def change(flat):
        flat[place] = value

    with_operands(nodes_of(pipe)[index], change)


def foreign(pipe, index, op, target):
    graph, node = pipe.split_gm.graph, nodes_of(pipe)[index]
    if node.op == "placeholder":
        node = next(each for each in graph.nodes if each.op != "placeholder")
    with graph.inserting_before(node):
        graph.create_node(op, target, () if op == "get_attr" else (next(iter(graph.nodes)),))


def another_input(pipe):
    with pipe.split_gm.graph.inserting_before(nodes_of(pipe)[0]):
        pipe.split_gm.graph.placeholder("another")


def stage_mutants(pipe):
    for stage, module in pipe.stages():
        for index, node in enumerate(module.graph.nodes):
            at = (stage, index)
            if node.op == "placeholder":
                yield f"rename input {node.name} of {stage}", lambda p, a=at: forge_name(stage_node(p, a))
                yield (
                    f"retarget input {node.name} of {stage}",
                    lambda p, a=at: setattr(stage_node(p, a), "target", "forged"),
                )
                yield f"drop input {node.name} of {stage}", lambda p, a=at: drop_stage_node(p, a)
            if node.op in ("get_attr", "call_module"):
                yield (
                    f"{node.name} of {stage} names nothing",
                    lambda p, a=at: setattr(stage_node(p, a), "target", "x.y"),
                )
            if node.op == "output" and isinstance(node.args[0], tuple):
                yield f"turn outputs of {stage}", lambda p, a=at: turn_outputs(stage_node(p, a))
                yield f"fewer outputs of {stage}", lambda p, a=at: fewer_outputs(stage_node(p, a))
            for target in (pipe_split, stage_backward):
                yield f"{target.__name__} in {stage}", lambda p, a=at, t=target: insert_in_stage(p, a, t)
        yield f"{stage} is no graph", lambda p, s=stage: p.split_gm._modules.__setitem__(s, nn.Identity())
        yield f"{stage} is away", lambda p, s=stage: p.split_gm._modules.__delitem__(s)
        for local, _ in module.named_parameters(remove_duplicate=False):
            yield f"{local} of {stage} gets a name", lambda p, s=stage, n=local: rename_parameter(p.stage(s), n)
    yield "a further stage", lambda p: p.split_gm.add_module(f"submod_{p.num_stages}", copy.deepcopy(p.stage(0)))


def stage_node(pipe, at):
    return list(pipe.stage(at[0]).graph.nodes)[at[1]]


def drop_stage_node(pipe, at):
    node = stage_node(pipe, at)
    for user in list(node.users):
        user.args, user.kwargs = (), {}
    pipe.stage(at[0]).graph.erase_node(node)


def turn_outputs(node):
    node.args = (tuple(reversed(node.args[0])),)


def fewer_outputs(node):
    node.args = (node.args[0][:-1],)


def insert_in_stage(pipe, at, target):
    graph = pipe.stage(at[0]).graph
    with graph.inserting_before(graph.output_node()):
        graph.call_function(target)


def rename_parameter(module, name):
    path, _, leaf = name.rpartition(".")
    holder = module.get_submodule(path)
    holder._parameters["forged"] = holder._parameters.pop(leaf)


def record_mutants(pipe):
    for index, group in enumerate(pipe.replicated_params):
        yield f"forget group {index}", lambda p, i=index: p.replicated_params.pop(i)
        for stage in group:
            yield f"forget {stage} of group {index}", lambda p, i=index, s=stage: p.replicated_params[i].pop(s)
            yield f"forge {stage} of {index}", lambda p, i=index, s=stage: p.replicated_params[i].update({s: "forged"})
        yield f"twice group {index}", lambda p, i=index: p.replicated_params.append(dict(p.replicated_params[i]))
        yield f"other shape in group {index}", lambda p, i=index: reshape_copy(p, i)
        yield f"one tensor in group {index}", lambda p, i=index: unify(p, i)
    yield "an invented group", lambda p: p.replicated_params.append({"submod_0": "forged", "submod_1": "forged"})
    for name in pipe.qualnames.places:
        yield f"{name} nowhere", lambda p, n=name: p.qualnames.places.pop(n)
        yield f"{name} elsewhere", lambda p, n=name: p.qualnames.places.update({n: ("submod_0.forged",)})
        yield f"{name} unused too", lambda p, n=name: p.qualnames.unused.update({n: torch.zeros(1)})
    yield "an invented name", lambda p: p.qualnames.places.update({"forged": ("submod_0.forged",)})
    yield "an invented saved name", lambda p: setattr(p.qualnames, "saved", (*p.qualnames.saved, "forged"))
    for node in pipe.wiring.values:
        yield f"another value for {node}", lambda p, n=node: p.wiring.values.update({n: "forged"})
        yield f"no value for {node}", lambda p, n=node: p.wiring.values.pop(n)
    yield "an invented value", lambda p: p.wiring.values.update(forged="forged")
    if pipe.loss is not None:
        yield "no such loss", lambda p: setattr(p, "loss", Loss("forged"))
        yield "another seed", lambda p: setattr(p, "loss", Loss(p.loss.value, [1.0]))
        yield "no loss", lambda p: setattr(p, "loss", None)
        for node in nodes_of(pipe):
            if node.op == "call_module" and node.name != pipe.loss.value:
                yield f"{node.name} for the loss", lambda p, n=node.name: setattr(p, "loss", Loss(n))
    if pipe.target_name is not None:
        yield "another target", lambda p: setattr(p, "target_name", "forged")


def reshape_copy(pipe, index):
    tensor = pipe.copies()[index][-1]
    tensor.data = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)


def unify(pipe, index):
    """Make two stages hold one and the same parameter."""
    (one, first), (other, second) = list(pipe.replicated_params[index].items())[:2]
    parameter = pipe.stage(one).get_parameter(first)
    path, _, leaf = second.rpartition(".")
    pipe.stage(other).get_submodule(path)._parameters[leaf] = parameter


@pytest.mark.parametrize("name", BASES)
def test_every_mutant_is_rejected(name, record_property, monkeypatch):
    blob = base(name)
    verify(pickle.loads(blob))
    monkeypatch.setattr(
        fx.GraphModule, "recompile", lambda self: None
    )  # mutants never run; their code took most of the time
    original, pipe = text(pickle.loads(blob)), pickle.loads(blob)
    survivors, count = [], 0
    mutants = [*top_level_mutants(pipe), *stage_mutants(pipe), *record_mutants(pipe)]
    for description, mutate in random.Random(name).sample(mutants, min(MOST, len(mutants))):
        mutant = pickle.loads(blob)
        mutate(mutant)
        if "frozen" not in description and same_but_for_ids(text(mutant), original):
            continue
        count += 1
        try:
            verify(mutant)
            survivors.append(description)
        except VerificationError:
            pass
    record_property("mutants", count)
    assert survivors == []
    assert count > 100


def same_but_for_ids(one: str, other: str) -> bool:
    identities = re.compile(r", \d{9,}\]")
    return identities.sub("]", one) == identities.sub("]", other)


def test_the_first_difference_is_marked_and_all_else_comes_in_the_same_error():
    pipe = pickle.loads(base("ExampleCode"))
    graph = pipe.split_gm.graph
    named = {node.name: node for node in graph.nodes}
    swap(named["submod_1"], 0, 1)  # the first difference
    named["stage_backward_1"].kwargs = {**named["stage_backward_1"].kwargs, "output_grads": None}
    pipe.replicated_params.pop()
    with pytest.raises(VerificationError) as caught:
        verify(pipe)
    lines = str(caught.value).splitlines()
    call = lines.index("    submod_1 = submod_1(getitem_2, getitem)")
    assert lines[call + 1] == "    ^^^ must be submod_1 = submod_1(getitem, getitem_2)"
    assert sum(line.startswith("    ^^^") for line in lines) == 1, "the first difference"
    assert any("replicated_params does not say so" in line for line in lines)
    assert len(caught.value.faults) >= 2
