"""Environment variables, a missing or broken library, and what `doctor` says of them."""

import json
import shutil
import sys
from pathlib import Path

import child
import pytest
import torch

import memlean
from memlean import _native, _ops, doctor, selftest

PACKAGE = Path(memlean.__file__).parent
needs_native = pytest.mark.skipif(_ops.native is None, reason="the C kernels are not in use in this run")

SCORE = """
import torch
from memlean import selective_log_softmax
torch.manual_seed(0)
logits = torch.randn(4, 3000, dtype=torch.float64, requires_grad=True)
logps, entropy = selective_log_softmax(logits, torch.arange(4), return_entropy=True)
(logps.sum() + entropy.sum()).backward()
print([*logps.tolist(), *entropy.tolist(), *logits.grad[:, :8].flatten().tolist()])
"""


@pytest.mark.parametrize(("name", "value"), [("MEMLEAN_DISABLE_NATIVE", "yes"), ("MEMLEAN_HUGEPAGE", "2")])
@needs_native
def test_flags_are_0_or_1(name, value):
    result = child.run("-c", "import memlean", **{name: value})
    assert result.returncode == 1
    assert result.stderr.strip().endswith(f"ValueError: environment variable {name} must be 0 or 1, got '{value}'")


@pytest.mark.parametrize("value", ["sse2", "avx-512"])
@needs_native
def test_an_unknown_instruction_set_names_the_known_ones(value):
    result = child.run("-c", "import memlean", MEMLEAN_ISA=value)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: environment variable MEMLEAN_ISA")
    for fact in (*_ops.native.isa_available(), repr(value)):
        assert fact in last


@pytest.fixture(scope="module")
def score():
    """What SCORE prints here by default."""
    return child.output_of("-c", SCORE)


def test_an_empty_variable_is_an_unset_one(score):
    blank = dict.fromkeys(("MEMLEAN_DISABLE_NATIVE", "MEMLEAN_ISA", "MEMLEAN_HUGEPAGE", "MEMLEAN_CHUNK_BYTES"), " ")
    assert child.output_of("-c", SCORE, **blank) == score


@needs_native
def test_huge_pages_change_no_number(score):
    assert child.output_of("-c", SCORE, MEMLEAN_HUGEPAGE="0") == score


@needs_native
@pytest.mark.parametrize("spelling", ["generic", " GENERIC "])
def test_the_instruction_set_asked_for_is_used(spelling):
    facts = json.loads(child.output_of("-m", "memlean", "doctor", "--json", MEMLEAN_ISA=spelling))
    assert facts["isa_active"] == "generic"
    assert facts["isa_available"] == _ops.native.isa_available()


@needs_native
def test_doctor_on_a_sound_installation():
    text = child.output_of("-m", "memlean", "doctor")
    for fact in (memlean.__version__, sys.version.split()[0], _ops.native.__file__, "torch", "threads"):
        assert fact in text
    assert "C kernels, " + _ops.native.isa_available()[-1] in text


def test_doctor_when_the_library_is_switched_off():
    result = child.run("-m", "memlean", "doctor", MEMLEAN_DISABLE_NATIVE="1")
    assert result.returncode == 1
    assert "MEMLEAN_DISABLE_NATIVE=1" in result.stdout
    assert "generic path" in result.stdout
    assert result.stderr == ""  # who switches it off needs no warning


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("MEMLEAN_HUGEPAGE", "9", "MEMLEAN_HUGEPAGE must be 0 or 1, got '9'"),
        ("MEMLEAN_CHUNK_BYTES", "64M", "MEMLEAN_CHUNK_BYTES must be a positive number of bytes, got '64M'"),
        ("MEMLEAN_MASK", "cuda", "MEMLEAN_MASK must be npu or auto, got 'cuda'"),
        ("MEMLEAN_PATCH", "nobody", "got 'nobody'"),
        pytest.param("MEMLEAN_ISA", "sse2", "got 'sse2'", marks=needs_native),
    ],
)
def test_doctor_reports_a_wrong_value_as_broken(name, value, complaint):
    result = child.run("-m", "memlean", "doctor", "--json", **{name: value})
    assert (result.returncode, result.stderr) == (2, "")
    facts = json.loads(result.stdout)
    (broken,) = facts["broken"]
    assert name in broken and complaint in broken
    assert facts["environment"] == {name: value}


def test_doctor_and_selftest_find_wrong_results(monkeypatch, capsys):
    forward = _ops.token_logprob_forward
    monkeypatch.setattr(
        _ops, "token_logprob_forward", lambda *a, **k: [x + 1e-4 * x.isfinite() for x in forward(*a, **k)]
    )
    assert selftest.report() == 1
    printed = capsys.readouterr().out
    assert "FAILED  values, entropy and gradients" in printed and "expected" in printed
    assert doctor.report() == 2
    assert capsys.readouterr().out.endswith("broken\n")


@needs_native
def test_selftest_finds_an_instruction_set_with_other_bits(monkeypatch):
    forward = _ops.token_logprob_forward
    if len(_ops.native.isa_available()) == 1:
        pytest.skip("this CPU has one instruction set alone")

    def one_is_off(*args, **kwargs):
        logps, *others = forward(*args, **kwargs)
        return logps * (1 + torch.finfo(logps.dtype).eps * (_ops.native.isa_active() != "generic")), *others

    monkeypatch.setattr(_ops, "token_logprob_forward", one_is_off)
    (failure,) = selftest.run()
    assert f"logps of {_ops.native.isa_available()[1]} and of generic differ" in failure


