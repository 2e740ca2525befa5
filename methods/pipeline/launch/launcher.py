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
from harness.base.console import counted
from harness.base.json_object import JsonObject
from harness.base.rank_agent import GRACE_SECONDS
from harness.core.failures import LOST_RANK
from methods.pipeline.launch.folder import Folder, step_line
from methods.pipeline.launch.job import LaunchJob, Pace, Round, Spread, assign_seats, make_rank_orders
from methods.pipeline.launch.machines import MachineLine, Remote, read_machine_list

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
        self.reports: queue.SimpleQueue[tuple[Remote, JsonObject | None]] = queue.SimpleQueue()
        self.agents: list[Remote] = []
        self.listed_machines: list[MachineLine] = read_machine_list(job.machine_list)
        self.last_read_list: list[MachineLine] | None = None
        self.polled_at = self.pruned_at = 0.0
        # for a lost machine: time of the next try, later wait
        self.retries: dict[MachineLine, tuple[float, float]] = {}
        self.round: Round | None = None
        self.num_rounds = 0
        self.num_crashes, self.furthest_step = 0, folder.last_step()
        self.waiting_reason = ""  # why no round runs

    def run(self) -> int:
        """Run rounds until the script is done, and return the job's exit code. At Ctrl-C or SIGTERM the ranks save a
        checkpoint before the job ends."""
        began_at = time.monotonic()
        try:
            while True:
                self._follow_list()
                is_waiting = any(not agent.is_ready for agent in self.agents)
                if is_waiting and self.num_rounds == 0 and time.monotonic() < began_at + START_SECONDS:
                    self._take_reports(POLL_SECONDS)
                    continue
                spread, machines = self._choose_spread()
                if spread is None:
                    self._take_reports(POLL_SECONDS)
                    continue
                if (exit_code := self._train(spread, machines)) is not None:
                    return exit_code
        except KeyboardInterrupt:
            return self._interrupted()
        finally:
            fork_server.close()
            for agent in self.agents:
                agent.close()

    # ---- Machines

    def _follow_list(self) -> None:
        """Follow the list: start agents on machines that were added, and end agents on machines that were removed."""
        if time.monotonic() < self.polled_at + POLL_SECONDS:
            return
        self.polled_at = time.monotonic()
        lines: list[MachineLine] | None = None
        with contextlib.suppress(ValueError):  # the list is being replaced
            lines = read_machine_list(self.job.machine_list)
        if lines is not None and lines == self.last_read_list:
            self.listed_machines = lines
        self.last_read_list = lines
        present_lines = {agent.line for agent in self.agents if not agent.is_leaving}
        for line in set(self.retries) - set(self.listed_machines):
            del self.retries[line]
        for line in self.listed_machines:
            if line not in present_lines and time.monotonic() >= self.retries.get(line, (0.0, 0.0))[0]:
                self._start_agent(line)
        for agent in self.agents:
            if agent.line not in self.listed_machines and not agent.is_leaving:
                agent.is_leaving = True
                self._note_event("leaving", machine=str(agent.line))
        for agent in [*self.agents]:
            is_used = self.round is not None and agent in self.round.machines
            if agent.is_leaving and not is_used:
                self._dismiss(agent)
            elif agent.is_silent():
                self._lose(agent, "is silent")

    def _start_agent(self, line: MachineLine) -> None:
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

    def _lose(self, agent: Remote, what_happened: str) -> None:
        """Handle a machine whose agent has ended, is silent or could not be started. `what_happened`: what happened,
        for the message to the user."""
        self._dismiss(agent)
        self._retry_later(agent.line)
        log_text = "" if agent.is_ready else f": {self.folder.last_log_line(agent.log.name)}"
        self._note_event("lost", machine=str(agent.line))
        self.say(f"machine {agent.line} {what_happened}{log_text}")

    def _retry_later(self, line: MachineLine) -> None:
        wait_seconds = self.retries.get(line, (0.0, RETRY_SECONDS))[1]
        self.retries[line] = (time.monotonic() + wait_seconds, 2 * wait_seconds)

    def _choose_spread(self) -> tuple[Spread | None, list[Remote]]:
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
        self.waiting_reason = ""
        return spread, ready[: -(-spread.num_ranks // per_machine)]

    def _wait_for(self, reason: str) -> None:
        if (
            reason != self.waiting_reason
            and self.round is None
            and all(agent.is_ready for agent in self.agents)
        ):
            self.waiting_reason = reason
            self.say(f"waiting for machines: {reason}")

    # ---- A round

    def _train(self, spread: Spread, machines: list[Remote]) -> int | None:
        """Run one round. Return the job's exit code if this round was the last; None if another round follows."""
        current_round = self._start_round(spread, machines)
        pace = Pace(spread.num_stages)
        while True:
            self._take_reports(0.1)
            self._follow_list()
            self._advance(current_round, pace)
            if current_round.failed_at is not None:
                is_late = time.monotonic() > current_round.failed_at + GRACE_SECONDS
                is_known = any(agent.is_lost for agent in machines)
                if is_known or is_late or not current_round.running_ranks:
                    return self._after_failure(current_round)
            elif not current_round.running_ranks:
                return self._after_end(current_round)
            elif current_round.asked_to_stop_at is None and current_round.is_seated:
                wanted_spread = self._choose_spread()
                may_wait = any(not agent.is_ready for agent in self.agents) and not any(
                    agent.is_leaving for agent in current_round.machines
                )
                if wanted_spread != (spread, machines) and not may_wait:
                    self._ask_to_stop(current_round)
            elif (
                current_round.asked_to_stop_at
                and time.monotonic() > current_round.asked_to_stop_at + STOP_SECONDS
            ):
                self.say(f"no checkpoint within {STOP_SECONDS:g} s of SIGUSR1: going on from an earlier one")
                self._end_ranks(current_round)
                return None
            if time.monotonic() > current_round.heard_at + self.job.stall_seconds:
                return self._stalled(current_round)

    def _start_round(self, spread: Spread, machines: list[Remote]) -> Round:
        resume_step = self.folder.resume()
        round_number, code = self.folder.state["round"] + 1, self.job.code()
        if other_code := self.folder.other_code(code):
            self._note_event("code", step=resume_step)
            self.say(f"warning: {other_code}")
        self.folder.keep_state(round=round_number, code=code)
        self.num_rounds += 1
        per_machine = self.job.choice.per_machine
        current_round = self.round = Round(
            round_number, spread, machines, resume_step, assign_seats(spread.num_ranks, machines, per_machine)
        )
        current_round.running_ranks = set(range(spread.num_ranks))
        self._note_event(
            "round",
            workers=spread.num_ranks,
            machines=[str(agent.line) for agent in machines],
            stages=spread.num_stages,
            replicas=spread.num_replicas,
            chunk_size=spread.chunk_size,
            resume_step=resume_step,
        )
        shape_text = f"{spread.num_stages} stages x {spread.num_replicas} replicas"
        resume_text = f"after step {resume_step}" if resume_step else "from the start"
        workers_text = f"{counted(spread.num_ranks, 'worker')} on {counted(len(machines), 'machine')}"
        batch_text = f"micro-batches of {spread.chunk_size}"
        self.say(f"round {round_number}: {workers_text}, {shape_text}, {batch_text}, {resume_text}")
        machines[0].send({"do": "meet", "round": round_number, "address": machines[0].line.address})
        return current_round

    def _start_ranks(self, current_round: Round, address: str, port: int) -> None:
        """Start the ranks. `address`, `port`: where the ranks find one another, on the first machine."""
        orders = make_rank_orders(self.job, self.folder.path, current_round, address, port)
        current_round.is_seated = True
        for agent, ranks in orders.items():
            agent.send({"do": "start", "round": current_round.number, "ranks": ranks})

    def _ask_to_stop(self, current_round: Round) -> None:
        current_round.asked_to_stop_at = time.monotonic()
        self._note_event("morph", round=current_round.number)
        for agent in current_round.machines:
            agent.send({"do": "signal"})

    def _end_ranks(self, current_round: Round) -> None:
        """Tell the agents to end the ranks that still run, and wait until these ranks have ended. An agent that takes
        longer than END_SECONDS counts as lost."""
        self.round = None
        waiting_agents = {agent for agent in current_round.machines if not agent.is_lost}
        for agent in waiting_agents:
            agent.send({"do": "end"})
        deadline = time.monotonic() + END_SECONDS
        while waiting_agents and time.monotonic() < deadline:
            try:
                agent, event = self.reports.get(timeout=0.1)
            except queue.Empty:
                continue
            if event and event["kind"] == "ended":
                waiting_agents.discard(agent)
            elif event is None or event["kind"] == "ready":
                self._hear(agent, event)
                waiting_agents.discard(agent)
        for agent in waiting_agents:
            self._lose(agent, "does not end its ranks")

    # ---- What agents and ranks tell

    def _take_reports(self, seconds: float) -> None:
        """Wait at most `seconds` for a report of an agent. Handle this report, and all further reports that have
        arrived."""
        with contextlib.suppress(queue.Empty):
            self._hear(*self.reports.get(timeout=seconds))
            while True:
                self._hear(*self.reports.get_nowait())

    def _hear(self, agent: Remote, event: JsonObject | None) -> None:
        current_round = self.round
        if agent.is_lost:
            return
        if event is None:
            is_used = current_round is not None and agent in current_round.machines
            self._lose(agent, "is gone" if agent.is_ready else "did not start")
            if is_used and current_round:
                current_round.failed_at = current_round.failed_at or time.monotonic()
                current_round.running_ranks -= {
                    rank for rank, seat in enumerate(current_round.seats) if seat[0] is agent
                }
        elif event["kind"] == "ready":
            agent.is_ready = True
            self.retries.pop(agent.line, None)
            self._note_event("came", machine=str(agent.line), agent=event["pid"])
        elif event["kind"] == "notice":
            if not agent.is_leaving:
                agent.is_leaving = True
                self._retry_later(agent.line)
                self._note_event("leaving", machine=str(agent.line))
                self.say(f"machine {agent.line} is about to be taken away")
        elif current_round and event.get("round") == current_round.number:
            self._hear_of_round(current_round, agent, event)

    def _hear_of_round(self, current_round: Round, agent: Remote, event: JsonObject) -> None:
        kind = event["kind"]
        if kind == "store":
            self._start_ranks(current_round, event["address"], event["port"])
        elif kind == "no-store":
            self._lose(agent, f"cannot listen at {event['address']}")
            current_round.failed_at, current_round.running_ranks = time.monotonic(), set()
        elif kind == "exit":
            rank, exit_code = event["rank"], event["code"]
            current_round.exit_codes[rank] = exit_code
            current_round.running_ranks.discard(rank)
            if exit_code:
                current_round.failed_at = current_round.failed_at or time.monotonic()
        elif kind == "error":
            current_round.error_texts[event["rank"]] = event["text"]
        elif kind == "note":
            self.say(event["text"])
        elif kind == "stopping":
            current_round.is_stopping = True
        elif kind == "saved":
            saver_ranks = current_round.savers_by_step.setdefault(event["step"], set())
            saver_ranks.add(event["rank"])
            if len(saver_ranks) == current_round.spread.num_ranks:
                self.folder.keep_state(saved=event["step"])
        if kind == "step":
            current_round.step_reports.setdefault(event["step"], {})[event["rank"]] = event
        if kind in ("step", "alive", "store"):
            current_round.heard_at = time.monotonic()

    def _advance(self, current_round: Round, pace: Pace) -> None:
        """Write the steps that all ranks have reported to the record, and the slow ranks to their file. Every
        PRUNE_SECONDS also remove old checkpoints."""
        spread = current_round.spread
        while current_round.step_reports:
            step = min(current_round.step_reports)
            if len(current_round.step_reports[step]) < spread.num_ranks:
                break
            reports = current_round.step_reports.pop(step)
            round_facts = {
                "num_workers": spread.num_ranks,
                "num_stages": spread.num_stages,
                "num_replicas": spread.num_replicas,
                "chunk_size": spread.chunk_size,
                "round": current_round.number,
                "time": time.time(),
            }
            self.folder.record_step(step_line(reports) | round_facts)
            if step > self.furthest_step:
                self.furthest_step, self.num_crashes = step, 0
            pace.add({rank: event["busy_seconds"] for rank, event in reports.items()})
            self._name_slow(current_round, pace)
        if time.monotonic() > self.pruned_at + PRUNE_SECONDS:
            self.pruned_at = time.monotonic()
            self.folder.prune_checkpoints()

    def _name_slow(self, current_round: Round, pace: Pace) -> None:
        lines = [
            f"{current_round.seats[slow_rank.rank][0].line.address} {slow_rank}"
            for slow_rank in pace.slow_ranks(current_round.spread)
        ]
        if lines != pace.named_lines:
            pace.named_lines = lines
            (self.folder.path / "slow_machines.txt").write_text("".join(f"{line}\n" for line in lines))

    # ---- Ends

    def _after_end(self, current_round: Round) -> int | None:
        self._end_ranks(current_round)
        if current_round.is_stopping:
            self._tell_unsaved()
            return None
        if not self.furthest_step:
            return self._crashed(
                "expected steps of training, got a script that ended without one; try model.step(inputs)"
            )
        self._note_event("done")
        self.folder.keep_state(end="done")
        self.say(f"done after step {self.furthest_step}")
        return OK

    def _after_failure(self, current_round: Round) -> int | None:
        is_lost = any(agent.is_lost for agent in current_round.machines)
        # Copy the codes now: ranks that _end_ranks() kills next did not fail by themselves.
        exit_codes = dict(current_round.exit_codes)
        self._end_ranks(current_round)
        failed_ranks = {rank: code for rank, code in exit_codes.items() if code}
        # ranks that failed by themselves, not because another rank was lost
        causes = {
            rank: code
            for rank, code in failed_ranks.items()
            if not CONSEQUENCE.search(current_round.error_texts.get(rank, ""))
        }
        killed_ranks = {rank: code for rank, code in causes.items() if code < 0}
        if -signal.SIGUSR1 in exit_codes.values():
            self.say("the script has no handler of SIGUSR1: going on from an earlier checkpoint")
            return None
        if is_lost or (current_round.is_stopping and not causes):
            return None  # the user has already been told of the lost machine
        if causes and not killed_ranks:
            rank = min(causes)
            text = current_round.error_texts.get(rank) or f"exit code {causes[rank]}"
            return self._crashed(f"rank {rank} crashed; its log is logs/rank-{rank}.txt\n{text.rstrip()}")
        first_rank = min(killed_ranks or failed_ranks)
        failure_text = f"rank {first_rank} lost another rank"
        if killed_ranks:
            failure_text = f"rank {first_rank} was killed by signal {-killed_ranks[first_rank]}"
        self.num_crashes += 1
        if self.num_crashes >= MOST_CRASHES:
            return self._crashed(
                f"{MOST_CRASHES} crashes in a row without progress since step {self.furthest_step}: {failure_text}"
            )
        self._note_event("crash", what=failure_text)
        self.say(f"{failure_text}: going on from the newest checkpoint")
        return None

    def _crashed(self, text: str) -> int:
        self._note_event("crash", what=text.splitlines()[0])
        self.say(f"error: {text}")
        return CRASH

    def _stalled(self, current_round: Round) -> int:
        self._end_ranks(current_round)
        last_step_of_rank = dict.fromkeys(range(current_round.spread.num_ranks), self.furthest_step)
        for step in sorted(current_round.step_reports):
            last_step_of_rank |= dict.fromkeys(current_round.step_reports[step], step)
        slowest_rank = min(last_step_of_rank, key=lambda rank: last_step_of_rank[rank])
        stall_seconds = self.job.stall_seconds
        self._note_event("stalled", rank=slowest_rank)
        last_step = last_step_of_rank[slowest_rank]
        self.say(
            f"error: no progress for {stall_seconds:g} s: rank {slowest_rank} told least, of step {last_step} at last"
        )
        return TIMEOUT

    def _interrupted(self) -> int:
        """Handle Ctrl-C or SIGTERM: let the ranks save a checkpoint, end the ranks, and return the job's exit code."""
        current_round = self.round
        if current_round and current_round.is_seated and current_round.failed_at is None:
            if current_round.asked_to_stop_at is None:
                self._ask_to_stop(current_round)
            with contextlib.suppress(KeyboardInterrupt):
                deadline = time.monotonic() + STOP_SECONDS
                while (
                    current_round.running_ranks
                    and current_round.failed_at is None
                    and time.monotonic() < deadline
                ):
                    self._take_reports(0.1)
                    self._advance(current_round, Pace(current_round.spread.num_stages))
                self._end_ranks(current_round)
                self._tell_unsaved()
        self._note_event("interrupted")
        self.say("interrupted: the same call goes on from the newest checkpoint")
        return INTERRUPTED

    def _tell_unsaved(self) -> None:
        """Warn if the ranks ended at SIGUSR1 without a checkpoint of their last step. In this case the script's handler
        saved nothing, or saved the state by itself and did not call saved()."""
        saved_step = max(self.folder.saved_steps(), default=0)
        if saved_step < self.furthest_step:
            lost_text = f"the steps after {saved_step} are trained again"
            remedy = "let the script's handler call model.checkpoint().result(), or model.saved() after it has saved"
            self.say(
                f"no checkpoint of step {self.furthest_step} was written at SIGUSR1: {lost_text}; {remedy}"
            )

    def _note_event(self, event: str, **facts: Any) -> None:
        self.folder.note_event(event, pid=os.getpid(), **facts)
