"""Runs one job in this process: trains under the clock, inspects the trained tensors, classifies the end, and hands
over the record.

launch.py, the parent, sends the job on standard input and keeps standard input open. If standard input closes, the
parent has ended, and the run ends as interrupted. Standard output is the readable log. Events, one JSON object a line,
go to a descriptor of their own, so that no output of an engine is mistaken for a measurement."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from harness.base import executed_code
from harness.base.child_process import interrupt_here, when_closed
from harness.base.foreign_file import parsed_json
from harness.base.json_object import JsonObject
from harness.core import failures, log_lines
from harness.core.job import Job, Plan
from harness.core.method import Method, OtherModel, Step, TensorState, Trained, create
from harness.core.record import Record, wrong_num_models
from harness.devices import budgets, machine, process_memory
from harness.devices.room import room_within

if TYPE_CHECKING:
    from harness.run.trace import Taking, Trace

ORPHAN_SECONDS = 60.0
Emit = Callable[[JsonObject], None]


class StepClock:
    """Marks the moments between steps: on CUDA by events, for which no step waits, elsewhere by the CPU's clock."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.is_cuda = torch, device == "cuda"
        self.marks: list[Any] = []

    def synchronize(self) -> None:
        if self.is_cuda:
            self.torch.cuda.synchronize()

    def mark(self) -> None:
        if self.is_cuda:
            self.marks.append(self.torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def is_done(self, index: int) -> bool:
        return not self.is_cuda or self.marks[index].query()

    def seconds(self, index: int) -> float:
        """Return the seconds between mark index - 1 and mark index."""
        before, after = self.marks[index - 1 : index + 1]
        return before.elapsed_time(after) / 1000 if self.is_cuda else after - before


@dataclass(frozen=True)
class CountedBatches:
    """An iterator of batches that also has a length, the number of all batches."""

    batches: Iterator[Any]
    num_batches: int

    def __iter__(self) -> Iterator[Any]:
        return self.batches

    def __len__(self) -> int:
        return self.num_batches


class Run:
    """Trains one job by its phases (data, build, steps, drain, inspect), and holds the measurements. If the training
    fails, the measurements so far remain."""

    def __init__(self, job: Job, emit: Emit) -> None:
        self.job, self.emit = job, emit
        list_fields = ("losses", "grad_norms", "loss_scales", "skipped_steps", "step_seconds")
        self.measured: JsonObject = {name: [] for name in list_fields}
        self.measured["phase_seconds"] = {"process": time.time() - psutil.Process().create_time()}
        self.phase, self._phase_start = "start", time.perf_counter()
        self._steps_in_flight: list[Step] = []  # steps whose loss and norm are on their way to the host
        self._num_taken = 0  # number of batches taken
        # at each yielded step: number of batches taken beyond this step's batch
        self._batches_ahead: set[int] = set()
        self.taking: Taking | None = None  # until the first batch is taken
        self.trace: Trace | None = None

    def enter(self, phase: str) -> None:
        now = time.perf_counter()
        phase_before = "training" if self.phase.startswith("step") else self.phase
        phase_seconds = self.measured["phase_seconds"]
        phase_seconds[phase_before] = phase_seconds.get(phase_before, 0.0) + now - self._phase_start
        self.phase, self._phase_start = phase, now
        if not phase.startswith("step"):
            self.emit({"event": "phase", "phase": phase})

    def build(self, method: Method) -> Any:
        """Make the batches, and return the method's training, a generator of steps."""
        import torch

        from harness.core import data
        from harness.gate import inspect_training
        from harness.run.trace import Taking, Trace

        job, self.dialect, bytes_before = self.job, method.log_dialect, process_memory.process_bytes()
        self.inspect_training = inspect_training
        machine.refuse_tf32(job.device, job.workload.dtype)
        self.enter("data")
        tokens = data.batches(job.workload, job.steps)
        self.measured["data_sha256"] = data.hash_of_tokens(tokens)
        self.tokens = torch.from_numpy(tokens).to(job.device)  # kept: the peaks of all records count it
        inputs, targets = self.tokens[..., :-1].contiguous(), self.tokens[..., 1:].contiguous()
        self.clock = StepClock(job.device)
        torch.manual_seed(job.workload.seed)
        self.taking, self.trace = Taking(job.device, self.emit), Trace(job) if job.trace else None
        self.enter("build")
        batches = CountedBatches(self._feed(zip(inputs, targets, strict=True), bytes_before), job.steps)
        training = method.train(job.workload, batches, job.device)
        if not hasattr(training, "close"):  # not a generator
            raise TypeError(
                f"expected train() to yield a Step for each batch, got {type(training).__name__} from it"
            )
        return training

    def _feed(self, batches: Iterable[tuple[Any, Any]], bytes_before: dict[str, int]) -> Iterator[Any]:
        """Yield the batches. The clock starts at the first batch, when the method has built its model. `bytes_before`:
        this process's bytes before training."""
        for step, batch in enumerate(batches, start=1):
            if self.taking:
                self.taking.end()
                self.taking = None
                self.clock.synchronize()
                self.clock.mark()
            if self.trace:
                self.trace.is_on = step >= self.trace.first_step
            self.enter(f"step {step}")
            self._num_taken = step
            yield batch
        self.enter("drain")
        budgets.check_taken(self.job, bytes_before)
        budgets.lift(self.job)  # the inspection may take memory beyond the budget

    def drive(self, training: Any) -> Trained:
        """Train all steps. A step's time is the time between two marks of the clock. Each mark ends a step and begins
        the next step, so no time of training is left out."""
        try:
            while True:
                # Noting kernels slows a step. So kernels are noted in the second step, if it is warm-up, and not in the
                # first step, whose time is reported to the user.
                if len(self.clock.marks) == 2 <= self.job.warmup:
                    with self.inspect_training.Kernels() as kernels:
                        step: Step = next(training)
                    self.measured["kernels"] = sorted(kernels.names)
                else:
                    step = next(training)
                self._check(step)
                self._batches_ahead.add(self._num_taken - len(self.clock.marks))
                self._steps_in_flight.append(
                    step._replace(loss=_to_host(step.loss), grad_norm=_to_host(step.grad_norm))
                )
                if len(self.clock.marks) == self.job.warmup:
                    self.clock.synchronize()
                self.clock.mark()
                self._collect(wait=False)
        except StopIteration as end:
            return end.value or Trained([])
        finally:
            training.close()

    def _check(self, step: Step) -> None:
        """Raise an error if this is no step of the next batch, or if its results may not yet be computed."""
        if len(self.clock.marks) > self._num_taken:
            raise ValueError(f"expected one Step for each batch, got another after batch {self._num_taken}")
        if len(self.clock.marks) == 1 and (complaint := complaint_about_group(self.job)):
            raise ValueError(complaint)
        for scalar in (step.loss, step.grad_norm):
            # another type might compute only when its value is read, after the step has ended
            if scalar is not None and type(scalar) is not self.clock.torch.Tensor:
                raise TypeError(
                    f"expected a torch.Tensor as a step's loss or norm, got {type(scalar).__name__}"
                )

    def conclude(self, trained: Trained) -> None:
        """Measure what is known once all steps are done, before the inspection takes memory. Raises ValueError if
        something falsifies the method's throughput."""
        self.clock.synchronize()
        self._collect(wait=True)
        if complaint := self._contradiction(trained):
            raise ValueError(complaint)
        machine.refuse_tf32(self.job.device, self.job.workload.dtype)
        if self.trace:
            self.trace.write(self.clock.marks, self.emit)
        self.measured["moved_bytes"], self.measured["schedule"] = trained.moved_bytes, trained.schedule
        self.measured |= memory_of_training(self.job.device)
        peaks = self.measured["peaks"]
        peaks |= {name: max(size, peaks.get(name, 0)) for name, size in trained.peaks.items()}

    def inspect(self, trained: Trained) -> None:
        """Measure how training changed each tensor, and save the tensors, if the job asks for this."""
        self.enter("inspect")
        inspect = self.inspect_training.inspect_tensors
        self.measured["tensors"] = inspect(self._saved(trained.tensors), self.job)
        self.measured["others"] = [
            _facts_of_other(other) | {"tensors": inspect(other.tensors, self.job)} for other in trained.others
        ]
        self.enter("done")

    def _saved(self, tensors: Iterable[TensorState]) -> Iterable[TensorState]:
        """Return the trained tensors, which are saved as they pass, if the job asks for this."""
        if not self.job.save:
            return tensors
        from harness.models.saved_weights import SavedAdapters, SavedWeights

        saved = SavedAdapters if self.job.workload.lora else SavedWeights
        return saved(self.job.workload, Path(self.job.save)).passing(tensors)

    def _contradiction(self, trained: Trained) -> str:
        """Describe what would falsify the method's throughput, a wrong statement or late yields; empty if nothing."""
        if complaint := wrong_num_models(trained.schedule, trained.others):
            return complaint
        if (resumed_steps := trained.schedule.get("resumed_steps", 0)) and not self.job.options.get("resume"):
            return f"expected resumed_steps 0 without the option resume, got {resumed_steps}"
        # If several models train, faster models may be one step ahead of the slowest model.
        if not self._batches_ahead <= {0, *([1] if trained.others else [])}:
            return (
                "expected each step to be yielded before the next batch is taken, since its time ends there, got up to "
                f"{max(self._batches_ahead)} batches taken beyond a step; try a yield at the end of the loop over"
                " batches"
            )
        return ""

    def _collect(self, wait: bool) -> None:
        """Measure and report the steps that the device has done. `wait`: True first waits until all are done."""
        losses = self.measured["losses"]
        while self._steps_in_flight and (wait or self.clock.is_done(len(losses) + 1)):
            step = self._steps_in_flight.pop(0)
            losses.append(float(step.loss))
            seconds = self.clock.seconds(len(losses))
            self.measured["step_seconds"].append(seconds)
            facts: JsonObject = {}
            if step.shares:
                facts["shares"] = [_parse_number("share", share) for share in step.shares]
            if step.grad_norm is not None:
                self.measured["grad_norms"].append(float(step.grad_norm))
            if step.loss_scale is not None:
                self.measured["loss_scales"].append(_parse_number("loss_scale", step.loss_scale))
            if step.is_skipped:
                self.measured["skipped_steps"].append(len(losses))
                facts["skipped_at_scale"] = _parse_number("loss_scale", step.loss_scale)
            self.emit({"event": "step", "step": len(losses), "loss": losses[-1], "seconds": seconds, **facts})
            if len(losses) % log_lines.interval_steps(self.job) == 0:
                peaks = budgets.device_peaks(self.job.device)
                for line in log_lines.interval_lines(self.job, self.measured, peaks, self.dialect):
                    print(line, flush=True)


def train_here(job: Job, key: str, folders: tuple[Path, ...], emit: Emit) -> Record:
    """Train one job in this process. Return its record, even if training failed. `emit` gets the run's events."""
    started, run = time.time(), Run(job, emit)
    machine_facts = machine.facts()  # before training: an engine may pin this process to some of its cores
    end, evidence, limits = failures.Failure("ok", ""), {}, dict[str, str]()
    method = create(job.method, job.options, folders)
    try:
        run.enter("import")
        limits = budgets.enforce(job)
        plan = method.plan(job.workload, room_within(job.budget, job.device, job.workload))
        run.measured["predicted"] = _predicted_facts(plan)
        trained = run.drive(run.build(method.settled(plan)))
        run.conclude(trained)
        run.inspect(trained)
    except KeyboardInterrupt:
        end = failures.of_stop(failures.End(run.phase, stopped="interrupt"))
    except Exception as error:
        folder = Path(inspect.getfile(type(method))).parent
        end = failures.of_exception(error, run.phase, budgets.lift(job), folder)
        evidence = _print_traceback(error)
    _ignore_signals()
    gc.collect()
    if "peaks" not in run.measured:
        run.measured |= memory_of_training(job.device)
    record = Record(
        job=job,
        key=key,
        phase=run.phase,
        clock=job.device,
        machine=machine_facts,
        software=machine.software(),
        started=started,
        limits=limits,
        **end.changes(evidence),
        description=method.describe(job.workload, job.device),
        bit_exact=method.bit_exact if job.workload.dtype == "fp32" else method.bit_exact_in_half,
        is_exact=method.is_exact,
        **run.measured,
    )
    return _checked_for_json(record)


def _print_traceback(error: Exception) -> dict[str, str]:
    """Print the error's traceback, and return it for the record's evidence."""
    text = traceback.format_exc()
    with contextlib.suppress(OSError):  # the disk of the log may be full
        print(text, flush=True)
    return {"error": type(error).__name__, "traceback": text}


def _ignore_signals() -> None:
    """From now on, when training is over, no signal interrupts the making of the record."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is interrupt_once:
            signal.signal(number, signal.SIG_IGN)


def _checked_for_json(record: Record) -> Record:
    """Return the record or, if JSON cannot hold its values, the record of a crash without the method's results."""
    try:
        Record.from_dict(parsed_json(json.dumps(record.to_dict(), allow_nan=False)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = (
            f"expected of {record.job.method} a plan, steps, Trained and describe() that a record can hold,"
            f" got {' '.join(str(error).split())}"
        )
        return dataclasses.replace(
            record,
            **failures.Failure("crash", reason, {"class": "exception"}).changes(record.evidence),
            moved_bytes=0,
            schedule={},
            tensors={},
            others=[],
            loss_scales=[],
            description={},
            predicted={},
        )
    return record


def _facts_of_other(other: OtherModel) -> JsonObject:
    """Return what a record holds of another model, but for its tensors."""
    return {
        "workload": other.changes,
        "losses": other.losses,
        "grad_norms": other.grad_norms,
        "loss_scales": other.loss_scales,
        "skipped_steps": other.skipped_steps,
    }


def memory_of_training(device: str) -> JsonObject:
    """Return the record's fields about training's memory. Call this before the inspection, which also takes memory."""
    torch = sys.modules.get("torch")
    if device != "cuda" or torch is None:
        return {"peaks": budgets.device_peaks(device)}
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    return {"peaks": budgets.device_peaks(device), "num_alloc_retries": retries}


def _predicted_facts(plan: Plan) -> JsonObject:
    names = ["device", "host", "disk", "moved_bytes"]
    names += ["step_seconds", "binds"] if plan.step_seconds else []
    names += ["stages"] if plan.stages else []
    return {name: getattr(plan, name) for name in names}


def complaint_about_group(job: Job) -> str:
    """Return a complaint if torch.distributed does not join all ranks of the job; else an empty text. Ranks that are
    not joined would each do the same work, and all of this work would count as throughput."""
    import torch.distributed as dist

    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks == job.world_size:
        return ""
    return (
        f"expected torch.distributed to join {job.world_size} ranks, got a group of {num_ranks}, so each would train"
        " alone; try init_process_group() by torchrun's variables"
    )


def _parse_number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"expected a number as a step's {name}, got {value!r:.80}") from error


def _to_host(value: Any) -> Any:
    return value if value is None else value.detach().to("cpu", non_blocking=True)


def _end_orphan() -> None:
    """Interrupt this run, because its parent has ended; kill the run if it does not end within ORPHAN_SECONDS."""
    interrupt_here()
    # meanwhile main() ends the process, unless main() hangs where Python handles no signal
    time.sleep(ORPHAN_SECONDS)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def interrupt_once(signal_number: int, frame: Any) -> None:
    """A signal handler: the first signal ends training, later signals are ignored while the record is written."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def hand_over(record: Record, order: JsonObject) -> None:
    """Send the record to the parent, which adds the peaks and writes it, so that no file holds a result without peaks.
    If the parent has ended, write the record here with the status interrupted, so that the job is run again."""
    line = json.dumps({"event": "record", "record": record.to_dict()}) + "\n"
    try:
        with open(order["events"], "wb", closefd=False) as events:
            # buffered, so that the whole line is written
            events.write(line.encode())
    except BrokenPipeError:
        end = failures.of_stop(failures.End(record.phase, stopped="interrupt"))
        changes = end.changes(record.evidence) if record.is_result else {}
        dataclasses.replace(record, **changes).write(Path(order["record"]))


def main() -> None:
    executed_code.watch()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt_once)
    order = json.loads(sys.stdin.readline())
    # This process holds the devices' locks until it ends. A child, which may live longer, must not inherit the locks.
    for lock in order["locks"]:
        os.set_inheritable(lock, False)
        os.register_at_fork(after_in_child=functools.partial(os.close, lock))
    events = os.fdopen(order["events"], "w", buffering=1)
    when_closed(0, _end_orphan)
    job = Job.from_dict(order["job"])
    print("\n".join(log_lines.header_lines(job)), flush=True)

    def emit(event: JsonObject) -> None:
        try:
            events.write(json.dumps(event) + "\n")
        except BrokenPipeError:
            interrupt_here()

    record = train_here(job, order["key"], tuple(map(Path, order["folders"])), emit)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hand_over(record, order)
    # _exit() does not wait for threads of engines, which would delay the end of the run.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
