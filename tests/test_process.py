"""Processes, threads, signals, interpreter exit, memory limits. Whatever could hang has a time limit."""

import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import child
import pytest
import torch
import torch.multiprocessing
from fingerprint import bits, results

import memlean
from memlean import _ops, selective_log_softmax

SETUP = """
import os, signal, sys, threading, time, torch
from memlean import selective_log_softmax
torch.manual_seed(0)
logits, index = torch.randn(64, 50_000), torch.arange(64)
def call(logits=logits):
    return selective_log_softmax(logits, index, return_entropy=True)
expected = call()
def check():
    assert all(map(torch.equal, call(), expected))
"""


def batch(rows=16, vocab=40_000):
    return torch.randn(rows, vocab), torch.randint(vocab, (rows,))


# ---- Threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.usefixtures("each_path")
def test_python_threads_at_once_get_the_bits_of_one_alone(count, threads):
    batches = [batch() for _ in range(4)]
    threads(count)
    alone = [bits(*results(*each)) for each in batches]
    together = threading.Barrier(4)

    def work(i):
        torch.set_num_threads(count)
        together.wait()
        return {bits(*results(*batches[i])) for _ in range(3)}

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [{hash} for hash in alone]


def test_a_thread_count_that_changes_between_the_passes(threads):
    logits, index = batch()
    expected = bits(*results(logits, index))
    leaf = logits.clone().requires_grad_()
    threads(1)
    outputs = selective_log_softmax(leaf, index, return_entropy=True)
    upstream = [1 + x.detach().nan_to_num(0, 0, 0).remainder(1) for x in outputs]
    threads(3)
    (gradient,) = torch.autograd.grad(outputs, leaf, upstream)
    assert bits(*outputs, gradient) == expected


def test_inside_a_parallel_region_of_torch(threads):
    # futures of TorchScript run on torch's own pool of threads.
    threads(2)
    logits, index = batch()
    expected = selective_log_softmax(logits, index)

    def call(_):
        return selective_log_softmax(logits, index)

    futures = [torch.futures.Future() for _ in range(3)]
    chained = [future.then(call) for future in futures]
    starters = [threading.Thread(target=future.set_result, args=(None,)) for future in futures]
    for starter in starters:
        starter.start()
    for got in chained:
        assert torch.equal(got.wait(), expected)
    for starter in starters:
        starter.join()


# ---- Processes ------------------------------------------------------------------------------------------------------


def in_a_child(seed, queue):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    queue.put(bits(*results(*batch())))


@pytest.mark.parametrize("start", ["spawn", "fork", "forkserver"])
def test_torch_multiprocessing(start):
    torch.manual_seed(5)
    expected = bits(*results(*batch()))
    context = torch.multiprocessing.get_context(start)
    queue = context.SimpleQueue()
    process = context.Process(target=in_a_child, args=(5, queue))
    process.start()
    process.join(60)
    try:
        assert process.exitcode == 0
        assert queue.get() == expected
    finally:
        process.kill()


def test_fork_before_the_first_parallel_region_needs_no_care():
    child.output_of(
        "-c",
        "import os, torch\nimport memlean\nif (pid := os.fork()) == 0:\n"
        f"{indented(SETUP)}    check()\n    os._exit(0)\n"
        "_, status = os.waitpid(pid, 0)\nassert status == 0, status\n",
        timeout=60,
    )


def indented(code):
    return "".join(f"    {line}\n" for line in code.splitlines())


# ---- Signals and exit -----------------------------------------------------------------------------------------------


def test_an_interrupt_during_calls_arrives_and_the_next_call_is_right():
    script = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it as ignored
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
begin = time.monotonic()
try:
    while time.monotonic() < begin + 30:
        call()
except KeyboardInterrupt:
    check()
    print("interrupted")
"""
    assert child.output_of("-c", SETUP + script, timeout=60) == "interrupted\n"


def test_a_signal_handler_may_call_too():
    script = """
