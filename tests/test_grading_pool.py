"""Supervised workers: a verdict for everything, in time, in order; nothing a worker does harms the run."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import hostile
import pytest

from posttrain.base.child import HelperPool
from posttrain.base.errors import RewardError
from posttrain.config import TagsConfig
from posttrain.grading import pool as pool_module
from posttrain.grading.pool import Pool
from posttrain.grading.process import WorkerProcess
from posttrain.grading.verdict import Grade, GradeRequest, read_grade
from posttrain.rewards.rules import COMPARES_EXPRESSIONS, RULES, canary, modules_of, prove

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
GRACE_S = 5.0  # of a busy machine


def job(name: str, completion: str = "", gold: str | None = None) -> GradeRequest:
    return GradeRequest(f"grading_rules:{name}", completion, gold)


def sleeps(*seconds: float) -> list[GradeRequest]:
    return [job("SLEEP", str(s)) for s in seconds]


@pytest.fixture(scope="module")
def quick():
    """A pool of one worker that imports nothing ahead: for rules of these tests, which need no algebra."""
    with Pool(1, deadline=1.0, modules=("grading_rules",)) as pool:
        yield pool


# --- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gold", "verdict", "reason"),
    [
        ("HANG", None, "timeout", "no answer within 1 s"),
        ("LEAVE", None, "crashed", "the worker ended with status 3"),
        ("FAIL", None, "crashed", "KeyError"),
        ("NAN", None, "crashed", "the worker's reply was invalid"),
        ("TEXT", None, "crashed", "the worker's reply was invalid"),
        ("SILENT", None, "crashed", "AttributeError"),
        ("SLEEP", "bad", "bad_gold", "it is bad"),
        ("SLEEP", "slow", "bad_gold", "the answer itself takes over 1 s to read"),
        ("NO_SUCH_RULE", None, "crashed", "AttributeError"),
        pytest.param("FILL", None, "crashed", "out of memory", marks=LINUX),
    ],
)
def test_what_goes_wrong_is_a_verdict_without_a_score(quick, name, gold, verdict, reason):
    start = time.monotonic()
    grade, after = quick.grade([job(name, gold=gold), *sleeps(0)])
    print(grade, f"{time.monotonic() - start:.2f} s")
    assert (grade.verdict, grade.reason, grade.score) == (verdict, reason, None)
    assert not grade.counts and grade.seconds <= 1.0 + GRACE_S
    assert (after.verdict, after.score) == ("correct", 1.0), "the next one is graded as if nothing had been"


def test_what_a_library_prints_is_no_reply(quick):
    [grade] = quick.grade([job("TALK", "mine")])
    assert (grade.verdict, grade.score, grade.extracted) == ("wrong", 0.0, "mine")


@pytest.mark.parametrize(
    "reply",
    [
        None,
        [],
        {},
        {"verdict": "right", "score": 1.0, "parts": {}},
        {"verdict": "correct", "score": True, "parts": {}},
        {"verdict": "correct", "score": float("inf"), "parts": {}},
        {"verdict": "correct", "score": 1.0},
        {"verdict": "correct", "score": 1.0, "parts": {"format": "1"}},
        {"verdict": "correct", "score": 1.0, "parts": {}, "extracted": "x" * 1001},
        {"verdict": "correct", "score": 1.0, "parts": {}, "extracted": 3},
    ],
)
def test_replies_of_another_form_are_crashes(reply):
    assert read_grade(reply, 0.1).verdict == "crashed"


def test_a_queue_costs_nobody_their_time_and_order_is_kept(quick):
    """Six jobs of 0.3 s and one worker: the last waits 1.5 s, over the deadline of 1 s, and is in time."""
    grades = quick.grade(sleeps(0.3, 0.29, 0.3, 0.28, 0.3, 0.27))
    assert [grade.extracted for grade in grades] == ["0.3", "0.29", "0.3", "0.28", "0.3", "0.27"]
    assert all(grade.verdict == "correct" for grade in grades)


def test_the_caller_of_time_outs_one_after_another_waits_for_no_fresh_worker():
    deadline = 0.5
    with Pool(1, deadline=deadline, modules=("grading_rules", "sympy")) as pool:  # which takes seconds to import
        pool.grade(sleeps(0))
        waited = []
        for _ in range(4):
            start = time.monotonic()
            [grade] = pool.grade([job("HANG")])
            waited.append(time.monotonic() - start)
            assert grade.verdict == "timeout"
    print("waited", *(f"{seconds:.2f} s" for seconds in waited))
    assert max(waited) <= deadline + 0.25


def test_counts_and_the_alarm(caplog):
    with Pool(1, deadline=1.0, modules=("grading_rules",)) as pool:
        pool.grade(sleeps(*[0] * 210))
        assert pool.alarm() is None
        pool.grade([job("FAIL")])
        assert pool.alarm() is None, "1 of 211 is below 0.5 %"
        pool.grade([job("FAIL"), job("SLEEP", gold="bad")])
        assert pool.counts == {"correct": 210, "crashed": 2, "bad_gold": 1}
        said = "3 of 213 completions have no verdict (1 bad_gold, 2 crashed): they are dropped, not rewarded"
        assert said in str(pool.alarm()) and said in caplog.text
        pool.grade(sleeps(0), count=False)
        assert pool.counts.total() == 213


# --- who calls --------------------------------------------------------------------------------------------------------


def test_from_a_thread_and_from_asyncio(quick):
    found: list[Grade] = []
    thread = threading.Thread(target=lambda: found.extend(quick.grade([job("HANG"), *sleeps(0)])))
    thread.start()
    thread.join()
    assert [grade.verdict for grade in found] == ["timeout", "correct"]

    async def main():
        ticks, graded = 0, asyncio.ensure_future(quick.grade_async([job("HANG"), *sleeps(0)]))
        while not graded.done():
            await asyncio.sleep(0.02)
            ticks += 1
        return ticks, await graded

    ticks, grades = asyncio.run(main())
    print(f"the event loop went round {ticks} times while a grader hung for a second")
    assert [grade.verdict for grade in grades] == ["timeout", "correct"] and ticks > 10


def test_many_threads_get_their_own_answers():
    with Pool(2, modules=("grading_rules",)) as pool:
        wrong: list[str] = []

        def ask(number: int) -> None:
            texts = [str(0.001 * number + 0.0001 * i) for i in range(20)]
            grades = pool.grade([job("SLEEP", text) for text in texts])
            wrong.extend(t for t, grade in zip(texts, grades, strict=True) if grade.extracted != t)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and pool.counts["correct"] == 160


def test_a_closed_pool_and_impossible_ones():
    pool = Pool(1, 60.0, modules=("grading_rules",))
    futures = [pool.submit(each) for each in sleeps(0, 30, 0)]
    assert futures[0].result(timeout=60).verdict == "correct"
    start = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - start < 15 and all(future.done() for future in futures)
    with pytest.raises(RewardError, match="closed"):
        pool.submit(job("SLEEP", "0"))
    with pytest.raises(RewardError, match="1 worker or more"):
        Pool(0)
    with pytest.raises(RewardError, match="above 0 seconds"):
        Pool(1, deadline=0)


def pids(pool: Pool) -> set[int]:
    return {worker._process.pid for worker in pool._alive}


def numbers(pool: Pool) -> set[int]:
    """Grade with a rule of ours; the processes afterwards."""
    [grade] = pool.grade([GradeRequest(RULES["gsm8k"], "#### 7", "7")])
    assert grade.verdict == "correct"
    return pids(pool)


@pytest.fixture
def idle(monkeypatch):
    """Nothing waits yet, and nothing of this test waits for others."""
    monkeypatch.setattr(pool_module, "_idle", HelperPool())
    yield pool_module._idle
    pool_module._idle.end_all()


NUMBERS = modules_of(["gsm8k"])
PATIENT = 60.0


def test_free_workers_wait_for_the_next_pool(idle, monkeypatch):
    with Pool(2, PATIENT, modules=NUMBERS) as pool:
        first = numbers(pool)
    with Pool(1, PATIENT, modules=NUMBERS) as pool, Pool(1, PATIENT, modules=NUMBERS) as other:
        assert len(first) == 3 and numbers(pool) < first
        assert numbers(pool) | numbers(other) > first, "no worker is in two pools"
        assert pool.counts["correct"] == 2, "counts are of one pool"
    with Pool(1, PATIENT, modules=NUMBERS, spares=0) as pool:
        numbers(pool)
        monkeypatch.syspath_prepend("/nowhere")
        [worker] = pool._alive
        worker.kill()
        pool.grade([GradeRequest(RULES["gsm8k"], "#### 7", "7")])  # its death is noticed here at the latest
        later = numbers(pool)  # by one that was started after the path had changed
    with Pool(1, PATIENT, modules=NUMBERS) as pool:
        assert not numbers(pool) & (first | later), "they find other modules"


def test_a_worker_that_owes_a_reply_is_in_no_other_pool(idle, monkeypatch):
    monkeypatch.setattr(pool_module, "_is_ours", lambda module: True)
    modules = ("grading_rules",)
    with Pool(1, PATIENT, modules=modules) as pool:
        pool.grade(sleeps(0))
        all_of_them = pids(pool)
        hanging = pool.submit(*sleeps(60))
        while not pool._at_work:
            time.sleep(0.001)
        [busy] = pool._at_work
        start = time.monotonic()
    assert time.monotonic() - start < 15 and hanging.result().verdict == "crashed"
    with Pool(1, PATIENT, modules=modules) as pool:
        grades = pool.grade(sleeps(0, 0.01, 0.02))
        assert [grade.extracted for grade in grades] == ["0", "0.01", "0.02"]
        assert busy._process.pid not in pids(pool) and pids(pool) & all_of_them, "the spare was free"


def test_an_answer_that_was_not_read_is_nobody_elses(monkeypatch):
    def no_memory(self):
        raise MemoryError

    with Pool(1, PATIENT, modules=("grading_rules",)) as pool:
        pool.grade(sleeps(0))
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(WorkerProcess, "_read", no_memory)
            pool.submit(*sleeps(0.01)).result()
        assert [grade.extracted for grade in pool.grade(sleeps(0.02, 0.03))] == ["0.02", "0.03"]


def foreign_rule() -> None:
    with Pool(1, PATIENT, modules=NUMBERS) as pool:
        numbers(pool)
        pool.grade(sleeps(0))


def foreign_module() -> None:
    with Pool(1, PATIENT, modules=("grading_rules",)) as pool:
        numbers(pool)


def failing() -> None:
    with pytest.raises(KeyError), Pool(1, PATIENT, modules=NUMBERS) as pool:
        numbers(pool)
        raise KeyError


def interrupted() -> None:
    pool = Pool(1, PATIENT, modules=NUMBERS)
    numbers(pool)

    def stop(timeout: float) -> None:
        raise KeyboardInterrupt

    pool._threads[0].join = stop
    with pytest.raises(KeyboardInterrupt):
        pool.close()


def killed() -> None:
    with Pool(1, PATIENT, modules=NUMBERS, spares=0) as pool:
        numbers(pool)
        [worker] = pool._alive
        worker._process.kill()  # by the system, short of memory
        worker._process.wait()


@pytest.mark.parametrize("use", [foreign_rule, foreign_module, failing, interrupted, killed])
def test_workers_that_may_not_be_as_new_do_not_wait(idle, monkeypatch, use):
    started = []

    class Noted(WorkerProcess):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            started.append(self)

    monkeypatch.setattr(pool_module, "WorkerProcess", Noted)
    use()
    assert started and not idle._kept and not any(_runs(worker._process.pid) for worker in started)


class Fake:
    def __init__(self, is_free=True):
        self.is_free, self.ended = is_free, 0

    def end(self):
        self.ended += 1


def test_idle_processes_are_free_and_of_their_kind():
    idle = HelperPool()
    one, other, busy = Fake(), Fake(), Fake(is_free=False)
    for kind, process in ((1, one), (2, other), (1, busy)):
        idle.put(kind, process)
    assert busy.ended == 1 and idle.take(3) is None
    assert idle.take(1) is one and idle.take(1) is None and not one.ended
    other.is_free = False  # it has ended by itself meanwhile
    assert idle.take(2) is None and other.ended == 1
    idle.put(1, one)
    idle.end_all()
    idle.end_all()
    assert idle.take(1) is None and one.ended == 1


def test_a_worker_that_does_not_start_is_an_error():
    with Pool(1, modules=("no_such_module",)) as pool:
        for _ in range(2):
            with pytest.raises(RewardError, match="does not start: ModuleNotFoundError: No module named 'no_such_mod"):
                pool.grade(sleeps(0))


# --- what a worker is kept from ---------------------------------------------------------------------------------------


def test_a_worker_has_no_secrets_and_nowhere_to_go(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@proxy")
    with socket.create_server(("127.0.0.1", 0)) as server, Pool(1, 10.0, modules=("grading_rules",)) as pool:
        [grade] = pool.grade([job("PROBE", str(server.getsockname()[1]))])
        print(pool.isolation, grade.extracted)
        can = json.loads(grade.extracted or "")
        assert not {"HF_TOKEN", "HTTPS_PROXY", "HOME", "PATH", "USER"} & set(can["environment"])
        if "no network" in pool.isolation or "no TCP" in pool.isolation:
            assert not can["connect"]
        if "no writable files, no programs" in pool.isolation:
            assert not can["write"] and not can["write_tmp"] and not can["program"]
        if sys.platform == "linux":
            assert "at most 1 GB of memory" in pool.isolation and not can["gigabyte"]


@LINUX
@pytest.mark.parametrize("doing", ["SLEEP", "HANG"])
def test_no_worker_outlives_its_program(doing):
    """Killed while one of its workers sleeps, or computes without ever looking up: all are gone within a second."""
    code = (
        "import sys; from posttrain.grading.pool import Pool; from posttrain.grading.verdict import GradeRequest\n"
        "pool = Pool(1, 600, modules=('grading_rules',))\n"
        "pool.grade([GradeRequest('grading_rules:SLEEP', '0')])\n"
        "pool.submit(GradeRequest('grading_rules:" + doing + "', '600'))\n"
        "print(*(worker._process.pid for worker in pool._alive), flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as program:
        assert program.stdout is not None
        workers = [int(pid) for pid in program.stdout.readline().split()]
        assert len(workers) == 2 and all(Path(f"/proc/{pid}").exists() for pid in workers)
        template = int(Path(f"/proc/{workers[0]}/stat").read_text().rpartition(")")[2].split()[1])
        assert template != program.pid
        program.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    while any(_runs(pid) for pid in (*workers, template)) and time.monotonic() < killed + 30:
        time.sleep(0.01)
    print(f"all gone {time.monotonic() - killed:.2f} s after their program")
    assert time.monotonic() < killed + 10


@LINUX
def test_a_template_that_was_killed_is_replaced():
    with Pool(1, PATIENT, modules=("grading_rules",)) as pool:
        pool.grade(sleeps(0))
        [one, other] = pids(pool)
        template = int(Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(template, signal.SIGKILL)
        while _runs(one) or _runs(other):
            time.sleep(0.01)
        verdicts = [grade.verdict for grade in pool.grade(sleeps(0, 0, 0, 0))]
        print(verdicts)
        assert verdicts[-1] == "correct" and set(verdicts) <= {"correct", "crashed"}


@LINUX
def test_no_worker_outlives_a_program_that_ends_in_peace():
    code = (
        "from posttrain.grading.pool import Pool; from posttrain.rewards.rules import modules_of\n"
        "with Pool(1, modules=modules_of(['math'])) as pool:\n"
        "    print(*(worker._process.pid for worker in pool._alive), flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) == 2 and not any(_runs(pid) for pid in workers), done.stderr


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie that no process has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_the_main_process_never_loads_the_algebra(tmp_path):
    """Parsing of what a model wrote is the workers' business: here the parser is not even imported."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"completion": r"\boxed{\frac{\sqrt{4}}{4}}", "answer": r"\frac12"}) + "\n")
    code = (
        "import sys; from posttrain.cli import main\n"
        f"assert main(['grade', {str(file)!r}, '--reward', 'math', '--workers', '1']) == 0\n"
        "loaded = [n for n in sys.modules if n.startswith(('latex2sympy', 'math_verify', 'antlr4', 'sympy.parsing'))]\n"
        "assert not loaded and 'posttrain.grading.symbolic' not in sys.modules, loaded\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "rows.jsonl.graded.jsonl").read_text())["verdict"] == "correct"


def test_rules_without_expressions_do_without_the_algebra():
    """A worker that never needs sympy must not spend seconds on loading it: their 20 known pairs are judged without."""
    code = (
        "import dataclasses, io, sys\n"
        "from posttrain.config import TagsConfig\n"
        "from posttrain.grading.worker import grade\n"
        "from posttrain.rewards.rules import COMPARES_EXPRESSIONS, RULES, canary, modules_of\n"
        "for name in RULES.keys() - COMPARES_EXPRESSIONS:\n"
        "    assert 'posttrain.grading.symbolic' not in modules_of([name])\n"
        "    for job, verdict in canary(name, TagsConfig()):\n"
        "        assert grade(dataclasses.asdict(job), io.BytesIO())['verdict'] == verdict\n"
        "assert 'sympy' not in sys.modules\n"
    )
    assert all("posttrain.grading.symbolic" in modules_of([name]) for name in COMPARES_EXPRESSIONS)
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=True)


