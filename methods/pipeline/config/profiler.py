"""Measures a user's model on the machines that will train it: each section between CutPoints, messages between ranks,
and all-reduces.

    profiler = Profiler(model, device=-1)
    profiler.initialize(get_batch)
    profiler.profile_all(get_batch, [1, 2, 4, 8], out_folder="profile")

Each rank measures some of the sections. All ranks compute at once, as in training, because ranks may share cores,
memory and network. A message is timed while both of its ranks compute. A single process measures only sections.
"""

from __future__ import annotations

import atexit
import json
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.core.cpu_cores import available_cores
from harness.core.failures import of_exception
from harness.devices import cuda_budget
from harness.devices.memory_account import Tracker
from harness.devices.streams import STREAMS
from methods.pipeline.batches import Inputs, cast_batch, move_value
from methods.pipeline.config.partition import BUCKET_BYTES
from methods.pipeline.config.profile import Message, Profile, Section, SectionCost, Sum
from methods.pipeline.cut import (
    InitWeights,
    Part,
    count_cuts,
    cut_into_parts,
    give_memory,
    run_without_memory,
    specs_of,
    trace_model,
)
from methods.pipeline.seat import take_seat
from methods.pipeline.transport import gather_messages, leave

MOST_REPEATS = 16
NUM_RUNS = 7  # number of measured runs, whose median the profile has; an additional first run is not counted
LIMIT_SECONDS = 1800.0  # longest wait for another rank


def device_tensor_bytes(device: torch.device) -> int | None:
    """Return the bytes that a stage's tensors may fill on a GPU: the GPU's memory without a process's CUDA context and
    a reserve. Return None for a CPU.
    """
    if device.type != "cuda":
        return None
    return cuda_budget.tensor_bytes(
        torch.cuda.get_device_properties(device).total_memory, cuda_budget.context_bytes()
    )


class SectionValues(NamedTuple):
    """The tensors that a section's passes take for one micro-batch."""

    received: list[Tensor]
    inputs: list[Any]
    # gradients of the tensors sent; None in the last section, which returns the loss
    grads: list[Tensor] | None


