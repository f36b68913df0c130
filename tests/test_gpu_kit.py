"""The kit of benchmarks/gpu on a CPU: every part runs, what needs a card says so, and what fails is seen."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config

from benchmarks.gpu import __main__ as kit
from benchmarks.gpu import common, fits, generate, kernels, learn, right, rows, shapes, train
from benchmarks.gpu.common import Book, CardLostError, Case, CheckError, Goal, NotRunError, Setup
from benchmarks.run import Sizes, useful_flops
from posttrain.models import attention

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def models(tmp_path_factory, sums_home):
    """The folder that all parts share; with the sums, which take longest to make."""
    folder = tmp_path_factory.mktemp("gpu-models")
    (folder / "sums").symlink_to(sums_home)
    return folder


@pytest.fixture
def tiny(models):
    return Setup(CPU, "tiny", models)


@pytest.fixture
def run(models, tmp_path, capsys):
    """The kit as it is called; gives the exit status, what it wrote and what it printed."""

    def call(*arguments: str):
        out = tmp_path / "gpu.json"
        options = ["--device", "cpu", "--size", "tiny", "--models", str(models), "--out", str(out)]
        status = kit.main([*arguments, *options])
        return status, json.loads(out.read_text()), capsys.readouterr().out

    return call


@pytest.fixture
def nothing_to_release(monkeypatch):
    """Made-up cases leave no memory behind, and looking for it takes longer than they do."""
    monkeypatch.setattr(common, "release_memory", lambda: None)


@pytest.fixture
def cases_of(monkeypatch, nothing_to_release):
    """Give a part other cases."""
    return lambda part, *cases: monkeypatch.setitem(kit.PARTS, part, lambda setup: iter(cases))


def outcomes(written: dict) -> dict[str, str]:
    return {name: common.outcome(result) for name, result in written["cases"].items()}


# --- the parts --------------------------------------------------------------------------------------------------------

NEED_CUDA = {
    "Flex = dense, backward, heads of 64",
    "graphs on = graphs off",
    "masters in halves = whole masters",
    "run with offloaded AdamW, pinned copies",
    *(f"Triton = PyTorch, {family}, {dtype}" for family in right.KERNELS_OF for dtype in right.DTYPES),
}
ONLY_ON_A_CARD = ("replay = eager", "FlashAttention 4 = ")


def test_only(run):
    _, written, _ = run("right", "generate", "--only", "^(packed.*bloom, float32|copy)$")
    assert list(written["right"]["cases"]) == ["packed = one by one, bloom, float32"]
    assert list(written["generate"]["cases"]) == ["copy"]


def test_short(tiny, run, cases_of, capsys):
    """Each of its patterns finds cases at full size, and it runs these only."""
    full = replace(tiny, size="full")
    for part, (chosen, _) in kit.SHORT.items():
        names = [case.name for case in kit.PARTS[part](full)]
        assert all(any(re.search(one, name) for name in names) for one in chosen.pattern.split("|^")), part
        assert 0 < sum(bool(chosen.search(name)) for name in names) < len(names)
    assert sum(minutes for _, minutes in kit.SHORT.values()) < 12
    for part in kit.SHORT:
        cases_of(part, Case("sft 0.6B 8k", lambda: {}), Case("copy", lambda: {}), Case("another", lambda: {}))
    _, written, _ = run("--short")
    assert {part: list(found["cases"]) for part, found in written.items()} == {
        "right": [], "train": ["sft 0.6B 8k"], "generate": ["copy"],
    }  # fmt: skip
    with pytest.raises(SystemExit):
        run("right", "--short")
    assert "leave PART or --short out" in capsys.readouterr().err


@pytest.mark.slow
def test_right(run):
    status, written, printed = run("right")
    found = outcomes(written["right"])
    print(printed)
    needed = NEED_CUDA | {name for name in found if name.startswith(ONLY_ON_A_CARD)}
    assert {name for name, outcome in found.items() if outcome.startswith("not run: needs ")} == needed
    assert {outcome for name, outcome in found.items() if name not in needed} == {"ok"} and status == 0
    assert len(found) > 10 and written["right"]["machine"]["card"] is None and written["right"]["size"] == "tiny"
    assert re.search(r"^right: graphs on = graphs off: not run: needs CUDA", printed, re.MULTILINE)
    assert "| graphs on = graphs off | not run: needs CUDA |" in printed


def test_train(run, monkeypatch):
    monkeypatch.setattr(common, "is_missing", lambda package: package == "trl")
    status, written, printed = run("train")
    cases = written["train"]["cases"]
    print(printed)
    assert status == 0 and printed.count("beside TRL, padded, with checkpointing: not run: TRL is not installed") == 1
    for name in ("sft 0.6B 8k", "dpo 0.6B 8k", "grpo-one-lora 4B 16k"):
        assert cases[name]["status"] == "ok" and cases[name]["tokens"] == train.TINY_LENGTH
        assert cases[name]["tokens_per_second"] > 0 and cases[name]["mfu"] is None
    assert sum(cases["sft 0.6B 8k"]["kernels"].values()) == pytest.approx(1)
    assert cases["sft 0.6B 8k"]["kernels"]["matmul"] > 0.05


@pytest.mark.slow
def test_beside_trl(run):
    """Both sides train on the same rows, with and without checkpointing."""
    status, written, printed = run("train", "--only", "beside TRL")
    cases = written["train"]["cases"]
    print(printed)
    assert status == 0 and [name.partition("padded, ")[2] for name in cases] == [
        "without checkpointing", "with checkpointing",
    ]  # fmt: skip
    for result in cases.values():
        assert result["status"] == "ok" and result["trl"]["side"].startswith("trl ") and result["trl_ratio"] > 0


def test_natural_rows():
    """The counts are those of the data, and the packs hold them."""
    assert rows.count() == json.loads(rows.FILE.read_text())
    names = {name: rows.natural(name) for name in rows.SET_OF.values()}
    assert {name: len(counts) for name, counts in names.items()} == dict.fromkeys(names, rows.ROWS)
    [tree] = rows.example(3, 5, [2, 4], vocabulary=100).trees
    assert len(tree.tokens) == 5 and [len(leaf.tokens) for leaf in tree.children] == [2, 4]


@pytest.mark.parametrize(("padded", "size"), [(True, 2), (False, 4)])
def test_trls_micro_batches_hold_as_many_tokens_as_a_pack(padded, size):
    """Rows of 10 to 40 tokens in 100: padded two rows of 40 fit (a power of two), without padding four of 25."""
    from benchmarks.gpu import trl_side  # TRL takes seconds to import

    made = [{"input_ids": [0] * length} for length in (10, 40, 20, 30)]
    assert trl_side.micro_batch(made, 100, padded) == size
    pair = [{"prompt_ids": [0] * 10, "chosen_ids": [0] * 40, "rejected_ids": [0] * 20}] * 8
    assert trl_side.micro_batch(pair, 200, True) == 2


def test_the_kit_needs_neither_tests_nor_data(tmp_path):
    """A machine with a card has the package and the kit, and nothing beside them."""
    for name in ("benchmarks", "posttrain"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = [sys.executable, "-P", "-m", "benchmarks.gpu", "--help"]  # the parts are imported before it is written
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_what_moved_is_told(run, cases_of):
    """Outcomes, and numbers that changed by more than a twentieth; not what was not run."""
    cases_of(
        "learn",
        Case("faster", lambda: {"tokens_per_second": 1000.0, "memory_gib": 2.0}),
        Case("same", lambda: {"tokens_per_second": 1000.0, "error": 1e-7}),
        Case("breaks", lambda: {}),
        Case("new here", partial(fails, NotRunError("no time"))),
    )
    run("learn")
    cases_of(
        "learn",
        Case("faster", lambda: {"tokens_per_second": 1500.0, "memory_gib": 2.05}),
        Case("same", lambda: {"tokens_per_second": 1040.0, "error": 1e-5}),
        Case("breaks", partial(fails, CheckError("losses differ"))),
        Case("new here", lambda: {"tokens_per_second": 1.0}),
    )
    _, _, printed = run("learn")
    assert printed.partition("Moved since")[2].splitlines()[1:] == [
        "learn: breaks: ok → failed: losses differ",
        "learn: faster: tokens/s 1,000 → 1,500 (+50%)",
    ]


def test_generate_learn_and_soak(run):
    status, written, printed = run("generate", "learn", "soak")
    print(printed)
    assert status == 0 and set(written) == {"generate", "learn", "soak"}
    assert all(outcome == "ok" for part in written.values() for outcome in outcomes(part).values())
    assert written["generate"]["cases"]["16 rows"]["floor_ratio"] > 1
    learned = written["learn"]["cases"]["grpo of sums, bfloat16"]
    assert 0 <= learned["rms"] < 0.03 and len(learned["rewards"]) == learn.TINY_STEPS
    assert set(learned["phases"]) == {*learn.PHASES, "the rest"} and all(s >= 0 for s in learned["phases"].values())
    soaked = written["soak"]["cases"]["sft, 6 steps"]
    assert len(soaked["host_bytes"]) == 6 and soaked["card_bytes"] == []


def test_a_wrong_mask_fails_the_part(run, monkeypatch, models):
    """The checks have teeth: packs whose completions see one another."""
    init = attention.PackedMask.__init__

    def leaking(self, whole, *read):
        init(self, whole, *read)
        self.end_T = whole.end_T.clone()
        for start, stop in zip(whole.tree_start, whole.tree_start[1:], strict=False):
            self.end_T[start:stop] = stop
        self._pack = replace(whole, nodes=tuple((start, int(self.end_T[start])) for start, _ in whole.nodes))

    monkeypatch.setattr(attention.PackedMask, "__init__", leaking)
    few = [case for case in right.cases(Setup(CPU, "tiny", models)) if "one by one, qwen3" in case.name]
    monkeypatch.setitem(kit.PARTS, "right", lambda setup: iter(few))
    status, written, _ = run("right")
    assert status == 1 and len(few) == 2
    assert all("differ by" in outcome for outcome in outcomes(written["right"]).values())


# --- what came of a case ----------------------------------------------------------------------------------------------


def fails(error: Exception):
    raise error


def test_what_fails_is_written_down_and_the_rest_is_run(run, cases_of):
    cases_of(
        "learn",
        Case("holds", lambda: {"error": 1e-7}),
        Case("does not", partial(fails, CheckError("losses differ"))),
        Case("breaks", partial(fails, ZeroDivisionError("by zero"))),
        Case("is too large", partial(fails, torch.OutOfMemoryError("CUDA out of memory."))),
        Case("cannot", partial(fails, NotRunError("nothing to stand beside"))),
        Case("needs a package", lambda: {}, ("no_such_package",)),
    )
    status, written, printed = run("learn")
    assert status == 1
    assert outcomes(written["learn"]) == {
        "holds": "ok",
        "does not": "failed: losses differ",
        "breaks": "failed: ZeroDivisionError: by zero",
        "is too large": "failed: out of memory",
        "cannot": "not run: nothing to stand beside",
        "needs a package": "not run: no_such_package is not installed",
    }
    assert "ZeroDivisionError" in written["learn"]["cases"]["breaks"]["traceback"]
    assert next(line for line in printed.splitlines() if line.startswith("learn: ")).startswith(
        "learn: holds: ok, largest error 1.00e-07, "
    )
    assert printed.rstrip().splitlines()[-1].startswith("| needs a package | not run")


def test_a_goal_counts_on_a_card_only(tmp_path, monkeypatch, nothing_to_release):
    slow = Case("slow", lambda: {"mfu": 0.3}, (), (Goal("mfu", least=0.45), Goal("rms", most=0.03)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    found = {}
    for device, size in (("cpu", "full"), ("cuda", "tiny"), ("cuda", "full")):
        setup = Setup(torch.device(device), size, tmp_path)
        part = common.run_part("train", [slow], setup, Book(tmp_path / f"{device}-{size}.json"), 8.0)
        found[device, size] = common.outcome(part["slow"])
    assert found == {
        ("cpu", "full"): "ok",
        ("cuda", "tiny"): "ok",
        ("cuda", "full"): "goal missed: MFU 0.3, goal at least 0.45",
    }
    assert common.is_bad({"status": "missed"}) and not common.is_bad({"status": "not run"})


def test_a_part_begins_nothing_that_would_outlast_its_time(tiny, tmp_path, monkeypatch, nothing_to_release):
    """Cases of 100 s in 8 minutes: after the fourth another one would end after them."""
    clock = SimpleNamespace(now=0.0)

    def takes(seconds: float):
        clock.now += seconds
        return {}

    monkeypatch.setattr(common.time, "monotonic", lambda: clock.now)
    cases = [Case(f"{number}", partial(takes, 100.0)) for number in range(6)]
    found = common.run_part("train", cases, tiny, Book(tmp_path / "gpu.json"), 8.0)
    assert [common.outcome(result) for result in found.values()] == ["ok"] * 4 + ["not run: time"] * 2


def test_a_killed_run_keeps_what_it_has_and_goes_on(run, cases_of):
    made = []

    def count(name: str):
        made.append(name)
        return {}

    cases_of("soak", Case("one", partial(count, "one")), Case("two", partial(fails, KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        run("soak")
    cases_of("soak", Case("one", partial(count, "one")), Case("two", partial(count, "two")))
    _, written, _ = run("soak", "--continue")
    assert made == ["one", "two"] and outcomes(written["soak"]) == {"one": "ok", "two": "ok"}
    run("soak")
    assert made == ["one", "two", "one", "two"], "without --continue a part begins anew"


def test_a_lost_card_is_left_to_a_new_process(run, cases_of, monkeypatch):
    """After an illegal access every call of that process fails: the rest is run by another, which skips that case."""

    def lost(setup):
        raise CardLostError("CUDA error: an illegal memory access was encountered")

    started = []
    monkeypatch.setattr(common, "check_card", lost)
    monkeypatch.setattr(kit.os, "execv", lambda program, arguments: started.append(arguments) or fails(SystemExit(9)))
    cases_of("right", Case("bad", partial(fails, RuntimeError("CUDA error"))), Case("next", lambda: {}))
    with pytest.raises(SystemExit):
        run("right")
    assert started[0][1:4] == ["-m", "benchmarks.gpu", "right"] and started[0][-1] == "--continue"
    _, written, _ = run("right", "--continue")
    assert outcomes(written["right"]) == {"bad": "failed: RuntimeError: CUDA error", "next": "ok"}


def test_parts_share_a_file(run, cases_of):
    cases_of("learn", Case("a", lambda: {}))
    cases_of("soak", Case("b", lambda: {}))
    run("learn")
    _, written, _ = run("soak")
    assert set(written) == {"learn", "soak"}


# --- what is reckoned -------------------------------------------------------------------------------------------------


def test_useful_work_by_hand():
    """Two layers of 8·(2·4 + 2·2)·2 + 3·8·10 weights; the last MLP for 3 of 5 tokens, the head for 2, 15 keys seen."""
    config = Qwen3Config(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=2,
        intermediate_size=10, vocab_size=7,
    )  # fmt: skip
    sizes = Sizes.of(config)
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 10
    assert (sizes.layers, sizes.mlp, sizes.head, sizes.attention) == (2 * layer, 240, 56, 2 * 4 * 8)
    work = [{"tokens": 5, "read": 3, "scored": 2, "visible": 15, "backward": True}]
    forward = 2 * (5 * 2 * layer - 2 * 240 + 2 * 56) + 15 * 64
    assert useful_flops(work, False, sizes) == 3 * forward and useful_flops(work, True, sizes) == 2 * forward


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 9090", None),
        (None, None),
    ],
)
def test_peaks_by_the_drivers_names(name, tflops):
    assert shapes.peak_flops(name) == (None if tflops is None else tflops * 1e12)


def test_rows_of_every_method_fill_their_packs(tiny):
    from posttrain.batch import physical_length

    for method in ("sft", "sft-lora", "dpo", "grpo", "grpo-one-lora"):
        [tree] = train.example(method, 2048, 100).trees
        assert physical_length(tree) == 2048, method
    names = [" ".join(case) for case in train.ORDER]
    assert len(names) == len(set(names)) and set(shapes.PUBLISHED) <= set(names)
    judged = {name for name in names if train.goals_of(name)}
    assert judged == {*train.GOALS, *shapes.PUBLISHED}


def test_bytes_of_generation_by_hand():
    """Of 3 tokens the second and third are steps: weights twice, one prompt of 5 twice, own keys of 1 and 2 tokens."""
    assert generate.floor_bytes(1000, 10, rows=4, groups=1, prompt=5, length=3) == 2 * (1000 + 50) + 4 * 10 * (1 + 2)
    assert generate.token_bytes(shapes.CONFIGS["0.6B"], torch.bfloat16, torch.device("cuda", 0)) == 2 * 28 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["triton_tem_fused_flex_attention_0"], "attention"),
        (["pytorch_flash::flash_bwd_kernel", "aten::mm"], "attention"),
        (["nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "aten::mm", "ChunkedScores"], "matmul"),
        (["sm90_xmma_gemm_bf16bf16_bf16f32"], "matmul"),
        (["void at::native::vectorized_elementwise_kernel<4, exp>", "aten::exp_", "ChunkedScoresBackward"],
         "head and softmax"),
        (["multi_tensor_apply_kernel<FusedAdamMathFunctor>"], "optimizer"),
        (["_adamw"], "optimizer"),
        (["Memcpy HtoD (Pinned -> Device)"], "copies"),
        (["triton_poi_fused_mul_silu_3"], kernels.REST),
    ],
)  # fmt: skip
def test_kinds_of_kernels(names, kind):
    assert kernels.kind_of(names) == kind


def test_growth_is_of_the_last_third():
    from benchmarks.gpu.soak import growth

    assert growth([9, 9, 4, 5, 5, 4]) == 1.0 and growth([1, 1, 4, 4, 5, 6]) == 1.5


# --- the page ---------------------------------------------------------------------------------------------------------

PAGE = ROOT / "docs/gpu.md"


SHOWN = PAGE.read_text(encoding="utf-8").partition("<!-- fits -->\n")[2].partition("<!-- end -->")[0]


def test_the_page_has_every_model_and_method():
    """`python -m benchmarks.gpu.fits` writes them."""
    rows = [line.split("|")[1:3] for line in SHOWN.strip().splitlines()[2:]]
    assert [(a.strip(), b.strip()) for a, b in rows] == [(m, method) for m in fits.MODELS for method in fits.METHODS]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["SFT, all weights", "GRPO, LoRA"])
def test_the_page_has_what_the_estimate_says(method):
    assert fits.row("0.5B", method) in SHOWN


def test_the_largest_pack_that_fits(monkeypatch):
    """Peaks of 4, 8, 32 and 128 GiB: 0.95 · (24 - 1) = 21.85 GiB lie at 2048 + 6144 · 13.85 / 24 = 5593 tokens."""
    monkeypatch.setattr(fits, "peaks", lambda model, method, card: [size << 30 for size in (4, 8, 32, 128)])
    assert fits.longest("7B", "SFT, LoRA", 24) == 5 * 1024
    assert fits.longest("7B", "SFT, LoRA", 8) == 1024 and fits.longest("7B", "SFT, LoRA", 5) == 0


def test_the_page_lists_the_wheels():
    lines = (PAGE.parents[1] / "benchmarks/gpu/wheels.txt").read_text().splitlines()
    wanted = [line.replace("==", " ") for line in lines if not line.startswith("#")]
    listed = re.findall(r"^\| ([\w.-]+ [\d.]+) \| ([\d.]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(name for name, _ in listed) == sorted(wanted)
    total = sum(float(size) for _, size in listed)
    assert f"{len(listed)} wheels, {total:.1f} MiB in total" in " ".join(PAGE.read_text(encoding="utf-8").split())
    assert total < 60
