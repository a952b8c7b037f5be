"""The bookkeeping, on the real twinkle packages and on copies of their source with one thing changed."""

import importlib
import importlib.metadata
import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import twinkle.model.megatron.megatron
import twinkle.model.megatron.strategy.megatron
import twinkle.model.transformers.transformers
import twinkle.processor.base
import twinkle.utils.torch_utils as torch_utils

import memlean
from memlean.integrations import _patch
from memlean.integrations.twinkle import MODEL, PROCESSOR, STRATEGY, TARGET, TORCH_UTILS

FIXES = ["twinkle.selective_log_softmax", "twinkle.causal_mask", "twinkle.report_logits"]


def everything_replaceable():
    """Every place that a fix may write to, and what is there."""
    symbols = {str(s): _patch._current(s) for fix in TARGET.fixes for s in fix.symbols}
    original = torch_utils.selective_log_softmax
    held = {
        f"{name}.{attribute}": value
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        for attribute, value in list(vars(module).items())
        if value is original
    }
    return symbols | held


def unchanged(before):
    return (
        all(after is before[name] for name, after in everything_replaceable().items())
        and before.keys() == everything_replaceable().keys()
    )


def statuses(report):
    return {record.name: record.status for record in report.records}


# --- apply and undo -------------------------------------------------------------------------------------------------


def test_newest_release_needs_all_three():
    """Fails when a release brings a fix of its own, or moves what memlean replaces."""
    assert importlib.metadata.version("twinkle-kit") == "0.5.1"
    assert statuses(_patch.examine("twinkle")) == dict.fromkeys(FIXES, "applies")
    assert statuses(memlean.patch("twinkle")) == dict.fromkeys(FIXES, "applied")


def test_patch_50_times_and_undo_once(monkeypatch):
    before = everything_replaceable()
    assert len(before) == 5 + 6 - 1  # six holders of one function, and four other functions
    first = memlean.patch("twinkle")
    after = everything_replaceable()
    for name in before:
        assert after[name] is not before[name]
    for _ in range(49):
        assert statuses(memlean.patch("twinkle")) == statuses(first)
    assert all(everything_replaceable()[name] is after[name] for name in after)  # not one layer more

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(200)
    try:
        torch_utils.selective_log_softmax(torch.randn(2, 3, 8), torch.zeros(2, 3).long())
    finally:
        sys.setrecursionlimit(limit)
    assert memlean.unpatch().records == ()
    assert unchanged(before)


def test_part_of_the_fixes_and_a_shared_symbol():
    """forward_backward serves two fixes: it is put back when the second of them goes."""
    before = everything_replaceable()
    step = f"{MODEL}.MegatronModel.forward_backward"
    memlean.patch("twinkle", exclude="selective_log_softmax")
    assert torch_utils.selective_log_softmax is before[f"{TORCH_UTILS}.selective_log_softmax"]
    left = memlean.unpatch("twinkle.causal_mask")
    assert statuses(left) == {"twinkle.report_logits": "applied"} and memlean.is_patched("twinkle.report_logits")
    assert everything_replaceable()[step] is not before[step]
    memlean.unpatch("twinkle.report_logits")
    assert unchanged(before) and not memlean.is_patched("twinkle")


def test_patched_takes_back_only_what_it_applied():
    before = everything_replaceable()
    with memlean.patched("twinkle", only="report_logits"):
        with memlean.patched("twinkle") as inner:
            assert statuses(inner) == dict.fromkeys(FIXES, "applied")
        assert statuses(memlean.report()) == {"twinkle.report_logits": "applied"}
    assert unchanged(before)
    memlean.patch("twinkle")
    with memlean.patched("twinkle"):
        pass
    assert statuses(memlean.report()) == dict.fromkeys(FIXES, "applied")


def test_patched_undoes_after_an_error():
    before = everything_replaceable()
    with pytest.raises(RuntimeError, match="inside"), memlean.patched("twinkle"):
        raise RuntimeError("inside")
    assert unchanged(before)


