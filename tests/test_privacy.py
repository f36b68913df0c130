"""No call to a network that was not asked for, and no telemetry."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from network import calls_outside

NETWORK = Path(__file__).with_name("network.py")
SEEN = """
import posttrain
import json, os
from huggingface_hub import constants
names = ["HF_HUB_DISABLE_TELEMETRY", "GRADIO_ANALYTICS_ENABLED", "VLLM_NO_USAGE_STATS", "WANDB_ERROR_REPORTING"]
print(json.dumps([os.environ.get(name) for name in names]), constants.HF_HUB_DISABLE_TELEMETRY)
"""


def seen(**variables: str) -> str:
    names = ("HF_HUB_DISABLE_TELEMETRY", "GRADIO_ANALYTICS_ENABLED", "VLLM_NO_USAGE_STATS", "WANDB_ERROR_REPORTING")
    environment = {name: value for name, value in os.environ.items() if name not in (*names, "DO_NOT_TRACK")}
    return subprocess.run(
        [sys.executable, "-c", SEEN], env=environment | variables, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_telemetry_is_off_unless_the_user_wants_it():
    assert seen() == '["1", "False", "1", "false"] True'
    assert seen(HF_HUB_DISABLE_TELEMETRY="0", GRADIO_ANALYTICS_ENABLED="True") == '["0", "True", "1", "false"] False'


def test_calls_are_heard():
    """The tests of this file could not fail without this: a look-up of a name and a datagram to another machine."""
    with calls_outside() as calls:
        with pytest.raises(OSError):
            socket.getaddrinfo("no-such-host.invalid", 443)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.connect(("192.0.2.1", 9))  # an address for documentation: nothing is sent
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()).close()
    assert calls == ["socket.getaddrinfo no-such-host.invalid", "socket.connect ('192.0.2.1', 9)"]


@pytest.mark.slow
def test_the_quickstart_in_an_empty_network_namespace(tmp_path):
    """Not even loopback is up there. It also tries to call nobody, which a machine with a network would let it."""
    unshare = ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this system lets no user make a network namespace")
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"POSTTRAIN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(NETWORK.parents[1])}
    done = subprocess.run(
        [*unshare, sys.executable, str(NETWORK), "quickstart"],
        env=environment, capture_output=True, text=True, timeout=1200, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "runs/quickstart/report.html").is_file()
