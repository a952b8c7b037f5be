"""selective_log_softmax beside the functions of released trainers and beside torch, eager and compiled.

    python benchmarks/bench_selective_log_softmax.py [--quick]

A base point, and one axis at a time from there; README.md in this folder says what is measured how.
"""

import contextlib
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial

import harness
import peers
import torch
from harness import Probes, Table, warm_heap
from peers import IN_PLACE, MEMLEAN
from torch import Tensor
from tqdm import tqdm

from memlean import _ops
from memlean.demo import logits as inputs
from memlean.demo import measure

FLOOR_CYCLES = 5.5 / 16  # of the AVX-512 forward for a logit in registers, without any memory
FEW = (MEMLEAN, "twinkle", "log_softmax", "gather - logsumexp compiled")
LINEAR_TURNS = 2  # of half a minute each
# Last the one after which the heap is not what it was.
ORDER = ("base", "one row", "small call", "isa", "one thread", "rows", "vocab", "dtype", "warm heap")
FACTS = {
    "retained_bytes": ("retained", "B"),
    "peak_forward_bytes": ("peak forward", "B"),
    "peak_backward_bytes": ("peak backward", "B"),
    "value_error": ("value error", "nats"),
    "gradient_error": ("gradient error", "nats"),
    "nan_rows_when_masked": ("NaN rows when masked", "rows"),
}