def test_two_threads_patch_and_undo_while_a_third_calls():
    before = everything_replaceable()
    logits, index = torch.randn(2, 3, 64), torch.randint(64, (2, 3))
    expected = torch_utils.selective_log_softmax(logits, index)
    errors, calls, done = [], [], threading.Event()

    def attempt(work):
        try:
            work()
        except Exception as error:
            errors.append(error)

    def patch_and_undo():
        for i in range(200):
            memlean.patch("twinkle")
            if i % 2:
                memlean.unpatch("twinkle")
            else:
                memlean.unpatch()

    def call():
        while not done.is_set():
            got = twinkle.utils.selective_log_softmax(logits, index)
            assert torch.allclose(got, expected, atol=1e-5)
            calls.append(None)

    caller = threading.Thread(target=attempt, args=(call,))
    patchers = [threading.Thread(target=attempt, args=(patch_and_undo,)) for _ in range(2)]
    for thread in (caller, *patchers):
        thread.start()
    for thread in patchers:
        thread.join()
    done.set()
    caller.join()
    assert errors == [] and calls
    memlean.unpatch()
    assert unchanged(before)


def test_a_module_imported_while_patched(monkeypatch, tmp_path):
    (tmp_path / "late_user.py").write_text("from twinkle.utils import selective_log_softmax\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    original = torch_utils.selective_log_softmax
    memlean.patch("twinkle")
    late_user = importlib.import_module("late_user")
    assert late_user.selective_log_softmax is torch_utils.selective_log_softmax is not original
    memlean.unpatch()
    assert late_user.selective_log_softmax is original
    del sys.modules["late_user"]


def test_a_function_kept_in_a_closure_passes_through_after_undo():
    original = torch_utils.selective_log_softmax
    memlean.patch("twinkle")
    kept = torch_utils.selective_log_softmax
    memlean.unpatch()
    logits, index = torch.randn(2, 3, 8, dtype=torch.bfloat16), torch.zeros(2, 3).long()
    assert torch.equal(kept(logits, index), original(logits, index))  # bfloat16, as the original returns it


def test_replacements_keep_what_the_trainer_dispatches_by():
    original = twinkle.model.megatron.megatron.MegatronModel.forward_backward
    with memlean.patched("twinkle"):
        replacement = twinkle.model.megatron.megatron.MegatronModel.forward_backward
        for attribute in ("__name__", "__qualname__", "_execute", "_collect", "_dispatch", "_lazy_collect", "_sync"):
            assert getattr(replacement, attribute) == getattr(original, attribute)


def test_subclasses_that_call_super_are_covered():
    """The server's backend and the multi-LoRA model override forward_backward and call super()."""
    from twinkle.model.megatron.multi_lora_megatron import MultiLoraMegatronModel

    assert "forward_backward" in vars(MultiLoraMegatronModel)
    source = _patch.Source.installed("twinkle")
    for module, name in [
        ("twinkle.model.megatron.multi_lora_megatron", "MultiLoraMegatronModel"),
        ("twinkle.server.model.backends.megatron_model", "_MegatronTinkerCompatMixin"),
    ]:
        for method in ("forward_backward", "forward_only"):
            function = source.function(module, f"{name}.{method}")
            assert {"super", method} <= _patch.names(function)


# --- others, and failures -------------------------------------------------------------------------------------------


def foreign_wrapper(function):
    def selective_log_softmax(*args, **kwargs):
        return function(*args, **kwargs)

    return selective_log_softmax


def test_foreign_is_refused_and_force_stacks(monkeypatch, caplog):
    other = foreign_wrapper(torch_utils.selective_log_softmax)
    monkeypatch.setattr(torch_utils, "selective_log_softmax", other)
    with caplog.at_level(logging.WARNING, "memlean"):
        report = memlean.patch("twinkle")
    record = report["selective_log_softmax"]
    assert record.status == "foreign" and "foreign_wrapper" in record.reason
    assert statuses(report)["twinkle.report_logits"] == "applied"  # the rest goes on
    assert torch_utils.selective_log_softmax is other
    assert any("foreign" in r.message for r in caplog.records)

    forced = memlean.patch("twinkle", force=True)
    assert forced["selective_log_softmax"].status == "applied"
    assert torch_utils.selective_log_softmax is not other
    memlean.unpatch()
    assert torch_utils.selective_log_softmax is other


def test_wrapped_by_others_afterwards_is_left_in_place(caplog):
    original = torch_utils.selective_log_softmax
    memlean.patch("twinkle")
    other = foreign_wrapper(torch_utils.selective_log_softmax)
    torch_utils.selective_log_softmax = other
    try:
        memlean.patch("twinkle")
        assert torch_utils.selective_log_softmax is other  # no second layer on top
        with caplog.at_level(logging.WARNING, "memlean"):
            memlean.unpatch()
        assert torch_utils.selective_log_softmax is other and twinkle.utils.selective_log_softmax is original
        assert any("passes through" in r.message for r in caplog.records)
        logits = torch.randn(2, 3, 8, dtype=torch.bfloat16)
        assert other(logits, torch.zeros(2, 3).long()).dtype is torch.bfloat16
    finally:
        torch_utils.selective_log_softmax = original


def test_foreign_at_the_end_of_an_import(tmp_path):
    """Replaced in the module itself: found when it arrives, and applied after all when forced."""
    root = Path(twinkle.__file__).parent
    shutil.copytree(root, tmp_path / "twinkle", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "twinkle/utils/torch_utils.py").open("a") as file:
        file.write("\nfrom other import wrap\nselective_log_softmax = wrap(selective_log_softmax)\n")
    (tmp_path / "other.py").write_text("def wrap(f):\n    return lambda *a, **k: f(*a, **k)\n")
    script = """
        import memlean
        first = memlean.patch("twinkle.selective_log_softmax").records[0].status
        import twinkle.utils.torch_utils
        print(first, memlean.report().records[0].status, end=" ")
        print(memlean.patch("twinkle.selective_log_softmax", force=True).records[0].status)
    """
    run = python("-", script=textwrap.dedent(script), env={"PYTHONPATH": str(tmp_path)})
    assert run.stdout.split() == ["pending-import", "foreign", "applied"], run.stderr
    assert "was replaced by other.wrap" in run.stderr


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_strict_raises_before_anything_changes(monkeypatch, how):
    other = foreign_wrapper(torch_utils.selective_log_softmax)
    monkeypatch.setattr(torch_utils, "selective_log_softmax", other)
    before = everything_replaceable()
    if how == "environment":
        monkeypatch.setenv("MEMLEAN_STRICT", "1")
    with pytest.raises(memlean.PatchError, match=r"twinkle.selective_log_softmax \(version 0.5.1\): foreign"):
        memlean.patch("twinkle", strict=how == "argument")
    assert unchanged(before) and memlean.report().records == ()


def test_an_error_while_applying_rolls_everything_back(monkeypatch):
    before = everything_replaceable()
    install = _patch._Slot.install
    installed = []

    def fails_at_the_fourth(slot):
        installed.append(slot)
        if len(installed) == 4:
            raise RuntimeError("cannot write")
        install(slot)

    monkeypatch.setattr(_patch._Slot, "install", fails_at_the_fourth)
    with pytest.raises(RuntimeError, match="cannot write"):
        memlean.patch("twinkle")
    assert unchanged(before) and memlean.report().records == ()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "says"),
    [
        (["twinkel"], {}, ValueError, "targets must name targets or fixes .*got 'twinkel'"),
        ([3], {}, TypeError, "targets must be strings, got 3"),
        (["twinkle"], {"only": "logits"}, ValueError, "only must name.*got 'logits'"),
        (["twinkle"], {"exclude": ["twinkle.mask"]}, ValueError, "exclude must name.*got 'twinkle.mask'"),
        (["twinkle"], {"mask": "cuda"}, ValueError, "mask must be one of 'npu', 'auto', got 'cuda'"),
        (["twinkle"], {"strict": "yes"}, TypeError, "strict must be True or False, got 'yes'"),
    ],
)
def test_arguments_that_mean_nothing(arguments, options, error, says):
    before = everything_replaceable()
    with pytest.raises(error, match=says):
        memlean.patch(*arguments, **options)
    with pytest.raises(error, match=says), memlean.patched(*arguments, **options):
        pass
    assert unchanged(before)


