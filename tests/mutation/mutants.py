"""Breaks one line at a time and shows that a test fails: python tests/mutation/mutants.py [--only TEXT] [--list].

A mutant of the C room meets the exp sweep, the fuzzer's generator, plain and sanitized, and the C tests first, and what
survives them meets pytest on an extension built from it; a mutant of the Python room meets pytest alone. Everything
happens in a copy of the tree. The exit status is 0 when each mutant is killed, or says in ``survives`` why none can be.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE, TEMPLATE = "csrc/core/token_logprob.c", "csrc/kernels/token_logprob_tpl.h"
EXP, NUMERIC = "csrc/kernels/exp_tpl.h", "csrc/kernels/numeric.h"
AVX2, AVX512 = "csrc/arch/x86/vector_avx2.h", "csrc/arch/x86/vector_avx512.h"
ARRAY, ARRAY32 = "csrc/arch/generic/vector_array_tpl.h", "csrc/arch/generic/vector_array_f32.h"
BINDING, CHECKS = "csrc/torch/binding.cpp", "csrc/torch/checks.h"
REFERENCE, FUNCTIONAL = "memlean/reference.py", "memlean/functional.py"
DISTRIBUTED = "memlean/distributed.py"

PYTEST = (
    "test_special_values test_gradients test_keep test_options test_inplace test_layouts test_same_bits "
    "test_token_stats test_values test_generic_path test_errors test_memory test_operators"
)


@dataclass
class Mutant:
    file: str
    old: str  # stands in the file once
    new: str
    survives: str = ""  # why no test can see it
    tests: str = PYTEST  # files of tests/ for pytest


MUTANTS = [
    # exp
    Mutant(EXP, "ML_V(set1)(ML_EXPF_C3)", "ML_V(set1)(-ML_EXPF_C3)"),
    Mutant(EXP, "ML_V(set1)(ML_EXPF_C2)", "ML_V(set1)(0.0f)"),
    Mutant(NUMERIC, "0x3f75fed7", "0x3f75feda"),
    Mutant(NUMERIC, "0x1.71547652b82fep+3", "0x1.71547852b82fep+3"),
    Mutant(NUMERIC, "ML_EXPF_LIMIT 87.25f", "ML_EXPF_LIMIT 88.75f"),
    Mutant(NUMERIC, "ML_EXP_LIMIT 708.0", "ML_EXP_LIMIT 70.0"),
    Mutant(NUMERIC, "t = ML_EXP_LOWEST > t ? ML_EXP_LOWEST : t;", ""),
    Mutant(NUMERIC, "if (!(t > -0.25))", "if (!(t > -2.25))"),
    Mutant(NUMERIC, "return ml_exp(t) - 1.0;", "return ml_exp(t);"),
    Mutant(NUMERIC, "if (d < 0.4) {", "if (d < 1e30) {"),
    Mutant(NUMERIC, "exponent--;", ""),
    # the row's state
    Mutant(NUMERIC, "state->excess = factor * sum;", "state->excess = sum;"),
    Mutant(NUMERIC, "state->squares *= factor * factor;", "state->squares *= factor;"),
    Mutant(NUMERIC, "factor * (state->shifted + step * sum)", "factor * (state->shifted - step * sum)"),
    Mutant(NUMERIC, "factor == 0.0 ? 0.0 * state->shifted : ", ""),
    # conversions
    Mutant(NUMERIC, "bits + 0x7fff + ((bits >> 16) & 1)", "bits + 0x8000"),
    Mutant(NUMERIC, "if (value != value)\n        return 0x7fc0;", ""),
    Mutant(
        NUMERIC, "rest >= 0x477ff000u", "rest >= 0x47800000u", survives="rounding up carries into infinity by itself"
    ),
    Mutant(NUMERIC, "0xfff + (rest >> 13 & 1)", "0x1000"),
    Mutant(NUMERIC, "rest < 0x38800000u", "rest < 0x38000000u"),
    Mutant(AVX2, "_mm256_set1_epi32(0x7fff)), odd)", "_mm256_set1_epi32(0x8000)), _mm256_setzero_si256())"),
    Mutant(AVX512, "_mm512_set1_epi32(0x7fff)), odd)", "_mm512_set1_epi32(0x8000)), _mm512_setzero_si512())"),
    # the template: chunks
    Mutant(TEMPLATE, "j + lane < n ? x[j + lane] : ML_MINUS_INF", "j + lane < n ? x[j + lane] : 0"),
    Mutant(
        TEMPLATE, "if (j + 32 <= n) {", "if (j + 33 <= n) {", survives="a whole chunk taken by the slow way is the same"
    ),
    Mutant(TEMPLATE, "    *u = clamped;\n", ""),
    Mutant(
        TEMPLATE, "ML_V(zero_above)(ML_V(exp)(clamped, row->rate), *u, row->limit)", "ML_V(exp)(clamped, row->rate)"
    ),
    Mutant(TEMPLATE, "sums->ue[v] = ML_V(fnma)", "sums->ue[v] = ML_V(fma)"),
    Mutant(TEMPLATE, "sums->ee[v] = ML_V(fma)(e, e, sums->ee[v])", "sums->ee[v] = ML_V(fma)(e, u, sums->ee[v])"),
    Mutant(TEMPLATE, "if (ML_V(any_negative)(u))\n            return 1;", ""),
    Mutant(TEMPLATE, "count ? ML_V(any_zero_or_outside)(u, row->limit) : ML_V", "0 ? 0 : ML_V"),
    Mutant(TEMPLATE, "if (count)\n                e = ML_V(drop_zero)(e, u[v], count);", ""),
    Mutant(TEMPLATE, "state->excess += (double)(equal - 1);", ""),
    Mutant(TEMPLATE, "state->squares += (double)equal;", ""),
    Mutant(TEMPLATE, "state->shifted += ML_V(sum)(sums->ue);", ""),
    Mutant(TEMPLATE, "state->top = state->columns + begin;", "state->top = state->columns + begin + 32;"),
    Mutant(TEMPLATE, "state->columns += n;", "", survives="the search for the first maximum only starts earlier"),
    # the template: blocks
    Mutant(TEMPLATE, "#define ML_BLOCK 2048", "#define ML_BLOCK 4096"),
    Mutant(TEMPLATE, "if (whole < end && !raise) {", "if (0) {"),
    Mutant(TEMPLATE, "ML_NAME(fwd_raise)(x, j, end, scale", "ML_NAME(fwd_raise)(x, j + 32, end, scale"),
    Mutant(
        TEMPLATE,
        "ML_NAME(fwd_body)(x, n, scale, MEMLEAN_WANT_SHIFTED, state);",
        "ML_NAME(fwd_body)(x, n, scale, 0, state);",
    ),
    # the template: backward
    Mutant(TEMPLATE, "entropy ? ML_V(fnma)(slope, u[v], factor)", "entropy ? ML_V(fma)(slope, u[v], factor)"),
    Mutant(
        TEMPLATE, "memcpy(dx + whole, chunk, (size_t)(n - whole)", "memcpy(dx + whole, chunk, (size_t)(n - whole - 1)"
    ),
    Mutant(TEMPLATE, "if (gradient->slope == 0.0)", "if (1)"),
    Mutant(TEMPLATE, "if (ML_UNLIKELY(ML_V(any_outside)(u, row->limit))) {\n        for", "if (0) {\n        for"),
    # vectors
    Mutant(
        AVX2, "y[v + 2] = _mm256_castsi256_ps(_mm256_and_si256(pairs, high));", "y[v + 2] = _mm256_castsi256_ps(pairs);"
    ),
    Mutant(AVX2, "_mm256_blend_epi16(even, odd, 0xaa)", "_mm256_blend_epi16(even, odd, 0x55)"),
    Mutant(
        AVX2,
        "_mm256_add_pd(_mm256_add_pd(d[0], d[1]), _mm256_add_pd(d[2], d[3]))",
        "_mm256_add_pd(_mm256_add_pd(d[0], d[2]), _mm256_add_pd(d[1], d[3]))",
    ),
    Mutant(AVX2, "avx2_any_above(u, limit, _mm256_set1_epi32(1))", "avx2_any_above(u, limit, _mm256_setzero_si256())"),
    Mutant(
        AVX512,
        "_mm512_add_pd(_mm512_add_pd(d[0], d[1]), _mm512_add_pd(d[2], d[3]))",
        "_mm512_add_pd(_mm512_add_pd(d[0], d[3]), _mm512_add_pd(d[2], d[1]))",
    ),
    Mutant(AVX512, "_mm512_mask_mov_epi16(even, 0xaaaaaaaau", "_mm512_mask_mov_epi16(even, 0x55555555u"),
    Mutant(AVX512, "_mm512_cmpgt_epu32_mask(highest", "_mm512_cmpgt_epi32_mask(highest"),
    Mutant(ARRAY, "a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];\n    return b;", "b.lane[i];\n    return b;"),
    Mutant(ARRAY, "d[i] += d[i + 4];", "d[i] += d[7 - i];"),
    Mutant(ARRAY32, "table[n & 7]", "table[n & 3]"),
    # core: rows
    Mutant(CORE, "row /= p->row_sizes[d];", "row /= p->row_sizes[0];"),
    Mutant(
        CORE,
        "return p->row_dims > 0 ? offset + row * row_strides[0] : 0;",
        "return p->row_dims > 0 ? row * row_strides[0] : 0;",
    ),
    Mutant(CORE, "if (p->row_mask && !p->row_mask[row])", "if (p->row_mask && p->row_mask[row])"),
    Mutant(CORE, "p->candidates > 0 && k == p->candidates;", "k > 0;"),
    Mutant(
        CORE,
        "limit < highest ? limit : highest}",
        "limit}",
        survives="a float cast of a limit beyond FLT_MAX is +inf, which compares as well",
    ),
    Mutant(CORE, "inverse < highest ? inverse : highest, rate", "inverse, rate"),
    Mutant(CORE, "rate < highest ? rate : highest,", "rate,"),
    Mutant(CORE, ".max = dtype == MEMLEAN_F64 ? -DBL_MAX : (double)-FLT_MAX}", ".max = -INFINITY}"),
    Mutant(CORE, "if (a.max < b.max)\n", "if (a.max > b.max)\n"),
    Mutant(CORE, ".excess = a.excess + b.excess", ".excess = a.excess"),
    Mutant(CORE, ".shifted = a.shifted + b.shifted", ".shifted = a.shifted"),
    Mutant(CORE, ".squares = a.squares + b.squares", ".squares = a.squares"),
    Mutant(
        CORE,
        "b.max > a.max ? a.columns + b.top : a.top",
        "b.max > a.max ? b.top : a.top",
        survives="the search for the first maximum only starts earlier",
    ),
    Mutant(CORE, "b.max > a.max ? a.columns + b.top : a.top", "b.max >= a.max ? a.columns + b.top : a.top"),
    # core: results
    Mutant(CORE, "const int valid = state.excess >= 0;", "const int valid = state.excess >= -1;"),
    Mutant(CORE, "(chosen - state.max) * scale->inverse_temperature - log_sum", "(chosen - state.max) - log_sum"),
    Mutant(CORE, "state.shifted / sum * scale->inverse_temperature", "state.shifted / sum"),
    Mutant(CORE, "entropy > highest ? highest : entropy", "entropy"),
    Mutant(CORE, "MEMLEAN_STATISTICS, state.max + 0.0", "MEMLEAN_STATISTICS, state.max"),
    Mutant(
        CORE, "p->entropy ? mean_shift : 0", "mean_shift", survives="the third statistic is read with entropy alone"
    ),
    Mutant(CORE, "column < 0 || column >= p->vocab) {\n            store", "0) {\n            store"),
    Mutant(CORE, "{p->entropy, p->logsumexp, p->max, p->sum_p2}", "{p->logsumexp, p->max, p->sum_p2}"),
    Mutant(CORE, "{p->entropy, p->logsumexp, p->max, p->sum_p2}", "{p->entropy, p->max, p->sum_p2}"),
    Mutant(CORE, "{p->entropy, p->logsumexp, p->max, p->sum_p2}", "{p->entropy, p->logsumexp, p->sum_p2}"),
    Mutant(CORE, "{p->entropy, p->logsumexp, p->max, p->sum_p2}", "{p->entropy, p->logsumexp, p->max}"),
    Mutant(CORE, "none = state.excess == -1 ? -INFINITY : NAN", "none = NAN"),
    Mutant(CORE, "valid ? state.max + 0.0 : none", "valid ? state.max : none"),
    Mutant(CORE, "state.max * scale->inverse_temperature + log_sum", "state.max + log_sum"),
    Mutant(CORE, "store(real(p), p->logp, row * p->candidates + k, 0);", ";"),
    # core: backward
    Mutant(CORE, "needed |= grad != 0;", ""),
    Mutant(CORE, "int needed = g->grad_entropy != 0;", "int needed = 0;"),
    Mutant(
        CORE,
        "-ml_expm1(logp) * own",
        "(1 - probability) * own",
    ),
    Mutant(CORE, "const double t = lowest > distance ? lowest : distance;", "const double t = distance;"),
    Mutant(CORE, "= others + g->grad_entropy", "= others + own + g->grad_entropy"),
    Mutant(CORE, "g->grad_entropy * (t - g->mean_shift)", "g->grad_entropy * t"),
    Mutant(CORE, "return value > highest ? highest : value < -highest ? -highest : value;", "return value;"),
    Mutant(CORE, "if (!isfinite(factor) || !isfinite(slope)) {", "if (0) {"),
    Mutant(CORE, "in_place ? chosen[k] : load", "0 ? chosen[k] : load"),
    Mutant(CORE, "index[l] == index[k] ? upstream", "l == k ? upstream"),
    Mutant(
        CORE,
        "ignored(p, index[k]) || column < begin || column >= end",
        "ignored(p, index[k]) || column < begin || column > end",
    ),
    Mutant(CORE, "memset(gradient, 0, (size_t)((last - first) * size));", ";"),
    Mutant(CORE, "p->grad_logp && !ignored(p, p->index[i])", "p->grad_logp"),
    # core: the kept set
    Mutant(CORE, "if (column >= 0 && column < columns)", "if (column >= 0 && column <= columns)"),
    Mutant(CORE, "((bytes & sevens) + sevens) | bytes", "(bytes & sevens) + sevens"),
    Mutant(CORE, "if (!ignored(p, token))\n            keep_column", "keep_column"),
    Mutant(CORE, "keep_column(kept, token - p->first_token - begin, n);", ";"),
    Mutant(
        CORE,
        "for (int64_t j = whole; j < n; j++)\n            if (mask",
        "for (int64_t j = n; j < n; j++)\n            if (mask",
    ),
    Mutant(CORE, "store(p->dtype, &minus_inf, 0, -INFINITY);", "store(p->dtype, &minus_inf, 0, 0);"),
    Mutant(CORE, "memset(destination, 0, bytes);", ";"),
    Mutant(
        CORE,
        "kept + (j - begin) / 64;\n        const void *x = columns(p, offset, j, min64(",
        "kept;\n        const void *x = columns(p, offset, j, min64(",
    ),
    # core: checks
    Mutant(CORE, "y < 0 || y >= p->index_limit", "y < 0 || y > p->index_limit"),
    Mutant(CORE, "temperature > 0 && temperature < INFINITY", "temperature > 0"),
    Mutant(
        CORE, "if (rows > 0 && !offsets_fit(p, p->row_strides, p->vocab_stride))\n        return MEMLEAN_EARGUMENT;", ""
    ),
    Mutant(CORE, "p->kept_ids[*position] < 0 || p->kept_ids[*position] >= p->vocab", "p->kept_ids[*position] < 0"),
    Mutant(CORE, "if (p->kept_offsets[p->rows] != p->kept_count) {", "if (0) {"),
    Mutant(CORE, "if (rows != p->rows)\n        return MEMLEAN_EARGUMENT;", ""),
    # the binding
    Mutant(
        BINDING,
        "if (segments == 1 || params.rows >= few_rows) {",
        "if (1) {",
        survives="the same bits by the other way, only slower",
    ),
    Mutant(
        BINDING,
        "for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces;)",
        "for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces - 1;)",
    ),
    Mutant(BINDING, "params.entropy = return_entropy ? entropy.data_ptr() : nullptr;", ""),
    Mutant(
        CHECKS, "params.temperature_step = options.temperature->numel() == 1 ? 0 : 1;", "params.temperature_step = 0;"
    ),
    Mutant(CHECKS, "params.vocab_stride = logits.stride(dims - 1);", "params.vocab_stride = 1;"),
    # the generic path
    Mutant(REFERENCE, "x.sub_(top)\n        if row", "if row"),
    Mutant(REFERENCE, "x.clamp_(min=_lowest(real))\n            e = x.exp()", "e = x.exp()"),
    Mutant(REFERENCE, "x.scatter_(-1, where_top, 0.0).sum", "x.sub(1 / x.shape[-1]).sum"),
    Mutant(REFERENCE, "excess = torch.where(top.isfinite(), excess, nothing)", "pass"),
    Mutant(REFERENCE, "(log_sum - mean_shift).clamp(max=math.log(vocab))", "(log_sum - mean_shift)"),
    Mutant(REFERENCE, "-logp.expm1() * own", "(1 - logp.exp()) * own"),
    Mutant(REFERENCE, "h * (t - mean_shift)))", "h * t))"),
    Mutant(REFERENCE, "masked_fill_(unused, 0.0)", "masked_fill_(unused & False, 0.0)"),
    Mutant(REFERENCE, "budget // (logits.shape[-1] * real.itemsize)", "budget // (logits.shape[-1])"),
    Mutant(
        REFERENCE,
        "kept.gather(-1, column) | counted[:, k : k + 1]",
        "kept.gather(-1, column) | (counted[:, k : k + 1] & (k == 0))",
    ),
    # autograd
    Mutant(FUNCTIONAL, "torch.autograd.graph.increment_version(logits)", "pass"),
    Mutant(FUNCTIONAL, "ctx.logits_overwritten = True\n            _ops", "_ops"),
    Mutant(FUNCTIONAL, "return None if temperature == 1 else", "return None if temperature >= 1 else"),
    # shards
    Mutant(DISTRIBUTED, "nothing = excess == -1", "nothing = excess == -2", tests="test_distributed"),
    Mutant(DISTRIBUTED, "part = weight * (1 + excess)", "part = 1 + excess", tests="test_distributed"),
    Mutant(DISTRIBUTED, "part * (mean_shift + shift.clamp(min=lowest))", "part * mean_shift", tests="test_distributed"),
    Mutant(DISTRIBUTED, "begins[1:] == ends[:-1]", "begins[1:] >= ends[:-1]", tests="test_distributed"),
]


def run(command: list[str], folder: Path, **environment: str) -> bool:
    """Whether it succeeds; what it prints is dropped."""
    try:
        done = subprocess.run(
            command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=1200
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


class DoesNotCompile(Exception):
    pass


class Tree:
    """A copy of the tree, in which the C tests and the extension are built."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("csrc", "tests", "memlean", "tools", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, folder)
        for name in ("memlean_autoload.py", "memlean_autoload.pth"):
            shutil.copy2(ROOT / name, folder)

    # (folder, flags, programs), the quickest first
    C_TESTS = (
        ("build/c", "", (("exp_sweep", "9973"), ("fuzz_token_logprob", "4000"), ("test_kernels",))),
        (
            "build/sanitize",
            "-fno-inline -fsanitize=address,undefined -fno-sanitize-recover=all",
            (("fuzz_token_logprob", "4000"),),
        ),
    )

    def killer_in_c(self) -> str:
        for folder, flags, programs in self.C_TESTS:
            targets = [f"../{folder}/{program}" for program, *_ in programs]
            options = [f"BUILD=../{folder}", f"CFLAGS=-O1 {flags} -Wno-error"]
            if not run(["make", "-C", "csrc", *targets, *options], self.folder):
                raise DoesNotCompile
            for program, *arguments in programs:
                if not run([str(self.folder / folder / program), *arguments], self.folder):
                    return f"{folder}/{program}"
        return ""

    def build_extension(self) -> bool:
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        return run(command, self.folder, PYTHONPATH="tools", MEMLEAN_BUILD="require")

    def killer_in_python(self, tests: str) -> str:
        files = [f"tests/{name}.py" for name in tests.split()]
        for file in files:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", file]
            if not run(command, self.folder, PYTHONPATH=str(self.folder)):
                return file
        return ""

    def killer(self, mutant: Mutant, c_tests_alone: bool) -> str:
        path = self.folder / mutant.file
        original, status = path.read_text(), path.stat()
        assert original.count(mutant.old) == 1, f"{mutant.file} holds {original.count(mutant.old)} times: {mutant.old}"
        path.write_text(original.replace(mutant.old, mutant.new))
        try:
            if mutant.file.startswith("csrc") and mutant.file not in (BINDING, CHECKS):
                killer = self.killer_in_c()
                if killer or c_tests_alone:
                    return killer
            if mutant.file.startswith("csrc") and not self.build_extension():
                raise DoesNotCompile
            return self.killer_in_python(mutant.tests)
        finally:
            path.write_text(original)
            if mutant.file.startswith("memlean"):
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose file, old or new text contains this")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many from the start")
    parser.add_argument("--c-tests", action="store_true", help="the C tests alone, on the C room: minutes, not hours")
    parser.add_argument("--list", action="store_true", help="check that each text stands in its file once, run nothing")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if any(options.only in text for text in (m.file, m.old, m.new))]
    if options.c_tests:
        chosen = [m for m in chosen if m.file.startswith("csrc") and m.file not in (BINDING, CHECKS)]
    if options.list:
        for mutant in chosen:
            count = (ROOT / mutant.file).read_text().count(mutant.old)
            print(f"{'ok' if count == 1 else f'{count} times':10}{mutant.file}: {mutant.old!r} -> {mutant.new!r}")
        return any((ROOT / m.file).read_text().count(m.old) != 1 for m in chosen)
    chosen = chosen[options.skip :]
    killed = explained = 0
    alive = []
    with tempfile.TemporaryDirectory() as name:
        tree = Tree(Path(name))
        assert not tree.killer_in_c(), "the C tests fail without a mutant"
        assert options.c_tests or tree.build_extension(), "the extension does not build without a mutant"
        for number, mutant in enumerate(chosen, 1):
            begin = time.monotonic()
            try:
                killer = tree.killer(mutant, options.c_tests)
                verdict = f"killed by {killer}" if killer else f"survives: {mutant.survives or 'NO TEST FAILS'}"
            except DoesNotCompile:
                killer, verdict = "", "DOES NOT COMPILE, which shows nothing"
            killed += bool(killer)
            explained += bool(not killer and mutant.survives)
            if not killer and not mutant.survives:
                alive.append(mutant)
            print(
                f"[{number}/{len(chosen)}, {time.monotonic() - begin:.0f} s] {mutant.file}: {mutant.old!r} -> "
                f"{mutant.new!r}: {verdict}",
                flush=True,
            )
    print(f"{len(chosen)} mutants: {killed} killed, {explained} alive as explained, {len(alive)} alive")
    return bool(alive)


if __name__ == "__main__":
    sys.exit(main())
