"""A method that trains as the reference does, but with one planted fault of a kind that an offloading method could
have, or with other rounding.

`--methods bench/faults -m planted --option fault=NAME` trains by this method. Without a fault the result has the
reference's bits, unless an option asks for kernels that round differently.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench import adapter_faults, convention_faults
from harness.core.job import BETAS, EPSILON, WEIGHT_DECAY, Plan, Room, Workload
from harness.core.method import Method, TensorState, Trained, Training
from methods.shared.memory_needs import resident_plan

if TYPE_CHECKING:
    from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Planted(Method):
    label = "planted"
    paper = "the reference with a planted fault"
    scales_loss = True
    accumulates = True
    takes_config = True
    takes_lora = True

    # a name in a file beside this one (_step_faults.py, _path_faults.py, _bf16_faults.py, _dropout_faults.py), in
    # bench/convention_faults.py or in bench/adapter_faults.py, or empty
    fault: str = ""
    # the dtype in which the fault is planted, as in the path of one dtype alone; empty: in all
    only: str = ""
    rounding: str = ""  # one of methods/shared/roundings.py
    # torch's "fused", "foreach" or "loop"; "plain": class Plain below; "double": Plain in fp64
    adam: str = "fused"
    threads: int = 0  # torch's threads; 0: unchanged
    dropout_seed: int = 0  # seed of dropout; 0: the reference's seed
    promises: bool = False  # True: promises the reference's bits

    @property
    def bit_exact(self) -> bool:
        return self.promises

    bit_exact_in_half = bit_exact

    def plan(self, workload: Workload, room: Room) -> Plan:
        return resident_plan(workload)

    def train(self, workload: Workload, batches, device: str) -> Training:
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or before)
        try:
            return (yield from Loop(self, workload, device).run(batches))
        finally:
            torch.set_num_threads(before)


class Loop:
    """A training loop. A fault replaces one of the loop's functions, or one of its numbers."""

    def __init__(self, how: Planted, workload: Workload, device: str) -> None:
        import torch

        from harness.models.gpt import initialize
        from harness.models.model import empty
        from methods._bf16_faults import BF16_FAULTS
        from methods._dropout_faults import DROPOUT_FAULTS
        from methods._path_faults import HIDDEN_FAULTS, PATH_FAULTS
        from methods._step_faults import FAULTS
        from methods.shared.loss_scale import LossScale

        self.how, self.workload, self.scale = how, workload, LossScale(workload)
        self.table = next(iter(workload.anatomy.embedding))  # name of the token embedding
        self.layer, self.next = (workload.anatomy.layer_name(index) for index in (1, 2))
        self.model = empty(workload, device)
        parameters = dict(self.model.named_parameters())
        self.frozen = {name: one.data for name, one in parameters.items() if not one.requires_grad}
        self.weights = {name: one for name, one in parameters.items() if one.requires_grad}
        self.is_mixed = workload.dtype != "fp32" and not workload.lora  # adapters are fp32
        self.masters: dict[str, Any] = dict(self.weights)
        if self.is_mixed:
            self.masters = {
                name: torch.empty_like(one, dtype=torch.float32) for name, one in self.weights.items()
            }
        initialize(
            ((name, one.data) for name, one in (*self.frozen.items(), *self.masters.items())), workload
        )
        self.betas, self.epsilon, self.max_norm = BETAS, EPSILON, workload.clip_norm
        self.step = 0
        self.patches: list[Any] = []  # functions whose contexts surround the model's passes
        self.memory: dict[str, Any] = {}  # values that a fault keeps from earlier steps
        if how.fault and how.only in ("", workload.dtype):
            conventions = {**convention_faults.of(workload), **convention_faults.ROUNDED}
            if how.fault in adapter_faults.FAULTS and workload.lora:
                adapter_faults.FAULTS[how.fault](self)
            elif how.fault in conventions:
                conventions[how.fault](self.model)
            else:
                {**FAULTS, **PATH_FAULTS, **BF16_FAULTS, **HIDDEN_FAULTS, **DROPOUT_FAULTS}[how.fault](self)
        if self.is_mixed:
            self.copy_to_weights()
        self.optimizer = self.make_optimizer()

    def run(self, batches: Any) -> Training:
        import torch

        from methods.shared.roundings import rounding_of

        if self.how.dropout_seed:
            torch.manual_seed(self.how.dropout_seed)
        for self.step, (inputs, targets) in enumerate(batches, start=1):
            inputs, targets = self.batch(inputs, targets)
            with contextlib.ExitStack() as stack:
                for patch in self.patches:
                    stack.enter_context(patch())
                loss = (
                    rounding_of(self.how.rounding)(self.backward, inputs, targets)
                    if self.how.rounding
                    else self.backward(inputs, targets)
                )
            grads = {}
            for name, weight in self.weights.items():
                assert weight.grad is not None
                grads[name], weight.grad = weight.grad.float(), None
            if self.scale.is_used:
                torch._foreach_div_(list(grads.values()), self.scale.value)
            self.change_gradients(grads)
            norm = self.norm(grads)
            if self.max_norm:
                self.clip(grads, norm)
            is_skipped = self.scale.overflows(norm)
            if is_skipped:
                self.skip()
            else:
                self.update(grads)
            if self.is_mixed:
                self.copy_to_weights()
            yield self.scale.step(loss, norm, is_skipped=is_skipped)
        state = self.optimizer.state
        trained = [
            TensorState(name, p.detach(), *map(state[p].get, MOMENTS)) for name, p in self.masters.items()
        ]
        return Trained([*(TensorState(*pair) for pair in self.frozen.items()), *trained])

    def batch(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, targets

    def backward(self, inputs: Tensor, targets: Tensor, num_parts: int = 1) -> Tensor:
        import torch

        total = torch.zeros((), device=inputs.device)
        for some, those in zip(inputs.chunk(num_parts), targets.chunk(num_parts), strict=True):
            loss = self.model(some, those, self.scale.value) / num_parts
            loss.backward()
            total += loss.detach()
        return total

    def change_gradients(self, grads: dict[str, Tensor]) -> None:
        pass

    def norm(self, grads: dict[str, Tensor]) -> Tensor:
        import torch

        return torch.nn.utils.get_total_norm(grads.values())

    def clip(self, grads: dict[str, Tensor], norm: Tensor) -> None:
        import torch

        torch._foreach_mul_(list(grads.values()), torch.clamp(self.max_norm / (norm + 1e-6), max=1.0))

    def rate(self, name: str) -> float:
        return self.workload.learning_rate_at(self.step)

    def decay(self, name: str) -> float:
        return WEIGHT_DECAY if self.masters[name].ndim > 1 else 0.0

    def is_updated(self, name: str) -> bool:
        return True

    def make_optimizer(self) -> Any:
        import torch

        groups = [
            {"params": [master], "weight_decay": self.decay(name), "name": name}
            for name, master in self.masters.items()
        ]
        if self.how.adam in ("plain", "double"):
            make = PlainAdamW if self.how.adam == "plain" else DoubleAdamW
            return make(groups, {"lr": 0.0, "betas": self.betas, "eps": self.epsilon})
        kind: dict[str, Any] = {"fused": self.how.adam == "fused", "foreach": self.how.adam == "foreach"}
        return torch.optim.AdamW(groups, betas=self.betas, eps=self.epsilon, **kind)

    def update(self, grads: dict[str, Tensor]) -> None:
        for group in self.optimizer.param_groups:
            name, (master,) = group["name"], group["params"]
            group["lr"] = self.rate(name)
            master.grad = grads[name] if self.is_updated(name) else None
        self.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after_update()

    def skip(self) -> None:
        pass

    def before_update(self) -> None:
        pass

    def after_update(self) -> None:
        pass

    def copy_to_weights(self) -> None:
        import torch

        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(self.masters[name])

    @property
    def matrix(self) -> str:
        """The name of the largest matrix of the chosen layer."""
        anatomy = self.workload.anatomy
        return self.layer + next(
            name for name, shape in anatomy.layer.items() if shape == anatomy.layer_matrix
        )

    def of(self, *starts: str) -> list[str]:
        return [name for name in self.masters if name.startswith(starts)]

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Return, by parameter name, the optimizer's states; a parameter that was never updated has none."""
        found = {name: self.optimizer.state[master] for name, master in self.masters.items()}
        return {name: state for name, state in found.items() if state}


def plain_adamw() -> Any:
    import torch

    class Plain(torch.optim.Optimizer):
        """AdamW as the paper writes it: correct the moments, then apply the step and the weight decay together."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            self.move(p, group)

        def move(self, p: Any, group: Any) -> None:
            state, (beta1, beta2) = self.state[p], group["betas"]
            if not state:
                state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            state["step"] += 1
            mean = state["exp_avg"].mul_(beta1).add_((1 - beta1) * p.grad) / (1 - beta1 ** state["step"])
            square = state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * p.grad**2) / (
                1 - beta2 ** state["step"]
            )
            p.sub_(group["lr"] * (mean / self.divisor(square, group) + group["weight_decay"] * p))

        def divisor(self, square: Any, group: Any) -> Any:
            return square.sqrt() + group["eps"]

    return Plain


def PlainAdamW(groups: Any, defaults: Any) -> Any:
    return plain_adamw()(groups, defaults)


def DoubleAdamW(groups: Any, defaults: Any) -> Any:
    """Return PlainAdamW, but with each step computed in fp64 and rounded once, to the weights' and moments' fp32."""
    import torch

    class Double(plain_adamw()):  # type: ignore[misc]
        def move(self, p: Any, group: Any) -> None:
            narrow, wide = self.state[p], torch.nn.Parameter(p.detach().double())
            wide.grad = p.grad.double()
            self.state[wide] = {
                name: value.double() if torch.is_tensor(value) else value for name, value in narrow.items()
            }
            super().move(wide, group)
            p.copy_(wide)
            moved = self.state.pop(wide)
            narrow |= {
                name: value.float() if torch.is_tensor(value) else value for name, value in moved.items()
            }

    return Double(groups, defaults)


def patch(loop: Loop, name: str, function: Callable[..., Any]) -> None:
    """Replace the function `name` of torch.nn.functional during the model's passes. The replacement gets the original
    as its first argument."""
    import torch.nn.functional as F

    from methods.shared.roundings import replaced

    loop.patches.append(lambda: replaced(F, name, functools.partial(function, getattr(F, name))))
