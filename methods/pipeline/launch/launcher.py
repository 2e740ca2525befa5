"""Trains on a changing set of machines, in rounds. A change of the machines ends a round; the last round ends when the
script is done. Does not import torch.

A round has one configuration: machines, number of stages, number of replicas. When machines leave or come, the ranks
get SIGUSR1, save a checkpoint between two steps, and end; the next round continues from that checkpoint. When ranks die
without saving, the next round continues from the newest complete checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import time
from collections.abc import Callable
from typing import Any

from harness.base import fork_server
from harness.base.counted import counted
from harness.base.rank_agent import GRACE_SECONDS
from harness.core.failures import LOST_RANK
from methods.pipeline.launch.folder import Folder, step_line
from methods.pipeline.launch.job import LaunchJob, Pace, Round, Spread, rank_orders, seated
from methods.pipeline.launch.machines import MachineLine, Remote, read_list

# Seconds between reads of the list of machines. A change counts only when two reads in a row agree, because a single
# read may find a half-written file.
POLL_SECONDS = 0.25
START_SECONDS = 60.0  # longest wait of the first round for agents that are starting; later rounds do not wait
STOP_SECONDS = 180.0  # most seconds that ranks may take from SIGUSR1 to their end, checkpoint included
END_SECONDS = 10.0  # most seconds that an agent may take to end its ranks after the order to do so
RETRY_SECONDS = 30.0  # seconds until a lost machine is tried again; the wait doubles with each try
MOST_CRASHES = 3  # number of crashes in a row without progress after which the job ends
PRUNE_SECONDS = 2.0
OK, CRASH, TIMEOUT, INTERRUPTED = 0, 3, 6, 130
# Matches the error of a rank that failed only because another rank was lost. methods/pipeline/transport.py and gloo
# write these texts.
CONSEQUENCE = re.compile(
    LOST_RANK.pattern + r"|LostPeer|DistNetworkError|Connection refused|gloo::EnforceNotMet"
)


class Launcher:
    def __init__(self, job: LaunchJob, folder: Folder, say: Callable[[str], None]) -> None:
        self.job, self.folder, self.say = job, folder, say
        self.reports: queue.SimpleQueue[tuple[Remote, dict[str, Any] | None]] = queue.SimpleQueue()
        self.agents: list[Remote] = []
        self.listed: list[MachineLine] = read_list(job.machine_list)
        self.seen: list[MachineLine] | None = None
        self.polled = self.pruned = 0.0
        # for a lost machine: time of the next try, later wait
        self.retry: dict[MachineLine, tuple[float, float]] = {}
        self.round: Round | None = None
        self.num_rounds = 0
        self.crashes, self.furthest = 0, folder.last_step()
        self.reason = ""  # why no round runs

    def run(self) -> int:
        """Run rounds until the script is done, and return the job's exit code. At Ctrl-C or SIGTERM the ranks save a
        checkpoint before the job ends."""
        began = time.monotonic()
        try:
            while True:
                self._watch()
                waits = any(not agent.is_ready for agent in self.agents)
                if waits and self.num_rounds == 0 and time.monotonic() < began + START_SECONDS:
                    self._take(POLL_SECONDS)
                    continue
                spread, machines = self._wanted()
                if spread is None:
                    self._take(POLL_SECONDS)
                    continue
                if (code := self._train(spread, machines)) is not None:
                    return code
        except KeyboardInterrupt:
            return self._interrupted()
        finally:
            fork_server.close()
            for agent in self.agents:
                agent.close()

    # ---- Machines

    def _watch(self) -> None:
        """Follow the list: start agents on machines that were added, and end agents on machines that were removed."""
        if time.monotonic() < self.polled + POLL_SECONDS:
            return
        self.polled = time.monotonic()
        lines: list[MachineLine] | None = None
        with contextlib.suppress(ValueError):  # the list is being replaced
            lines = read_list(self.job.machine_list)
        if lines is not None and lines == self.seen:
            self.listed = lines
        self.seen = lines
        present = {agent.line for agent in self.agents if not agent.is_leaving}
        for line in set(self.retry) - set(self.listed):
            del self.retry[line]
        for line in self.listed:
            if line not in present and time.monotonic() >= self.retry.get(line, (0.0, 0.0))[0]:
                self._admit(line)
        for agent in self.agents:
            if agent.line not in self.listed and not agent.is_leaving:
                agent.is_leaving = True
                self._event("leaving", machine=str(agent.line))
        for agent in [*self.agents]:
            is_used = self.round is not None and agent in self.round.machines
            if agent.is_leaving and not is_used:
                self._dismiss(agent)
            elif agent.is_silent():
                self._lose(agent, "is silent")

    def _admit(self, line: MachineLine) -> None:
        order = {
            "folder": str(self.folder.path),
            "script": self.job.script,
            "code_dir": str(self.job.code_dir),
        }
        log = self.folder.path / "logs" / f"agent-{line.address.replace('/', '_')}-{line.number}.txt"
        self.agents.append(Remote(line, order, log, self.reports))

    def _dismiss(self, agent: Remote) -> None:
        self.agents.remove(agent)
        agent.is_lost = True
        agent.close()

    def _lose(self, agent: Remote, how: str) -> None:
        """Handle a machine whose agent has ended, is silent or could not be started. `how`: what happened, for the
        message to the user."""
        self._dismiss(agent)
        self._retry_later(agent.line)
        last = "" if agent.is_ready else f": {self.folder.newest_log(agent.log.name)}"
        self._event("lost", machine=str(agent.line))
        self.say(f"machine {agent.line} {how}{last}")

    def _retry_later(self, line: MachineLine) -> None:
        wait = self.retry.get(line, (0.0, RETRY_SECONDS))[1]
        self.retry[line] = (time.monotonic() + wait, 2 * wait)

    def _wanted(self) -> tuple[Spread | None, list[Remote]]:
        """Return the configuration for the available machines, and the machines that this configuration uses. Return
        (None, []) if no configuration is possible."""
        ready = [agent for agent in self.agents if agent.is_ready and not agent.is_leaving]
        per_machine = self.job.choice.per_machine
        if not ready:
            self._wait_for("no machine of the list is there")
            return None, []
        try:
            spread = self.job.choice.spread(len(ready) * per_machine)
        except ValueError as error:
            self._wait_for(str(error))
            return None, []
        self.reason = ""
        return spread, ready[: -(-spread.num_ranks // per_machine)]

    def _wait_for(self, reason: str) -> None:
        if reason != self.reason and self.round is None and all(agent.is_ready for agent in self.agents):
            self.reason = reason
            self.say(f"waiting for machines: {reason}")

    # ---- A round

    def _train(self, spread: Spread, machines: list[Remote]) -> int | None:
        """Run one round. Return the job's exit code if this round was the last; None if another round follows."""
        running = self._start(spread, machines)
        pace = Pace(spread.num_stages)
        while True:
            self._take(0.1)
            self._watch()
            self._advance(running, pace)
            if running.failed_at is not None:
                is_late = time.monotonic() > running.failed_at + GRACE_SECONDS
                is_known = any(agent.is_lost for agent in machines)
                if is_known or is_late or not running.running:
                    return self._after_failure(running)
            elif not running.running:
                return self._after_end(running)
            elif running.asked_to_stop is None and running.is_seated:
                wanted = self._wanted()
                may_wait = any(not agent.is_ready for agent in self.agents) and not any(
                    agent.is_leaving for agent in running.machines
                )
                if wanted != (spread, machines) and not may_wait:
                    self._ask_to_stop(running)
            elif running.asked_to_stop and time.monotonic() > running.asked_to_stop + STOP_SECONDS:
                self.say(f"no checkpoint within {STOP_SECONDS:g} s of SIGUSR1: going on from an earlier one")
                self._end(running)
                return None
            if time.monotonic() > running.heard + self.job.stall_seconds:
                return self._stalled(running)

    def _start(self, spread: Spread, machines: list[Remote]) -> Round:
        resume_step = self.folder.resume()
        number, code = self.folder.state["round"] + 1, self.job.code()
        if other := self.folder.other_code(code):
            self._event("code", step=resume_step)
            self.say(f"warning: {other}")
        self.folder.keep(round=number, code=code)
        self.num_rounds += 1
        per_machine = self.job.choice.per_machine
        running = self.round = Round(
            number, spread, machines, resume_step, seated(spread.num_ranks, machines, per_machine)
        )
        running.running = set(range(spread.num_ranks))
        self._event(
            "round",
            workers=spread.num_ranks,
            machines=[str(agent.line) for agent in machines],
            stages=spread.num_stages,
            replicas=spread.num_replicas,
            chunk_size=spread.chunk_size,
            resume_step=resume_step,
        )
        shape = f"{spread.num_stages} stages x {spread.num_replicas} replicas, micro-batches of {spread.chunk_size}"
        where = f"after step {resume_step}" if resume_step else "from the start"
        workers = f"{counted(spread.num_ranks, 'worker')} on {counted(len(machines), 'machine')}"
        self.say(f"round {number}: {workers}, {shape}, {where}")
        machines[0].send({"do": "meet", "round": number, "address": machines[0].line.address})
        return running

    def _seat(self, running: Round, address: str, port: int) -> None:
        """Start the ranks. `address`, `port`: where the ranks find one another, on the first machine."""
        orders = rank_orders(self.job, self.folder.path, running, address, port)
        running.is_seated = True
        for agent, ranks in orders.items():
            agent.send({"do": "start", "round": running.number, "ranks": ranks})

    def _ask_to_stop(self, running: Round) -> None:
        running.asked_to_stop = time.monotonic()
        self._event("morph", round=running.number)
        for agent in running.machines:
            agent.send({"do": "signal"})

    def _end(self, running: Round) -> None:
        """Tell the agents to end the ranks that still run, and wait until these ranks have ended. An agent that takes
        longer than END_SECONDS counts as lost."""
        self.round = None
        waiting = {agent for agent in running.machines if not agent.is_lost}
        for agent in waiting:
            agent.send({"do": "end"})
        until = time.monotonic() + END_SECONDS
        while waiting and time.monotonic() < until:
            try:
                agent, event = self.reports.get(timeout=0.1)
            except queue.Empty:
                continue
            if event and event["kind"] == "ended":
                waiting.discard(agent)
            elif event is None or event["kind"] == "ready":
                self._hear(agent, event)
                waiting.discard(agent)
        for agent in waiting:
            self._lose(agent, "does not end its ranks")

    # ---- What agents and ranks tell

    def _take(self, seconds: float) -> None:
        """Wait at most `seconds` for a report of an agent. Handle this report, and all further reports that have
        arrived."""
        with contextlib.suppress(queue.Empty):
            self._hear(*self.reports.get(timeout=seconds))
            while True:
                self._hear(*self.reports.get_nowait())

    def _hear(self, agent: Remote, event: dict[str, Any] | None) -> None:
        running = self.round
        if agent.is_lost:
            return
        if event is None:
            is_used = running is not None and agent in running.machines
            self._lose(agent, "is gone" if agent.is_ready else "did not start")
            if is_used and running:
                running.failed_at = running.failed_at or time.monotonic()
                running.running -= {rank for rank, seat in enumerate(running.seats) if seat[0] is agent}
        elif event["kind"] == "ready":
            agent.is_ready = True
            self.retry.pop(agent.line, None)
            self._event("came", machine=str(agent.line), agent=event["pid"])
        elif event["kind"] == "notice":
            if not agent.is_leaving:
                agent.is_leaving = True
                self._retry_later(agent.line)
                self._event("leaving", machine=str(agent.line))
                self.say(f"machine {agent.line} is about to be taken away")
        elif running and event.get("round") == running.number:
            self._hear_of_round(running, agent, event)

    def _hear_of_round(self, running: Round, agent: Remote, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "store":
            self._seat(running, event["address"], event["port"])
        elif kind == "no-store":
            self._lose(agent, f"cannot listen at {event['address']}")
            running.failed_at, running.running = time.monotonic(), set()
        elif kind == "exit":
            rank, code = event["rank"], event["code"]
            running.codes[rank] = code
            running.running.discard(rank)
            if code:
                running.failed_at = running.failed_at or time.monotonic()
        elif kind == "error":
            running.errors[event["rank"]] = event["text"]
        elif kind == "note":
            self.say(event["text"])
        elif kind == "stopping":
            running.is_stopping = True
        elif kind == "saved":
            ranks = running.saved.setdefault(event["step"], set())
            ranks.add(event["rank"])
            if len(ranks) == running.spread.num_ranks:
                self.folder.keep(saved=event["step"])
        if kind == "step":
            running.step_reports.setdefault(event["step"], {})[event["rank"]] = event
        if kind in ("step", "alive", "store"):
            running.heard = time.monotonic()

    def _advance(self, running: Round, pace: Pace) -> None:
        """Write the steps that all ranks have reported to the record, and the slow ranks to their file. Every
        PRUNE_SECONDS also remove old checkpoints."""
        spread = running.spread
        while running.step_reports:
            step = min(running.step_reports)
            if len(running.step_reports[step]) < spread.num_ranks:
                break
            reports = running.step_reports.pop(step)
            of_round = {
                "num_workers": spread.num_ranks,
                "num_stages": spread.num_stages,
                "num_replicas": spread.num_replicas,
                "chunk_size": spread.chunk_size,
                "round": running.number,
                "time": time.time(),
            }
            self.folder.record(step_line(reports) | of_round)
            if step > self.furthest:
                self.furthest, self.crashes = step, 0
            pace.add({rank: event["busy_seconds"] for rank, event in reports.items()})
            self._name_slow(running, pace)
        if time.monotonic() > self.pruned + PRUNE_SECONDS:
            self.pruned = time.monotonic()
            self.folder.prune()

    def _name_slow(self, running: Round, pace: Pace) -> None:
        lines = [f"{running.seats[slow.rank][0].line.address} {slow}" for slow in pace.slow(running.spread)]
        if lines != pace.named:
            pace.named = lines
            (self.folder.path / "slow_machines.txt").write_text("".join(f"{line}\n" for line in lines))

    # ---- Ends

    def _after_end(self, running: Round) -> int | None:
        self._end(running)
        if running.is_stopping:
            self._tell_unsaved()
            return None
        if not self.furthest:
            return self._crashed(
                "expected steps of training, got a script that ended without one; try model.step(inputs)"
            )
        self._event("done")
        self.folder.keep(end="done")
        self.say(f"done after step {self.furthest}")
        return OK

    def _after_failure(self, running: Round) -> int | None:
        is_lost = any(agent.is_lost for agent in running.machines)
        codes = dict(running.codes)  # Copied now: ranks that _end() kills next did not fail by themselves.
        self._end(running)
        failed = {rank: code for rank, code in codes.items() if code}
        # ranks that failed by themselves, not because another rank was lost
        causes = {
            rank: code
            for rank, code in failed.items()
            if not CONSEQUENCE.search(running.errors.get(rank, ""))
        }
        killed = {rank: code for rank, code in causes.items() if code < 0}
        if -signal.SIGUSR1 in codes.values():
            self.say("the script has no handler of SIGUSR1: going on from an earlier checkpoint")
            return None
        if is_lost or (running.is_stopping and not causes):
            return None  # the user has already been told of the lost machine
        if causes and not killed:
            rank = min(causes)
            text = running.errors.get(rank) or f"exit code {causes[rank]}"
            return self._crashed(f"rank {rank} crashed; its log is logs/rank-{rank}.txt\n{text.rstrip()}")
        first = min(killed or failed)
        what = f"rank {first} lost another rank"
        if killed:
            what = f"rank {first} was killed by signal {-killed[first]}"
        self.crashes += 1
        if self.crashes >= MOST_CRASHES:
            return self._crashed(
                f"{MOST_CRASHES} crashes in a row without progress since step {self.furthest}: {what}"
            )
        self._event("crash", what=what)
        self.say(f"{what}: going on from the newest checkpoint")
        return None

    def _crashed(self, text: str) -> int:
        self._event("crash", what=text.splitlines()[0])
        self.say(f"error: {text}")
        return CRASH

    def _stalled(self, running: Round) -> int:
        self._end(running)
        last = dict.fromkeys(range(running.spread.num_ranks), self.furthest)
        for step in sorted(running.step_reports):
            last |= dict.fromkeys(running.step_reports[step], step)
        behind = min(last, key=lambda rank: last[rank])
        seconds = self.job.stall_seconds
        self._event("stalled", rank=behind)
        self.say(
            f"error: no progress for {seconds:g} s: rank {behind} told least, of step {last[behind]} at last"
        )
        return TIMEOUT

    def _interrupted(self) -> int:
        """Handle Ctrl-C or SIGTERM: let the ranks save a checkpoint, end the ranks, and return the job's exit code."""
        running = self.round
        if running and running.is_seated and running.failed_at is None:
            if running.asked_to_stop is None:
                self._ask_to_stop(running)
            with contextlib.suppress(KeyboardInterrupt):
                until = time.monotonic() + STOP_SECONDS
                while running.running and running.failed_at is None and time.monotonic() < until:
                    self._take(0.1)
                    self._advance(running, Pace(running.spread.num_stages))
                self._end(running)
                self._tell_unsaved()
        self._event("interrupted")
        self.say("interrupted: the same call goes on from the newest checkpoint")
        return INTERRUPTED

    def _tell_unsaved(self) -> None:
        """Warn if the ranks ended at SIGUSR1 without a checkpoint of their last step. In this case the script's handler
        saved nothing, or saved the state by itself and did not call saved()."""
        saved = max(self.folder.saved_steps(), default=0)
        if saved < self.furthest:
            lost = f"the steps after {saved} are trained again"
            remedy = "let the script's handler call model.checkpoint().result(), or model.saved() after it has saved"
            self.say(f"no checkpoint of step {self.furthest} was written at SIGUSR1: {lost}; {remedy}")

    def _event(self, event: str, **facts: Any) -> None:
        self.folder.note(event, pid=os.getpid(), **facts)
