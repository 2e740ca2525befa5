"""The state of a user's training as torch's AdamW has it: `optimizer.state_dict()` and `optimizer.load_state_dict()` of
the user's optimizer save and load the states at the layers' homes. Weights that the model's load_state_dict() has
loaded become the masters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from methods.streaming.layer_state import LayerState


class StatesElsewhere(dict[Any, Any]):
    """Replaces the user's `optimizer.state`, because the states are at the layers' homes. Every use is refused: it
    would read nothing, or change nothing."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()


def refuse_copy() -> NoReturn:
    raise ValueError(
        "cannot copy a model while a trainer holds it; copy its state_dict(), or close() the trainer"
    )


def _refuse_use(*_: Any) -> NoReturn:
    raise ValueError(
        "optimizer.state: expected state_dict() or load_state_dict() of the optimizer, because the trainer keeps the"
        " states; named_states() of the trainer reads one at a time"
    )


USES = "items", "keys", "values", "get", "pop", "popitem", "clear", "update", "setdefault", "copy"
OPERATORS = "getitem", "setitem", "delitem", "iter", "len", "contains", "bool", "or", "ior"
for _name in (*USES, *(f"__{operator}__" for operator in OPERATORS)):
    setattr(StatesElsewhere, _name, _refuse_use)


class SavedState:
    """Saves and loads a training's state."""

    def __init__(self, training: Any) -> None:
        self.training, self.user = training, training.user
        # for each part the states that the optimizer loads now
        self.loading: list[list[Mapping[str, Tensor]]] = []

    def named_states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield each trained parameter's name and state."""
        training = self.training
        training.come_home()
        for state, parameters in training.parts():
            step, names = torch.tensor(float(state.num_updates)), self.user.names_of(parameters)
            for name, (_, weight, exp_avg, exp_avg_sq) in zip(names, state.tensors(), strict=True):
                assert exp_avg is not None and exp_avg_sq is not None
                master = {} if training.terms.dtype == "fp32" else {"master": weight.cpu()}
                yield (
                    name,
                    {"step": step, "exp_avg": exp_avg.cpu(), "exp_avg_sq": exp_avg_sq.abs().cpu(), **master},
                )

    def check_states(self) -> None:
        """Raise ValueError if the script has given the optimizer other states."""
        if type(self.user.optimizer.state) is not StatesElsewhere:
            _refuse_use()

    def show_none(self, optimizer: Any) -> None:
        """Let the optimizer's state_dict() find no states, until add_states()."""
        self.check_states()
        optimizer.state = {}

    def add_states(self, optimizer: Any, state_dict: dict[str, Any]) -> None:
        """Add copies of the states to the optimizer's state_dict(), which has none."""
        optimizer.state = StatesElsewhere()
        places = self._places()
        for name, state in self.named_states():
            if float(state["step"]):  # AdamW has no state before its first step
                state_dict["state"][places[name]] = {key: value.clone() for key, value in state.items()}

    def keep_states(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Keep the states for load_states(): the optimizer would copy them to its parameters' device. Raises ValueError
        unless all parameters of a part have made the same number of updates."""
        self.training.check_stream()
        self.training.rewind()
        self.training.come_home()
        places, self.loading = self._places(), []
        for state, parameters in self.training.parts():
            names = self.user.names_of(parameters)
            rows = [state_dict["state"].get(places[name], {}) for name in names]
            steps = {int(row.get("step", 0)): name for name, row in zip(names, rows, strict=True)}
            if len(steps) > 1:
                (first, one), (second, other), *_ = steps.items()
                raise ValueError(
                    f"{state.prefix.rstrip('.')}: expected one number of steps for all parameters, because they are"
                    f" updated together, got {first} for {one}, {second} for {other}; try a new optimizer"
                )
            self.loading.append(rows)
        return {**state_dict, "state": {}}

    def load_states(self, optimizer: Any) -> None:
        """Load the states that keep_states() has kept. A parameter without a state begins anew."""
        optimizer.state = StatesElsewhere()
        for (state, _), rows in zip(self.training.parts(), self.loading, strict=True):
            values = []
            for row, (_, weight, exp_avg, _) in zip(rows, state.tensors(), strict=True):
                assert exp_avg is not None
                zeros = torch.zeros_like(exp_avg)
                values.append(
                    (row.get("master", weight), row.get("exp_avg", zeros), row.get("exp_avg_sq", zeros))
                )
            state.load(values)
            state.num_updates = int(rows[0].get("step", 0)) if rows else 0
        self.loading = []
        self.training.refetch()

    def take_weights(self, *_: Any) -> None:
        """Take over the weights that load_state_dict() has put into the model's parameters: in bf16 and fp16 as the
        masters of those that differ."""
        training, access = self.training, self.training.access
        training.check_stream()
        if self.user.names.keys() != {id(parameter) for parameter in self.user.model.parameters()}:
            raise ValueError("load_state_dict() replaced the model's parameters; try it without assign=True")
        if training.terms.dtype == "fp32":
            return
        frozen = training.user.are_frozen
        versions = [parameter._version for parameter in self.user.rest]
        changed = [new != before for new, before in zip(versions, access.versions, strict=True)]
        self._take_changed(training.ends, changed)
        access.versions = versions
        for place, before in access.touched.items():
            if frozen[place]:  # it has no master
                continue
            assert before is not None
            state = training.stream.states[place]
            pairs = zip(state.layout.views(before), state.layout.views(state.current.weights), strict=True)
            self._take_changed(state, [not torch.equal(old, new) for old, new in pairs])
            before.copy_(state.current.weights)

    def _take_changed(self, state: LayerState, changed: Sequence[bool]) -> None:
        """Set the masters of those parameters that have changed to their weights."""
        if any(changed):
            weights = state.layout.views(state.current.weights)
            rows = zip(changed, weights, state.tensors(), strict=True)
            state.load([(weight if is_new else kept.weight, None, None) for is_new, weight, kept in rows])

    def _places(self) -> dict[str, int]:
        """Return each trained parameter's number in the optimizer, by its name."""
        parameters = (
            parameter for group in self.user.optimizer.param_groups for parameter in group["params"]
        )
        return {self.user.names[id(parameter)]: place for place, parameter in enumerate(parameters)}
