"""Starts the ranks of a run with torchrun's agent, and connects them through a store in which every rank checks in.
Importing this module does not import torch."""

import dataclasses
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from posttrain.base.errors import RankError, RunError
from posttrain.base.system import usable_cores
from posttrain.base.terminal import say

if TYPE_CHECKING:
    from torch.distributed import Store

GRACE_S = 120  # seconds for a checkpoint after a signal, before processes are killed
NODE_PATIENCE_S = 900  # seconds in which all machines must join
JOIN_S = 300.0  # seconds in which all ranks must start: they import torch, perhaps from a slow file system
MARGIN_S = 10.0  # seconds in addition to JOIN_S, for a connection that hangs
ANSWER_S = 30.0  # seconds in which a listening launcher must answer
POLL_S = 0.05  # seconds between two checks for a rank that starts
READ_S = 1.0  # seconds in which the other ranks can read this rank's entry before it ends
ELSEWHERE = "192.0.2.1"  # an address reserved for documentation (RFC 5737), reached over the default route
OTHERWISE = "start all machines with the same --address, --nodes and --nproc"
OTHER_PROGRAM = "{}: its process hangs, or another program has the port; " + OTHERWISE


@contextmanager
def meeting(index: int, size: int) -> "Iterator[Store]":
    """Connect to the store that all ranks share, and wait for every rank to check in. The time limit also covers the
    block. Raises RankError if a rank does not start in time or expects a different number of ranks. Ends the process
    if the connection itself hangs, for example because another program has the port."""
    with in_time(f"rank {index} got no answer from the store of the ranks {OTHER_PROGRAM}", JOIN_S + MARGIN_S):
        store = connected(index)
        try:
            _check_in(store, index, size)
        except RuntimeError as error:
            raise RankError(f"rank {index}: the first rank ended before all had started: see its output") from error
        yield store