# --- hostile completions ----------------------------------------------------------------------------------------------


def math_jobs(completions: list[str]) -> list[GradeRequest]:
    return [GradeRequest(RULES["math"], completion, hostile.GOLD) for completion in completions]


def check_hostile(completions: list[str], grades: list[Grade], deadline: float) -> None:
    kinds = {v: sum(grade.verdict == v for grade in grades) for v in ("wrong", "timeout", "crashed")}
    print(f"{len(grades)} hostile completions: {kinds}, slowest {max(grade.seconds for grade in grades):.2f} s")
    for completion, grade in zip(completions, grades, strict=True):
        shown = f"{completion[:100]!a}: {grade}"
        assert grade.verdict in kinds, shown
        assert grade.seconds <= deadline + GRACE_S, shown
    assert not Path(hostile.CANARY).exists() and not Path("/", hostile.CANARY).exists()


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def test_hostile_completions_get_a_verdict_in_time():
    """One in eight of them; the slow test below has all, from three kinds of callers."""
    some = hostile.COMPLETIONS[::8]
    with Pool(1, deadline=1.0, modules=modules_of(RULES)) as pool:
        check_hostile(some, pool.grade(math_jobs(some)), 1.0)
        assert [grade.verdict for grade in pool.grade(math_jobs([r"\boxed{3.5}", r"\boxed{7}"]))] == [
            "correct",
            "wrong",
        ]


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize("caller", ["main thread", "worker thread", "asyncio"])
def test_all_hostile_completions_at_the_default_deadline(caller, figure):
    with Pool(2, modules=modules_of(RULES)) as pool:
        pool.grade(math_jobs(["none"] * 4))
        before, gaps = resident_bytes(), [0.0]
        stop = threading.Event()

        def beat() -> None:
            last = time.monotonic()
            while not stop.wait(0.01):
                now = time.monotonic()
                gaps.append(now - last)
                last = now

        heart = threading.Thread(target=beat)
        heart.start()
        grades: list[Grade] = []
        if caller == "asyncio":
            grades = asyncio.run(pool.grade_async(math_jobs(hostile.COMPLETIONS)))
        elif caller == "worker thread":
            thread = threading.Thread(target=lambda: grades.extend(pool.grade(math_jobs(hostile.COMPLETIONS))))
            thread.start()
            thread.join()
        else:
            grades = pool.grade(math_jobs(hostile.COMPLETIONS))
        stop.set()
        heart.join()
        grown = resident_bytes() - before
        check_hostile(hostile.COMPLETIONS, grades, pool.deadline)
        figure("hostile completions", len(grades))
        figure("slowest verdict, s", max(grade.seconds for grade in grades))
        figure("longest standstill, s", max(gaps))
        figure("growth of the training process, MB", grown / 1e6)


