"""Environment variables, a missing or broken library, and what `doctor` says of them."""

import json
import shutil
import sys
from pathlib import Path

import child
import pytest

import memlean
from memlean import _ops

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


def _remove(library: Path) -> None:
    library.unlink()


def _truncate(library: Path) -> None:
    # Into the headers. Cut off later, every shared object kills its process inside the dynamic loader.
    with library.open("r+b") as file:
        file.truncate(512)


def _empty(library: Path) -> None:
    library.write_bytes(b"")


def _of_another_kind(library: Path) -> None:
    library.write_text("not a shared object\n" * 300)


@pytest.fixture(params=[_remove, _truncate, _empty, _of_another_kind], ids=lambda damage: damage.__name__.strip("_"))
def broken_installation(request, tmp_path):
    """The folder of a copy of the package whose library is damaged."""
    if not (libraries := list(PACKAGE.glob("_C.*"))):
        pytest.skip("no built library to damage")
    shutil.copytree(PACKAGE, tmp_path / "memlean", ignore=shutil.ignore_patterns("__pycache__"))
    for library in libraries:
        request.param(tmp_path / "memlean" / library.name)
    return tmp_path


# The second call of SCORE shows that the warning comes once.
DIAGNOSE = f"{SCORE}{SCORE}\nimport sys; from memlean.doctor import report; sys.exit(report(as_json=True))"


def test_a_broken_library_means_one_warning_and_the_same_numbers(broken_installation, score):
    # -S: without the finders that an editable installation adds, which would find the sound library.
    result = child.run("-S", "-c", DIAGNOSE, pythonpath=broken_installation)
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("RuntimeWarning") == 1
    for fact in ("memlean", "_C", "generic path", "doctor", "MEMLEAN_DISABLE_NATIVE"):
        assert fact in result.stderr
    assert "circular import" not in result.stderr

    first, second, diagnosis = result.stdout.split("\n", 2)
    assert first == second
    assert json.loads(first) == pytest.approx(json.loads(score), rel=1e-12, abs=1e-14)

    facts = json.loads(diagnosis)
    assert facts["location"] == str(broken_installation / "memlean")
    assert facts["native"] is False
    assert "_C" in facts["native_missing_because"]
    assert facts["paths"]["cpu"] == "generic path"
