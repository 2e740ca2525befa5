"""Slurm of the tests' own, from Debian's packages: two nodes on this machine, private sockets, keys and folders."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.support.packages import missing, need
from tests.support.ports import free_ports
from tests.support.until import until

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
ACCOUNTING_PACKAGES = ("slurmdbd", "mariadb-server")
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/cgroup
TaskProlog={folder}/prolog
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=2048
FirstJobId={ports[0]}
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
{accounting}
ReturnToService=2
KillWait=20
UnkillableStepTimeout=600
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=4096
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=4096
PartitionName=tests Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


# What slurmctld has forgotten after two seconds, the accounting remembers.
UNACCOUNTED, ACCOUNTED = (
    "AccountingStorageType=accounting_storage/none",
    """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
MinJobAge=2
""",
)
DATABASE = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdPort={port}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={storage_port}
StorageUser=root
"""
MARIADB = ["--no-defaults", "--user=root", "--innodb-buffer-pool-size=32M", "--innodb-log-file-size=8M"]
# What a job asks for, or else DefMemPerNode, is enforced. Groups are named by node and job, so that number is its own.
LIMITS = "CgroupAutomount=no\nConstrainRAMSpace=yes\nIgnoreSystemd=yes\n"


@contextlib.contextmanager
def cluster(folder: Path, is_accounted: bool = False) -> Iterator[Path]:
    """Two idle nodes; yields the configuration that SLURM_CONF names. Nothing is left running. Where it is accounted,
    sacct answers."""
    if os.geteuid() != 0:
        missing("a Slurm of the tests' own takes root")
    need(PACKAGES, "slurmctld", "/usr/sbin/slurmctld")
    if is_accounted:
        need(ACCOUNTING_PACKAGES, "slurmdbd", "/usr/sbin/slurmdbd")
    for name in ("state", "spool.n1", "spool.n2"):
        (folder / name).mkdir()
    # Two nodes of one machine: each has a temporary folder, and so a lock of its processors, of its own.
    (folder / "prolog").write_text(
        f"#!/bin/sh\nmkdir -p {folder}/$SLURMD_NODENAME\n"
        f"for name in TMPDIR HARNESS_LOCKS; do echo export $name={folder}/$SLURMD_NODENAME; done\n"
    )
    (folder / "prolog").chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    configuration = folder / "slurm.conf"
    ports = free_ports(5)
    accounting = ACCOUNTED.format(folder=folder, port=ports[3]) if is_accounted else UNACCOUNTED
    host = socket.gethostname().split(".")[0]
    configuration.write_text(
        CONFIGURATION.format(host=host, ports=ports, folder=folder, accounting=accounting)
    )
    (folder / "cgroup.conf").write_text(LIMITS)
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    parts = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = [f"--{name}={folder}/munge.{end}" for name, end in parts.items()]
    daemons = [
        ["munged", "--foreground", "--force", *munge],
        *(database(folder, *ports[3:]) if is_accounted else []),
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    running = []
    try:
        for command in daemons:
            with open(folder / "daemons.log", "a") as log:
                command[0] = shutil.which(command[0], path=path) or command[0]
                running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            wait_for((folder / "munge.socket").exists, running, folder)
            if Path(command[0]).name in ("mariadbd", "slurmdbd"):
                port = ports[4 if "mariadbd" in command[0] else 3]
                wait_for(partial(listens, port), running, folder)
        wait_for(lambda: idle_nodes(environment) == 2, running, folder)
        yield configuration
    finally:
        subprocess.run(["scancel", "--user=root", "--signal=KILL"], env=environment, capture_output=True)
        for process in reversed(running):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
        for groups in Path("/sys/fs/cgroup").glob("*/slurm_n[12]"):
            for group, _, _ in os.walk(groups, topdown=False):
                with contextlib.suppress(OSError):  # another cluster has jobs in it
                    os.rmdir(group)


def database(folder: Path, port: int, storage_port: int) -> list[list[str]]:
    """What keeps the accounts, its folders made: MariaDB, open to this machine only, and slurmdbd."""
    words = ["mariadb-install-db", *MARIADB, f"--datadir={folder}/mariadb", "--skip-test-db"]
    subprocess.run(words, check=True, capture_output=True)
    configuration = folder / "slurmdbd.conf"
    configuration.write_text(DATABASE.format(folder=folder, port=port, storage_port=storage_port))
    configuration.chmod(0o600)
    places = [
        f"--datadir={folder}/mariadb",
        f"--socket={folder}/mariadb.socket",
        f"--pid-file={folder}/mariadb.pid",
    ]
    network = ["--bind-address=127.0.0.1", f"--port={storage_port}", "--skip-grant-tables"]
    return [["mariadbd", *MARIADB, *places, *network], ["slurmdbd", "-D"]]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def idle_nodes(environment: dict[str, str]) -> int:
    done = subprocess.run(["sinfo", "-N", "-h", "-o", "%T"], env=environment, capture_output=True, text=True)
    return done.stdout.split().count("idle")


def wait_for(
    condition: Callable[[], object], running: Sequence[subprocess.Popen[bytes]], folder: Path
) -> None:
    """Wait until the condition holds; where a daemon has ended, Slurm does not start here."""
    until(lambda: condition() or any(process.poll() is not None for process in running), poll_seconds=0.1)
    if not condition():
        missing(
            f"Slurm does not start here: {' '.join((folder / 'daemons.log').read_text()[-2000:].split())}"
        )