@contextmanager
def in_time(problem: str, seconds: float) -> Iterator[None]:
    """End the process with a message if the block takes longer than `seconds`, which replaces `{}` in `problem`."""

    def give_up() -> None:
        say(f"error: {problem.format(f'within {seconds:.0f} seconds')}", error=True)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def choose_network() -> None:
    """Let gloo connect machines over the interface that leads to the first machine, unless GLOO_SOCKET_IFNAME is set.
    By default, gloo uses the address of the host name, which is a loopback address on many machines."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    from psutil import net_if_addrs

    interfaces = {
        entry.address.partition("%")[0]: name
        for name, entries in net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and not ipaddress.ip_address(entry.address).is_loopback
    }
    # The first machine's own name may resolve to its loopback: then use the default route's interface, or the only one.
    hosts = (os.environ.get("MASTER_ADDR", ELSEWHERE), ELSEWHERE)
    names = [interfaces[address] for address in map(_own_address, hosts) if address in interfaces]
    if not names and len(set(interfaces.values())) == 1:
        names = list(interfaces.values())
    if names:
        os.environ["GLOO_SOCKET_IFNAME"] = names[0]


def _own_address(host: str) -> str | None:
    """The address from which this machine would send packets to `host` (none are sent); None without a route."""
    try:
        family, kind, *_, there = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as unused:
            unused.connect(there)
            return unused.getsockname()[0].partition("%")[0]
    except OSError:
        return None


def refuse_port_in_use(port: int) -> None:
    """Raise RankError if this machine cannot listen on a port."""
    with socket.socket() as listener, socket.socket() as free:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections that were just closed
        free.bind(("", 0))
        try:
            listener.bind(("", port))
            listener.listen()
        except OSError as error:
            raise RankError(
                f"port {port} of --address cannot be used on this machine ({error.strerror}): another run or program "
                f"may be using it. Give a free one, such as {free.getsockname()[1]}, the same on every machine"
            ) from None


def reach(host: str, port: int, seconds: float) -> None:
    """Wait until the launcher of the first machine listens and answers. Raises RankError if it does not in time."""
    from torch.distributed import TCPStore

    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankError(
                    f"the first machine was not reached at {host}:{port} within {seconds:.0f} seconds "
                    f"({error.strerror or error}): start `posttrain launch … --node-rank 0` there, and open the port"
                ) from None
            time.sleep(1)
    problem = f"no answer from a launcher at {host}:{port}"
    with in_time(f"{problem} {OTHER_PROGRAM}", ANSWER_S):
        try:
            TCPStore(host, port, None, False, timedelta(seconds=ANSWER_S), wait_for_workers=False)
        except RuntimeError:
            raise RankError(f"{problem}: another program has this port; {OTHERWISE}") from None


def connected(index: int, as_client: bool = False) -> "Store":
    """Connect to the ranks' store, which the launcher or else the first rank hosts."""
    from torch.distributed import PrefixStore, TCPStore

    variables = os.environ
    if "MASTER_ADDR" not in variables or not variables.get("MASTER_PORT", "").isdecimal():
        raise RankError(
            "RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT are not: start the ranks with `posttrain "
            "launch`, or unset RANK and WORLD_SIZE to train in one process"
        )
    host, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    hosts = index == 0 and not as_client and variables.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    patience = timedelta(seconds=JOIN_S)
    try:
        store = TCPStore(host, port, None, hosts, patience, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise RankError(
                f"port {port} (MASTER_PORT) is in use on this machine: set it to a free port, the same for every rank"
            ) from None
        raise RankError(
            f"rank {index} cannot reach the first rank at {host}:{port} (MASTER_ADDR and MASTER_PORT): {OTHERWISE}"
        ) from error
    return PrefixStore(f"posttrain/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _check_in(store: "Store", index: int, size: int) -> None:
    """Wait until all ranks have checked in, with the same number of ranks."""
    host, deadline = socket.gethostname(), time.monotonic() + JOIN_S
    store.set(f"here/{index}", f"{size} {host}")
    for rank in range(size):
        while not store.check([f"here/{rank}"]):
            if time.monotonic() > deadline:
                late = [str(other) for other in range(rank, size) if not store.check([f"here/{other}"])]
                raise RankError(
                    f"rank {', '.join(late)} of {size} did not start within {JOIN_S:.0f} seconds: check the output "
                    f"on its machine; {OTHERWISE}"
                )
            time.sleep(POLL_S)
        count, _, where = store.get(f"here/{rank}").decode().partition(" ")
        if count != str(size):
            time.sleep(READ_S)
            raise RankError(
                f"rank {rank} on {where} was started as one of {count} ranks (WORLD_SIZE), rank {index} on {host} as "
                f"one of {size}: {OTHERWISE}"
            )


def is_rank() -> bool:
    """Whether this process was started by torchrun or another launcher."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(arguments: Sequence[str], processes: int, nodes: int = 1, node: int = 0, address: str | None = None) -> None:
    """Run `posttrain train ARGUMENTS` as `processes` ranks on each of `nodes` machines; this one is number `node`.

    `address` is HOST:PORT of the first machine; on one machine a free port is chosen. Raises RunError if a rank fails,
    the port is in use, or the machines do not join.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # posttrain itself reports lost connections
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if address is not None:
        host, _, port = address.rpartition(":")
        if node == 0:
            refuse_port_in_use(int(port))
        else:
            reach(host.strip("[]"), int(port), NODE_PATIENCE_S)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # its error reports fill a page
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
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # settings that the installed torch knows
    config = LaunchConfig(**{name: value for name, value in settings.items() if name in known})
    try:
        elastic_launch(config, sys.executable)("-m", "posttrain", "train", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        raise RunError(
            f"rank {rank} {how}; the other ranks were stopped. The reason is above or in training.log and logs/ in the "
            "run folder; posttrain launch … --resume continues from the last checkpoint"
        ) from error
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from error  # the first rank has reported what was saved
    except (RuntimeError, ValueError, OSError) as error:
        if "waiting for clients" in str(error):
            raise RunError(
                f"not all {nodes} machines joined within {NODE_PATIENCE_S} seconds: run the same command on each, "
                f"with --node-rank 0 to {nodes - 1} and the same --address"
            ) from None
        raise RunError(f"the ranks could not be started: {error}") from error