def test_disabled(monkeypatch):
    logits, index = torch.randn(2, 3, 8, dtype=torch.bfloat16), torch.zeros(2, 3).long()
    memlean.patch("twinkle")
    assert torch_utils.selective_log_softmax(logits, index).dtype is torch.float32
    monkeypatch.setenv("MEMLEAN_DISABLE", "1")  # seen by what is patched already
    assert torch_utils.selective_log_softmax(logits, index).dtype is torch.bfloat16
    memlean.unpatch()
    before = everything_replaceable()
    assert statuses(memlean.patch("twinkle")) == dict.fromkeys(FIXES, "disabled")
    assert unchanged(before)


def test_report_is_a_table_and_plain_values():
    report = memlean.patch("twinkle")
    torch_utils.selective_log_softmax(torch.randn(2, 3, 8), torch.zeros(2, 3).long())
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["twinkle.selective_log_softmax"]["counters"] == {"calls: memlean": 1}
    assert plain["twinkle.selective_log_softmax"]["version"] == "0.5.1"
    for text in ("twinkle.report_logits", "applied", "calls: memlean: 1", f"{STRATEGY}.MegatronStrategy.reduce_loss"):
        assert text in str(report)
    with pytest.raises(KeyError, match="names 0 of the fixes"):
        report["nothing"]


