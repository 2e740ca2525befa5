"""Cuts a user's model into stages at its CutPoints.

torch.fx traces the modules that hold a CutPoint. All other modules stay as they are, so the code of these modules may
do anything. A stage is the part of the trace between two active cuts. Each stage computes for itself the values that
depend on the batch's inputs alone, such as a mask. Other values that a later stage needs are sent with the cut's own
tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from methods.pipeline.config.partition import group_sections
from methods.pipeline.transport import TensorSpec, spec_of
from methods.shared.module_watch import ModuleState, ModuleWatch, hooks_of, random_states

# The beginning of an error about a pass that is repeated by a recompute, and runs once for each micro-batch.
CHANGES_ERROR = (
    "expected a forward pass that changes nothing, as it runs again for each micro-batch and recompute; try to compute"
    " it anew in each pass; got one that changes"
)
InitWeights = Callable[[Iterable[tuple[str, Tensor]]], None]  # fills named tensors in place
LOSS_SCALE = "loss_scale"  # an optional argument of a model's forward pass: factor of the loss's gradient


class CutPoint(nn.Module):
    """A module that returns its input and marks a place where the model may be cut: `x = self.cutpoints[3](x)`.

    A forward pass must use each CutPoint once. The first dimension of x is the batch.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Part:
    """A stage of a model. `module`: takes `num_received` tensors of the stage below and then the batch's values named
    in `inputs`; returns the tensors to send or, in the last stage, the model's result."""

    module: fx.GraphModule
    inputs: tuple[str, ...]
    num_received: int


def cut_here(x: Any) -> Any:
    """Return x; a trace calls this function in place of a CutPoint."""
    return x


def trace_model(model: nn.Module, inputs: Mapping[str, Any]) -> fx.Graph:
    """Trace the model's forward pass over these inputs, through the modules that contain CutPoints. Raises ValueError
    if the model cannot be traced, or if the batch lacks an input or has an unknown input."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError) as error:
        raise ValueError(f"the model's forward pass has no signature: {error}") from error
    if unknown_names := sorted(set(inputs) - set(parameters)):
        input_names = ", ".join(parameters)
        raise ValueError(
            f"expected a batch of the forward pass's inputs ({input_names}), got {', '.join(unknown_names)} as well"
        )
    fixed_values = {
        name: inputs.get(name, parameter.default)
        for name, parameter in parameters.items()
        if not isinstance(inputs.get(name), Tensor) and (name != LOSS_SCALE or name not in inputs)
    }
    if missing_names := [name for name, value in fixed_values.items() if value is inspect.Parameter.empty]:
        raise ValueError(f"the batch lacks {', '.join(missing_names)}, which the model's forward pass needs")
    tracer, watch = _Tracer(model), ModuleWatch(model, 0)
    _refuse_hooks(model, tracer.cut_holders)
    state_before, random_states_before = watch.state(), [*random_states(), torch.get_rng_state().tolist()]
    try:
        with _NoParameters(model):
            graph = tracer.trace(model, fixed_values)
        draws_random = random_states_before != [*random_states(), torch.get_rng_state().tolist()]
        if change := watch.change(state_before) or "the random state" * draws_random:
            raise ValueError(
                f"the modules that hold CutPoints run once, when they are traced, but change {change}: move this into a"
                " module without CutPoints"
            )
        return graph
    except (fx.proxy.TraceError, TypeError, NameError, AttributeError) as error:
        raise ValueError(
            f"the modules that hold CutPoints cannot be traced ({' '.join(str(error).split())}): move code that"
            " depends on the data's values into a module without CutPoints"
        ) from error


def _refuse_hooks(model: nn.Module, cut_holders: set[int]) -> None:
    """Raise ValueError if a module that is traced has a hook, which would be called once, or a parameter has one, which
    would be called for each micro-batch."""
    for name, module in model.named_modules():
        hooks = (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        if id(module) in cut_holders and any(hooks):
            raise ValueError(
                f"module {name or type(module).__name__} has a hook, but holds CutPoints, and so is only traced; try a"
                " hook of a module within"
            )
    for name, parameter in model.named_parameters():
        if hooks_of(parameter):
            raise ValueError(
                f"parameter {name} has a hook, which would be called for each micro-batch; try a hook of its module"
            )


class _NoParameters(TorchDispatchMode):
    """While a model is traced, refuse operations on its parameters, whose results would stay as they are: a trace sees
    parameters only as attributes of the modules that it traces."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if id(value) in self.names:
                raise ValueError(
                    f"the forward pass computes with parameter {self.names[id(value)]} outside of its module, when it"
                    " is traced: name it as an attribute, as in self.layer.weight, or leave it to the optimizer"
                )
        return func(*args, **(kwargs or {}))