@pytest.mark.slow
def test_throughput_per_worker_against_math_verify(shared):
    """Gold solutions of MATH-500 against their own answers and against the next problem's: 999 ordinary answers."""
    from math_verify import parse, verify

    rows = [json.loads(line) for line in (shared / "data/math/math500.jsonl").read_text().splitlines()]
    pairs = [(row["solution"], row["answer"]) for row in rows]
    pairs += [(one["solution"], other["answer"]) for one, other in pairwise(rows)]
    parse("$x^2$")
    start = time.perf_counter()
    theirs = [verify(parse(f"${answer}$"), parse(solution)) for solution, answer in pairs]
    their_seconds = time.perf_counter() - start
    with Pool(1, modules=modules_of(RULES)) as pool:
        jobs = [GradeRequest(RULES["math"], solution, answer) for solution, answer in pairs]
        pool.grade(jobs[:4])
        start = time.perf_counter()
        grades = pool.grade(jobs)
        seconds = time.perf_counter() - start
    print(
        f"math_verify in this process: {len(pairs) / their_seconds:.0f} a second; "
        f"one worker: {len(pairs) / seconds:.0f} a second, {their_seconds / seconds:.2f} times as many"
    )
    assert [grade.verdict == "correct" for grade in grades] == theirs
    assert seconds <= their_seconds / 0.8


# --- the known pairs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tags", [TagsConfig(), TagsConfig(reasoning_end="[/T]", solution_start="[A]", solution_end="$")]
)
def test_every_rule_has_twenty_known_pairs_and_gets_them_right(grading_pool, tags):
    for name in RULES:
        known = canary(name, tags)
        assert len(known) == 20 and {want for _, want in known} >= {"correct", "wrong"}
        prove(grading_pool, name, tags)


def test_a_grader_that_gives_zero_to_all_is_refused(quick, monkeypatch):
    monkeypatch.setitem(RULES, "math", "grading_rules:ALWAYS_ZERO")
    before = quick.counts.total()
    with pytest.raises(RewardError, match=r"`math` gets 14 of 20 known pairs wrong.*constraints\.txt"):
        prove(quick, "math", TagsConfig())
    assert quick.counts.total() == before, "the known pairs are no completions"
