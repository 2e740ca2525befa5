"""The agent of one machine: in each round it starts this machine's ranks as the launcher orders, and reports how they
end.

Orders come as lines of JSON on standard input. When standard input closes, the launcher is gone, and the agent ends its
ranks. The ranks' reports and exit codes go to standard output.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import runpy
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from harness.base import fork_server
from harness.base.json_object import JsonObject
from harness.base.rank_agent import RankAgent, write_all
from methods.pipeline.launch.folder import WORKERS_LOCK

ERROR_BYTES = 3000  # most bytes of a report's traceback: pipes take only lines below 4096 bytes in one piece
ALIVE_SECONDS = 2.0
# Modules that the agent imports once for all ranks, which it forks. torch would import torch._dynamo by itself at the
# first operation that one of torch's counters sees, even if nothing is compiled.
IMPORTED_MODULES = ("methods.pipeline.pipeline", "torch.distributed.checkpoint", "torch._dynamo")


class MachineAgent(RankAgent):
    def __init__(self, output_fd: int, script_order: JsonObject) -> None:
        super().__init__(private=[output_fd])
        self.output_fd, self.script_order = output_fd, script_order
        self.round = 0
        self.unread_bytes = b""
        self.watch(0, self.obey)
        # Ranks inherit the blocked signal; methods/pipeline/launch/link.py unblocks it between two steps of a rank.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

    def run(self) -> None:
        self.tell("ready", pid=os.getpid())
        reported_at = time.monotonic()  # time of the last report
        while True:
            self.turn(ALIVE_SECONDS)
            if time.monotonic() > reported_at + ALIVE_SECONDS:
                reported_at = time.monotonic()
                self.tell("here")

    def tell(self, kind: str, **facts: Any) -> None:
        os.write(self.output_fd, (json.dumps({"kind": kind, "round": self.round, **facts}) + "\n").encode())

    def heard(self, rank: int, data: bytes) -> None:
        write_all(self.output_fd, data)

    def exited(self, rank: int, code: int) -> None:
        self.tell("exit", rank=rank, code=code)

    def signalled(self, kinds: bytes) -> None:
        """Report SIGTERM to the launcher: Slurm and clouds send SIGTERM before they take a machine away."""
        if signal.SIGTERM in kinds:
            self.tell("notice")

    def obey(self) -> None:
        received_bytes = os.read(0, 65536)
        if not received_bytes:
            self.end()
            sys.exit()
        *lines, self.unread_bytes = (self.unread_bytes + received_bytes).split(b"\n")
        for line in lines:
            order = json.loads(line)
            getattr(self, order.pop("do"))(**order)

    # ---- Orders

    def meet(self, round: int, address: str) -> None:
        """Open the store through which the ranks of a round find one another. Report the store's address and port, or
        that the store cannot be opened."""
        self.round = round
        try:
            host, port = self.listen(address)
        except OSError:
            self.tell("no-store", address=address)
        else:
            self.tell("store", address=host, port=port)

    def start(self, round: int, ranks: list[JsonObject]) -> None:
        """Start this machine's ranks of a round. `ranks`: for each rank its number, arguments, environment, link and
        log file."""
        self.round = round
        self.fork({entry["rank"]: partial(run_script, self.script_order, entry) for entry in ranks})

    def signal(self) -> None:
        for rank in self.ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)

    def end(self) -> None:
        self.kill()
        self.tell("ended")


def run_script(script_order: JsonObject, rank_entry: JsonObject, reports_fd: int) -> int:
    """Run the user's script in this process, as Python would run it; return its exit code. `script_order`: the
    launcher's order. `rank_entry`: this rank's entry in start(). `reports_fd`: file descriptor for reports."""
    log_fd = os.open(rank_entry["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(log_fd, stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
    os.environ.update(
        rank_entry["environment"], VARUNA_LINK=json.dumps({**rank_entry["link"], "descriptor": reports_fd})
    )
    os.chdir(script_order["code_dir"])
    path = os.path.abspath(script_order["script"])
    sys.argv, exit_code, error = [script_order["script"], *rank_entry["arguments"]], 1, ""
    sys.path.insert(0, os.path.dirname(path))
    try:
        runpy.run_path(path, run_name="__main__")
        exit_code = 0
    except SystemExit as exit_error:
        exit_code = exit_error.code if isinstance(exit_error.code, int) else int(exit_error.code is not None)
        error = str(exit_error.code) if exit_code and not isinstance(exit_error.code, int) else ""
        print(error, file=sys.stderr)
    except BaseException as raised_error:
        script_traceback = raised_error.__traceback__
        # skip the frames above the script
        while script_traceback and script_traceback.tb_frame.f_code.co_filename != path:
            script_traceback = script_traceback.tb_next
        shown_traceback = script_traceback or raised_error.__traceback__
        error = "".join(traceback.format_exception(type(raised_error), raised_error, shown_traceback))
        print(error, file=sys.stderr)
    if exit_code:
        link, text = rank_entry["link"], error[-ERROR_BYTES // 2 :]
        report = {"kind": "error", "rank": link["rank"], "round": link["round"], "text": text}
        os.write(reports_fd, (json.dumps(report) + "\n").encode())
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    return exit_code


def main() -> None:
    with open(0, "rb", buffering=0, closefd=False) as orders:
        # unbuffered, so that no byte of the next order is read
        order = json.loads(orders.readline())
    output_fd = os.dup(1)
    os.set_inheritable(output_fd, False)
    os.dup2(2, 1)
    lock = open(Path(order["folder"]) / WORKERS_LOCK)  # noqa: SIM115  ranks inherit the lock, and hold it to their end
    fcntl.flock(lock, fcntl.LOCK_SH)
    fork_server.import_all(IMPORTED_MODULES)
    agent, code = MachineAgent(output_fd, order), 0
    try:
        agent.run()
    except (BrokenPipeError, SystemExit):  # the launcher is gone
        pass
    except BaseException:
        traceback.print_exc()
        code = 1
    for rank in agent.ranks.values():
        rank.signal(signal.SIGKILL)
    os._exit(code)  # a normal exit of a process that has imported torch would take seconds


if __name__ == "__main__":
    main()
