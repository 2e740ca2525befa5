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

STRIKES = 5  # the step, from 1, at which a fault of a single step happens
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Planted(Method):
    label = "planted"
    paper = "the reference with a planted fault"
    scales_loss = True
    accumulates = True
    takes_config = True
    takes_lora = True

    # a name in FAULTS, PATH_FAULTS, HIDDEN_FAULTS, DROPOUT_FAULTS, in _bf16_faults.py beside this file, in
    # bench/convention_faults.py or bench/adapter_faults.py, or empty
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

    def of(self, *starts: str) -> list[str]:
        return [name for name in self.masters if name.startswith(starts)]

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Return, by parameter name, the optimizer's states; a parameter that was never updated has none."""
        found = {name: self.optimizer.state[master] for name, master in self.masters.items()}
        return {name: state for name, state in found.items() if state}


def _plain_adamw() -> Any:
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
    return _plain_adamw()(groups, defaults)


def DoubleAdamW(groups: Any, defaults: Any) -> Any:
    """Return PlainAdamW, but with each step computed in fp64 and rounded once, to the weights' and moments' fp32."""
    import torch

    class Double(_plain_adamw()):  # type: ignore[misc]
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


def _patch(loop: Loop, name: str, function: Callable[..., Any]) -> None:
    """Replace the function `name` of torch.nn.functional during the model's passes. The replacement gets the original
    as its first argument."""
    import torch.nn.functional as F

    from methods.shared.roundings import replaced

    loop.patches.append(lambda: replaced(F, name, functools.partial(function, getattr(F, name))))


# The faults: by name, a function that changes a Loop before its training begins.

FAULTS: dict[str, Callable[[Loop], None]] = {}


