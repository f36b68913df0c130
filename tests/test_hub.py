"""The hub's library stays offline at once where there is no network, and only then."""

import socket

import pytest
from huggingface_hub import constants

from posttrain.base import hub
from posttrain.cli import main


@pytest.fixture
def online(monkeypatch):
    """A process that the environment lets use the hub, without a proxy; names as the test says."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_ours", False)
    monkeypatch.setattr(hub, "PAUSE_S", 0)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    asked = []

    def answers(*known: bool) -> list[str]:
        results = iter(known)

        def look_up(host, port):
            asked.append(host)
            if not next(results):
                raise socket.gaierror(-2, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        return asked

    return answers


def test_without_network_only_the_cache_is_used_until_it_is_back(online):
    asked = online(False, False, True)
    hub.stay_offline_without_network()
    assert constants.HF_HUB_OFFLINE and asked == ["huggingface.co"] * 2
    hub.stay_offline_without_network()
    assert not constants.HF_HUB_OFFLINE


def test_one_look_up_may_fail(online):
    online(False, True)
    hub.stay_offline_without_network()
    assert not constants.HF_HUB_OFFLINE


def test_nothing_is_asked_behind_a_proxy_or_where_offline_is_the_wish(online, monkeypatch):
    asked = online()
    for name, endpoint in (("HTTPS_PROXY", "https"), ("ALL_PROXY", "https"), ("HTTP_PROXY", "http")):
        with monkeypatch.context() as proxy:
            proxy.setenv(name, "http://127.0.0.1:1")
            proxy.setattr(constants, "ENDPOINT", f"{endpoint}://hub.internal.invalid")
            hub.stay_offline_without_network()
    assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.stay_offline_without_network()
    assert constants.HF_HUB_OFFLINE and not asked


def test_a_model_and_data_of_the_hub_are_refused_at_once(online, capsys, shared):
    """No retries: the library would make five for each file."""
    asked = online(*[False] * 20)
    rows = shared / "data/hh-harmless/train.jsonl.gz"
    assert main(["explore", "dpo-hh", f"data.source={rows}", "model.path=nobody/nothing"]) == 1
    assert "model nobody/nothing: is neither a folder" in capsys.readouterr().err and asked
    constants.HF_HUB_OFFLINE = False
    model = shared / "models/stories260K"
    assert main(["explore", "dpo-hh", "data.source=nobody/nothing", f"model.path={model}"]) == 1
    assert "nobody/nothing is not a file or folder here" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["data.source", "model.path"])
def test_a_name_that_no_file_can_have(setting, capsys, shared):
    local = {"data.source": shared / "data/hh-harmless/train.jsonl.gz", "model.path": shared / "models/stories260K"}
    settings = {**local, setting: "a" * 300 + "/b"}
    assert main(["explore", "dpo-hh", *(f"{key}={value}" for key, value in settings.items())]) == 1
    assert f"{'a' * 60}… is too long for the name of a file or folder" in capsys.readouterr().err
