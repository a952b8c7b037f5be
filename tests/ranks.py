"""Processes that form a gloo group and call functions of the tests, each with its rank."""

import datetime
import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = 60  # seconds for one call on all ranks, far beyond what any takes


def _serve(rank: int, ranks: int, store: str, timeout: float, pipe) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout),
    )
    while True:
        function, arguments = pickle.loads(pipe.recv_bytes())
        try:
            answer = function(rank, *arguments)
        except Exception as error:
            answer = Failure(type(error).__name__, str(error), traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))


class Failure:
    """What a rank raised, or that it has ended."""

    def __init__(self, kind: str, message: str, trace: str = ""):
        self.kind, self.message, self.trace = kind, message, trace

    def __repr__(self):
        return self.trace or f"{self.kind}: {self.message}"


class Ranks:
    """``with Ranks(n) as ranks: ranks(function, *arguments)`` returns what function(rank, *arguments) gave on each."""

    def __init__(self, count: int, timeout: float = TIMEOUT):
        self.count, self.timeout = count, timeout

    def __enter__(self):
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name, "store"))
        self._pipes, self._processes = [], []
        for rank in range(self.count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.count, store, self.timeout, there), daemon=True)
            process.start()
            there.close()  # so that the end of the process is the end of the pipe
            self._pipes.append(here)
            self._processes.append(process)
        return self

    def __exit__(self, *error):
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def outcomes(self, function: Callable, *arguments) -> list:
        """As a call, with a Failure in the place of what a rank raised. A hang fails the test."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, arguments)))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(TIMEOUT), f"rank {rank} gave no answer in {TIMEOUT} s"
            try:
                answers.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                self._processes[rank].join()
                answers.append(Failure("ended", f"exit code {self._processes[rank].exitcode}"))
        return answers

    def __call__(self, function: Callable, *arguments) -> list:
        answers = self.outcomes(function, *arguments)
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        assert not failures, failures
        return answers
