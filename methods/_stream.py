"""How a layer travels between host and device; when it travels is each method's own loop.

A layer at home is flat slabs: weights, gradient, fp32 master and moments. A slot is room on the device for one layer's
weights and gradient, with the module bound to it. A copy is one flat transfer per direction and visit. Three streams
(compute, inbound, outbound) are ordered by events alone; host threads wait for what they need, the launching thread
only for a copy to have been queued. Slots and slabs live as long as the run, so no buffer changes streams through an
allocator.

Shapes: B batch, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from harness.method import TensorState
from harness.model import DTYPES, Layer, decays, initial
from harness.spec import BETAS, EPSILON, WEIGHT_DECAY, Workload

ALIGNMENT = 16  # elements: 64 bytes of fp32, so that every tensor of a slab starts where an allocation would


class HostStream:
    """A stream of the CPU: work is done when it is queued, so there is nothing to wait for. Its own event, too."""

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> HostStream:
        return self

    def synchronize(self) -> None: ...


class CpuStreams:
    """Streams and threads where the device is the CPU."""

    stream: Any = HostStream
    current: Any = HostStream

    def use(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def pool(self, num_threads: int) -> Any:
        """Threads of one core each. torch hands a thread its number of cores at its first parallel work, from a count
        that these threads overwrite: the computing thread takes its own first."""
        torch.get_num_threads()
        return ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,))


class CudaStreams(CpuStreams):
    """Streams and threads of the CUDA device."""

    stream = staticmethod(torch.cuda.Stream)
    current = staticmethod(torch.cuda.current_stream)
    use = staticmethod(torch.cuda.stream)


# One table for what orders work; the race detector and virtual time put theirs in here.
STREAMS: dict[str, Any] = {"cpu": CpuStreams(), "cuda": CudaStreams()}


class Device:
    """One device's three streams, the thread that queues inbound copies, and the host's update threads."""

    def __init__(self, name: str, num_workers: int = 1) -> None:
        self.name = torch.device(name)
        self.streams = STREAMS[self.name.type]
        self.compute = self.streams.current()
        self.inbound, self.outbound = self.streams.stream(), self.streams.stream()
        self.copier, self.workers = self.streams.pool(1), self.streams.pool(num_workers)
        self.moved_bytes = 0

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: object) -> None:
        for pool in (self.copier, self.workers):
            pool.shutdown(cancel_futures=True)

    def room(self, numel: int, dtype: torch.dtype, *, host: bool) -> Tensor:
        """A zeroed slab; on the host of a CUDA device it is page-locked, exactly as large as asked."""
        slab = torch.zeros(numel, dtype=dtype, device="cpu" if host else self.name)
        if host and self.name.type == "cuda":
            code = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 0)
            if int(code):
                raise torch.OutOfMemoryError(f"cannot page-lock {slab.nbytes} bytes of host memory: CUDA error {code}")
        return slab

    def synchronize(self, *pending: Future) -> None:
        """Wait for these futures, then for everything queued on the three streams."""
        for future in pending:
            future.result()
        for stream in (self.inbound, self.compute, self.outbound):
            stream.synchronize()


class Layout:
    """Where each parameter of a module lies in a flat slab."""

    def __init__(self, module: nn.Module) -> None:
        self.names, self.shapes, self.starts, self.decays = [], [], [], []
        self.numel = 0
        for name, parameter in module.named_parameters():
            self.names.append(name)
            self.shapes.append(parameter.shape)
            self.starts.append(self.numel)
            self.decays.append(decays(parameter))
            self.numel += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT

    def views(self, slab: Tensor) -> list[Tensor]:
        starts_shapes = zip(self.starts, self.shapes, strict=True)
        return [slab[start : start + shape.numel()].view(shape) for start, shape in starts_shapes]


class Clip:
    """The global gradient norm, of each layer's norms in the model's order, and the factor it asks for, which also goes
    to the host."""

    def __init__(self, device: Device, norms: list[list[Tensor]], max_norm: float) -> None:
        self.total = torch.linalg.vector_norm(torch.stack([*chain.from_iterable(norms)]))
        self.factor = self.host_factor = None
        if not max_norm:
            return
        self.factor = torch.clamp(max_norm / (self.total + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_
        done = device.compute.record_event()
        with device.streams.use(device.outbound):
            device.outbound.wait_event(done)
            self.host_factor = self.factor.to("cpu", non_blocking=True)
            self.landed = device.outbound.record_event()

    def on_host(self) -> Tensor | None:
        """The factor, waited for; None without clipping."""
        if self.host_factor is not None:
            self.landed.synchronize()
        return self.host_factor


class Home:
    """A layer where it lives: the host, or the device for what is resident. Weights and gradient in the dtype that
    travels, fp32 master (the weights themselves in fp32) and AdamW's moments."""

    def __init__(self, device: Device, module: nn.Module, prefix: str, workload: Workload, *, host: bool) -> None:
        self.device, self.layout, self.prefix = device, Layout(module), prefix
        dtype, numel = DTYPES[workload.dtype], self.layout.numel
        self.weights = device.room(numel, dtype, host=host)
        self.grads = device.room(numel, dtype, host=host)
        self.master = self.weights if dtype == torch.float32 else device.room(numel, torch.float32, host=host)
        self.exp_avg = device.room(numel, torch.float32, host=host)
        self.exp_avg_sq = device.room(numel, torch.float32, host=host)
        self.steps = [torch.zeros((), device=self.weights.device) for _ in self.layout.names]
        self.updated: Future = Future()
        self.updated.set_result(None)
        self.landed: Any = None
        named_views = zip(self.layout.names, self.layout.views(self.master), strict=True)
        for name, view in named_views:
            view.copy_(initial(prefix + name, view.shape, workload))
        self.weights.copy_(self.master)

    def update(self, learning_rate: float, factor: Tensor | None) -> None:
        """One AdamW step from this home's gradient, scaled by the clip factor; decay on matrices only.

        torch's fused kernel tensor by tensor: the very bits of torch.optim.AdamW(fused=True).
        """
        grads = self.grads.float()  # the slab itself in fp32
        if factor is not None:
            grads.mul_(factor)
        slabs = (self.master, grads, self.exp_avg, self.exp_avg_sq)
        rows = zip(self.layout.decays, *map(self.layout.views, slabs), self.steps, strict=True)
        table = list(rows)
        for decayed in (True, False):
            chosen = [row[1:] for row in table if row[0] is decayed]
            weights, gradients, exp_avgs, exp_avg_sqs, steps = (list(column) for column in zip(*chosen, strict=True))
            with torch.no_grad():
                adamw(
                    weights, gradients, exp_avgs, exp_avg_sqs, [], steps,
                    fused=True, amsgrad=False, maximize=False, beta1=BETAS[0], beta2=BETAS[1], eps=EPSILON,
                    lr=learning_rate, weight_decay=WEIGHT_DECAY if decayed else 0.0,
                )  # fmt: skip
        if self.master is not self.weights:
            self.weights.copy_(self.master)

    def update_when_landed(self, learning_rate: float, clip: Callable[[], Tensor | None]) -> None:
        """Queue the update on the host's threads: it waits for the gradient and for the clip factor, nothing waits
        for it but the next prefetch of this layer."""
        landed = self.landed

        def work() -> None:
            landed.synchronize()
            self.update(learning_rate, clip())

        self.updated = self.device.workers.submit(work)

    def states(self) -> Iterator[TensorState]:
        columns = (self.layout.views(self.master), self.layout.views(self.exp_avg))
        for name, weight, exp_avg in zip(self.layout.names, *columns, strict=True):
            yield TensorState(self.prefix + name, weight, exp_avg)