@dataclass(frozen=True)
class Point:
    case: str
    dtype: torch.dtype
    rows: int
    vocab: int
    peers: tuple[str, ...]
    entropy: bool = False
    threads: int = 2
    warm: bool = False  # freed memory stays, so that no pass pays for fresh pages
    scoring: bool = False  # also without autograd
    facts: bool = True  # also memory and errors

    @property
    def columns(self) -> dict:
        return {
            "case": self.case,
            "dtype": str(self.dtype).removeprefix("torch."),
            "rows": self.rows,
            "vocab": self.vocab,
            "entropy": int(self.entropy),
        }

    @property
    def calls(self) -> int:
        """In one sample, which has to be long against the clock's resolution."""
        return max(1, min(1000, 2**24 // (self.rows * self.vocab)))


def points(quick: bool, everyone: tuple[str, ...]) -> list[Point]:
    rows, vocab = (16, 32_000) if quick else (256, 151_936)
    vocabs = (4_000,) if quick else (32_000, 128_256, 262_144)
    many_rows = (4,) if quick else (16, 1024)
    found = []

    def without_compiling(point: Point) -> Point:
        return replace(point, peers=tuple(name for name in point.peers if not name.endswith("compiled")))

    for dtype in (torch.bfloat16, torch.float32):
        base = Point("base", dtype, rows, vocab, everyone)
        few = replace(base, peers=FEW)
        found += [
            base,
            replace(base, entropy=True),
            *(replace(few, case="vocab", vocab=other) for other in vocabs),
            *(replace(few, case="rows", rows=other) for other in many_rows),
            replace(base, case="one row", rows=1, scoring=True),
            replace(few, case="one thread", threads=1),
            replace(base, case="small call", rows=4, vocab=20, peers=FEW[:3], scoring=True, facts=False),
        ]
        if _ops.native:
            levels = tuple(f"{MEMLEAN} {isa}" for isa in _ops.native.isa_available())
            found.append(replace(base, case="isa", peers=(MEMLEAN, *levels), facts=False))
        warm = (MEMLEAN, IN_PLACE, "twinkle", "log_softmax", "gather - logsumexp compiled")
        found.append(replace(base, case="warm heap", peers=warm, warm=True, facts=False))
    found.append(Point("dtype", torch.float16, rows, vocab, FEW))
    if quick:  # the compiler takes most of the time
        found = [point if point.case == "base" and not point.entropy else without_compiling(point) for point in found]
    return sorted(found, key=lambda point: ORDER.index(point.case))


def methods_of(point: Point, known: dict[str, measure.Method]) -> dict[str, measure.Method]:
    without = {"cross_entropy", "cross_entropy compiled"} if point.entropy else set()
    return {name: known[name] for name in point.peers if name not in without}


def sample(method: measure.Method, name: str, logits: Tensor, point: Point, index: Tensor, upstream) -> dict:
    """Seconds of each pass."""
    own = (lambda: logits * 1) if name == IN_PLACE else (lambda: logits)
    level = _ops.native.isa_active() if _ops.native else None
    passes = [measure.seconds(method, own(), index, upstream) for _ in range(point.calls)]
    forward, backward = (sum(times) / point.calls for times in zip(*passes, strict=True))
    found = {"forward": forward, "backward": backward, "both": forward + backward}
    if point.scoring:
        with torch.no_grad():
            start = time.perf_counter()
            for _ in range(point.calls):
                method(logits, index, point.entropy)
            found["scoring"] = (time.perf_counter() - start) / point.calls
    if _ops.native:
        _ops.native.isa_select(level)  # a method of one level leaves that selected
    return found


def study(point: Point, known: dict[str, measure.Method], repeats: int, table: Table, bar) -> None:
    bar.set_description(", ".join(str(value) for value in point.columns.values()))
    torch.set_num_threads(point.threads)
    torch.compiler.reset()  # else it gives up compiling after a few variants of one function
    sequences = 8 if point.rows >= 16 else 1  # trainers have a batch of sequences
    values, index = inputs.peaked((sequences, point.rows // sequences), point.vocab)
    case = measure.Case("peaked", values, index, point.dtype, point.entropy)
    logits = values.to(point.dtype).requires_grad_()
    upstream = measure.upstream_gradients(case)
    methods = methods_of(point, known)
    expected = measure.reference(logits.detach(), index, upstream) if point.facts else None
    for name, method in methods.items():
        if name.endswith("compiled"):
            first = sum(measure.seconds(method, logits, index, upstream))
            table.add(peer=name, measure="first call", value=first, unit="s", **point.columns)
        if point.facts:
            found = measure.facts(method, logits, case, upstream, expected)
            for key, (measured, unit) in FACTS.items():
                if found[key] is not None:
                    table.add(peer=name, measure=measured, value=found[key], unit=unit, **point.columns)
        bar.update()
    del expected, values, case

    samples = {name: partial(sample, method, name, logits, point, index, upstream) for name, method in methods.items()}
    probes = Probes(logits)
    has_floor = "avx512" in table.constant["machine"]
    samples["probes"] = lambda: probes() | ({"clock": harness.clock()} if has_floor else {})
    with warm_heap() if point.warm else contextlib.nullcontext():
        for warm_up in samples.values():
            warm_up()
        turns = measure.in_turns(samples, repeats, bar.update)
    add_times(turns.pop("probes"), turns, point, table)


def add_times(probes: list[dict], turns: dict[str, list[dict]], point: Point, table: Table) -> None:
    limits = {name: [turn[name] for turn in probes] for name in probes[0]}
    hertz = max(limits.pop("clock", [0]))  # of the turn that was disturbed least
    if hertz:
        table.add(peer="clock", measure="probe", value=hertz, unit="Hz", **point.columns)
    for name, seconds in limits.items():
        table.add(peer=name, measure="probe", value=statistics.median(seconds), unit="s", **point.columns)
    both = [read + copy for read, copy in zip(limits["read probe"], limits["copy probe"], strict=True)]
    limits["read + copy probe"] = both
    limit_of = {"backward": "copy probe", "both": "read + copy probe"}
    for measured in turns[point.peers[0]][0]:
        times = {name: [turn[measured] for turn in mine] for name, mine in turns.items()}
        if measured == "forward" and hertz:
            floor = point.rows * point.vocab * FLOOR_CYCLES / point.threads / hertz
            times["arithmetic floor"] = [floor] * len(probes)
        baseline = (MEMLEAN, times[MEMLEAN])
        for name, mine in times.items():
            limit = (
                "in-place probe" if (name, measured) == (IN_PLACE, "backward") else limit_of.get(measured, "read probe")
            )
            # A small call waits for Python, and the floor for nothing.
            limited = point.case != "small call" and name in turns
            where = {"measure": measured, **point.columns}
            table.add_times({name: mine}, baseline, (limit, limits[limit]) if limited else None, **where)


def recompilations(quick: bool, table: Table, bar) -> None:
    """Seconds until the first result for a first, second and third number of rows, and graphs compiled so far."""
    # Other numbers of rows than those of the points, whose code the process already has.
    vocab, rows = (32_000, (12, 6, 3)) if quick else (151_936, (240, 120, 60))
    values, index = inputs.peaked((rows[0],), vocab)
    logits = values.bfloat16()
    expressions = {"log_softmax": peers.log_softmax} if quick else peers.EXPRESSIONS
    for name, expression in expressions.items():
        bar.set_description(f"row counts, {name}")
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        with measure.empty_compiler_cache():
            compiled = torch.compile(expression)
            for count in rows:
                mine = logits[:count].detach().requires_grad_()
                arguments = (compiled, mine, index[:count], [torch.ones(count)])
                first, again = (sum(measure.seconds(*arguments)) for _ in range(2))
                columns = {"peer": f"{name} compiled", "case": "row counts", "dtype": "bfloat16", "entropy": 0}
                columns |= {"rows": count, "vocab": vocab}
                table.add(measure="compilation", value=first - again, unit="s", **columns)
                graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
                table.add(measure="graphs so far", value=graphs, unit="graphs", **columns)
        bar.update()


def fused_linear(quick: bool, table: Table, bar) -> None:
    """For context: the projection to the vocabulary included, as torch's linear_cross_entropy has it."""
    rows, vocab, hidden = (16, 4_000, 64) if quick else (256, 151_936, 576)
    bar.set_description("linear_cross_entropy")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab, hidden, generator=generator) / hidden**0.5
    states = torch.randn(rows, hidden, generator=generator).requires_grad_()
    index = torch.randint(vocab, (rows,), generator=generator)
    case = measure.Case("hidden states", states, index, torch.float32, False)
    upstream = measure.upstream_gradients(case)
    columns = {"case": "fused linear", "dtype": "float32", "rows": rows, "vocab": vocab, "entropy": 0}
    methods = peers.fused_linear(weight)
    for name, method in methods.items():
        sum(measure.seconds(method, states, index, upstream))
        kept = measure.saved(method, states, case)["retained_bytes"] - weight.untyped_storage().nbytes()
        table.add(peer=name, measure="retained", value=kept, unit="B", **columns)
    timed = {name: partial(measure.seconds, method, states, index, upstream) for name, method in methods.items()}
    turns = measure.in_turns(timed, LINEAR_TURNS, bar.update)
    times = {name: [sum(passes) for passes in mine] for name, mine in turns.items()}
    table.add_times(times, ("linear + memlean", times["linear + memlean"]), measure="both", **columns)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--repeats", type=int, help="turns (default: 7; quick: 2)")
    options = parser.parse_args()
    repeats = options.repeats or (2 if options.quick else 7)
    table = Table(__file__, options)
    everyone = peers.all_peers()
    known = everyone | peers.variants()
    todo = points(options.quick, tuple(everyone))
    steps = sum(len(methods_of(point, known)) + repeats for point in todo) + len(peers.EXPRESSIONS) + LINEAR_TURNS
    with tqdm(total=steps) as bar, measure.empty_compiler_cache():
        for point in todo:
            study(point, known, repeats, table, bar)
            table.write()  # now, in case somebody stops it
        recompilations(options.quick, table, bar)
        fused_linear(options.quick, table, bar)
    table.write()


if __name__ == "__main__":
    main()
