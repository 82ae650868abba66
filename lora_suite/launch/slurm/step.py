# SPDX-License-Identifier: Apache-2.0
"""A training as a job step: one torchrun on every node of the allocation that is already held.

Rendezvous is on the allocation's first node, at a port that follows from the job's id: two jobs on one node
have different ones, and no port has to be found free on a machine that is not this one.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_suite.config.errors import ConfigError

SRUN_WORDS = "LORA_SUITE_SRUN"
"""Holds the site's own options of srun; set, every training becomes a step, also on one node."""

# Below the range from which the kernel gives ports to clients (32768 and up on Linux).
_FIRST_PORT, _PORTS = 10240, 22000
_COMMAND_SECONDS = 30.0
# torchrun's node rank is known on the node alone. Its options must stand before the module's name.
_NODE = 'exec "$0" -m torch.distributed.run --node-rank "$SLURM_NODEID" "$@"'


@dataclass(frozen=True)
class Allocation:
    """The Slurm allocation that this process runs in. nodes: how many; nodelist: as Slurm writes it."""

    job: str
    nodes: int
    nodelist: str

    @classmethod
    def held(cls, environment: Mapping[str, str] | None = None) -> Allocation | None:
        """The allocation that the environment tells of, None outside of one."""
        known = os.environ if environment is None else environment
        job, nodelist = known.get("SLURM_JOB_ID"), known.get("SLURM_JOB_NODELIST")
        if not job or not nodelist:
            return None
        return cls(job, int(known.get("SLURM_JOB_NUM_NODES", "1")), nodelist)

    @property
    def port(self) -> int:
        """The rendezvous port of this job's trainings, which follow one another."""
        return _FIRST_PORT + int(self.job) % _PORTS

    def first_node(self) -> str:
        """Name of the first node; raises ConfigError where Slurm does not tell."""
        return slurm("scontrol", "show", "hostnames", self.nodelist).split()[0]


def step_command(
    allocation: Allocation, nodes: int, processes: int, name: str, run_dir: Path, extra: Sequence[str] = ()
) -> list[str]:
    """The words that start a training on the first `nodes` nodes of the allocation.

    processes: ranks a node. name: of the step, by which `cancel_steps` finds it. extra: the site's options of
    srun. A rank that fails ends the step on every node: without --kill-on-bad-exit the other nodes would wait
    for it until a timeout of minutes. Raises ConfigError for more nodes than the allocation has.
    """
    if nodes > allocation.nodes:
        raise ConfigError(
            f"cluster.num_nodes={nodes}: job {allocation.job} holds {allocation.nodes} nodes; "
            f"allocate more, or set cluster.num_nodes={allocation.nodes}"
        )
    srun = [
        *("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"),
        # The ranks use all cores of the job; which of them is for the trainer to say.
        *("--cpu-bind=quiet,none", "--unbuffered", f"--job-name={name}", *extra),
    ]
    ranks = ["--nproc-per-node", str(processes), "-m", "lora_suite.train", str(run_dir)]
    if nodes == 1:
        return [*srun, sys.executable, "-m", "torch.distributed.run", "--standalone", *ranks]
    place = ["--master-addr", allocation.first_node(), "--master-port", str(allocation.port)]
    return [*srun, "bash", "-c", _NODE, sys.executable, "--nnodes", str(nodes), *place, *ranks]


def site_words() -> list[str] | None:
    """The site's options of srun as the environment has them; None where trainings need not be steps."""
    text = os.environ.get(SRUN_WORDS)
    return shlex.split(text) if text is not None else None


def cancel_steps(allocation: Allocation, name: str) -> None:
    """End the steps of a name, on all their nodes: killing srun leaves what it started elsewhere alive."""
    listed = slurm("squeue", "--steps", f"--jobs={allocation.job}", "--noheader", "--format=%i %j")
    found = [line.split(maxsplit=1) for line in listed.splitlines() if line.strip()]
    steps = [words[0] for words in found if words[-1].strip() == name]
    if steps:
        slurm("scancel", *steps)


def slurm(*command: str) -> str:
    """What a command of Slurm prints; raises ConfigError with what it says of a failure."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigError(f"{command[0]} is missing: this is no machine of a Slurm cluster") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{command[0]}: no answer within {_COMMAND_SECONDS:g} s") from error
    if done.returncode != 0:
        raise ConfigError(f"{command[0]}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return done.stdout.strip()
