"""A real SLURM of two nodes in a folder, on ports of its own; it needs root and Debian's packages."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

DAEMONS = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "sbatch", "sacct")
NODES = ("n1", "n2")
PATIENCE = 60.0  # seconds that a daemon may take to answer
_SLURM = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ctld}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=30
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd}
AccountingStoragePass={folder}/munge.socket
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=5,bf_interval=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=4 Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=4 Gres=gpu:2 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=120
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE PriorityTier=10 PreemptMode=off
"""
_GRES = "NodeName=n[1-2] Name=gpu File={folder}/gpu[0-1]\n"  # files of that name will do
_DBD = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={dbd}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm
"""


def missing() -> str | None:
    absent = [name for name in DAEMONS if _find(name) is None]
    if absent:
        return f"a SLURM needs {', '.join(absent)}"
    return None if os.geteuid() == 0 else "a SLURM of several daemons needs root"


@contextlib.contextmanager
def started(folder: Path) -> Iterator[dict[str, str]]:
    """Start a cluster whose files are in `folder`; yield the environment in which its commands are called."""
    folder.chmod(0o755)
    ports = dict(zip(("ctld", "dbd", "sql", *NODES), _free_ports(5), strict=True))
    values = {"folder": folder, "host": socket.gethostname(), "password": secrets.token_hex(8), **ports}
    for name, text, mode in (("slurm", _SLURM, 0o644), ("slurmdbd", _DBD, 0o600), ("gres", _GRES, 0o644)):
        (folder / f"{name}.conf").write_text(text.format_map(values))
        (folder / f"{name}.conf").chmod(mode)
    for name in ("gpu0", "gpu1"):
        (folder / name).touch()
    for name in ("state", "sql", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir()
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    with contextlib.ExitStack() as stack:

        def daemon(name: str, *arguments: str, answers: Callable[[], bool]) -> None:
            log = folder / f"{name}.{'.'.join(arguments)[-2:]}.out"
            with log.open("w") as out:
                command = [str(_find(name)), *arguments]
                process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
            stack.callback(_stop, process)
            until = time.monotonic() + PATIENCE
            while not answers():
                if process.poll() is not None or time.monotonic() > until:
                    told = "\n".join(
                        path.read_text()[-2000:] for path in (log, folder / f"{name}.log") if path.exists()
                    )
                    raise RuntimeError(f"{name} does not answer:\n{told}")
                time.sleep(0.2)

        def said(*command: str) -> str:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
            return done.stdout if done.returncode == 0 else ""

        (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (folder / "munge.key").chmod(0o400)
        munge = ("socket", "pid", "log", "seed")
        options = ("--socket", "--pid-file", "--log-file", "--seed-file")
        files = [f"{option}={folder}/munge.{name}" for option, name in zip(options, munge, strict=True)]
        there = folder / "munge.socket"
        daemon("munged", "--foreground", "--force", f"--key-file={folder}/munge.key", *files, answers=there.exists)
        _database(folder, ports["sql"], str(values["password"]), daemon)
        daemon("slurmdbd", "-D", answers=lambda: _open(ports["dbd"]))
        said("sacctmgr", "-i", "add", "cluster", "tests")
        stack.callback(lambda: said("scancel", "-f", "-s", "KILL", "--state=RUNNING"))
        daemon("slurmctld", "-D", answers=lambda: "UP" in said("scontrol", "ping"))
        for node in NODES:
            daemon("slurmd", "-D", "-N", node, answers=lambda node=node: "idle" in said("sinfo", "-h", "-n", node))
        yield environment
        said("scancel", "--user=root")
        until = time.monotonic() + PATIENCE
        while said("squeue", "-h").strip() and time.monotonic() < until:
            time.sleep(0.5)


def _database(folder: Path, port: int, password: str, daemon: Callable[..., None]) -> None:
    data = [f"--datadir={folder}/sql", "--user=root"]
    install = ["mariadb-install-db", "--no-defaults", *data, "--auth-root-authentication-method=normal"]
    subprocess.run([*install, "--skip-test-db"], check=True, capture_output=True, timeout=PATIENCE)
    (folder / "first.sql").write_text(
        f"CREATE DATABASE slurm;\nCREATE USER slurm@'127.0.0.1' IDENTIFIED BY '{password}';\n"
        "GRANT ALL ON slurm.* TO slurm@'127.0.0.1';\n"
    )
    listening = ["--bind-address=127.0.0.1", f"--port={port}", f"--socket={folder}/sql.socket", "--skip-name-resolve"]
    files = [f"--pid-file={folder}/sql.pid", f"--init-file={folder}/first.sql", "--innodb-buffer-pool-size=64M"]
    daemon("mariadbd", "--no-defaults", *data, *listening, *files, answers=lambda: _open(port))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
