# SPDX-License-Identifier: Apache-2.0
"""A Slurm cluster of two nodes on this machine: munge, slurmctld and two slurmd, in a folder of its own.

Each slurmd lives in namespaces of its own, where its node's name is the host's name and both names resolve
to loopback addresses. Ports are chosen free, and everything is ended by the pid files that it wrote.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

NODES = {"node1": "127.0.0.2", "node2": "127.0.0.3"}
CORES = 8
_SECONDS = 30.0

_CONF = """\
ClusterName=t
SlurmctldHost=localhost
SlurmUser=root
AuthInfo=socket={root}/run/munge.socket
SlurmctldPort={controller}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MailProg=/bin/true
KillWait=2
SlurmdTimeout=300
SchedulerParameters=batch_sched_delay=0,sched_interval=1,requeue_setup_env_fail
JobCompType=jobcomp/filetxt
JobCompLoc={root}/log/jobcomp.txt
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node1 NodeHostname=localhost Port={node1} CPUs={cores} RealMemory=4000 Gres=gpu:8
NodeName=node2 NodeHostname=localhost Port={node2} CPUs={cores} RealMemory=4000 Gres=gpu:8
PartitionName=debug Nodes=ALL Default=YES State=UP
"""
_START_NODE = 'hostname "$0"; mount --bind "$1" /etc/hosts; exec slurmd -N "$0"'


def missing() -> str:
    """Why no cluster can be started here, empty where one can."""
    lacking = [name for name in ("slurmctld", "slurmd", "munged", "sbatch", "unshare") if not _find(name)]
    if lacking:
        return f"{', '.join(lacking)} missing: apt-get install slurm-wlm munge"
    return "" if os.getuid() == 0 else "a cluster of its own needs root"


@contextlib.contextmanager
def cluster() -> Iterator[Path]:
    """Run a cluster in a folder of its own; yields its slurm.conf, for SLURM_CONF."""
    with tempfile.TemporaryDirectory(prefix="lora-suite-slurm-") as folder:
        # munge wants everybody to reach its socket, and the path of a socket must be short.
        Path(folder).chmod(0o755)
        with _running(Path(folder)) as conf:
            yield conf


@contextlib.contextmanager
def _running(root: Path) -> Iterator[Path]:
    conf = _configure(root)
    environment = {**os.environ, "SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    run = root / "run"
    try:
        _call(
            environment,
            "munged",
            f"--socket={run}/munge.socket",
            f"--key-file={root}/etc/munge.key",
            f"--log-file={root}/log/munged.log",
            f"--pid-file={run}/munged.pid",
            f"--seed-file={run}/munged.seed",
        )
        _call(environment, "slurmctld", "-c")
        for node in NODES:
            _call(
                environment,
                *("unshare", "--uts", "--mount", "bash", "-c", _START_NODE, node, f"{root}/etc/hosts"),
            )
        _wait_for_nodes(environment)
        yield conf
    finally:
        if (run / "slurmctld.pid").exists():
            _call(environment, "scancel", "--user=root", check=False)
        for name in (*(f"slurmd-{node}" for node in NODES), "slurmctld", "munged"):
            _end(run / f"{name}.pid")


def _configure(root: Path) -> Path:
    for folder in ("etc", "run", "log", "state", "spool"):
        (root / folder).mkdir(parents=True)
    ports = dict(zip(("controller", *NODES), _free_ports(3), strict=True))
    conf = root / "etc" / "slurm.conf"
    conf.write_text(_CONF.format(root=root, cores=CORES, **ports))
    (root / "etc" / "gres.conf").write_text("AutoDetect=off\nName=gpu File=/dev/tty[0-7]\n")
    hosts = "".join(f"{address} {node}\n" for node, address in NODES.items())
    (root / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    key = root / "etc" / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    return conf


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_for_nodes(environment: dict[str, str]) -> None:
    deadline = time.monotonic() + _SECONDS
    while True:
        said = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.split()
        if said == ["idle"] * len(NODES):
            return
        assert time.monotonic() < deadline, f"the nodes did not come up: {said}"
        time.sleep(0.05)


def _call(environment: dict[str, str], *command: str, check: bool = True) -> None:
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=check, timeout=_SECONDS)


def _end(pid_file: Path) -> None:
    """End a daemon by its pid file and wait until it is gone."""
    try:
        pid = int(pid_file.read_text())
        handle = os.pidfd_open(pid)
    except (OSError, ValueError):
        return
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        deadline = time.monotonic() + 10.0
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)


def _find(name: str) -> bool:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None