class Profiler:
    """Measures a model's sections on the ranks that torchrun started. `device`: a name, or the number of a GPU; -1: GPU
    LOCAL_RANK, or the CPU in all ranks if a machine has fewer GPUs than ranks. `fp16`: True: the model's weights are
    rounded in place. `make_optimizer`: returns, for a list of parameters, the optimizer that will train these
    parameters. `init_weights`: for a model on the meta device: fills named tensors in place; None: for other models.
    """

    def __init__(
        self,
        model: nn.Module,
        device: int | str = -1,
        fp16: bool = False,
        *,
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
        init_weights: InitWeights | None = None,
    ) -> None:
        self.rank, self.world_size, self.device, self.note = take_seat(LIMIT_SECONDS, device)
        self.fp16, self.model, self.make_optimizer = fp16, model.half() if fp16 else model, make_optimizer
        self.dtype, self.init_weights = torch.float16 if fp16 else None, init_weights
        self.sections: list[Part] = []

    def initialize(self, get_batch: Callable[[int], Inputs]) -> None:
        """Cut the model at all of its CutPoints. `get_batch`: returns a batch with the given number of samples. Raises
        ValueError if the model cannot be cut."""
        graph = trace_model(self.model.train(), get_batch(1))
        self.sections = cut_into_parts(self.model, graph, range(count_cuts(graph)))

    def profile_all(
        self,
        get_batch: Callable[[int], Inputs],
        microbatches: Iterable[int],
        out_folder: str | Path = "profile",
    ) -> Profile:
        """Measure all sections with micro-batches of these sizes, in samples, smallest first, until memory runs out.
        Then, if there are several ranks, measure messages and all-reduces. Rank 0 writes the profile; all ranks return
        the profile.
        """
        if not self.sections:
            raise ValueError(
                "profile_all: expected a model that is cut, got none; try initialize(get_batch) first"
            )
        sizes = sorted(set(microbatches))
        if not sizes or sizes[0] < 1:
            raise ValueError(f"microbatches: expected sizes of at least 1, got {sizes}")
        batches = {size: cast_batch(get_batch(size), self.dtype) for size in sizes}
        num_params = [
            sum(weight.numel() for weight in section.module.parameters()) for section in self.sections
        ]
        self._check_sections(batches)
        self._measure_sections(batches)
        costs, update_medians = self._gather_costs(), self._gather_update_medians()
        messages, sums = [], []
        if self.world_size > 1 and len(costs) == len(self.sections):
            sent_sizes = {cost.activation_bytes for section in costs.values() for cost in section} - {0}
            messages = self._time_messages(_least_middle_most(sent_sizes), batches)
            sums = self._time_sums(min(BUCKET_BYTES, max(4 * sum(num_params), 64)))
        sections = [
            Section(count, update_medians.get(section_number, 0.0), costs.get(section_number, []))
            for section_number, count in enumerate(num_params)
        ]
        tensor_bytes, crowding = device_tensor_bytes(self.device), self._measure_crowding()
        profile = Profile(self.fp16, tensor_bytes, sections, messages, sums, *crowding)
        if self.rank == 0:
            profile.write(out_folder)
        self._meet()
        atexit.register(leave)
        return profile

    # ---- Sections

    def _check_sections(self, batches: Mapping[int, Inputs]) -> None:
        """Keep what each section returns, without memory. Raises ValueError if a value cannot be sent."""
        self._returned_values = {
            size: [values for values, _ in run_without_memory(self.sections, batch)]
            for size, batch in batches.items()
        }
        for returned in self._returned_values.values():
            for section_number, values in enumerate(returned[:-1]):
                specs_of(values, section_number)

    def _measure_sections(self, batches: Mapping[int, Inputs]) -> None:
        """Measure this rank's share of the sections with each size of micro-batch, in NUM_RUNS + 1 rounds. Each round
        measures all sections and sizes, so that a moment when the machine is busy slows all of them alike."""
        self._pass_rounds: dict[tuple[int, int], list[list[float]]] = defaultdict(list)
        self._update_rounds: dict[int, list[float]] = defaultdict(list)
        self._section_bytes: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._too_large_sizes: set[tuple[int, int]] = set()
        self._elapsed_seconds = self._core_seconds = 0.0
        # ids of the tensors that _enter() brought from the meta device to this device
        self._from_meta: set[int] = set()
        for _ in range(NUM_RUNS + 1):
            for first_section in range(0, len(self.sections), self.world_size):
                self._meet()
                # A rank for which no section is left measures one of the first sections again, so that no rank is idle.
                self._measure_section((first_section + self.rank) % len(self.sections), batches)

    def _gather_costs(self) -> dict[int, list[SectionCost]]:
        """Return the costs of all ranks' sections, by the section's number."""
        costs_by_number: dict[int, list[SectionCost]] = defaultdict(list)
        for (section_number, size), rounds in sorted(self._pass_rounds.items()):
            forward, copy, recompute, backward = map(statistics.median, zip(*rounds[1:], strict=True))
            costs_by_number[section_number].append(
                SectionCost(
                    size, forward, recompute, backward, copy, *self._section_bytes[section_number, size]
                )
            )
        message = [
            (section_number, [*map(asdict, section_costs)])
            for section_number, section_costs in costs_by_number.items()
        ]
        costs = {}
        for sections_of_rank in self._gather(message):
            for section_number, section_costs in sections_of_rank:
                costs[section_number] = [SectionCost(**cost) for cost in section_costs]
        return costs

    def _gather_update_medians(self) -> dict[int, float]:
        """Return the seconds of the updates of all ranks' sections, by the section's number."""
        medians = [
            (section_number, statistics.median(rounds[1:]))
            for section_number, rounds in self._update_rounds.items()
        ]
        return {
            section_number: seconds
            for medians_of_rank in self._gather(medians)
            for section_number, seconds in medians_of_rank
        }

    def _measure_section(self, section_number: int, batches: Mapping[int, Inputs]) -> None:
        """Time the passes of section `section_number` with each size of micro-batch, and the section's update. If
        memory runs out at a size, drop this size and all larger sizes, in later rounds too.
        """
        module, size = self.sections[section_number].module, min(batches)
        try:
            self._enter(section_number)
            for size, batch in batches.items():
                if (section_number, size) in self._too_large_sizes:
                    break
                values = self._make_values(section_number, size, batch)
                # Run about as many samples at each size: on busy cores, a single short pass often ends before another
                # process takes the core, and would seem faster.
                num_repeats = max(1, min(MOST_REPEATS, max(batches) // size))
                passes = [self._time_passes(module, values) for _ in range(num_repeats)]
                means = [statistics.mean(seconds) for seconds in zip(*passes, strict=True)]
                self._pass_rounds[section_number, size].append(means)
                if (section_number, size) not in self._section_bytes:
                    self._section_bytes[section_number, size] = self._measure_bytes(module, values)
            size = min(batches)
            self._update_rounds[section_number].append(self._time_update(module))
        except (RuntimeError, MemoryError) as error:
            if not of_exception(error, "profile", {}).status.startswith("oom"):
                raise
            self._too_large_sizes.add((section_number, size))
            for larger_size in batches:
                if larger_size >= size:
                    self._pass_rounds.pop((section_number, larger_size), None)
        finally:
            self._leave(module)

    def _enter(self, section_number: int) -> nn.Module:
        """Move a section to the device and return it. Tensors on the meta device get memory and values there."""
        module, self._from_meta = self.sections[section_number].module, set()
        values = {
            name: torch.empty_like(tensor, device=self.device)
            for name, tensor in _named_tensors(module)
            if tensor.is_meta
        }
        if values and self.init_weights:
            self.init_weights(values.items())
            give_memory(module, values)
        self._from_meta = {id(tensor) for name, tensor in _named_tensors(module) if name in values}
        return module.to(self.device)

    def _leave(self, module: nn.Module) -> None:
        """Move a section back to the host. Tensors that came from the meta device go back there."""
        module.zero_grad()
        module._apply(
            lambda tensor: tensor.to("meta" if tensor.is_meta or id(tensor) in self._from_meta else "cpu")
        )

    def _make_values(self, section_number: int, size: int, batch: Inputs) -> SectionValues:
        returned = self._returned_values[size]
        received = (
            [self._random_like(tensor) for tensor in returned[section_number - 1]] if section_number else []
        )
        grads = None
        if section_number < len(self.sections) - 1:
            grads = [
                self._random_like(tensor).detach()
                for tensor in returned[section_number]
                if tensor.requires_grad
            ]
        inputs = [
            move_value(batch.get(name), self.device, self.dtype)
            for name in self.sections[section_number].inputs
        ]
        return SectionValues(received, inputs, grads)

    def _random_like(self, like: Tensor) -> Tensor:
        """Return a tensor in place of `like`, which another section would send: random numbers, or zeros if `like`
        holds integers."""
        if not like.is_floating_point():
            return torch.zeros(like.shape, dtype=like.dtype, device=self.device)
        return torch.randn(like.shape, dtype=like.dtype, device=self.device).requires_grad_(
            like.requires_grad
        )

    def _time_passes(self, module: nn.Module, values: SectionValues) -> list[float]:
        """Return the seconds of four operations: a forward pass, copying its output to the host and back, a recompute
        and a backward pass."""
        with torch.no_grad():
            outputs, forward_seconds = self._call_timed(module, *values.received, *values.inputs)
            _, copy_seconds = self._call_timed(
                self._copy_to_host_and_back, [] if values.grads is None else outputs
            )
        outputs, recompute_seconds = self._call_timed(module, *values.received, *values.inputs)
        _, backward_seconds = self._call_timed(_run_backward, outputs, values.grads)
        return [forward_seconds, copy_seconds, recompute_seconds, backward_seconds]

    def _call_timed(self, function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        """Call the function. Return its result and its seconds, without the seconds in which this thread waited for a
        core."""
        self._synchronize()
        began_at, waited_seconds = time.perf_counter(), self._waited_seconds()
        result = function(*arguments)
        self._synchronize()
        seconds, waited_seconds = time.perf_counter() - began_at, self._waited_seconds() - waited_seconds
        self._elapsed_seconds += seconds
        core_seconds = max(
            0.0, seconds - waited_seconds
        )  # negative by chance: Linux counts the wait by another clock
        self._core_seconds += core_seconds
        return result, core_seconds

    def _waited_seconds(self) -> float:
        """Return the seconds for which this thread has waited for a core so far. Return 0.0 on a GPU, and on a system
        without /proc/thread-self/schedstat.
        """
        with suppress(OSError, IndexError):
            if self.device.type == "cpu":
                return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
        return 0.0

    def _time_update(self, module: nn.Module) -> float:
        """Return the seconds of an optimizer's update of the section. The second step is timed, because the first step
        makes the optimizer's state. The update changes copies of the weights, not the weights.
        """
        copies = [nn.Parameter(weight.detach().float().clone()) for weight in module.parameters()]
        if not copies:
            return 0.0
        optimizer = self.make_optimizer(copies)
        for copy in copies:
            copy.grad = torch.ones_like(copy)
        optimizer.step()
        return self._call_timed(optimizer.step)[1]

    def _copy_to_host_and_back(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.to("cpu").contiguous().to(self.device) for tensor in tensors]

    def _measure_bytes(self, module: nn.Module, values: SectionValues) -> tuple[int, int, int]:
        """Return the bytes that a forward pass saves, the peak bytes during forward and backward pass, and the bytes of
        the output. The weights' gradients exist already and do not count; the input's gradient counts.
        """
        for tensor in values.received:
            tensor.grad = None
        is_cuda, tracker = self.device.type == "cuda", Tracker()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        bytes_before = torch.cuda.memory_allocated(self.device) if is_cuda else 0
        with nullcontext() if is_cuda else tracker.in_thread():
            outputs = module(*values.received, *values.inputs)
            saved_bytes = (
                torch.cuda.memory_allocated(self.device) if is_cuda else tracker.stats()["host_allocated"]
            )
            _run_backward(outputs, values.grads)
            peak_bytes = (
                torch.cuda.max_memory_allocated(self.device) if is_cuda else tracker.stats()["host_peak"]
            )
        sent_bytes = 0 if values.grads is None else sum(tensor.nbytes for tensor in outputs)
        return saved_bytes - bytes_before, peak_bytes - bytes_before, sent_bytes

    def _synchronize(self) -> None:
        STREAMS[self.device.type].current().synchronize()

    # ---- Between ranks

    def _meet(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def _gather(self, message: Any) -> list[Any]:
        """Return every rank's message, which is sent as JSON, in the ranks' order."""
        group = dist.group.WORLD if self.world_size > 1 else None
        return list(map(json.loads, gather_messages(json.dumps(message).encode(), group)))

    def _measure_crowding(self) -> tuple[float, int, float | None]:
        """Return the profile's fields `crowding`, `num_ranks` and `num_served`. `crowding`: the seconds that all ranks'
        passes took, divided by the seconds in which these passes had a core. `num_ranks`: number of ranks on the
        machine of rank 0. `num_served`: number of ranks whose threads the machine's cores can run at once; None on a
        GPU."""
        host_names = self._gather(socket.gethostname())
        seconds = self._gather((self._elapsed_seconds, self._core_seconds))
        elapsed, core_seconds = sum(pair[0] for pair in seconds), sum(pair[1] for pair in seconds)
        num_served = available_cores() / torch.get_num_threads() if self.device.type == "cpu" else None
        return elapsed / core_seconds, host_names.count(host_names[0]), num_served

    def _time_messages(self, message_sizes: Sequence[int], batches: Mapping[int, Inputs]) -> list[Message]:
        """Time messages of these sizes, in bytes, between neighboring ranks; a message takes half of a round trip. The
        pairs of ranks (0, 1), (2, 3), ... exchange messages at once, then the pairs (1, 2), (3, 4), .... While a pair
        exchanges messages, both ranks of the pair compute.
        """
        host_names, timings = self._gather(socket.gethostname()), []
        section_number = self.rank % len(self.sections)
        module = self._enter(section_number)
        values = self._make_values(section_number, *next(iter(batches.items())))
        with ThreadPoolExecutor(1) as pool:
            for message_bytes in message_sizes:
                for parity in (0, 1):
                    lower = self.rank - (self.rank + parity) % 2
                    self._meet()
                    if lower < 0 or lower + 1 == self.world_size:
                        continue
                    round_trips = pool.submit(
                        self._time_round_trips, 2 * lower + 1 - self.rank, message_bytes, self.rank == lower
                    )
                    while not round_trips.done():
                        _run_backward(module(*values.received, *values.inputs), values.grads)
                    is_one_machine = host_names[lower] == host_names[lower + 1]
                    timings.append(
                        ((is_one_machine, message_bytes), statistics.median(round_trips.result()[1:]) / 2)
                    )
        self._leave(module)
        return [Message(*key) for key in self._gather_medians(timings)]

    @staticmethod
    def _time_round_trips(peer: int, num_bytes: int, is_first: bool) -> list[float]:
        message, seconds = torch.zeros(num_bytes, dtype=torch.uint8), []
        for _ in range(NUM_RUNS + 1):
            began_at = time.perf_counter()
            for is_sender in (is_first, not is_first):
                if is_sender:
                    dist.send(message, peer)
                else:
                    dist.recv(message, peer)
            seconds.append(time.perf_counter() - began_at)
        return seconds

    def _time_sums(self, num_bytes: int) -> list[Sum]:
        """Time all-reduces of `num_bytes` and of `num_bytes` / 8, over 2, 4, 8, ... ranks and over all ranks. In each
        group the difference between one rank and the next is the same, as among the replicas of a stage.
        """
        timings = []
        powers = {2**power for power in range(1, self.world_size.bit_length())}
        for num_ranks in sorted({self.world_size, *powers}):
            distance = self.world_size // num_ranks
            if not distance:
                continue
            groups = [
                dist.new_group([first_rank + distance * index for index in range(num_ranks)])
                for first_rank in range(distance)
            ]
            for summed_bytes in sorted({num_bytes // 8, num_bytes}):
                self._meet()
                seconds = []
                num_runs = NUM_RUNS + 1 if self.rank < distance * num_ranks else 0
                for _ in range(num_runs):
                    tensor = torch.zeros(summed_bytes // 4, device=self.device)
                    self._synchronize()
                    began_at = time.perf_counter()
                    dist.all_reduce(tensor, group=groups[self.rank % distance])
                    self._synchronize()
                    seconds.append(time.perf_counter() - began_at)
                if seconds:
                    timings.append(((num_ranks, summed_bytes), statistics.median(seconds[1:])))
        return [Sum(*key) for key in self._gather_medians(timings)]

    def _gather_medians(self, timings: Sequence[tuple[Any, float]]) -> list[Any]:
        """Return each key, extended by the median over all ranks of the seconds that were measured for the key."""
        seconds_by_key: dict[Any, list[float]] = defaultdict(list)
        for timings_of_rank in self._gather(timings):
            for key, seconds in timings_of_rank:
                seconds_by_key[tuple(key)].append(seconds)
        return [
            (*key, statistics.median(seconds_of_ranks))
            for key, seconds_of_ranks in sorted(seconds_by_key.items())
        ]


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _least_middle_most(sizes: set[int]) -> list[int]:
    """Return the smallest size, the one in the middle and the largest, each once."""
    ascending = sorted(sizes)
    return sorted({*ascending[:1], *ascending[len(ascending) // 2 :][:1], *ascending[-1:]})


def _run_backward(outputs: Any, grads: Sequence[Tensor] | None) -> None:
    if grads is None:
        loss = outputs[0] if isinstance(outputs, tuple | list) else outputs
        loss.float().reshape(()).backward()
    else:
        trained_outputs = [tensor for tensor in outputs if tensor.requires_grad]
        if trained_outputs:  # `trained_outputs` is empty if all parameters up to this section are frozen
            torch.autograd.backward(trained_outputs, list(grads))
