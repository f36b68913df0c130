"""Starts the processes of a run on several devices or machines, by torchrun's agent, and says which one failed."""

import dataclasses
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from posttrain.base.errors import RunError
from posttrain.base.system import usable_cores

GRACE_S = 120  # for the checkpoint after a signal, before processes are killed
NODE_PATIENCE_S = 900  # until all machines must have joined


def is_rank() -> bool:
    """Whether this process was started by torchrun or another launcher."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(arguments: Sequence[str], processes: int, nodes: int = 1, node: int = 0, address: str | None = None) -> None:
    """`posttrain train ARGUMENTS` as `processes` ranks on each of `nodes` machines, of which this is number `node`.

    `address` is HOST:PORT of the first machine; on one machine a free port is chosen. Raises RunError if a rank fails,
    the port is in use, or the machines do not join.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # lost connections are named by posttrain
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from posttrain.parallel.rendezvous import reach, refuse_port_in_use

    if address is not None:
        host, _, port = address.rpartition(":")
        if node == 0:
            refuse_port_in_use(int(port))
        else:
            reach(host.strip("[]"), int(port), NODE_PATIENCE_S)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # its reports have a page
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
    settings = {
        "min_nodes": nodes,
        "max_nodes": nodes,
        "nproc_per_node": processes,
        "run_id": "posttrain" if nodes > 1 else str(uuid.uuid4()),
        "rdzv_backend": "static" if nodes > 1 else "c10d",
        "rdzv_endpoint": address or "127.0.0.1:0",
        "rdzv_configs": {"rank": node, "timeout": NODE_PATIENCE_S} if nodes > 1 else {},
        "max_restarts": 0,
        "shutdown_timeout": GRACE_S,
    }
    known = {one.name for one in dataclasses.fields(LaunchConfig)}
    config = LaunchConfig(**{name: value for name, value in settings.items() if name in known})
    try:
        elastic_launch(config, sys.executable)("-m", "posttrain", "train", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        raise RunError(
            f"rank {rank} {how}, and the other ranks with it. The reason is above, or in training.log and logs/ of the "
            "run folder; posttrain launch … --resume continues from the last checkpoint"
        ) from error
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from error  # the first rank has said what was saved
    except (RuntimeError, ValueError, OSError) as error:
        if "waiting for clients" in str(error):
            raise RunError(
                f"not all of {nodes} machines joined within {NODE_PATIENCE_S} seconds: run the same command on each, "
                f"with --node-rank 0 to {nodes - 1} and the same --address"
            ) from None
        raise RunError(f"the ranks could not be started: {error}") from error