def _fault(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(function: Callable[..., None]) -> Callable[..., None]:
        FAULTS[name] = function
        return function

    return add


def is_bias(name: str) -> bool:
    return name.endswith("bias") and not _is_of_norm(name)


def _is_of_norm(name: str) -> bool:
    return ".ln" in name or "norm." in name


def _never(loop: Loop, is_left_out: Callable[[str], bool]) -> None:
    loop.is_updated = lambda name: not is_left_out(name)  # type: ignore[method-assign]


FAULTS["a layer's update skipped once"] = lambda loop: _never(
    loop, lambda name: loop.step == STRIKES and name.startswith(loop.layer)
)
FAULTS["a layer's update skipped always"] = lambda loop: _never(
    loop, lambda name: name.startswith(loop.layer)
)
FAULTS["a layer's update skipped every other step"] = lambda loop: _never(
    loop, lambda name: loop.step % 2 == 0 and name.startswith(loop.layer)
)
FAULTS["biases never updated"] = lambda loop: _never(loop, is_bias)
FAULTS["norms never updated"] = lambda loop: _never(loop, _is_of_norm)


@_fault("only the first rows of each tensor updated")
def _first_rows(loop: Loop) -> None:
    import torch

    def before() -> None:
        loop.memory = {name: master.detach().clone() for name, master in loop.masters.items()}

    def after() -> None:
        with torch.no_grad():
            for name, master in loop.masters.items():
                master[1:] = loop.memory[name][1:]

    loop.before_update, loop.after_update = before, after  # type: ignore[method-assign]


def _with(**changes: Any) -> Callable[[Loop], None]:
    return lambda loop: vars(loop).update(changes)


FAULTS["decay on norms and biases"] = _with(decay=lambda name: WEIGHT_DECAY)
FAULTS["no decay"] = _with(decay=lambda name: 0.0)
FAULTS["epsilon 1e-6"] = _with(epsilon=1e-6)
FAULTS["epsilon 1e-10"] = _with(epsilon=1e-10)
FAULTS["beta2 0.95"] = _with(betas=(BETAS[0], 0.95))
FAULTS["beta1 0.95"] = _with(betas=(0.95, BETAS[1]))
FAULTS["clip off"] = _with(clip=lambda grads, norm: None)
FAULTS["clip at half"] = lambda loop: vars(loop).update(max_norm=loop.max_norm / 2)


def _count_from(loop: Loop, count: Callable[[int], int]) -> None:
    """Plant a fault: at step n, AdamW uses the bias correction of step count(n)."""

    def before() -> None:
        import torch

        for master in loop.masters.values():
            state = loop.optimizer.state[master]
            if not state:
                state |= {"step": torch.zeros(()), **{name: torch.zeros_like(master) for name in MOMENTS}}
            state["step"].fill_(count(loop.step) - 1)

    loop.before_update = before  # type: ignore[method-assign]


FAULTS["no bias correction"] = lambda loop: _count_from(loop, lambda step: 10**6)
FAULTS["step off by one"] = lambda loop: _count_from(loop, lambda step: step + 1)


@_fault("constant rate on some layers")
def _constant(loop: Loop) -> None:
    of_step = loop.workload.learning_rate_at
    loop.rate = lambda name: of_step(3200 if name.startswith(loop.layer) else loop.step)  # type: ignore[method-assign]


FAULTS["rate one step late"] = lambda loop: vars(loop).update(
    rate=lambda name: loop.workload.learning_rate_at(loop.step - 1)
)


@_fault("clip by each layer's norm")
def _clip_each(loop: Loop) -> None:
    whole = loop.clip

    def clip(grads: dict[str, Tensor], norm: Tensor) -> None:
        prefix = loop.workload.anatomy.layer_prefix
        owners = {
            name[: len(prefix) + 2] if name.startswith(prefix) else name.rpartition(".")[0] for name in grads
        }  # valid for up to 10 layers, because layer numbers must have one digit
        for group in owners:
            some = {name: grad for name, grad in grads.items() if name.startswith(group)}
            whole(some, Loop.norm(loop, some))

    loop.clip = clip  # type: ignore[method-assign]


@_fault("norm counts the embedding twice")
def _twice(loop: Loop) -> None:
    import torch

    loop.norm = lambda grads: torch.nn.utils.get_total_norm([*grads.values(), grads[loop.table]])  # type: ignore


@_fault("norm leaves out a layer")
def _left_out(loop: Loop) -> None:
    loop.norm = lambda grads: Loop.norm(  # type: ignore[method-assign]
        loop, {name: grad for name, grad in grads.items() if not name.startswith(loop.layer)}
    )


def _stale_gradients(starts: Callable[[Loop], tuple[str, ...]]) -> Callable[[Loop], None]:
    def plant(loop: Loop) -> None:
        def change(grads: dict[str, Tensor]) -> None:
            for name in loop.of(*starts(loop)):
                fresh = grads[name]
                grads[name] = loop.memory.get(name, fresh).clone()
                loop.memory[name] = fresh.clone()

        loop.change_gradients = change  # type: ignore[method-assign]

    return plant


FAULTS["gradient a step stale in a layer"] = _stale_gradients(lambda loop: (loop.layer,))
FAULTS["gradient a step stale everywhere"] = _stale_gradients(lambda loop: ("",))
FAULTS["gradient a step stale in a window"] = _stale_gradients(lambda loop: (loop.layer, loop.next))


@_fault("weights a step stale")
def _stale_weights(loop: Loop) -> None:
    import torch

    whole = loop.backward

    def backward(inputs: Tensor, targets: Tensor) -> Tensor:
        fresh = {name: weight.detach().clone() for name, weight in loop.weights.items()}
        with torch.no_grad():
            for name, weight in loop.weights.items():
                weight.copy_(loop.memory.get(name, weight))
        loss = whole(inputs, targets)
        with torch.no_grad():
            for name, weight in loop.weights.items():
                weight.copy_(fresh[name])
        loop.memory = fresh
        return loss

    loop.backward = backward  # type: ignore[method-assign]


def _times(factor: float, *starts: str) -> Callable[[Loop], None]:
    def plant(loop: Loop) -> None:
        def change(grads: dict[str, Tensor]) -> None:
            for name in loop.of(*starts):
                grads[name] *= factor

        loop.change_gradients = change  # type: ignore[method-assign]

    return plant


FAULTS["gradients halved"] = _times(0.5, "")
FAULTS["gradients doubled"] = _times(2.0, "")


@_fault("gradients with noise of 1e-3")
def _noise(loop: Loop) -> None:
    import torch

    generator = torch.Generator().manual_seed(1)

    def change(grads: dict[str, Tensor]) -> None:
        for grad in grads.values():
            grad *= 1 + 1e-3 * torch.randn(grad.shape, generator=generator)

    loop.change_gradients = change  # type: ignore[method-assign]


FAULTS["a sample dropped"] = lambda loop: vars(loop).update(
    batch=lambda inputs, targets: (inputs[:-1], targets[:-1])
)


@_fault("a batch twice")
def _repeat(loop: Loop) -> None:
    def batch(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if loop.step == STRIKES:
            return loop.memory["batch"]  # type: ignore[no-any-return]
        loop.memory["batch"] = inputs, targets
        return inputs, targets

    loop.batch = batch  # type: ignore[method-assign]


@_fault("tied gradient from the head only")
def _head_only(loop: Loop) -> None:
    def embedding(original: Any, inputs: Any, weight: Any, *words: Any) -> Any:
        is_tied = weight is loop.weights[loop.table]
        return original(inputs, weight.detach() if is_tied else weight, *words)

    _patch(loop, "embedding", embedding)


@_fault("tied gradient from the look-up only")
def _look_up_only(loop: Loop) -> None:
    from harness.models.gpt import HeadLoss
    from methods.shared.roundings import replaced

    whole = HeadLoss.apply
    loop.patches.append(
        lambda: replaced(HeadLoss, "apply", lambda x, weight, *others: whole(x, weight.detach(), *others))
    )


def _rounded(of: Callable[[Loop], list[Tensor]], dtype: str = "") -> Callable[[Loop], None]:
    def plant(loop: Loop) -> None:
        from harness.models.gpt import DTYPES

        def after() -> None:
            for tensor in of(loop):
                tensor.data.copy_(tensor.data.to(DTYPES[dtype or loop.workload.dtype]))

        loop.after_update = after  # type: ignore[method-assign]

    return plant


FAULTS["no fp32 master"] = lambda loop: _rounded(lambda loop: list(loop.masters.values()))(loop)
FAULTS["moments in bf16"] = lambda loop: _rounded(
    lambda loop: [state[name] for state in loop.states().values() for name in MOMENTS], "bf16"
)(loop)


def _swap(loop: Loop, pairs: dict[str, Any]) -> None:
    """In `pairs`, whose keys are tensor names, swap the values of the loop's two chosen layers."""
    for name in [name for name in pairs if name.startswith(loop.layer)]:
        other = name.replace(loop.layer, loop.next)
        pairs[name], pairs[other] = pairs[other], pairs[name]


FAULTS["two layers' gradients swapped"] = lambda loop: vars(loop).update(
    change_gradients=functools.partial(_swap, loop)
)


@_fault("two layers' states swapped")
def _swap_states(loop: Loop) -> None:
    def after() -> None:
        if loop.step == STRIKES:
            found = {name: dict(state) for name, state in loop.states().items()}
            _swap(loop, found)
            for name, state in loop.states().items():
                state.update(found[name])

    loop.after_update = after  # type: ignore[method-assign]


@_fault("first moment not decayed")
def _undecayed(loop: Loop) -> None:
    def before() -> None:
        for state in loop.states().values():
            state["exp_avg"] /= loop.betas[0]

    loop.before_update = before  # type: ignore[method-assign]


@_fault("mask off by one")
def _other_mask(loop: Loop) -> None:
    from methods.shared.roundings import attended

    def attention(original: Any, *each: Any, scale: float | None = None, **others: Any) -> Any:
        return attended(*each, scale=scale, diagonal=1)

    _patch(loop, "scaled_dot_product_attention", attention)


@_fault("tanh GELU")
def _tanh(loop: Loop) -> None:
    _patch(loop, "gelu", lambda original, x: original(x, approximate="tanh"))


@_fault("dropout left at 0.1")
def _dropout(loop: Loop) -> None:
    for module in loop.model.modules():
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.1)


@_fault("norm epsilon 1e-6")
def _norm_epsilon(loop: Loop) -> None:
    for module in loop.model.modules():
        for name in ("eps", "variance_epsilon"):
            if hasattr(module, name):
                setattr(module, name, 1e-5 if getattr(module, name) == 1e-6 else 1e-6)


@_fault("a starting tensor off by 1 %")
def _start(loop: Loop) -> None:
    loop.masters[_matrix(loop)].data *= 1.01


# Faults of a path that a training takes with some sizes, dtypes or steps only: a part of a tensor, a step that fp16
# skips, the schedule after the warm-up, a head or a sample larger than a kernel's block.

PATH_FAULTS: dict[str, Callable[[Loop], None]] = {}
OF_SKIPS = ["weights decayed in skipped steps", "moments decayed in skipped steps"]  # in fp16 only
OF_SIZES = [  # beyond BLOCK_TOKENS or BLOCK_COLUMNS only
    "attention to the last 64 tokens only",
    "scale of heads wider than 32 wrong",
    "half the gradient of positions from 64 on",
]


def _path_fault(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(function: Callable[..., None]) -> Callable[..., None]:
        PATH_FAULTS[name] = function
        return function

    return add


def _matrix(loop: Loop) -> str:
    """Return the name of the largest matrix of the loop's chosen layer."""
    anatomy = loop.workload.anatomy
    return loop.layer + next(name for name, shape in anatomy.layer.items() if shape == anatomy.layer_matrix)


def _frozen(part: Callable[[Tensor], Tensor]) -> Callable[[Loop], None]:
    """Return a fault: part(matrix) of a layer's matrix is never updated."""

    def plant(loop: Loop) -> None:
        def before() -> None:
            loop.memory["frozen"] = part(loop.masters[_matrix(loop)]).detach().clone()

        def after() -> None:
            part(loop.masters[_matrix(loop)].data).copy_(loop.memory["frozen"])

        loop.before_update, loop.after_update = before, after  # type: ignore[method-assign]

    return plant


PATH_FAULTS["a row of a matrix never updated"] = _frozen(lambda matrix: matrix[3])
PATH_FAULTS["the last 16 elements of a matrix never updated"] = _frozen(lambda matrix: matrix.view(-1)[-16:])


@_path_fault("gradient of a column lost")
def _lost_column(loop: Loop) -> None:
    def change(grads: dict[str, Tensor]) -> None:
        grads[_matrix(loop)][:, -1] = 0

    loop.change_gradients = change  # type: ignore[method-assign]


@_path_fault("the last position's gradient lost")
def _lost_position(loop: Loop) -> None:
    from harness.models import gpt
    from methods.shared.roundings import replaced

    original, num_tokens = gpt.cross_entropy, loop.workload.seq_len

    def cross_entropy(logits: Tensor, targets: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        loss, dlogits = original(logits, targets, *others)
        dlogits[num_tokens - 1 :: num_tokens] = 0
        return loss, dlogits

    loop.patches.append(lambda: replaced(gpt, "cross_entropy", cross_entropy))


def _undecayed_in(start: Callable[[Loop], str]) -> Callable[[Loop], None]:
    return lambda loop: vars(loop).update(
        decay=lambda name: 0.0 if name.startswith(start(loop)) else Loop.decay(loop, name)
    )


PATH_FAULTS["no decay in a layer"] = _undecayed_in(lambda loop: loop.layer)
PATH_FAULTS["no decay in the embedding"] = _undecayed_in(lambda loop: loop.table)


@_path_fault(OF_SKIPS[0])
def _decayed_when_skipped(loop: Loop) -> None:
    def skip() -> None:
        for name, master in loop.masters.items():
            master.data.mul_(1 - loop.rate(name) * loop.decay(name))

    loop.skip = skip  # type: ignore[method-assign]


@_path_fault(OF_SKIPS[1])
def _moments_decayed_when_skipped(loop: Loop) -> None:
    def skip() -> None:
        for state in loop.states().values():
            for name, beta in zip(MOMENTS, loop.betas, strict=True):
                state[name].mul_(beta)

    loop.skip = skip  # type: ignore[method-assign]


PATH_FAULTS["constant rate after the warm-up"] = lambda loop: vars(loop).update(
    rate=lambda name: loop.workload.learning_rate_at(min(loop.step, loop.workload.lr_warmup_steps))
)
BLOCK_TOKENS, BLOCK_COLUMNS = 64, 32  # sizes that a kernel handles; the faults below show beyond them


@_path_fault(OF_SIZES[0])
def _sliding(loop: Loop) -> None:
    import torch

    def attention(original: Any, query: Any, *others: Any, is_causal: bool, **words: Any) -> Any:
        is_seen = torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool, device=query.device).tril()
        return original(query, *others, attn_mask=is_seen.triu(1 - BLOCK_TOKENS), **words)

    _patch(loop, "scaled_dot_product_attention", attention)


@_path_fault(OF_SIZES[1])
def _wide_scale(loop: Loop) -> None:
    def attention(original: Any, query: Any, *others: Any, **words: Any) -> Any:
        is_wide = query.shape[-1] > BLOCK_COLUMNS
        return original(query * 2**-0.5 if is_wide else query, *others, **words)

    _patch(loop, "scaled_dot_product_attention", attention)


@_path_fault(OF_SIZES[2])
def _half_positions(loop: Loop) -> None:
    def change(grads: dict[str, Tensor]) -> None:
        for name in loop.workload.anatomy.embedding:
            if name != loop.table:
                grads[name][BLOCK_TOKENS:] *= 0.5

    loop.change_gradients = change  # type: ignore[method-assign]


# Faults that the gate's probe cannot show: they affect only layers beyond the probe's 4 layers, or steps after its 20
# steps.


def _undecayed_after(loop: Loop) -> None:
    def before() -> None:
        for group in loop.optimizer.param_groups if loop.step > 20 else ():
            group["weight_decay"] = 0.0

    loop.before_update = before  # type: ignore[method-assign]


def _undecayed_beyond(loop: Loop) -> None:
    deep = tuple(loop.workload.anatomy.layer_name(index) for index in range(4, loop.workload.num_layers))
    loop.decay = lambda name: 0.0 if name.startswith(deep) else Loop.decay(loop, name)  # type: ignore[method-assign]


HIDDEN_FAULTS: dict[str, Callable[[Loop], None]] = {
    "no decay beyond layer 4": _undecayed_beyond,
    "no decay after step 20": _undecayed_after,
}


# Faults of dropout, for bench/dropout_rule.py. Training without dropout does not show these faults.


def _dropout_at(factor: float) -> Callable[[Loop], None]:
    """Return a fault that multiplies the dropout probability by `factor`."""

    def plant(loop: Loop) -> None:
        for part in (loop.model.ends, *loop.model.layers):
            part.dropout *= factor  # type: ignore[operator, assignment]

    return plant


def _unscaled(loop: Loop) -> None:
    """Plant a fault: kept elements are not divided by the share of elements that dropout keeps."""

    def dropout(original: Any, x: Any, probability: float) -> Any:
        return original(x, probability) * (1 - probability)

    _patch(loop, "dropout", dropout)


def _undropped_attention(loop: Loop) -> None:
    def attention(original: Any, *words: Any, dropout_p: float, **others: Any) -> Any:
        return original(*words, dropout_p=0.0, **others)

    _patch(loop, "scaled_dot_product_attention", attention)


def _same_each_step(loop: Loop) -> None:
    import torch

    whole = loop.batch

    def batch(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        return whole(inputs, targets)

    loop.batch = batch  # type: ignore[method-assign]


def _anew_in_recompute(loop: Loop) -> None:
    """Plant a fault: the recompute in the backward pass drops other elements than the forward pass did."""
    from harness.models import gpt
    from methods.shared.roundings import replaced

    forgetful = functools.partial(gpt.checkpoint, preserve_rng_state=False)
    loop.patches.append(lambda: replaced(gpt, "checkpoint", forgetful))


DROPOUT_FAULTS: dict[str, Callable[[Loop], None]] = {
    "no dropout": _dropout_at(0.0),
    "twice the probability": _dropout_at(2.0),
    "five times the probability": _dropout_at(5.0),
    "what stays is not scaled": _unscaled,
    "attention without dropout": _undropped_attention,
    "the same elements at each step": _same_each_step,
    "other elements in recompute": _anew_in_recompute,
}