def test_propagate_and_take_back(monkeypatch):
    monkeypatch.setenv("MEMLEAN_PATCH", "other")
    monkeypatch.setenv("MEMLEAN_MASK", "npu")
    memlean.patch("twinkle", exclude="causal_mask", mask="auto", propagate=True)
    assert os.environ["MEMLEAN_PATCH"] == "twinkle.selective_log_softmax,twinkle.report_logits"
    assert os.environ["MEMLEAN_MASK"] == "auto"
    memlean.unpatch()
    assert os.environ["MEMLEAN_PATCH"] == "other" and os.environ["MEMLEAN_MASK"] == "npu"


def test_targets_of_others(monkeypatch, tmp_path):
    """What a distribution registers under the entry-point group memlean.targets."""
    (tmp_path / "othertrainer").mkdir()
    (tmp_path / "othertrainer/__init__.py").write_text("def loss(x):\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    fix = _patch.Fix(
        "double",
        (_patch.Symbol("othertrainer", "loss", lambda original, x: 2 * original(x)),),
        lambda source: (
            _patch.Verdict("applies", "it has a loss")
            if source.function("othertrainer", "loss")
            else _patch.Verdict("unsupported", "no loss")
        ),
    )
    entry = SimpleNamespace(name="othertrainer", load=lambda: _patch.Target("othertrainer", "other-trainer", (fix,)))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == "memlean.targets" else [])
    other = importlib.import_module("othertrainer")
    with memlean.patched("othertrainer") as report:
        assert statuses(report) == {"othertrainer.double": "applied"}
        assert other.loss(2) == 4
    assert other.loss(2) == 2
    del sys.modules["othertrainer"]


# --- what the installed source says ---------------------------------------------------------------------------------

FILES = {module: Path(sys.modules[module].__file__) for module in (TORCH_UTILS, MODEL, STRATEGY, PROCESSOR)}


@pytest.fixture
def verdicts(tmp_path):
    """The verdicts on a copy of the installed source in which ``old`` of one module is replaced by ``new``."""

    def judge(module, old, new):
        root = Path(twinkle.__file__).parent
        for path in FILES.values():
            copy = tmp_path / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        changed = tmp_path / FILES[module].relative_to(root)
        text = changed.read_text()
        assert old in text
        changed.write_text(text.replace(old, new))
        source = _patch.Source(tmp_path)
        return {fix.name: _patch.verdict(TARGET, fix, source) for fix in TARGET.fixes}

    return judge