class _Tracer(fx.Tracer):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.used_cutpoints: set[int] = set()
        self.cut_holders = {id(module) for module in model.modules() if _holds_cut(module)}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) not in self.cut_holders

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(m, CutPoint):
            return super().call_module(m, forward, args, kwargs)
        if id(m) in self.used_cutpoints:
            raise ValueError("a CutPoint is used twice in a forward pass: make a CutPoint for each place")
        self.used_cutpoints.add(id(m))
        return self.create_proxy("call_function", cut_here, args, kwargs)


def _holds_cut(module: nn.Module) -> bool:
    """Return whether the module contains a CutPoint, even in a plain list, which does not register modules."""

    def holds_cut(value: Any) -> bool:
        if isinstance(value, nn.Module):
            return isinstance(value, CutPoint) or (value is not module and _holds_cut(value))
        return any(map(holds_cut, value)) if isinstance(value, list | tuple) else False

    return any(map(holds_cut, [*vars(module).values(), *module.children()]))


def count_cuts(graph: fx.Graph) -> int:
    return sum(node.target is cut_here for node in graph.nodes)


def cut_into_parts(model: nn.Module, graph: fx.Graph, active_cuts: Sequence[int]) -> list[Part]:
    """Return the model's parts between the active cuts. `active_cuts`: numbers of CutPoints, from 0 in the order of the
    forward pass. The parts share the model's parameters, under the same names."""
    stage_of, num_active_below, cut_number = {}, 0, 0
    for node in graph.nodes:
        stage_of[node] = num_active_below
        if node.target is cut_here:
            num_active_below += cut_number in active_cuts
            cut_number += 1
    free_nodes = _of_inputs_alone(model, graph)
    # at each cut: the nodes whose values are sent
    crossing_nodes: list[list[fx.Node]] = [[] for _ in active_cuts]
    for node in graph.nodes:
        if node in free_nodes or node.op == "get_attr":
            continue
        for boundary in range(stage_of[node], len(active_cuts)):
            if any(stage_of[user] > boundary for user in node.users):
                crossing_nodes[boundary].append(node)
    last_stage = len(active_cuts)
    parts = []
    for stage in range(last_stage + 1):
        received_nodes = crossing_nodes[stage - 1] if stage else []
        sent_nodes = crossing_nodes[stage] if stage < last_stage else None
        parts.append(_extract_part(model, graph, received_nodes, sent_nodes))
    return parts


def _of_inputs_alone(model: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that any stage can compute by itself: the batch's inputs, buffers, and functions of these."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    nodes: set[fx.Node] = set()
    for node in graph.nodes:
        is_function = node.op in ("call_function", "call_method") and node.target is not cut_here
        is_free = is_function and all(source in nodes for source in node.all_input_nodes)
        if node.op == "placeholder" or is_free or (node.op == "get_attr" and node.target not in parameters):
            nodes.add(node)
    return nodes


def _extract_part(
    model: nn.Module, model_graph: fx.Graph, received_nodes: list[fx.Node], sent_nodes: list[fx.Node] | None
) -> Part:
    """Return the part that computes the nodes `sent_nodes` from the nodes `received_nodes` and the batch's inputs.
    `sent_nodes`: None: compute the model's result."""
    if sent_nodes is None:
        result: Any = next(node for node in model_graph.nodes if node.op == "output").args[0]
    else:
        result = tuple(sent_nodes)
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"received_{index}") for index, node in enumerate(received_nodes)}
    needed_nodes: set[fx.Node] = set()
    nodes_to_visit: list[fx.Node] = []
    fx.map_arg(result, nodes_to_visit.append)
    while nodes_to_visit:
        node = nodes_to_visit.pop()
        if node not in needed_nodes and node not in copies:
            needed_nodes.add(node)
            nodes_to_visit.extend(node.all_input_nodes)
    inputs = [node for node in model_graph.nodes if node in needed_nodes and node.op == "placeholder"]
    for node in inputs:
        copies[node] = graph.placeholder(str(node.target))
    for node in model_graph.nodes:
        if node in needed_nodes and node not in copies:
            if node.target is cut_here:
                copies[node] = copies[node.args[0]]
            else:
                copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(fx.map_arg(result, lambda node: copies[node]))
    return Part(fx.GraphModule(model, graph), tuple(str(node.target) for node in inputs), len(received_nodes))


