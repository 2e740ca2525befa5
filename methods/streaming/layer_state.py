"""A layer in its home, which is the memory that stores the layer's state: flat slabs of weights, gradient and AdamW
state, the module that computes, and the layer's updates.

A layer computes all micro-batches of a step, one after the other. For each micro-batch a tuple of tensors passes
between layers; for the harness's GPT this is one tensor (B, T, D) of B samples, T tokens, D hidden."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from harness.core.job import Workload
from harness.core.method import TensorState
from harness.devices.streams import Device
from harness.models.gpt import DTYPES, drawn_blocks
from harness.models.model import new_layer
from methods.offload.adamw import AdamStep, Factor, Settings, split_into_runs, takes_one_pass, update
from methods.offload.clip import Clip, norms_of
from methods.offload.layout import cut_pieces, install, is_frozen, layout_of
from methods.offload.state import State, joined_master, keep_master_, kept_dtypes, master_of
from methods.shared.memory_needs import CHUNK_NUMEL, block_numel, shared_numel
from methods.shared.terms import Terms
from methods.streaming.gradient_views import GradientViews, settle_gradient
from methods.streaming.recompute import run_recomputed

if TYPE_CHECKING:
    from methods.streaming.boundaries import Boundary
    from methods.streaming.disk import Shelf


# random elements drawn at once for a rank's part of a layer, or for a frozen layer: few, because host memory is nearly
# full at that time
DRAWN = 2**14
# The tensors that one layer passes to the next for one micro-batch, or their gradients; None: that gradient is zero.
Passed = tuple[Any, ...]


class Speculation(NamedTuple):
    """A speculative update into the spare state: the AdamW step, the future that ends with the update, and a list with
    one entry for each chunk whose update was skipped."""

    step: AdamStep
    done: Future
    skipped: list[bool]


class NamedLayer(NamedTuple):
    """A layer's module, without memory, and the prefix of its parameters' names. `groups`: by a parameter's name, the
    index of its AdamW settings; None: the groups of published_settings(). `dtype`: of the weights; None: the
    training's."""

    module: nn.Module
    prefix: str
    groups: Mapping[str, int] | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Home:
    """The memory that stores a layer's state, and which parts of the state have room there. A layer is resident (on
    the device) unless its home is the host.

    `spare`: a second state, into which a speculative update writes before the clip factor is known; a commit exchanges
    both states. `streamed` layers live on the host and are updated on the device, in a slot. If `has_gradient` is
    False, the home has no memory for the gradient: the device updates the layer right after its backward pass. If there
    is a `shelf`, the optimizer's state is on the disk, in that shelf. A `bare` layer is never updated: it has no
    optimizer's state, and on the host no gradient."""

    on_host: bool
    spare: bool = False
    streamed: bool = False
    has_gradient: bool = True
    shelf: Shelf | None = None
    bare: bool = False