@pytest.mark.parametrize(
    ("fix", "module", "old", "new", "status", "evidence"),
    [
        ("selective_log_softmax", TORCH_UTILS, "logits, index, return_entropy: bool",
         "logits, ids, return_entropy: bool", "unsupported", r"takes \(logits, ids, return_entropy\)"),
        ("selective_log_softmax", TORCH_UTILS, "    if logits.dtype in [torch",
         "    return Chunked.apply(logits)\n    if logits.dtype in [torch", "already-fixed", "autograd.Function"),
        ("selective_log_softmax", TORCH_UTILS, "for lg in logits]", "for lg in rows]", "applies", "loops over"),
        ("selective_log_softmax", TORCH_UTILS, "def selective_log_softmax", "def other", "unsupported", "not defined"),
        ("selective_log_softmax", TORCH_UTILS, "import ", "import import ", "unsupported", "SyntaxError"),
        ("report_logits", MODEL, "'return_logits', False", "'keep_logits', False", "unsupported", "no return_logits"),
        ("report_logits", MODEL, "reduce_loss(losses, counts, output_tensor, logps)",
         "reduce_loss(losses, counts, output_tensor if return_logits else None, logps)",
         "already-fixed", "post_loss_function looks at return_logits"),
        ("report_logits", STRATEGY, "local_loss, local_count, logits, logps)", "loss, count, logits, logps)",
         "unsupported", r"takes \(self, loss, count, logits, logps\)"),
        ("report_logits", STRATEGY, "'logps': logps", "'log_probs': logps", "unsupported", "does not return a tuple"),
        ("report_logits", MODEL, "if 'logits' in loss_dict", "if loss_dict['logits'] is not None",
         "unsupported", "does not collect"),
        ("causal_mask", PROCESSOR, "def drop_causal_4d_mask", "def drop_mask", "unsupported", "no stage"),
        ("causal_mask", PROCESSOR, "            self.drop_causal_4d_mask,\n", "", "unsupported", "process_pipeline"),
        ("causal_mask", PROCESSOR, "                   micro_batch_size: Optional[int] = None,\n",
         "                   rows: Optional[int] = None,\n", "unsupported", "collate_fn takes"),
        ("causal_mask", PROCESSOR, "variable_seq_lengths=False,\n",
         "variable_seq_lengths=False,\n                   attention_mask_type=None,\n",
         "already-fixed", "collate_fn looks at attention_mask_type"),
        ("causal_mask", MODEL, "attention_mask_type=", "mask_type=", "unsupported", "does not hand"),
    ],
)  # fmt: skip
def test_one_thing_changed_in_the_source(verdicts, fix, module, old, new, status, evidence):
    import re

    found = verdicts(module, old, new)
    assert found[fix].status == status and re.search(evidence, found[fix].evidence)
    untouched = {"selective_log_softmax", "causal_mask", "report_logits"} - {fix}
    if module != MODEL:
        assert {found[name].status for name in untouched} == {"applies"}


def test_what_does_not_apply_is_said_and_the_rest_is_applied(tmp_path):
    """A twinkle without the stage, as in 0.2.0, imported by a process of its own."""
    root = Path(twinkle.__file__).parent
    shutil.copytree(root, tmp_path / "twinkle", ignore=shutil.ignore_patterns("__pycache__"))
    processor = tmp_path / "twinkle" / FILES[PROCESSOR].relative_to(root)
    processor.write_text(processor.read_text().replace("drop_causal_4d_mask", "another_stage"))
    script = """
        import memlean, twinkle.model.megatron.megatron
        report = memlean.patch("twinkle")
        print(twinkle.__file__, *(r.status for r in report.records))
    """
    run = python("-", script=textwrap.dedent(script), env={"PYTHONPATH": str(tmp_path)})
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(tmp_path / "twinkle/__init__.py"), "applied", "unsupported", "applied"]
    assert "twinkle.causal_mask not applied" in run.stderr and "no stage drop_causal_4d_mask" in run.stderr


def test_a_missing_package():
    fix = _patch.Fix("none", (), lambda source: _patch.Verdict("applies", ""))
    record = _patch._judge(_patch.Target("no_such_package", "no-such-package", (fix,)), fix, force=False)
    assert record.status == "not-installed" and "pip install no-such-package" in record.reason
    with pytest.raises(memlean.PatchError, match="not-installed"):
        memlean.PatchReport((record,)).raise_for_status()


# --- processes of their own -----------------------------------------------------------------------------------------

CHILD = """
import sys
import {first}
import twinkle.loss.grpo
import twinkle.model.megatron.megatron
import memlean
for record in memlean.report().records:
    print(record.name, record.status)
print(memlean.report().to_dict()["twinkle.selective_log_softmax"]["sites"] if memlean.report().records else "nothing")
"""


def python(*arguments, script=None, env=None):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MEMLEAN_")}
    environment = clean | {"TORCHDYNAMO_DISABLE": "1"} | (env or {})
    run = subprocess.run(
        [sys.executable, *arguments], input=script, env=environment, capture_output=True, text=True, check=False
    )
    return run


@pytest.mark.parametrize("first", ["twinkle", "torch", "memlean"])
def test_a_child_process_with_the_variable(first):
    run = python("-", script=CHILD.format(first=first), env={"MEMLEAN_PATCH": "twinkle"})
    assert run.returncode == 0, run.stderr
    assert [line for line in run.stdout.splitlines() if line.startswith("twinkle.")] == [f"{n} applied" for n in FIXES]
    assert "twinkle.loss.grpo.selective_log_softmax" in run.stdout