ran = []
signal.signal(signal.SIGALRM, lambda *_: (check(), ran.append(1)))
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
begin = time.monotonic()
while len(ran) < 3 and time.monotonic() < begin + 30:
    check()
signal.setitimer(signal.ITIMER_REAL, 0)
print(len(ran) >= 3)
"""
    assert child.output_of("-c", SETUP + script, timeout=60) == "True\n"


@pytest.mark.parametrize("daemon", [False, True])
def test_the_interpreter_exits_while_threads_compute(daemon):
    script = f"""
def many():
    for _ in range({10**9 if daemon else 20}):
        call()
for _ in range(3):
    threading.Thread(target=many, daemon={daemon}).start()
check()
time.sleep(0.2)
print("done")
"""
    result = child.run("-c", SETUP + script, timeout=60)
    assert result.stdout == "done\n"
    # Python ends daemon threads inside C++ by an abort, in torch's own operators too.
    assert result.returncode in ((0, -signal.SIGABRT) if daemon else (0,)), result.stderr


# ---- Installation and environment -----------------------------------------------------------------------------------


def test_a_read_only_installation(tmp_path):
    shutil.copytree(Path(memlean.__file__).parent, tmp_path / "memlean", ignore=shutil.ignore_patterns("__pycache__"))
    folders = [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]
    before = sorted(tmp_path.rglob("*"))
    for folder in folders:
        folder.chmod(0o555)
    try:
        # Root may write anyway: what counts then is that nothing is written.
        child.output_of("-S", "-B", "-c", SETUP + "check()", pythonpath=tmp_path)
        assert sorted(tmp_path.rglob("*")) == before
    finally:
        for folder in folders:
            folder.chmod(0o755)


WRONG = {
    "MEMLEAN_DISABLE_NATIVE": "true",
    "MEMLEAN_ISA": "neon9",
    "MEMLEAN_HUGEPAGE": "-1",
    "MEMLEAN_CHUNK_BYTES": "1.5",
}


@pytest.mark.skipif(_ops.native is None, reason="the C kernels are not in use in this run")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variable_is_named_at_import(name):
    result = child.run("-c", "import memlean", **{name: WRONG[name]})
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ValueError: environment variable {name}")
    assert repr(WRONG[name]) in last


# ---- Memory that runs out -------------------------------------------------------------------------------------------

LIMITED = """
import resource
def limited(function, room=2**20):
    pages = int(open("/proc/self/statm").read().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, hard))
    try:
        function()
    except (MemoryError, RuntimeError) as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    raise AssertionError("there was enough memory")
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
@pytest.mark.parametrize("disable_native", ["0", "1"])
def test_memory_that_runs_out_in_forward_is_an_error_and_the_next_call_is_right(disable_native):
    script = """
rows = torch.zeros(1).expand(2**22, 1)
print(limited(lambda: selective_log_softmax(rows, torch.zeros(1).long().expand(2**22).contiguous())))
check()
"""
    printed = child.output_of("-c", SETUP + LIMITED + script, MEMLEAN_DISABLE_NATIVE=disable_native)
    assert "memory" in printed


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
@pytest.mark.parametrize("disable_native", ["0", "1"])
def test_memory_that_runs_out_in_backward_is_an_error_and_the_next_call_is_right(disable_native):
    script = """
leaf = logits.clone().requires_grad_()
loss = call(leaf)[0].sum()
print(limited(lambda: torch.autograd.grad(loss, leaf, retain_graph=True)))
(first,) = torch.autograd.grad(loss, leaf)
(second,) = torch.autograd.grad(call(leaf)[0].sum(), leaf)
assert torch.equal(first, second)
check()
"""
    printed = child.output_of("-c", SETUP + LIMITED + script, MEMLEAN_DISABLE_NATIVE=disable_native)
    assert "memory" in printed
    if disable_native == "0" and _ops.native:
        assert printed == "memlean: not enough memory for a tensor of shape [64, 50000]\n"