class LayerState:
    """A layer's state in its home. Weights and gradient have the training's dtype, unless the layer has one of its own.
    `deadline`: the update with the lowest deadline runs first; None: layers have their deadlines in the order in which
    they are made, the order of the forward pass.

    If the module has frozen parameters (`is_frozen`), the state is their weights alone, which are never updated: there
    is no gradient and no optimizer's state. Trained parameters of the same module then have another home.

    With several ranks a layer on the host is split: this home is the rank's part, which begins at element `first` of
    the whole slab of `whole_numel` elements. A resident layer is whole on every rank, and each rank makes the same
    update."""

    def __init__(
        self, device: Device, layer: NamedLayer, terms: Terms, home: Home, deadline: int | None = None
    ) -> None:
        self.device, self.module, self.prefix = device, layer.module, layer.prefix
        self.layout, self.terms, self.shelf = layout_of(layer.module), terms, home.shelf
        self.is_frozen, self.dtype = is_frozen(layer.module), layer.dtype or terms.dtype
        self.adds = False  # True: the next backward pass adds to the gradient at home
        self.deadline = device.next_place() if deadline is None else deadline
        self._take_memory(home, layer.groups)
        self.num_updates = 0
        self.adamw = partial(update, num_threads=device.num_workers, deadline=self.deadline)
        self.updated: Future = Future()
        self.updated.set_result(None)
        self.speculation: Speculation | None = None
        self.landed: Any = None  # event: the gradient has arrived at home; None: no gradient was sent yet
        # holds the layer's inputs on the host; None: the device keeps these
        self.boundary: Boundary | None = None
        # For each micro-batch: the layer's inputs, and the edges at which the outputs' gradients enter the graph.
        self.saved: list[tuple[Passed, list[GradientEdge]]] = []
        self.collected = torch.empty(0)  # slab that the last backward pass filled with gradients
        # the module's parameters by name; empty: not yet looked up
        self._parameters_by_name: dict[str, nn.Parameter] = {}
        self.rooms = GradientViews({}, is_open=True)
        if home.shelf is not None:
            home.shelf.prefix = layer.prefix

    def _take_memory(self, home: Home, groups: Mapping[str, int] | None) -> None:
        """Make the slabs of this home, and divide the update into chunks."""
        device, dtype, numel = self.device, DTYPES[self.dtype], self.layout.numel
        ranks = device.ranks
        self.is_shared = home.on_host and ranks.num_ranks > 1
        self.whole_numel = shared_numel(numel, ranks.num_ranks)
        if self.is_shared:
            numel = self.whole_numel // ranks.num_ranks
        self.first = numel * ranks.rank if self.is_shared else 0
        # the pieces in this home
        self.pieces = cut_pieces(self.layout.pieces(groups), self.first, self.first + numel)
        kept, is_bare = kept_dtypes(self.dtype), home.bare or self.is_frozen
        in_memory = [] if home.shelf is not None or is_bare else kept
        self.current = _room_for_state(device, numel, dtype, in_memory, host=home.on_host)
        has_spare = home.spare and not self.is_frozen
        self.spare = _room_for_state(device, numel, dtype, kept, host=home.on_host) if has_spare else None
        self.has_gradient = home.has_gradient and not (is_bare and home.on_host) and not self.is_frozen
        self.grads = torch.empty(0, dtype=dtype)
        if self.has_gradient:
            self.grads = device.room(numel, dtype, host=home.on_host)
        by_device = home.streamed or not home.on_host
        self.steps = device.room(1, torch.float32, host=False)[0] if by_device else torch.zeros(())
        # One call of a compiled kernel on the device takes a whole layer. The host's updates go in chunks, which share
        # its threads.
        block = block_numel(self.dtype) if by_device else CHUNK_NUMEL
        by_kernel = takes_one_pass(self.current, self.steps.device.type)
        self.chunks = split_into_runs(self.pieces, numel if by_kernel else block)
        self.updater = "update" if home.on_host else "compute"  # the row of a trace that shows update()

    @classmethod
    def of_model(
        cls, device: Device, workload: Workload, index: int, *, host: bool, **kept: Any
    ) -> LayerState:
        """Return the state of layer `index` of a workload's model. `host`, `kept`: fields of its Home."""
        layer = NamedLayer(new_layer(workload, index), workload.anatomy.layer_name(index))
        return cls(device, layer, Terms.of(workload), Home(on_host=host, **kept))

    def state_of(self, kept: list[Tensor]) -> State:
        """Return a state of the current weights and the optimizer's slabs `kept`. The slabs may be longer than the
        layer; the state has only the layer's elements."""
        return _state_of_slabs(self.current.weights, [slab[: self.layout.numel] for slab in kept])

    def to_draw(self, state: State) -> Iterator[tuple[str, Tensor]]:
        """Return, by name, the tensors to fill with starting values. If the fp32 master is split (its upper 16 bits are
        the weights), the tensors lie in the first moment's slab."""
        names = (self.prefix + name for name in self.layout.names)
        return zip(
            names,
            self.layout.views(state.exp_avg if state.has_split_master else joined_master(state)),
            strict=True,
        )

    def keep_drawn(self, state: State) -> Future:
        """Store the drawn values as the state's master and weights."""
        drawn = state.exp_avg if state.has_split_master else joined_master(state)
        for start in range(0, len(drawn), CHUNK_NUMEL):
            keep_master_(state.cut(start, start + CHUNK_NUMEL), drawn[start : start + CHUNK_NUMEL])
        if state.has_split_master:
            drawn.zero_()
        return self.updated

    def draw_part(self, workload: Workload) -> None:
        """Draw the starting values of this rank's part of a layer. Every whole tensor that reaches into the part is
        drawn block by block; only the part's elements are kept. A frozen layer keeps them in the dtype of its
        weights."""
        part = self.current.exp_avg if self.current.has_split_master else joined_master(self.current)
        for name, place in self.layout.places.items():
            if place.start >= self.first + len(part) or place.stop <= self.first:
                continue
            for start, drawn in drawn_blocks(self.prefix + name, place.shape, workload, DRAWN):
                begin = place.start + start - self.first
                end = min(begin + len(drawn), len(part))
                if end > max(begin, 0):
                    part[max(begin, 0) : end].copy_(drawn[max(-begin, 0) : end - begin])
        if not self.is_frozen:
            self.keep_drawn(self.current)

    def bind(self, weights: Tensor) -> None:
        """Make the module's parameters views of the slab `weights` on the device."""
        parameters = [*self._parameters().items()]
        for (name, parameter), weight in zip(parameters, self.layout.views(weights), strict=True):
            if parameter.is_meta:
                parameter = nn.Parameter(weight, requires_grad=parameter.requires_grad)
                self.adopt(name, parameter)
            # Keep the parameter objects in every slot: the graph of the forward pass knows them by identity.
            parameter.data = weight

    def _parameters(self) -> dict[str, nn.Parameter]:
        if not self._parameters_by_name:
            self._parameters_by_name.update(
                (name, self.module.get_parameter(name)) for name in self.layout.names
            )
        return self._parameters_by_name

    def adopt(self, name: str, parameter: nn.Parameter) -> Any:
        """Make this tensor the module's parameter of that name. A hook moves the gradients to the slab that
        collect_gradients() was given; return the handle of this hook, None if the parameter is frozen."""
        install(self.module, name, parameter)
        self._parameters_by_name.clear()
        if not parameter.requires_grad:
            return None
        return parameter.register_post_accumulate_grad_hook(
            partial(settle_gradient, self.rooms, self.prefix, name)
        )

    def forward(self, xs: list[Passed]) -> list[Passed]:
        """Return the layer's outputs; keep only the layer's inputs for backward(), which returns the gradients of those
        inputs that require one."""
        self.saved, ys = [], list[Passed]()
        self.rooms.is_open = False
        with self.device.span("compute", "forward", self.prefix):
            for x in xs if self.boundary is None else self.boundary.keep(xs):
                x = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in x)
                y = run_recomputed(self.module, x, keeps_random=self.terms.keeps_random)
                y = y if isinstance(y, tuple) else (y,)
                self.saved.append((x, [get_gradient_edge(tensor) for tensor in y if tensor.requires_grad]))
                ys.append(tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in y))
        return ys

    def backward(self, dys: list[Passed], grads: Tensor) -> list[Passed]:
        """Recompute the layer on its inputs, leave the sum over micro-batches of its parameters' gradients in the slab
        `grads`, and return the gradients of the inputs that require one. dys: for each micro-batch the gradients of the
        outputs that require one."""
        saved, self.saved, dxs = self.saved, [], []
        self.rooms.is_open = True
        if self.boundary is not None:
            self.boundary.arrive()
        with self.device.span("compute", "backward", self.prefix):
            self.collect_gradients(grads)
            for (x, output_edges), dy in zip(saved, dys, strict=True):
                pairs = [
                    (edge, grad) for edge, grad in zip(output_edges, dy, strict=True) if grad is not None
                ]
                if pairs:
                    torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
                dxs.append(tuple(tensor.grad for tensor in x if tensor.requires_grad))
        if self.boundary is not None:
            self.boundary.leave()
        self.rooms.is_open = False
        return dxs

    def collect_gradients(self, grads: Tensor) -> None:
        """Make the next backward passes leave the sum of their gradients in the slab `grads` on the device. The first
        gradient of each parameter is copied into the slab, so the slab need not be cleared; later gradients are added.
        If the layer `adds`, the first gradient is added, too. A frozen layer has no gradients."""
        if self.is_frozen:
            return
        if self.collected is not grads:
            self.rooms.views.update(zip(self.layout.names, self.layout.views(grads), strict=True))
            self.collected = grads
        for name, parameter in self._parameters().items():
            parameter.grad = self.rooms.views[name] if self.adds else None

    def norms(self) -> list[Tensor]:
        """Return the norm of each parameter's gradient after the last backward pass, fp32, on the device. If the layer
        is split over ranks, return the norms of this rank's part. If all ranks have the whole layer, the first rank
        returns its norms and every other rank returns zero. A frozen layer has none."""
        if self.is_frozen:
            return []
        with self.device.span("compute", "norm", self.prefix):
            grads = [*self.rooms.views.values()]
            if self.is_shared:
                part = self.device.ranks.part(self.collected[: self.whole_numel])
                grads = [part[start:stop] for start, stop, _ in self.pieces]
            elif self.device.ranks.rank:
                return [self.collected.new_zeros((), dtype=torch.float32)]
            return norms_of(grads, in_blocks=self.terms.norms_in_blocks)

    def sum_gradients(self) -> None:
        """Sum the gradient of the last backward pass over all ranks. If the layer is split over ranks, this rank sums
        only its own part."""
        ranks = self.device.ranks
        if ranks.num_ranks > 1 and not self.is_frozen:
            with self.device.span("compute", "sum", self.prefix):
                (ranks.sum_part if self.is_shared else ranks.sum)(self.collected[: self.whole_numel])

    def update(self, settings: Settings, factor: Factor, grads: Tensor | None = None) -> None:
        """Update in place with the gradient in `grads`, multiplied by the clip factor. If `grads` is None, take the
        gradient at home. A frozen layer stays as it is."""
        if self.is_frozen:
            return
        grads = self.grads if grads is None else grads
        with self.device.span(self.updater, "update", self.prefix):
            self.adamw(grads, self.current, self.current, self.chunks, self.next_step(settings), factor)

    def update_when_landed(self, settings: Settings, clip: Clip) -> None:
        """Queue the update on the host's threads. The update starts when the gradient and the clip factor have arrived;
        only the layer's next prefetch waits until the update is complete. If the factor is 1 and a speculative update
        is complete, commit the speculative update instead. A frozen layer stays as it is."""
        if self.is_frozen:
            return
        landed, spare, ahead = self.landed, self.spare, self.speculation
        step = ahead.step if ahead else self.next_step(settings)

        def begin(state: State) -> Future:
            def work(first: int, last: int) -> None:
                landed.synchronize()
                factor = clip.on_host()
                if ahead is not None and spare is not None:
                    ahead.done.result()
                    if not ahead.skipped and clip.is_one():
                        self.current, self.spare = spare, state  # every chunk's call sets the same two states
                        return
                with self.device.span("update", "update", self.prefix):
                    self.adamw(self.grads, state, state, self.chunks[first:last], step, factor)

            # The update gets a thread only when the event has come: while it waits, another update can use the thread.
            return self.device.workers.update(
                self.deadline, clip.landed_event or landed, len(self.chunks), work
            )

        self.speculation = None
        if self.shelf is None:
            self.updated = begin(self.current)
        else:
            self.updated = self.shelf.visit(lambda kept: begin(self.state_of(kept)))

    def speculate_when_landed(self, settings: Settings, clip: Clip) -> None:
        """Queue an update into the spare state, as if nothing were clipped. The update skips its remaining chunks when
        the norm of the gradients known so far exceeds the limit."""
        landed, state, spare = self.landed, self.current, self.spare
        is_within, unclipped = clip.is_within(), clip.unclipped_factor
        skipped: list[bool] = []
        assert spare is not None
        step = self.next_step(settings)

        def work(first: int, last: int) -> None:
            landed.synchronize()
            if skipped or not is_within():
                skipped.append(True)
                return
            with self.device.span("update", "update ahead", self.prefix):
                self.adamw(self.grads, state, spare, self.chunks[first:last], step, unclipped)

        done = self.device.workers.update(self.deadline, landed, len(self.chunks), work)
        self.speculation = Speculation(step, done, skipped)

    def drop(self) -> None:
        """Skip this step's update after an fp16 overflow. If a speculative update was made, discard it."""
        if self.speculation is not None:
            self.num_updates -= 1
            self.updated, self.speculation = self.speculation.done, None

    def commit(self) -> None:
        """Exchange the spare state and the current state."""
        assert self.spare is not None
        self.current, self.spare = self.spare, self.current

    def next_step(self, settings: Settings) -> AdamStep:
        self.num_updates += 1
        return AdamStep(settings, self.num_updates, self.steps.fill_(self.num_updates))

    def load(self, values: Sequence[tuple[Tensor, Tensor | None, Tensor | None]]) -> None:
        """Load for each parameter a tuple of its weight and both moments; a moment that is None stays unchanged."""
        done: Future = Future()
        done.set_result(None)

        def take(state: State) -> Future:
            for (name, place), (weight, *moments) in zip(self.layout.places.items(), values, strict=True):
                part = state.cut(place.start, place.stop)
                for slab, moment in zip((part.exp_avg, part.exp_avg_sq), moments, strict=True):
                    if moment is not None:
                        slab.copy_(self.layout.flat(name, moment))
                flat = self.layout.flat(name, weight)
                for start in range(
                    0, len(flat), CHUNK_NUMEL
                ):  # a device may have no room for a copy of all values
                    chunk = flat[start : start + CHUNK_NUMEL].to(slab.device, torch.float32)
                    keep_master_(part.cut(start, start + CHUNK_NUMEL), chunk)
            return done

        if self.shelf is None:
            take(self.current)
        else:
            self.updated = self.shelf.visit(lambda kept: take(self.state_of(kept)))

    def tensors(self) -> Iterator[TensorState]:
        """Yield each parameter's weight, or master, and both moments; of a frozen layer the weights alone."""
        state = self.current if self.shelf is None else self.state_of(self.shelf.read())
        columns: Iterable[Any] = (master_of(state), state.exp_avg, state.exp_avg_sq)
        if self.is_frozen:
            columns = (state.weights,)
        if self.is_shared:
            columns = map(self.device.ranks.gathered, columns)
        columns = map(self.layout.views, columns)
        for name, *tensors in zip(self.layout.names, *columns, strict=True):
            yield TensorState(self.prefix + name, *tensors)


def _state_of_slabs(weights: Tensor, kept: list[Tensor]) -> State:
    return State(weights, kept[0] if len(kept) == 3 else None, *kept[-2:])


def _room_for_state(
    device: Device, numel: int, dtype: torch.dtype, kept: list[torch.dtype], *, host: bool
) -> State:
    """Return a state of zeroed slabs: one for the weights, and one for each part of the optimizer's state, with the
    dtypes in `kept`. If `kept` is empty, those parts are on the disk and get no memory."""
    weights = device.room(numel, dtype, host=host)
    rooms = [device.room(numel, kept_dtype, host=host) for kept_dtype in kept]
    return _state_of_slabs(weights, rooms or [torch.empty(0), torch.empty(0)])