def test_selftest_passes_and_leaves_no_trace(threads):
    threads(3)
    state = torch.get_rng_state()
    active = _ops.native and _ops.native.isa_active()
    lines = []
    assert selftest.run(lines.append) == []
    assert len(lines) == len(selftest.CHECKS)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == 3
    assert (_ops.native and _ops.native.isa_active()) == active


def _remove(library: Path) -> None:
    library.unlink()


def _rename(library: Path) -> None:
    library.rename(library.with_name("_C.cpython-27-x86_64-linux-gnu.so"))


def _cut_off(library: Path, size: int) -> None:
    with library.open("r+b") as file:
        file.truncate(size)


def _replace(library: Path, old: bytes, new: bytes) -> None:
    content = library.read_bytes()
    assert old in content and len(old) == len(new)
    library.write_bytes(content.replace(old, new))


def _to_another_machine(library: Path) -> None:
    with library.open("r+b") as file:
        file.seek(18)
        file.write((243).to_bytes(2, sys.byteorder))  # e_machine: RISC-V


def _without_the_library(package: Path) -> None:
    _remove(package)
    (package.parent / "_not_built.txt").write_text("command 'cc' failed: No such file or directory")


DAMAGE = {
    "missing": (_remove, "there is no file _C."),
    "not built": (_without_the_library, "memlean was installed without it: command 'cc' failed: No such file"),
    "for another Python": (_rename, "only _C.cpython-27-x86_64-linux-gnu.so, for another Python or platform"),
    "empty": (lambda library: _cut_off(library, 0), "is cut off after 0 bytes"),
    "cut off in the headers": (lambda library: _cut_off(library, 512), "is cut off: it has 512 bytes and should have"),
    # The dynamic loader maps it, and the process dies at the first page that is not there (SIGBUS).
    "cut off after them": (lambda library: _cut_off(library, 60_000), "is cut off: it has 60000 bytes and should have"),
    "of another kind": (lambda library: library.write_text("no library\n" * 300), "is not a shared library of Linux"),
    "for another machine": (_to_another_machine, "is a library for riscv64, this Python is one for "),
    "for another torch": (
        lambda library: _replace(library, b"\0aoti_torch_get_numel\0", b"\0aoti_torch_got_numel\0"),
        f"was built with torch {torch.__version__}, which the installed torch {torch.__version__} does not fit: ",
    ),
}


@pytest.fixture(params=DAMAGE)
def broken_installation(request, tmp_path):
    """The folder of a copy of the package whose library is damaged, and what the warning should say of it."""
    if not (libraries := list(PACKAGE.glob("_C.*"))):
        pytest.skip("no built library to damage")
    damage, complaint = DAMAGE[request.param]
    shutil.copytree(PACKAGE, tmp_path / "memlean", ignore=shutil.ignore_patterns("__pycache__"))
    for library in libraries:
        damage(tmp_path / "memlean" / library.name)
    return tmp_path, complaint


# The second call of SCORE shows that the warning comes once.
DIAGNOSE = f"{SCORE}{SCORE}\nimport sys; from memlean.doctor import report; sys.exit(report(as_json=True))"


def assert_works_without(result, score, complaint):
    """One warning that says why; the numbers of a sound installation twice; the verdict of doctor."""
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("RuntimeWarning") == 1
    for fact in ("memlean", "_C", complaint, "generic path", "doctor", "MEMLEAN_DISABLE_NATIVE"):
        assert fact in result.stderr
    assert "circular import" not in result.stderr

    first, second, diagnosis = result.stdout.split("\n", 2)
    assert first == second
    assert json.loads(first) == pytest.approx(json.loads(score), rel=1e-12, abs=1e-14)

    facts = json.loads(diagnosis)
    assert facts["native"] is False
    assert complaint in facts["native_missing_because"]
    assert facts["paths"]["cpu"] == "generic path"
    assert facts["broken"] == []
    return facts


def test_a_broken_library_means_one_warning_and_the_same_numbers(broken_installation, score):
    folder, complaint = broken_installation
    # -S: without the finders that an editable installation adds, which would find the sound library.
    result = child.run("-S", "-c", DIAGNOSE, pythonpath=folder, OMP_NUM_THREADS="1")
    assert assert_works_without(result, score, complaint)["location"] == str(folder / "memlean")
    assert "torch.manual_seed" not in result.stderr and "from memlean import" not in result.stderr


@needs_native
def test_an_older_torch_means_the_same(score):
    # Stands in for a torch 2.9: the library must not even be tried, whatever symbols are there.
    older = "import torch; torch.__version__ = '2.9.1+cpu'"
    result = child.run("-c", f"{older}{DIAGNOSE}", OMP_NUM_THREADS="1")
    assert_works_without(result, score, "needs torch 2.10 or newer, installed is torch 2.9.1+cpu")
    assert "pip install 'torch>=2.10'" in result.stderr


def test_a_library_that_raises_is_a_broken_installation(monkeypatch):
    def raises(name):
        raise RuntimeError("something new")

    monkeypatch.setattr(_native.importlib, "import_module", raises)
    with pytest.warns(RuntimeWarning, match=r"_C\..* raised RuntimeError: something new") as caught:
        native, problem = _native.load()
    assert native is None and len(caught) == 1
    monkeypatch.setattr(_ops, "native", native)
    monkeypatch.setattr(_ops, "native_problem", problem)
    facts = doctor.collect()
    assert facts["exit_code"] == 2
    assert "something new" in facts["broken"][0]
