"""The streamed training of a user's model. The model runs its own loop over its layers; each call of a layer in that
loop runs this file's code.

A node of autograd's graph replaces a layer's forward pass. In both passes the node calls a `LayerStream`. Like the
method's own loop, the stream fetches the layer, computes it, and sends its gradient home. Each forward pass visits all
layers once, bottom first; each backward pass visits all layers once, top first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import CheckpointError

from harness.devices.streams import Device, num_update_threads
from methods.shared.terms import Terms
from methods.streaming.layer_kinds import send_boundaries_home
from methods.streaming.layer_state import Home, LayerState, NamedLayer, Passed
from methods.streaming.users.access import (
    UPDATES_HAVE_BEGUN,
    ScriptAccess,
    has_lent_gradients,
    norms_at_home,
    settle_gradients,
    show_at_home,
)
from methods.streaming.users.layer import IN_PLACE
from methods.streaming.users.model import UserModel, move_frozen_and_buffers
from methods.streaming.users.state import SavedState
from methods.streaming.users.streams import LayerStream, Parts
from methods.streaming.users.take_over import (
    layers_of,
    move_home,
    observe_script,
    replace_forwards,
    take_optimizer,
)

# By a part of torch's message about a layer's pass, what was expected of the layer.
MEANT = {
    "a leaf Variable that requires grad": IN_PLACE,
    "modified by an inplace operation": IN_PLACE,
}


class LayerTurn(torch.autograd.Function):
    """A layer as a node of autograd's graph. `anchor`: a tensor that requires a gradient, so that backward() is called
    even if no input of the layer requires one. `outputs`: the layer's results. `uses`: the layer's inputs, each once
    for each use, in the order in which backward() has the gradients: autograd adds these one by one.
    """

    @staticmethod
    def forward(
        ctx: Any, training: UserTraining, place: int, outputs: Passed, anchor: Tensor, *uses: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.training, ctx.place, ctx.number = training, place, training.num_passes
        # a backward pass visits later nodes of the layer first
        ctx._set_sequence_nr(training.user.layers[place].start)
        plain = [output.detach() for output in outputs]
        ctx.have_gradients = [output.requires_grad for output in outputs]
        pairs = zip(plain, ctx.have_gradients, strict=True)
        ctx.mark_non_differentiable(*(output for output, has_gradient in pairs if not has_gradient))
        return tuple(plain)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        ctx.training.check_engine()
        pairs = zip(dys, ctx.have_gradients, strict=True)
        gradients = tuple(dy for dy, has_gradient in pairs if has_gradient)
        return None, None, None, None, *ctx.training.down(ctx.place, ctx.number, gradients)


@dataclass(frozen=True)
class Script:
    """A trainer's arguments from a user's script. `max_norm`: limit of the norm of all gradients together; 0 or None:
    no clipping. `accumulates`: True: several backward passes sum their gradients before a step."""

    model: nn.Module
    layers: Sequence[nn.Module]
    optimizer: torch.optim.AdamW
    max_norm: float | None
    device: str
    accumulates: bool


class UserTraining:
    """Base class of the trainers: a model whose layers pass through the trainer's LayerStream.

    The user's loop stays as it was, except for the end of a step: `loss.backward()`, then `step()` in place of
    clip_grad_norm_(), optimizer.step() and zero_grad(). In fp16 the loop calls `scale(loss).backward()`.
    """

    stream: LayerStream

    def __init__(self, script: Script) -> None:
        if (num_ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise ValueError(f"expected one process, got {num_ranks}; try to run the script without torchrun")
        self.user = UserModel(script.model, script.layers, script.optimizer)
        self.terms = Terms(self.user.dtype, float(script.max_norm or 0.0), accumulates=script.accumulates)
        self.gpu = Device(script.device, num_workers=num_update_threads(script.device))
        self.device = self.gpu.name
        move_frozen_and_buffers(self.user, self.device)
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        self.anchor_node = get_gradient_edge(self.anchor).node
        self.graph_task = -1  # autograd's number of the last backward pass
        self.computing: int | None = None  # place of the layer that computes
        self._is_home = True  # all updates have ended, and the user's parameters show them
        self._held: list[int] = []
        self.num_passes = self.num_backward = 0  # forward passes so far; backward passes since the last step
        # is_up: a forward pass waits for its backward pass
        self.next_up, self.next_down, self.is_up = 0, 0, False
        self.last_down = (
            0  # the lowest layer of the backward pass; below are frozen layers without a gradient
        )
        self.is_skipped = False  # True: the last step was skipped (fp16)
        self._undo = ExitStack()
        for parameter in script.model.parameters():
            parameter.grad = None

    # ---- The two passes, a layer at a time

    def up(self, place: int, tensors: Passed) -> Passed:
        with torch.set_grad_enabled(self._is_trained), _uncached_autocast(), self._computing(place):
            return self.stream.forward(place, [tensors])[0]

    def down(self, place: int, number: int, dys: Passed) -> list[Tensor | None]:
        if not self.is_up or number != self.num_passes or place != self.next_down:
            raise ValueError(
                f"layer {place}: expected one backward pass through all layers after each forward pass; try to call"
                " backward() once for each loss, before the next forward pass"
            )
        state = self.stream.states[place]
        if place == len(self.user.layers) - 1:
            self._begin_backward()
        try:
            with self._computing(place, is_down=True):
                self.stream.backward(place, [dys])
        except CheckpointError as error:
            raise ValueError(
                f"layer {place}: expected the same tensors when the backward pass recomputes them, got others; try"
                f" use_cache=False, and layers without state ({str(error).splitlines()[0]})"
            ) from error
        if not state.is_frozen:
            self._check_gradients(state, self.user.own_parameters[place])
        self.next_down -= 1
        if place == self.last_down:
            if place:
                self.stream.rewind()  # as if the backward pass had visited the layers below
            self.access.check_unchanged()
            if self.terms.dtype == "fp32":  # otherwise the masters need the same weights until step()
                self.access.touched.clear()
            self.num_backward, self.is_up = self.num_backward + 1, False
            self.access.return_gradients()
        return self.user.layers[place].collected()

    def _begin_backward(self) -> None:
        self._take_gradients()
        if self.num_backward and not self.terms.accumulates:
            raise ValueError(
                "expected one backward pass before step(), got two; try accumulates=True to sum gradients"
            )
        self.access.check_unchanged()
        self.graph_task = torch._C._current_graph_task_id()
        if not self.stream.waits:
            self._held, self._is_home = self.access.held(), False
        for state in self.stream.states:
            state.adds = self.num_backward > 0
        self.stream.begin(self.user.settings())

    def check_engine(self) -> None:
        """Raise ValueError unless autograd runs a plain backward(), which gives a gradient to every parameter."""
        if not torch._C._will_engine_execute_node(self.anchor_node):  # type: ignore[attr-defined]
            raise ValueError(
                "expected backward(), got torch.autograd.grad() or backward(inputs=...), which leave the layers'"
                " gradients out; try a copy of the model made before the trainer"
            )
        if torch.is_grad_enabled():
            raise ValueError(
                "expected backward() without create_graph=True, got a backward pass to differentiate"
            )

    def is_passing(self) -> bool:
        """Return whether layers are between a forward pass and its backward pass, or in one of them."""
        return self.is_up and (self._is_trained or self.next_up < len(self.user.layers))

    def is_down(self) -> bool:
        """Return whether a backward pass has begun that is not complete."""
        return self.is_up and self.next_down < len(self.user.layers) - 1

    @contextmanager
    def _computing(self, place: int, *, is_down: bool = False) -> Iterator[None]:
        self.computing, self.user.layers[place].is_down = place, is_down
        try:
            yield
        except RuntimeError as error:
            for part, meant in MEANT.items():
                if part in str(error):
                    raise ValueError(f"{self.user.layers[place].name}: {meant}") from error
            raise
        finally:
            self.computing, self.user.layers[place].is_down = None, False

    def visit(self, place: int, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return a layer's result. The model's own loop calls this method in place of the layer's forward()."""
        if place and place != self.next_up:
            raise ValueError(
                f"expected each layer once, in the list's order, got layer {place} after layer {self.next_up - 1}; try"
                " to turn the model's own checkpointing off, because the trainer recomputes layers, and to skip none"
            )
        if not place:
            self._begin_forward()
        layer, module = self.user.layers[place], self.user.modules[place]
        if module._compiled_call_impl is not None:
            raise ValueError(
                f"{layer.name}: expected a layer without compile(), which would compile the trainer; try"
                " layer.forward = torch.compile(layer.forward), before the trainer is made"
            )
        tensors = layer.take(args, options)
        self.next_up = place + 1
        if self._is_trained:
            # as transformers' have
            caches = [leaf for leaf in layer.leaves if hasattr(leaf, "get_seq_length")]
            if caches:
                raise ValueError(
                    f"layer {place}: expected no cache, which recompute fills twice, got {type(caches[0]).__name__};"
                    " try use_cache=False"
                )
            outputs = self.up(place, tensors)
            if not any(output.requires_grad for output in outputs):
                return self._without_gradient(place, outputs, tensors)
            uses = (tensors[index] for index in layer.uses)
            results = LayerTurn.apply(self, place, outputs, self.anchor, *uses)  # type: ignore[no-untyped-call]
            return layer.give(results, tensors)
        return self._without_gradient(place, self.up(place, tensors), tensors)

    def _without_gradient(self, place: int, outputs: Passed, tensors: Passed) -> Any:
        """Return the result of a layer that has no backward pass."""
        if self._is_trained and place == self.last_down:
            self.last_down += 1
            if self.last_down == len(self.user.layers):
                raise ValueError(
                    "expected a trained parameter in the layers or below them, got none; try to train the model"
                    " without a trainer, on the layers' results, which never change"
                )
        self.stream.states[place].saved = []
        return self.user.layers[place].give(outputs, tensors)

    def _begin_forward(self) -> None:
        self.check_stream()
        if self.num_backward and not self.stream.waits:
            raise ValueError(UPDATES_HAVE_BEGUN.format("forward pass after backward()"))
        if self.access.has_dropped_all():
            self._take_gradients()
        self.rewind()
        if self.access.touched:
            if self.terms.dtype != "fp32":
                self.access.check_unchanged()
            self.access.touched.clear()
            self.refetch()
        self.num_passes, self.is_up, self.next_down = self.num_passes + 1, True, len(self.user.layers) - 1
        self.last_down = 0
        self._is_trained = torch.is_grad_enabled()

    def check_stream(self) -> None:
        """Raise ValueError if the user's loop and the trainer run on different CUDA streams, because the trainer's
        copies would not wait for the loop's work."""
        if self.device.type == "cuda" and self.gpu.streams.current() != self.gpu.compute:
            raise ValueError(
                "expected the training loop on the CUDA stream that was current when the trainer was made, got another;"
                " try to make the trainer within the loop's torch.cuda.stream()"
            )

    def _check_gradients(self, state: LayerState, parameters: Sequence[nn.Parameter]) -> None:
        for name, parameter in zip(state.layout.names, parameters, strict=True):
            if state.module.get_parameter(name).grad is None:
                raise ValueError(
                    "expected each backward pass to give a gradient to every parameter with requires_grad=True, got"
                    f" no gradient for {self.user.names[id(parameter)]}"
                )

    # ---- A step

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, for backward() in fp16."""
        return loss * self.stream.scale.value if self.stream.scale.is_used else loss

    def step(self) -> Tensor:
        """Clip the gradients that the backward passes since the last step have summed, update all parameters with these
        gradients, and then drop the gradients. Return the gradient norm before clipping. In fp16 a step whose norm is
        not finite is skipped, and `is_skipped` is True.
        """
        self.check_stream()
        exposed = sorted(self.access.exposed)
        dropped = self._take_gradients()
        if self.is_down() or not self.num_backward:
            raise ValueError(
                "step: expected a backward pass through all layers before step(), got none, or a part of one"
            )
        if dropped:
            raise ValueError(f"step: expected a gradient for every parameter, got none for {dropped[0]}")
        self.rewind()
        self.access.check_parameters()
        self.saved.check_states()
        self._check_gradients(self.ends, self.user.rest)
        settle_gradients(self.ends)
        for place in exposed:
            visit = -1 - (place - self.last_down)
            self.stream.clip.norms[visit] = norms_at_home(self.stream.states[place])
        held = self.access.held() if self.stream.waits else self._held
        ended = self.stream.finish(self.user.settings())
        assert ended.grad_norm is not None
        self.num_backward, self.is_skipped, self._is_home = 0, ended.is_skipped, False
        self.access.touched.clear()
        self._renew_gradients(self.stream.clip.factor)
        self.user.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedules check this
        for place in held:
            self.access.touch(place)
        return ended.grad_norm

    def _take_gradients(self) -> list[str]:
        """Take over what the script has done with the gradients. If it has dropped all, no backward pass counts.
        Return the names of the layers' parameters whose gradients the script has dropped."""
        has_dropped_all = self.access.has_dropped_all() and all(
            parameter.grad is None for parameter in self.user.rest
        )
        dropped = self.access.take_gradients()
        if has_dropped_all:
            self.num_backward, self.access.taken = 0, []
            self._renew_gradients()
        return dropped

    def _renew_gradients(self, factor: Tensor | None = None) -> None:
        """Make the rest of the model ready for the next step's gradients. If the script keeps gradients of the last
        step, it keeps their memory, too, and sees them clipped by `factor`."""
        for parameter in self.user.rest:
            parameter.grad = None
        kept = [taken.gradient for taken in self.access.taken if taken.gradient is not None]
        self.access.taken = []
        if has_lent_gradients(self.ends):
            kept.append(self.ends.grads)
            self.ends.grads = self.gpu.room(len(self.ends.grads), self.ends.grads.dtype, host=False)
        self.ends.collect_gradients(self.ends.grads)
        if factor is not None:
            for gradient in kept:
                gradient.mul_(factor.to(gradient.device))

    # ---- The state at home

    def synchronize(self) -> None:
        """Finish all updates. Before each use of a layer's parameters the trainer does so by itself."""
        self.come_home()

    def come_home(self) -> None:
        """Finish all updates, so that the user's parameters have the newest weights. Raises ValueError while updates
        run that plain training would make in step()."""
        if self._is_home:
            return
        if (self.num_backward or self.is_down()) and not self.stream.waits:
            raise ValueError(UPDATES_HAVE_BEGUN.format("layers' parameters"))
        if not self.is_passing():
            self.rewind()
            self.stream.settle()
        elif self.stream.is_late():
            raise ValueError(
                "expected no use of layers' weights within a forward pass, got one; try it after step(), or a placement"
                " without S"
            )
        self.gpu.synchronize(*(state.updated for state in self.stream.states))
        for state, home in zip(self.stream.states, self._homes, strict=True):
            show_at_home(state, home)
        self._is_home = True

    def named_states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield each trained parameter's name and state on the host: step, exp_avg, exp_avg_sq and, for weights in bf16
        or fp16, their fp32 master. States whose home is the host are yielded without a copy, so use them before
        training goes on. States on the device or the disk are copied to the host, one layer at a time.
        """
        return self.saved.named_states()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the optimizer's state in the format of torch's AdamW, with the loss scale added. The weights
        are in model.state_dict().
        """
        scale = self.stream.scale
        state = self.user.optimizer.state_dict()
        return {**state, "loss_scale": scale.value, "num_good_steps": scale.num_good}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the result of state_dict(), of this class or of torch's AdamW. Load the model's own
        state_dict() first."""
        self.check_stream()
        self.user.optimizer.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.stream.scale.value = state_dict.get("loss_scale", self.stream.scale.value)
        self.stream.scale.num_good = state_dict.get("num_good_steps", 0)

    def close(self) -> None:
        """Finish all updates and restore the layers' own forward(). The weights stay in the memory that was their home:
        the device's or the host's.
        """
        self.rewind()
        self.num_backward = 0
        self.gpu.synchronize(*(state.updated for state in self.stream.states))
        self.come_home()
        self._undo.close()
        self.gpu.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self.close()
        else:
            self._undo.close()
            self.gpu.__exit__(*exc)

    def parts(self) -> Iterator[tuple[LayerState, list[nn.Parameter]]]:
        """Yield the rest of the model, then each layer that is trained: its state, and the user's parameters."""
        yield self.ends, self.user.rest
        for state, parameters in zip(self.stream.states, self.user.own_parameters, strict=True):
            if not state.is_frozen:
                yield state, parameters

    def refetch(self) -> None:
        """Fetch layers again that were fetched for the next step, because their weights may have changed."""
        for state in self.stream.states:
            state.updated.result()
        self.stream.refetch()

    def rewind(self) -> None:
        """Drop a forward pass that no backward pass follows."""
        if self.is_up:
            self.stream.rewind()
            self.is_up = False

    # ---- Set-up

    def _set_up(
        self, make: Callable[[Parts], LayerStream], *, bare: bool = False, boundaries: str = "device"
    ) -> None:
        """Place the layers, with their boundaries in the memory `boundaries`, and replace the layers' forward(). If
        placing fails, for example because the host's memory cannot be page-locked, restore the layers and unlock the
        memory, so that the user may try a smaller training.
        """
        try:
            self._place(make, bare=bare)
            if boundaries == "host":
                send_boundaries_home(self.stream.states)
            self._take_over()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def _place(self, make: Callable[[Parts], LayerStream], *, bare: bool = False) -> None:
        """Move the layers to their homes, and the rest of the model to the device. `bare`: True: make no AdamW
        states."""
        rest = NamedLayer(self.user.ends, "rest of the model", self.user.groups_of(self.user.rest))
        self.ends = LayerState(self.gpu, rest, self.terms, Home(on_host=False, bare=bare))
        move_home(self.ends, self.user.rest)
        for name, parameter in zip(self.ends.layout.names, self.user.rest, strict=True):
            self._undo.callback(self.ends.adopt(name, parameter).remove)
        self.ends.collect_gradients(self.ends.grads)
        self.stream = make(Parts(self.gpu, layers_of(self.user, self.terms), self.ends, self.user.order))

    def _take_over(self) -> None:
        """Replace each layer's forward() by a call of this training, observe the script's uses of the layers'
        parameters, and let the optimizer's state_dict() and load_state_dict() be those of this training."""
        replace_forwards(self, self._undo)
        self._homes = [state.current.weights for state in self.stream.states]
        self.access, self.saved = ScriptAccess(self), SavedState(self)
        observe_script(self.user, self.access, self._undo)
        take_optimizer(self.user, self.saved, self._undo)


@contextmanager
def _uncached_autocast() -> Iterator[None]:
    """Turn off autocast's cache. The cache would keep a copy of every layer's weights until autocast ends, and could
    return weights that a slot held in an earlier step.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
