"""The one thread that computes for a stage, and the queue in front of it.

Everything that is ready when a turn begins shares the turn, and what is about to be ready is waited for (see
gather.py); a job that needs several turns (a long prefill) stays in the queue while others come and go. It
does not know what the jobs compute.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic

from services.engine import AnswerT, Engine, Job, SessionT, TaskT
from services.gather import Gather

_log = logging.getLogger(__name__)

AnyJob = Job[Any, Any, Any]


class Batcher(Generic[SessionT, TaskT, AnswerT]):
    """Runs an engine's jobs on a thread of its own."""

    def __init__(self, engine: Engine[SessionT, TaskT, AnswerT], on_done: Callable[[AnyJob], None]) -> None:
        """Starts the thread.

        Args:
            engine: What computes.
            on_done: Called on the thread with every finished job, for the books.
        """
        self._engine = engine
        self._on_done = on_done
        self._changed = threading.Condition()
        self._queue: dict[Job[SessionT, TaskT, AnswerT], Callable[[], object]] = {}
        self._leaving: list[SessionT] = []
        self._gather = Gather()
        self._pass_s = 0.0  # of the last turn
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="stage-worker", daemon=True)
        self._thread.start()

    async def run(self, job: Job[SessionT, TaskT, AnswerT]) -> AnswerT:
        """Puts a job into the queue and waits for its answer.

        Raises:
            Exception: What the job ended with.
        """
        loop = asyncio.get_running_loop()
        finished = asyncio.Event()
        with self._changed:
            if self._stopped:
                raise RuntimeError("the batcher has stopped")
            self._queue[job] = partial(loop.call_soon_threadsafe, finished.set)
            self._gather.asked(job.session, time.perf_counter())
            self._changed.notify()
        try:
            await finished.wait()
        except asyncio.CancelledError:
            with self._changed:
                self._queue.pop(job, None)
            raise
        if job.error is not None:
            raise job.error
        assert job.answer is not None
        return job.answer

    def release(self, session: SessionT) -> None:
        """Closes a session between turns, when no job of it can be running."""
        with self._changed:
            self._leaving.append(session)
            self._gather.closed(session)
            self._changed.notify()

    def stop(self) -> None:
        """Ends the thread after the present turn."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        # A turn is a call of its own, so that while the thread waits it holds on to no session.
        while self._turn():
            pass

    def _turn(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._leaving or self._stopped)
            self._wait_for_others()
            jobs, leaving, stopped = list(self._queue), self._leaving, self._stopped
            self._leaving = []
        for session in leaving:
            session.close()
        if stopped:
            return False
        for job in jobs:
            if not job.begun:
                _begin(job)
        self._compute([job for job in jobs if not job.done])
        for job in jobs:
            if job.done:
                self._finish(job)
        return True

    def _wait_for_others(self) -> None:
        # With the lock held, which waiting gives up.
        ready_at = now = time.perf_counter()
        while self._queue and not self._stopped:
            deadline = self._gather.deadline(ready_at, self._pass_s)
            if deadline <= now:
                return
            self._changed.wait(deadline - now)
            now = time.perf_counter()

    def _compute(self, jobs: list[Job[SessionT, TaskT, AnswerT]]) -> None:
        if not jobs:
            return
        begin = time.perf_counter()
        try:
            self._engine.run(jobs)
        except Exception as error:
            # The engine sets a job's own fault on that job; what gets here concerns all of them.
            _log.exception("a turn of %d jobs failed", len(jobs))
            for job in jobs:
                job.error = job.error or error
        self._pass_s = time.perf_counter() - begin

    def _finish(self, job: Job[SessionT, TaskT, AnswerT]) -> None:
        self._on_done(job)
        with self._changed:
            wake = self._queue.pop(job, None)
            if wake is not None:
                self._gather.answered(job.session, time.perf_counter())
        if wake is not None:
            try:
                wake()
            except RuntimeError:
                _log.debug("the loop of a finished job is gone")


def _begin(job: AnyJob) -> None:
    """Brings the session's context up to date, on the thread that owns it."""
    job.begun = True
    now = time.perf_counter()
    job.spend("queue", now - job.arrived)
    try:
        job.session.apply(job.base_length, job.token_ids)
    except Exception as error:
        job.error = error
    job.spend("sync", time.perf_counter() - now)