class Saved(NamedTuple):
    """What a forward pass keeps for its recompute: the layer's input and, with dropout, the random state before it."""

    x: Tensor
    random_state: Tensor | None


class Slot:
    """Room on the device for one layer. A resident layer's slot is its home's own slabs."""

    def __init__(self, device: Device, module: nn.Module, workload: Workload, home: Home | None = None) -> None:
        self.device, self.layer, self.layout = device, module, Layout(module)
        self.has_dropout = workload.dropout > 0
        numel, dtype = self.layout.numel, DTYPES[workload.dtype]
        self.weights = home.weights if home else device.room(numel, dtype, host=False)
        self.grads = home.grads if home else device.room(numel, dtype, host=False)
        self.grad_views = self.layout.views(self.grads)
        self.loaded: Future | None = None
        self.drained: Any = None
        bind(module, self.layout, self.weights, self.grads)

    def prefetch(self, home: Home) -> None:
        """Queue the copy of a layer's weights into this slot, after its own update and the slot's last use."""
        device, updated, used = self.device, home.updated, self.device.compute.record_event()

        def work() -> Any:
            updated.result()
            with device.streams.use(device.inbound):
                device.inbound.wait_event(used)
                self.weights.copy_(home.weights, non_blocking=True)
                return device.inbound.record_event()

        device.moved_bytes += self.weights.nbytes
        self.loaded = device.copier.submit(work)

    def forward(self, x: Tensor) -> tuple[Tensor, Saved]:
        """The layer's output and what its backward pass needs; no graph is kept. x: (B, T, D)."""
        self._arrive()
        saved = Saved(x, _random_state(self.device) if self.has_dropout else None)
        with torch.no_grad():
            return self.layer(x), saved

    def backward(self, saved: Saved, dy: Tensor) -> Tensor:
        """Recompute the layer on its input, leave its gradient in the slot, return the input's. dy: (B, T, D).

        Source: Chen et al. 2016, sublinear memory.
        """
        self._arrive()
        if self.drained is not None:
            # The copy home may still be reading the slot's last gradient: wait for it, not for the device.
            self.device.compute.wait_event(self.drained)
        self.grads.zero_()
        x = saved.x.detach().requires_grad_()
        with _replayed(self.device, saved.random_state), torch.enable_grad():
            y = self.layer(x)
        torch.autograd.backward(y, dy)
        assert x.grad is not None
        return x.grad

    def norms(self) -> list[Tensor]:
        """The norm of each parameter's gradient, fp32, on the device."""
        return list(torch._foreach_norm(self.grad_views, 2, dtype=torch.float32))

    def offload(self, home: Home) -> None:
        """Queue the copy of the slot's gradient to its home."""
        device, done = self.device, self.device.compute.record_event()
        with device.streams.use(device.outbound):
            device.outbound.wait_event(done)
            home.grads.copy_(self.grads, non_blocking=True)
            self.drained = home.landed = device.outbound.record_event()
        device.moved_bytes += self.grads.nbytes

    def wait(self) -> None:
        """Wait on the host until what this slot asked for, in either direction, has happened."""
        self.device.synchronize(*([self.loaded] if self.loaded else []))

    def _arrive(self) -> None:
        """Let compute wait for the weights; the launching thread waits only until their copy is queued."""
        if self.loaded is not None:
            self.device.compute.wait_event(self.loaded.result())
            self.loaded = None


def new_layer(workload: Workload) -> Layer:
    """A layer without memory of its own; Slot gives it some."""
    with torch.device("meta"):
        return Layer(workload)


def bind(module: nn.Module, layout: Layout, weights: Tensor, grads: Tensor) -> None:
    """Make a module's parameters and their gradients views of two slabs."""
    views = zip(layout.names, layout.views(weights), layout.views(grads), strict=True)
    for name, weight, grad in views:
        owner, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(weight)
        parameter.grad = grad
        setattr(module.get_submodule(owner), leaf, parameter)


def _random_state(device: Device) -> Tensor:
    return torch.cuda.get_rng_state(device.name) if device.name.type == "cuda" else torch.get_rng_state()


@contextmanager
def _replayed(device: Device, state: Tensor | None) -> Iterator[None]:
    """Run with the random state of the forward pass, then go on with the present one."""
    if state is None:
        yield
        return
    set_state = torch.cuda.set_rng_state if device.name.type == "cuda" else torch.set_rng_state
    present = _random_state(device)
    set_state(state)
    try:
        yield
    finally:
        set_state(present)
