"""The vLLM engine's own matters: where it runs, what is pushed, and every way in which a server can fail.

The conformance suite (tests/test_engines.py) says how it samples. What needs vLLM itself is run by `make test-vllm`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from pydantic import ValidationError
from test_engines import PROMPTS, SAMPLED, assert_trainers, policy_of, tokens_of, with_lora
from test_engines import vllm_server as vllm_server
from vllm_stand_in import HAS_VLLM, NO_VLLM, Core, standing_in

from posttrain.base.errors import ConfigError, EngineError, ModelError, VitalSignError
from posttrain.config.schema.rollout import RolloutConfig, VllmConfig
from posttrain.engines import EmbeddedEngine, make_engine
from posttrain.engines.vllm import core, server, wire
from posttrain.engines.vllm.engine import fingerprint, weights_of

needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason=NO_VLLM)


def at(url, timeout=60.0):
    return VllmConfig(mode="server", base_url=url, timeout=timeout)


def change(policy):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vllm", "message"),
    [
        ({"base_url": "http://gpu:8001"}, "base_url.*needs mode: server, but mode is colocate"),
        ({"timeout": 5.0}, "timeout.*needs mode: server"),
        ({"servers": 2}, "servers.*needs mode: server"),
        ({"push": "nccl"}, "push.*needs mode: server"),
        ({"mode": "server", "base_url": ["http://gpu:8001", "http://gpu:8001"]}, "each only once"),
        ({"mode": "server", "base_url": []}, "needs at least one address"),
        ({"mode": "server", "base_url": "http://gpu:8001", "servers": 2}, "servers that the run starts"),
        ({"mode": "server", "servers": 2, "gpus": [1]}, "1 GPUs for 2 servers"),
        ({"mode": "server", "base_url": "gpu:8001"}, "give only http://HOST:PORT"),
        ({"mode": "server", "base_url": "http://gpu"}, "give only http://HOST:PORT"),
        ({"mode": "server", "base_url": "http://gpu:8001/v1"}, "give only http://HOST:PORT"),
        ({"mode": "server", "base_url": "http://gpu:port"}, "give only http://HOST:PORT"),
        ({"mode": "server", "base_url": "http://gpu:8001", "gpu_memory_utilization": 0.5}, "not to those at base_url"),
        ({"gpu_memory_utilization": 1.5}, "less than or equal to 1"),
        ({"mode": "remote"}, "'colocate' or 'server'"),
    ],
)
def test_settings_that_do_not_go_together(vllm, message):
    with pytest.raises(ValidationError, match=message):
        RolloutConfig(engine="vllm", vllm=vllm)


def test_settings_of_vllm_are_for_its_engine():
    with pytest.raises(ValidationError, match="needs engine: vllm, but engine is embedded"):
        RolloutConfig(vllm={"gpu_memory_utilization": 0.5})
    assert RolloutConfig(engine="vllm", vllm={"mode": "server", "base_url": "http://[::1]:8001/"}).vllm.timeout == 600


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is here")
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_without_vllm_it_is_said_what_to_install(mode):
    with pytest.raises(ConfigError, match=r"rollout\.engine: vllm needs vllm.*pip install .*\[vllm\]'"):
        make_engine("vllm", policy_of(), vllm=VllmConfig(mode=mode))


def test_another_version_of_vllm_is_refused(monkeypatch):
    other = ModuleType("vllm")
    other.__version__ = "0.29.1"
    monkeypatch.setitem(sys.modules, "vllm", other)
    with pytest.raises(ConfigError, match=r"works with vLLM 0\.32, but 0\.29\.1 is installed"):
        core.import_vllm()


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_are_merged_as_peft_does_and_the_policy_stays(family, use_dora):
    torch.manual_seed(5)
    targets = ["c_attn"] if family == "gpt2" else ["q_proj", "down_proj"]
    lora = LoraConfig(r=4, target_modules=targets, use_dora=use_dora, fan_in_fan_out=family == "gpt2", lora_dropout=0.5)
    policy = get_peft_model(policy_of(family), lora)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    pushed = {name: tensor.clone() for name, tensor in weights_of(policy)}
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    with policy.disable_adapter():
        base = {name: tensor.clone() for name, tensor in weights_of(policy)}
    plain = dict(policy_of(family).named_parameters())
    assert base.keys() == plain.keys() and all(torch.equal(base[name], plain[name]) for name in plain)
    merged = dict(policy.merge_and_unload().named_parameters())
    assert pushed.keys() == merged.keys()
    changed = [name for name in merged if not torch.equal(merged[name], plain[name])]
    assert changed and all(name.split(".")[-2] in targets for name in changed)
    for name, tensor in merged.items():
        torch.testing.assert_close(pushed[name], tensor)


def test_tied_weights_are_pushed_once_and_quantised_ones_refused():
    policy = policy_of("qwen3", tie_word_embeddings=True)
    assert "lm_head.weight" not in dict(weights_of(policy))
    policy.is_quantized = True
    with pytest.raises(ModelError, match=r"quantised.*rollout\.engine: embedded"):
        next(weights_of(policy))


def test_a_fingerprint_sees_one_bit():
    policy = policy_of()
    first = fingerprint(policy)
    assert fingerprint(policy_of()) == first
    with torch.no_grad():
        policy.lm_head.weight.view(-1).view(torch.int32)[7] ^= 1
    assert fingerprint(policy) != first


def test_tensors_arrive_as_they_were_sent():
    for tensor in (torch.randn(3, 4), torch.randn(5).bfloat16(), torch.randn(4, 6).t(), torch.tensor(2.5)):
        header, data = wire.tensor_to_wire("a.weight", tensor)
        name, got = wire.tensor_from_wire(header, bytearray(data))
        assert name == "a.weight" and got.dtype == tensor.dtype and torch.equal(got, tensor)
    damaged = bytearray(data)
    damaged[1] ^= 4
    with pytest.raises(EngineError, match=r"a\.weight arrived damaged"):
        wire.tensor_from_wire(header, damaged)


def test_weights_are_pushed_when_they_changed_and_not_otherwise():
    loads = []

    class Counting(Core):
        def load(self, mark, weights):
            loads.append(mark)
            super().load(mark, weights)

    with standing_in(patched=Counting) as url:
        policy = with_lora(policy_of())
        engine = make_engine("vllm", policy, vllm=at(url))
        engine.load(policy, version=1)
        assert len(loads) == 1 and engine.generate(PROMPTS[:1], SAMPLED)[0][0].version == 1
        with policy.disable_adapter():
            engine.generate(PROMPTS[:1], SAMPLED)
        engine.generate(PROMPTS[:1], SAMPLED)
        assert len(loads) == 3, "off, and on again"
        change(policy)
        engine.load(policy, version=2)
        assert len(loads) == len(set(loads)) == 4


# --- a server that fails --------------------------------------------------------------------------------------------


class Stale(Core):
    """Takes the first weights only."""

    def load(self, mark, weights):
        if self.mark:
            self.mark = mark
        else:
            super().load(mark, weights)


def test_stale_weights_are_seen_at_the_push():
    with standing_in(patched=Stale) as url:
        policy = policy_of()
        engine = make_engine("vllm", policy, vllm=at(url))
        change(policy)
        with pytest.raises(
            VitalSignError, match="does not serve the weights it was given: after the push of version 1"
        ):
            engine.load(policy, version=1)


def test_weights_of_another_run_are_not_drawn_from():
    with standing_in() as url:
        policy = policy_of()
        mine = make_engine("vllm", policy, vllm=at(url))
        make_engine("vllm", policy, vllm=at(url))
        with pytest.raises(VitalSignError, match="holds different weights"):
            mine.generate(PROMPTS, SAMPLED)


def test_a_server_that_is_absent():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(
        EngineError, match=rf"nothing listens at http://127.0.0.1:{port} .*base_url.*python -m posttrain"
    ):
        make_engine("vllm", policy_of(), vllm=at(f"http://127.0.0.1:{port}"))


def test_a_server_of_another_version():
    with (
        standing_in(server.Desk("0.29.1", 0.7)) as url,
        pytest.raises(EngineError, match=r"http://.* another version of vLLM: 0\.29\.1, but 0\.32 is needed.*pip"),
    ):
        make_engine("vllm", policy_of(), vllm=at(url))


class Other(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, format, *args):
        pass


def test_a_server_of_another_posttrain(monkeypatch):
    with standing_in() as url:
        monkeypatch.setattr(server.Desk, "health", lambda self: {"protocol": 1, "vllm": "0.32.0"})
        with pytest.raises(EngineError, match=r"another version of posttrain.*protocol 1.*install the same posttrain"):
            make_engine("vllm", policy_of(), vllm=at(url))


def test_a_server_of_something_else():
    bound = HTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=bound.serve_forever, daemon=True).start()
    with pytest.raises(EngineError, match="is not a posttrain server"):
        make_engine("vllm", policy_of(), vllm=at(f"http://127.0.0.1:{bound.server_address[1]}"))
    bound.shutdown()
    bound.server_close()


def test_a_server_that_accepts_and_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(EngineError, match=r"no heartbeat for 0\.3 s"):
        make_engine("vllm", policy_of(), vllm=at(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3))


class Slow(Core):
    """Sampling takes one and a half seconds, in steps or at one go."""

    alive = True

    def generate(self, mark, asked, sampling, tick=lambda: None):
        for _ in range(15 if len(asked) > 1 else 0):  # not the probe
            time.sleep(0.1)
            if self.alive:
                tick()
        return super().generate(mark, asked, sampling)


def test_work_may_take_longer_than_the_deadline_but_silence_may_not(monkeypatch):
    monkeypatch.setattr(server, "BEAT", 0.2)
    with standing_in(patched=Slow) as url:
        engine = make_engine("vllm", policy_of(), vllm=at(url, timeout=1.0))
        assert len(engine.generate(PROMPTS, SAMPLED)) == len(PROMPTS)
        monkeypatch.setattr(Slow, "alive", False)
        with pytest.raises(EngineError, match=r"no heartbeat for 1 s.*rollout\.vllm\.timeout"):
            engine.generate(PROMPTS, SAMPLED)


def test_an_error_inside_the_server_is_told():
    class Broken(Core):
        def load(self, mark, weights):
            raise KeyError("model.layers.7")

    with standing_in(patched=Broken) as url, pytest.raises(EngineError, match=r"server at .*KeyError.*layers\.7"):
        make_engine("vllm", policy_of(), vllm=at(url))


def test_a_key_keeps_others_out(monkeypatch):
    with standing_in(key="secret") as url:
        with pytest.raises(EngineError, match=f"key differs: set {wire.KEY}"):
            make_engine("vllm", policy_of(), vllm=at(url))
        monkeypatch.setenv(wire.KEY, "secret")
        make_engine("vllm", policy_of(), vllm=at(url))
    with pytest.raises(ConfigError, match="is reachable from other machines"):
        server.server_at("0.0.0.0", 0, None, server.Desk("0.32.0", 0.7))
    with pytest.raises(ConfigError, match="is reachable from other machines"):
        server.server_at("0.0.0.0", 0, "", server.Desk("0.32.0", 0.7))


# A parent that is killed, and a child as a server is one: it ends when its standard input does.
PARENT = """
import os, subprocess, sys, time
child = "import os, sys, time\\nfrom posttrain.base.child import end_with_parent\\n"
child += "end_with_parent(int(sys.argv[1]))\\nprint('ready', flush=True)\\ntime.sleep(60)"
command = [sys.executable, "-c", child, str(os.getpid())]
process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
print(process.pid, flush=True)
time.sleep(60)
"""


def ended(pid: int, within: float) -> bool:
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="vLLM runs on Linux")
def test_a_server_ends_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert parent.stdout.readline() == "ready\n"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert ended(child, within=60.0)
    parent.stdout.close()


# --- vLLM itself ----------------------------------------------------------------------------------------------------


@needs_vllm
def test_a_tied_head_follows_the_weights(monkeypatch):
    """And without packing it again it would not, which is seen."""
    policy = policy_of("qwen3", tie_word_embeddings=True)
    engine = make_engine("vllm", policy)
    change(policy)
    engine.load(policy, version=1)
    assert_trainers(policy, PROMPTS, engine.generate(PROMPTS, SAMPLED), SAMPLED.temperature)
    monkeypatch.setattr(core, "_repack_tied_head", lambda model: None)
    change(policy)
    with pytest.raises(VitalSignError, match="does not serve the weights it was given: after the push of version 2"):
        engine.load(policy, version=2)
    engine.close()


@needs_vllm
def test_a_group_shares_its_prefill_and_a_push_forgets_it():
    torch.manual_seed(1)
    prompt = torch.randint(3, 60, (80,)).tolist()
    sampling = replace(SAMPLED, num_generations=8, max_completion_length=20, stop_token_ids=())
    policy = policy_of()
    engine = make_engine("vllm", policy)
    before = engine.host.prefilled
    for version in range(2):
        engine.load(policy, version)
        got = engine.generate([prompt], sampling)
        assert tokens_of(got) == tokens_of(EmbeddedEngine(policy).generate([prompt], sampling))
        change(policy)
    fed = (engine.host.prefilled - before) / 2
    print(f"{fed:.0f} tokens of the prompt's {8 * 80} were computed for 8 completions")
    assert 80 <= fed < 80 + 8 * core.CPU_BLOCK, "whole blocks are shared, the rest is each completion's own"
    engine.close()


@needs_vllm
def test_weights_that_are_missing_are_named():
    policy = policy_of()
    engine = make_engine("vllm", policy)
    some = [(name, tensor) for name, tensor in weights_of(policy) if "layers.1.mlp.down" not in name]
    with pytest.raises(ModelError, match=r"not given all weights.*layers\.1\.mlp\.down_proj"):
        engine.host.load("x", some)
    with pytest.raises(VitalSignError, match="holds different weights"):
        engine.generate(PROMPTS, SAMPLED)
    engine.close()


@needs_vllm
def test_the_trainers_process_stays_as_it_was():
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    engine = make_engine("vllm", policy_of())
    assert torch.set_num_threads is set_num_threads and torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    engine.close()


@needs_vllm
def test_heads_that_vllm_has_no_attention_for():
    with pytest.raises(ModelError, match="heads have 8 dimensions, but on a CPU vLLM supports 32, 64"):
        make_engine("vllm", policy_of(head_dim=8))


@needs_vllm
def test_bfloat16():
    engine = make_engine("vllm", policy_of().bfloat16())
    [[one, *_], *_] = engine.generate(PROMPTS, SAMPLED)
    assert all(value <= 0 for value in one.logprobs)
    engine.close()


def pids(engine):
    return [one.process._process.pid for one in engine.host._mine.values()]


@needs_vllm
def test_our_own_servers_are_replaced_when_killed_and_stopped_at_the_end():
    """Two of them; one is killed while it samples."""
    policy = policy_of()
    engine = make_engine("vllm", policy, vllm=VllmConfig(mode="server", servers=2, timeout=300.0))
    want = tokens_of(EmbeddedEngine(policy).generate(PROMPTS, SAMPLED))
    assert tokens_of(engine.generate(PROMPTS, SAMPLED)) == want
    first = pids(engine)
    killer = threading.Timer(0.3, os.kill, (first[1], signal.SIGKILL))
    killer.start()
    sampling = replace(SAMPLED, max_completion_length=150, stop_token_ids=())
    assert tokens_of(engine.generate(PROMPTS, sampling)) == tokens_of(
        EmbeddedEngine(policy).generate(PROMPTS, sampling)
    )
    killer.join()
    assert tokens_of(engine.generate(PROMPTS, SAMPLED)) == want
    second = pids(engine)
    assert second[0] == first[0] and second[1] != first[1]
    engine.close()
    assert all(ended(pid, within=1.0) for pid in second)


@needs_vllm
def test_ranks_that_ask_a_server_together_share_its_steps(vllm_server):
    """Requests of several clients at once give the completions that each gets alone."""
    policy = policy_of()
    engine = make_engine("vllm", policy, vllm=at(vllm_server, timeout=300.0))
    sampling = replace(SAMPLED, max_completion_length=60, stop_token_ids=())
    want = [EmbeddedEngine(policy).generate([prompt], sampling, seeds=[7]) for prompt in PROMPTS]
    found = [None] * len(PROMPTS)

    def ask(place):
        found[place] = engine.generate([PROMPTS[place]], sampling, seeds=[7])

    threads = [threading.Thread(target=ask, args=[place]) for place in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [tokens_of(one) for one in found] == [tokens_of(one) for one in want]


@needs_vllm
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_grpo_run_is_that_of_the_embedded_engine(sums_home, tmp_path, mode):
    """The same completions, and so the same rewards and updates; the samples have the trainer's log-probabilities."""
    from test_online import lines, train

    home = tmp_path / "home"
    subprocess.run(["cp", "-r", str(sums_home), str(home)], check=True)
    config = json.loads((home / "model/config.json").read_text())
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}  # the same matrices, larger heads
    (home / "model/config.json").write_text(json.dumps(config))
    rollout = {"vllm": {"engine": "vllm", "vllm": {"mode": mode}}, "embedded": {"engine": "embedded"}}
    runs = {
        name: lines(train(home, tmp_path / name, {}, rollout=chosen, training={"max_steps": 3}))
        for name, chosen in rollout.items()
    }
    ours, theirs = ([line for line in runs[name] if "loss" in line] for name in rollout)
    assert len(ours) == len(theirs) == 3
    for mine, its in zip(ours, theirs, strict=True):
        assert mine["sampling/sampling_logp_difference/max"] < 1e-4
        assert mine["reward"] == its["reward"]
        assert mine["loss"] == pytest.approx(its["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(its["grad_norm"], rel=1e-3)
    assert ours[0]["max_ratio"] == pytest.approx(1.0, abs=1e-5)