def test_a_child_process_without_the_variable_loads_nothing():
    run = python("-c", "import sys; print([m for m in sys.modules if m.startswith(('memlean', 'torch'))])")
    assert run.stdout.strip() == "[]"


def test_a_child_process_with_the_variable_loads_nothing_until_the_trainer_is_imported():
    run = python("-c", "import sys; print([m for m in sys.modules if m.startswith(('memlean', 'torch'))])",
                 env={"MEMLEAN_PATCH": "twinkle"})  # fmt: skip
    assert run.stdout.strip() == "['memlean_autoload']"


def test_a_child_process_with_a_wrong_name_says_so():
    run = python("-c", "import twinkle; print('goes on')", env={"MEMLEAN_PATCH": "twinkle.logits"})
    assert run.stdout.strip() == "goes on" and "MEMLEAN_PATCH=twinkle.logits not applied" in run.stderr
    strict = python("-c", "import twinkle", env={"MEMLEAN_PATCH": "twinkle.logits", "MEMLEAN_STRICT": "1"})
    assert strict.returncode != 0 and "must name targets or fixes" in strict.stderr


def test_patching_imports_no_trainer():
    script = """
        import sys, memlean
        report = memlean.patch("twinkle")
        assert "twinkle" not in sys.modules and "megatron" not in sys.modules
        assert [r.status for r in report.records] == ["pending-import"] * 3
        import twinkle.utils.torch_utils as torch_utils
        assert [r.status for r in memlean.report().records] == ["applied", "pending-import", "pending-import"]
        original = [torch_utils.selective_log_softmax.__wrapped__]  # in a list: names of this module are put back too
        assert original[0].__globals__ is vars(torch_utils)
        import twinkle.model.megatron.megatron as model
        assert [r.status for r in memlean.report().records] == ["applied"] * 3
        assert model.selective_log_softmax is torch_utils.selective_log_softmax is not original[0]
        memlean.unpatch()
        assert model.selective_log_softmax is torch_utils.selective_log_softmax is original[0]
        assert not any("exec_module" in vars(m.__loader__) for m in (torch_utils, model))
    """
    run = python("-", script=textwrap.dedent(script))
    assert run.returncode == 0, run.stderr


def test_lazy_modules_are_not_triggered():
    """twinkle's packages load their submodules on attribute access; looking for holders must not do that."""
    script = """
        import sys, memlean, twinkle, twinkle.utils.torch_utils, twinkle.loss, twinkle.processor, twinkle.model
        before = set(sys.modules)
        memlean.patch("twinkle")
        memlean.report(); memlean.unpatch()
        loaded = {m for m in set(sys.modules) - before if m.startswith(("twinkle", "transformers", "megatron"))}
        assert not loaded, loaded
    """
    run = python("-", script=textwrap.dedent(script))
    assert run.returncode == 0, run.stderr


def test_run_runs_a_script_unchanged(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "script.py").write_text(
        "import subprocess, sys\n"
        "import beside\n"
        "import twinkle.loss.grpo as grpo\n"
        "print(__name__, sys.argv[1:], beside.VALUE, hasattr(grpo.selective_log_softmax, '__memlean__'))\n"
        "sys.stdout.flush()\n"
        "subprocess.run([sys.executable, '-c', 'import twinkle.loss.grpo as g; "
        'print(hasattr(g.selective_log_softmax, "__memlean__"))\'])\n'
    )
    run = python("-m", "memlean", "run", "--patch", "twinkle", "--", str(tmp_path / "script.py"), "--lr", "3")
    assert run.stdout.split("\n")[:2] == ["__main__ ['--lr', '3'] 7 True", "True"], run.stderr
    bad = python("-m", "memlean", "run", "--patch", "twinkel", "--", str(tmp_path / "script.py"))
    assert bad.returncode == 2 and "got 'twinkel'" in bad.stderr


def test_doctor_shows_the_verdicts():
    run = python("-m", "memlean", "doctor", "--json")
    patches = json.loads(run.stdout)["patches"]
    assert list(patches) == FIXES
    assert all(text.startswith("applies, twinkle 0.5.1: ") for text in patches.values())
    assert "twinkle.report_logits: applies, twinkle 0.5.1" in python("-m", "memlean", "doctor").stdout
