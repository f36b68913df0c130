"""The pool of grading workers: it grades completions, whatever their content, and returns the verdicts in order.

    with Pool(workers=4) as pool:
        grades = pool.grade(jobs)                 # from any thread
        grades = await pool.grade_async(jobs)     # from asyncio

Each worker has a thread in this process that sends it one job at a time and waits for the reply; another thread kills
workers that exceed their deadline. A job's deadline starts when the job is sent, so waiting in the queue does not
count. A killed worker is replaced by a spare; when a pool closes, its free workers are kept for the next pool.
"""

import asyncio
import atexit
import contextlib
import os
import queue
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from posttrain.base.child import HelperPool
from posttrain.base.errors import RewardError
from posttrain.base.log import log
from posttrain.base.signals import result_of
from posttrain.base.system import CAN_FORK
from posttrain.grading.process import Deadlines, Template, WorkerProcess, worker_environment
from posttrain.grading.verdict import NON_VERDICTS, Grade, GradeRequest

DEADLINE_S = 2.0
ALARM_SHARE = 0.005
MOST_WORKERS = 8
CLOSED = "the grading pool is closed"

_idle: HelperPool[WorkerProcess] = HelperPool()


def workers_of(processes: int = 1) -> int:
    """The number of workers of a pool if `processes` processes on this machine have a pool each."""
    return max(1, min(os.cpu_count() or 1, MOST_WORKERS) // processes)


class Pool(contextlib.AbstractContextManager["Pool"]):
    """Supervised worker processes. Each imports `modules` before its first job, outside the job's deadline.

    `spares` additional workers are ready to replace killed ones. Close the pool, or use it as a context manager; its
    processes also end if the program ends without closing the pool.
    """

    def __init__(
        self,
        workers: int | None = None,
        deadline: float = DEADLINE_S,
        spares: int = 1,
        modules: Sequence[str] = ("posttrain.grading.symbolic",),
    ):
        if workers is not None and workers < 1:
            raise RewardError(f"grading needs 1 worker or more, not {workers}")
        if not deadline > 0:
            raise RewardError(f"the deadline of a grader must be above 0 seconds, not {deadline:g}")
        self.workers = workers or workers_of()
        self.deadline = deadline
        self.isolation: tuple[str, ...] = ()
        self.counts: Counter[str] = Counter()
        self._modules = tuple(modules)
        self._environment = worker_environment()
        self._kind = (self._modules, *sorted(self._environment.items()))
        self._can_be_kept = all(map(_is_ours, self._modules))
        self._jobs: queue.SimpleQueue[tuple[GradeRequest, Future[Grade], bool] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._broken: RewardError | None = None
        self._alarmed = 0
        self._deadlines = Deadlines()
        self._alive: set[WorkerProcess] = set()
        self._at_work: set[WorkerProcess] = set()
        self._spares: deque[WorkerProcess] = deque()
        self._threads: list[threading.Thread] = []
        self._wanted_spares = spares
        self._template: Template | None = None
        atexit.register(self.close)
        for _ in range(self.workers + spares):
            self._spares.append(self._start())
        for number in range(self.workers):
            thread = threading.Thread(target=self._serve, name=f"posttrain-grading-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    # --- jobs -----------------------------------------------------------------------------------------------------

    def submit(self, job: GradeRequest, count: bool = True) -> Future[Grade]:
        """Queue a job. Never blocks; a cancelled future is not graded. `count`: add the verdict to `counts`."""
        future: Future[Grade] = Future()
        with self._lock:
            if self._closed:
                raise RewardError(CLOSED)
            if self._broken is not None:
                raise self._broken
            self._can_be_kept &= _is_ours(job.rule)
            self._jobs.put((job, future, count))
        return future

    def stream(self, jobs: Sequence[GradeRequest], count: bool = True) -> Iterator[Grade]:
        """Yield the grades in the order of the jobs, each as soon as it and all previous ones are ready."""
        yield from self.collect([self.submit(job, count) for job in jobs])

    def collect(self, futures: Sequence[Future[Grade]]) -> Iterator[Grade]:
        """Yield the grades of submitted jobs in order, waiting at most a fifth of a second at a time."""
        try:
            yield from map(result_of, futures)
            self._raise_alarm()
        finally:
            for future in futures:
                future.cancel()

    def grade(self, jobs: Sequence[GradeRequest], count: bool = True) -> list[Grade]:
        """The grade of each job, in order. Blocks only this thread, at most a fifth of a second at a time."""
        return list(self.stream(jobs, count))

    async def grade_async(self, jobs: Sequence[GradeRequest]) -> list[Grade]:
        """Like `grade`, without blocking the event loop."""
        grades = await asyncio.gather(*(asyncio.wrap_future(self.submit(job)) for job in jobs))
        self._raise_alarm()
        return list(grades)

    def alarm(self) -> str | None:
        """A warning if more than 0.5 % of all completions so far have no verdict, otherwise None."""
        total, missing = sum(self.counts.values()), sum(self.counts[kind] for kind in NON_VERDICTS)
        if missing <= ALARM_SHARE * total:
            return None
        kinds = ", ".join(f"{self.counts[kind]} {kind}" for kind in sorted(NON_VERDICTS) if self.counts[kind])
        return (
            f"{missing} of {total} completions have no verdict ({kinds}): they are dropped, not rewarded. "
            "timeout: raise the deadline or check the completions; crashed: see the reasons; "
            "bad_gold: check the answers in the data"
        )

    def _raise_alarm(self) -> None:
        """Log the alarm the first time, and then whenever the number has doubled, to keep a long run's log readable."""
        message, missing = self.alarm(), sum(self.counts[kind] for kind in NON_VERDICTS)
        if message is not None and missing >= 2 * self._alarmed:
            self._alarmed = missing
            log.warning(message)

    # --- the workers ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """The body of a thread: start a worker, send it jobs, and replace it when it has ended."""
        worker: WorkerProcess | None = None
        while (item := self._jobs.get()) is not None:
            job, future, counted = item
            if not future.set_running_or_notify_cancel():
                continue
            if self._broken is not None:
                future.set_exception(self._broken)
                continue
            try:
                worker = worker or self._next()
                grade = self._ask(worker, job)
            except Exception as error:
                if isinstance(error, RewardError):  # workers do not start; other errors concern only this job
                    with self._lock:
                        self._broken = self._broken or error
                future.set_exception(error)
                grade = None
            if worker is not None and not worker.is_free:
                self._end(worker)
                worker = None
            if grade is None:
                continue
            if counted:
                with self._lock:
                    self.counts[grade.verdict] += 1
            future.set_result(grade)

    def _ask(self, worker: WorkerProcess, job: GradeRequest) -> Grade:
        """Grade a job, with the worker registered as busy for `close`."""
        with self._lock:
            if self._closed:
                raise RewardError(CLOSED)
            self._at_work.add(worker)
        try:
            worker.wait_ready(self._deadlines)
            self.isolation = worker.isolation
            return worker.ask(job, self.deadline, self._deadlines)
        finally:
            with self._lock:
                self._at_work.discard(worker)

    def _start(self) -> WorkerProcess:
        worker = _idle.take(self._kind) or self._make()
        with self._lock:
            self._template = self._template or worker.template
            self._alive.add(worker)
            if self._closed:
                worker.kill()
        return worker

    def _make(self) -> WorkerProcess:
        """Create a worker. Where the platform can fork, it is ready as soon as the template has imported everything."""
        if not CAN_FORK:
            return WorkerProcess(self._modules, self._environment)
        if self._template is not None:
            with contextlib.suppress(OSError):  # the template was killed: a new one replaces it
                return WorkerProcess(self._modules, self._environment, self._template)
        self._template = Template(self._modules, self._environment)
        return WorkerProcess(self._modules, self._environment, self._template)

    def _next(self) -> WorkerProcess:
        """Take a live spare worker, or start one if there is none, and start a replacement for the spare."""
        while True:
            with self._lock:
                worker = self._spares.popleft() if self._spares else None
                missing = len(self._spares) < self._wanted_spares
            if worker is None or worker.is_free:
                break
            self._end(worker)
        worker = worker or self._start()
        if missing:
            self._spares.append(self._start())
        return worker

    def _end(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._alive.discard(worker)
        worker.end()

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self, keep: bool = True) -> None:
        """Kill the busy workers; free ones are kept for the next pool, unless they may be unhealthy.

        `keep=False` ends free workers too. May be called again, and from any thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            at_work = list(self._at_work)
        all_idle = False
        try:
            for worker in at_work:
                worker.kill()
            with contextlib.suppress(queue.Empty):
                while True:
                    if item := self._jobs.get_nowait():
                        item[1].cancel()
            for _ in self._threads:  # each ends after its current job
                self._jobs.put(None)
            others = [thread for thread in self._threads if thread is not threading.current_thread()]
            for thread in others:
                thread.join(timeout=5)
            all_idle = not any(thread.is_alive() for thread in others)
        finally:
            with self._lock:
                alive, self._alive = list(self._alive), set()
                self._template = None  # ends with its last worker
            for worker in alive:
                if keep and self._can_be_kept and all_idle:
                    _idle.put(self._kind, worker)
                else:
                    worker.end()
            self._deadlines.close()
            atexit.unregister(self.close)

    def __exit__(self, error: object, *_: object) -> None:
        self.close(keep=error is None)


def _is_ours(module: str) -> bool:
    """Whether the module belongs to posttrain. Others may be edited between two pools, but workers import only once."""
    return module.startswith("posttrain.")
