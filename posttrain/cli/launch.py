"""`posttrain launch`."""

import shlex
from collections.abc import Mapping
from typing import Annotated

import typer

from posttrain.base.terminal import say
from posttrain.cli.errors import UsageError
from posttrain.cli.settings import Config, Overrides, load_stages
from posttrain.cli.train import ModelIndex, Overwrite, Resume, Skip, as_given, several_methods

Processes = Annotated[
    int, typer.Option("--nproc", min=1, help="Processes on this machine: one for each GPU; on a CPU, share its cores.")
]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Machines; run the same command on each.")]
Node = Annotated[int, typer.Option("--node-rank", min=0, help="Number of this machine, 0 for the first.")]
Address = Annotated[
    str | None, typer.Option("--address", metavar="HOST:PORT", help="A free port of the first machine, for --nodes.")
]


def launch(
    config: Config = None,
    overrides: Overrides = None,
    nproc: Processes = 1,
    nodes: Nodes = 1,
    node_rank: Node = 0,
    address: Address = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
    model_index: ModelIndex = None,
    skip: Skip = None,
    *,
    flags: Mapping[str, str],
) -> None:
    """Train on several devices or machines: `posttrain train` in several processes that share every step.

    Takes what `posttrain train` takes. The number of processes changes no gradient: batch_size is that of the step.

        posttrain launch grpo.yaml --nproc 8
        posttrain launch grpo.yaml --nproc 8 --nodes 2 --node-rank 1 --address 10.0.0.1:29500
    """
    if nodes > 1 and address is None:
        raise UsageError("--nodes needs --address HOST:PORT, a free port of the first machine")
    host, _, port = (address or "127.0.0.1:1").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"--address {address}: it is HOST:PORT with a port from 1 to 65535, such as 10.0.0.1:29500")
    if node_rank >= nodes:
        raise UsageError(f"--node-rank {node_rank}: the machines have the numbers 0 to {nodes - 1}")
    if overwrite and resume is not None:
        raise UsageError("--resume continues a run and --overwrite deletes it; give one of them")
    if resume is None and not several_methods(flags):
        stages = load_stages(config, overrides, flags)  # an error here is said once, not by every process
        ids = stages[0].config.devices.ids
        if ids and len(ids) != nproc:
            raise UsageError(f"devices.ids names {len(ids)} GPUs: give --nproc {len(ids)}, or other ids")
    arguments = as_given(config, overrides, flags, resume, overwrite, model_index, skip)
    from posttrain.parallel.launch import launch as start

    if nodes > 1:
        say(f"machine {node_rank} of {nodes}: posttrain train {shlex.join(arguments)}", error=True)
    start(arguments, nproc, nodes, node_rank, address)