def run_without_memory(
    parts: Sequence[Part], inputs: Mapping[str, Any]
) -> Iterator[tuple[Sequence[Any], int]]:
    """Run the forward passes of the parts, one after the other, on tensors without memory. Yield each part's result and
    its FLOPs."""
    received_values: Sequence[Any] = ()
    for part_number, part in enumerate(parts):
        leaves = [_as_leaf(value) for value in received_values]
        counter = FlopCounterMode(display=False)
        with counter:
            arguments = (*leaves, *(_to_meta(inputs.get(name)) for name in part.inputs))
            with _refusing_changes(part.module, part_number):
                weights = _weights_on_meta(part.module)
                try:
                    output = torch.func.functional_call(part.module, weights, arguments, tie_weights=False)
                except RuntimeError as error:
                    if "meta" not in str(error).lower():
                        raise
                    raise ValueError(
                        f"stage {part_number}: expected a forward pass that can run without memory, which tells shapes"
                        f" and FLOPs, got {type(error).__name__} ({str(error).splitlines()[0][:100]}); try"
                        " register_buffer() for a module's tensors, and shapes that do not follow from values"
                    ) from error
        is_last = part_number == len(parts) - 1
        received_values = (output,) if is_last else output
        yield received_values, counter.get_total_flops()


@contextmanager
def _refusing_changes(module: nn.Module, part_number: int) -> Iterator[None]:
    """Within this context raise ValueError if a pass of part `part_number` changes a tensor or attribute of the module,
    or an argument."""
    watch, states = ModuleWatch(module, 0), list[ModuleState]()

    def refuse_change(*_: Any) -> None:
        if change := watch.change(states.pop()):
            raise ValueError(f"stage {part_number}: {CHANGES_ERROR} {change}")

    handles = [
        module.register_forward_pre_hook(lambda _, arguments: states.append(watch.state(arguments))),
        module.register_forward_hook(refuse_change),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _weights_on_meta(module: nn.Module) -> dict[str, Tensor]:
    weights = {
        name: torch.empty_like(weight, device="meta").requires_grad_(weight.requires_grad)
        for name, weight in module.named_parameters(remove_duplicate=False)
    }
    return {
        **weights,
        **{name: buffer.to("meta") for name, buffer in module.named_buffers(remove_duplicate=False)},
    }


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _as_leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def give_memory(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Replace the model's tensors without memory by the tensors of the same names in `values`, rounded to the model's
    dtypes. A tensor that `values` lacks stays without memory."""
    # for each tensor, by id: the tables of modules that hold it, with its key and its name in the model
    holders: dict[int, list[tuple[dict[str, Any], str, str]]] = {}
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for tensor_name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    holders.setdefault(id(tensor), []).append(
                        (tensors, tensor_name, f"{prefix}.{tensor_name}".lstrip("."))
                    )
    for places in holders.values():
        given_names = [name for _, _, name in places if name in values]
        if not given_names:
            continue
        tensors, tensor_name, _ = places[0]
        old_tensor, value = tensors[tensor_name], values[given_names[0]]
        value = value.to(old_tensor.dtype)
        new_tensor = (
            nn.Parameter(value, old_tensor.requires_grad) if isinstance(old_tensor, nn.Parameter) else value
        )
        for tensors, tensor_name, _ in places:
            tensors[tensor_name] = new_tensor


def choose_cuts(flops: Sequence[int], has_parameters: Sequence[bool], num_stages: int) -> list[int]:
    """Return the active cuts, as indexes of CutPoints, that make the longest stage as short as possible. The time of
    every stage but the last includes the recompute of its forward pass.

    `flops`: FLOPs of a forward pass through each run of modules between neighboring CutPoints. `has_parameters`:
    whether the run has parameters. Raises ValueError if there are too few CutPoints, or if a stage would have no
    parameters.
    """
    num_runs = len(flops)
    if num_stages > num_runs:
        raise ValueError(
            f"expected at least {num_stages - 1} CutPoints for {num_stages} stages, got {num_runs - 1}"
        )

    costs = [run_flops + 1 for run_flops in flops]
    groupings = group_sections([4 * cost for cost in costs], [3 * cost for cost in costs], has_parameters)
    active_cuts = groupings[num_stages - 1]
    if active_cuts is None:
        raise ValueError(
            f"expected parameters in all {num_stages} stages: try fewer, or move the CutPoints apart"
        )
    return active_cuts


def specs_of(values: Sequence[Any], stage: int) -> list[TensorSpec]:
    """Return the shapes and dtypes of the values that stage number `stage` sends to the next stage. Raises ValueError
    if a value is not a tensor."""
    for value in values:
        if not isinstance(value, Tensor):
            raise ValueError(
                f"expected tensors at the cut above stage {stage}, got {type(value).__name__}: compute this value after"
                " the cut, or from the batch's inputs"
            )
    return [spec_of(value) for value in values]
