"""Replacing functions of an installed package, and putting every one of them back.

A *target* is an installed package, a *fix* repairs one defect of it, a *symbol* is one function that a fix replaces.
What is wrong in which trainer is the business of the other files here; this one only judges, applies and undoes.

- Judged before anything changes. What the installed source looks like decides (`Source`, parsed and never executed),
  then whether the live function still is the package's own. A version number is only ever printed.
- Two phases: all is judged, then all is applied; an error while applying rolls back what that call applied.
- Found by identity. A function imported by name into other modules is replaced in each of them, by ``is`` over
  ``vars(module)``: ``getattr`` would make lazy modules import what they postpone.
- Never imports a target. What is not imported yet is patched at the end of its import.
- The lock guards the bookkeeping only and nothing is imported under it: the end of an import waits for it while holding
  the lock of the imported module, so an import under it could deadlock.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.metadata
import importlib.util
import logging
import os
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from memlean import _env

log = logging.getLogger("memlean")

MASKS = ("npu", "auto")
_Names = str | Iterable[str] | None


class _Options(TypedDict, total=False):
    """The keyword arguments of `patch`."""

    only: _Names
    exclude: _Names
    strict: bool
    force: bool
    mask: Literal["npu", "auto"]
    tp: bool
    propagate: bool


class PatchError(RuntimeError):
    """A fix that was asked for strictly cannot be applied; nothing has been changed.

    The message names each fix that was refused, the installed version, and what does not fit.

    Example::

        try:
            memlean.patch("twinkle", strict=True)
        except memlean.PatchError as error:
            print(error)
    """


# --- what a trainer's file declares -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What the installed source says about one fix, and the evidence in words."""

    status: Literal["applies", "already-fixed", "unsupported"]
    evidence: str


@dataclass(frozen=True)
class Symbol:
    """One function to replace: ``module`` and ``qualname`` name it, ``body(original, *args, **kwargs)`` runs instead.

    ``everywhere``: also replace it in every other module that holds it by name. Fixes may share a symbol and its body.
    """

    module: str
    qualname: str
    body: Callable[..., Any]
    everywhere: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"


@dataclass(frozen=True)
class Fix:
    """One defect and its repair; ``detect`` reads the installed source and changes nothing."""

    name: str
    symbols: tuple[Symbol, ...]
    detect: Callable[[Source], Verdict]


@dataclass(frozen=True)
class Target:
    """An installed package that memlean has fixes for: ``name`` is its import name, ``distribution`` its name for pip.

    Others register theirs under the entry-point group ``memlean.targets``, with ``name`` as the entry point's name.
    """

    name: str
    distribution: str
    fixes: tuple[Fix, ...]


class Source:
    """The source files of a package, parsed on demand and never executed. ``root`` is the package's own folder."""

    def __init__(self, root: str | Path):
        self.root = Path(root)

    @classmethod
    def installed(cls, package: str) -> Source | None:
        """The installed package's, without importing it; None if there is none, or none in a folder."""
        spec = importlib.util.find_spec(package)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        return cls(folders[0]) if folders else None

    def function(self, module: str, qualname: str) -> ast.FunctionDef | None:
        """The definition of ``module.qualname``; None if the file or the definition is not there."""
        node: ast.AST | None = self._tree(module)
        for name in qualname.split("."):
            node = next((child for child in getattr(node, "body", ()) if getattr(child, "name", None) == name), None)
        return node if isinstance(node, ast.FunctionDef) else None

    def _tree(self, module: str) -> ast.Module | None:
        path = self.root.joinpath(*module.split(".")[1:])
        for file in (path.parent / f"{path.name}.py", path / "__init__.py"):
            if file.is_file():
                return _parse(file, file.stat().st_mtime_ns)
        return None


@functools.lru_cache(maxsize=32)
def _parse(file: Path, mtime_ns: int) -> ast.Module:
    return ast.parse(file.read_bytes())


def parameters(function: ast.FunctionDef) -> list[str]:
    """Its parameter names in order, ``*args`` and ``**kwargs`` with their stars."""
    a = function.args
    names = [p.arg for p in (*a.posonlyargs, *a.args)]
    names += ["*" + a.vararg.arg] if a.vararg else []
    names += [p.arg for p in a.kwonlyargs]
    return names + (["**" + a.kwarg.arg] if a.kwarg else [])


def strings(node: ast.AST) -> set[str]:
    """Every string constant in it."""
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def names(node: ast.AST) -> set[str]:
    """Every variable, attribute and keyword-argument name in it."""
    found = set()
    for n in ast.walk(node):
        if isinstance(n, ast.Name):
            found.add(n.id)
        elif isinstance(n, ast.Attribute):
            found.add(n.attr)
        elif isinstance(n, ast.keyword) and n.arg:
            found.add(n.arg)
    return found


# --- what the user gets back ------------------------------------------------------------------------------------------

Status = Literal["applied", "pending-import", "already-fixed", "unsupported", "foreign", "disabled", "not-installed"]
_REFUSED = ("unsupported", "foreign", "not-installed")


@dataclass(frozen=True)
class Record:
    """One fix: its status and why, the installed version, the names that now hold a replacement, and live counters."""

    target: str
    fix: str
    status: Status | Literal["applies"]
    reason: str
    version: str | None
    sites: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.target}.{self.fix}"


@dataclass(frozen=True)
class PatchReport:
    """What was done, fix by fix. ``str(report)`` is a table; the counters in it go on counting.

    Attributes:
        records: one for each fix, with ``name``, ``status`` and why (``reason``), the installed ``version``, the
            ``sites`` that now hold a replacement, and the live ``counters``.

    Example::

        report = memlean.patch("twinkle")
        print(report)
        dropped = report["report_logits"].counters.get("logits bytes dropped", 0)
        as_json = json.dumps(report.to_dict())
        report.raise_for_status()
    """

    records: tuple[Record, ...]

    def __getitem__(self, name: str) -> Record:
        """The record of ``"twinkle.report_logits"`` or, where that is unambiguous, ``"report_logits"``."""
        found = [r for r in self.records if name in (r.name, r.fix)]
        if len(found) != 1:
            raise KeyError(f"{name!r} names {len(found)} of the fixes here: {[r.name for r in self.records]}")
        return found[0]

    def __str__(self) -> str:
        if not self.records:
            return "nothing patched"
        width = max(len(r.name) for r in self.records)
        lines = []
        for r in self.records:
            lines.append(f"{r.name:{width}}  {r.status:14}  {r.target} {r.version or '-'}: {r.reason}")
            details = [*r.sites, *(f"{name}: {n}" for name, n in r.counters.items())]
            lines += [f"{'':{width}}  {'':14}  {text}" for text in details]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values, for logs: name of the fix -> its fields."""
        return {
            r.name: {
                "status": r.status,
                "reason": r.reason,
                "version": r.version,
                "sites": list(r.sites),
                "counters": dict(r.counters),
            }
            for r in self.records
        }

    def raise_for_status(self) -> None:
        """Raises `PatchError` if a fix was refused."""
        refused = [r for r in self.records if r.status in _REFUSED]
        if refused:
            raise PatchError("; ".join(f"{r.name} (version {r.version}): {r.status}: {r.reason}" for r in refused))


# --- replaced functions -----------------------------------------------------------------------------------------------


class _Slot:
    """One function, its replacement, and the names of the fixes that want it replaced."""

    def __init__(self, symbol: Symbol, original: Callable[..., Any]):
        self.symbol = symbol
        self.original = original
        self.owners: set[str] = set()
        body, slot = symbol.body, self

        # wraps() keeps name, signature and attributes, which trainers read to dispatch calls to their workers.
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            # Undone, but still held by someone's wrapper or closure; or switched off from the environment.
            if not slot.owners or _env.patches_disabled():
                return original(*args, **kwargs)
            return body(original, *args, **kwargs)

        vars(replacement)["__memlean__"] = str(symbol)
        self.replacement = replacement

    def install(self) -> None:
        _assign(self.symbol, self.replacement)
        self.rebind()

    def rebind(self) -> None:
        """Replaces it wherever else it is held by name."""
        if self.symbol.everywhere:
            _swap(self.original, self.replacement)

    def restore(self) -> None:
        current = _current(self.symbol)
        if current is self.replacement:
            _assign(self.symbol, self.original)
        elif current is not self.original:
            log.warning("%s was wrapped by others after memlean: left in place, and passes through now", self.symbol)
        if self.symbol.everywhere:
            _swap(self.replacement, self.original)

    def sites(self) -> list[str]:
        found = [str(self.symbol)] if _current(self.symbol) is self.replacement else []
        if self.symbol.everywhere:
            found += [f"{m}.{name}" for m, name in _holders(self.replacement) if f"{m}.{name}" != str(self.symbol)]
        return found


def _owner(symbol: Symbol) -> tuple[Any, str]:
    """The live module or class that holds the symbol, and the attribute. KeyError if it is not there."""
    *path, attribute = symbol.qualname.split(".")
    owner: Any = sys.modules[symbol.module]
    for name in path:
        owner = vars(owner)[name]
    return owner, attribute


def _current(symbol: Symbol) -> Any:
    try:
        owner, attribute = _owner(symbol)
        return vars(owner)[attribute]
    except KeyError:
        return None


def _assign(symbol: Symbol, value: Callable[..., Any]) -> None:
    owner, attribute = _owner(symbol)
    setattr(owner, attribute, value)


def _holders(value: Any) -> Iterator[tuple[str, str]]:
    for module_name, module in list(sys.modules.items()):
        # A process with a trainer holds some 300,000 names: look for the id in C first. The lists are copies, as
        # another thread may be importing.
        if isinstance(module, types.ModuleType) and id(value) in map(id, list(vars(module).values())):
            for name, held in list(vars(module).items()):
                if held is value:
                    yield module_name, name


def _swap(old: Any, new: Any) -> None:
    for module_name, name in list(_holders(old)):
        vars(sys.modules[module_name])[name] = new


def _stranger(package: str, function: Any) -> str | None:
    """Who made this function, if any layer of it was not written in the package."""
    while function is not None:
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if home.partition(".")[0] != package:
            return f"{home}.{function.__qualname__}" if home else f"an object of type {type(function).__name__}"
        function = getattr(function, "__wrapped__", None)
    return None


# --- the registry -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _State:
    """A fix that is applied, or waits for its modules. ``holds``: who wants it; it goes when nobody does."""

    target: Target
    fix: Fix
    reason: str
    force: bool
    strict: bool
    holds: set[object] = field(default_factory=set)
    slots: list[_Slot] = field(default_factory=list)
    status: Status = "pending-import"
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        return f"{self.target.name}.{self.fix.name}"

    def record(self) -> Record:
        sites = tuple(dict.fromkeys(site for slot in self.slots for site in slot.sites()))
        return Record(
            self.target.name,
            self.fix.name,
            self.status,
            self.reason,
            _version(self.target),
            sites,
            types.MappingProxyType(self.counters),
        )


_lock = threading.RLock()
_states: dict[str, _State] = {}
_slots: dict[str, _Slot] = {}  # kept after undo, so that what still holds a replacement is found by the next one
_DEFAULTS: dict[str, str | bool] = {"mask": "npu", "tp": False}
_options = dict(_DEFAULTS)
_BY_PATCH = object()  # the hold of memlean.patch, as opposed to one of a `with memlean.patched`
_before_export: dict[str, str | None] = {}  # environment variables that propagate=True has overwritten


def count(name: str, what: str, n: int = 1) -> None:
    """Adds ``n`` to a counter of the fix called ``name``, if it is applied."""
    state = _states.get(name)
    if state is not None:
        with _lock:
            state.counters[what] += n


def option(name: str) -> str | bool:
    return _options[name]


def targets() -> dict[str, Target]:
    """Every target known here: memlean's own, then what is registered under the entry-point group."""
    from memlean.integrations import twinkle

    known = {twinkle.TARGET.name: twinkle.TARGET}
    for entry in importlib.metadata.entry_points(group="memlean.targets"):
        if entry.name not in known:
            known[entry.name] = entry.load()
    return known


def verdict(target: Target, fix: Fix, source: Source | None) -> Verdict | None:
    """What the source says; None without a source. A source that cannot be read or parsed is unsupported."""
    if source is None:
        return None
    try:
        return fix.detect(source)
    except (OSError, SyntaxError, ValueError) as error:
        return Verdict("unsupported", f"cannot read the source under {source.root}: {type(error).__name__}: {error}")


def examine(*names: str) -> PatchReport:
    """The report that `patch` would give, with nothing changed: "applies" where it would apply."""
    records = []
    for target, fix in _select(names, None, None):
        state = _states.get(f"{target.name}.{fix.name}")
        records.append(state.record() if state else _judge(target, fix, force=False))
    return PatchReport(tuple(records))


def _judge(target: Target, fix: Fix, force: bool) -> Record:
    """Phase one for one fix. Changes nothing."""

    def record(status: Status | Literal["applies"], reason: str) -> Record:
        return Record(target.name, fix.name, status, reason, _version(target))

    found = verdict(target, fix, Source.installed(target.name))
    if found is None:
        return record("not-installed", f"there is no package {target.name}: pip install {target.distribution}")
    if found.status != "applies":
        return record(found.status, found.evidence)
    if _loaded(fix):
        status, reason = _judge_live(target, fix, force)
        if status != "applies":
            return record(status, reason)
    return record("applies", found.evidence)


def _judge_live(target: Target, fix: Fix, force: bool) -> tuple[Literal["applies", "unsupported", "foreign"], str]:
    for symbol in fix.symbols:
        current = _current(symbol)
        if current is None:
            return "unsupported", f"{symbol} is in the source but not in the imported module"
        slot = _slots.get(str(symbol))
        ours = slot is not None and current is slot.replacement
        stranger = None if ours else _stranger(target.name, current)
        if stranger and not force:
            return "foreign", f"{symbol} was replaced by {stranger}; memlean stacks on it only with force=True"
    return "applies", ""


def _loaded(fix: Fix, finished: str = "") -> bool:
    """Whether its modules are imported to the end. ``finished`` is one that is, although Python does not say so yet."""
    return all(
        (module := sys.modules.get(symbol.module)) is not None
        and (symbol.module == finished or not getattr(module.__spec__, "_initializing", False))
        for symbol in fix.symbols
    )


def _apply(state: _State) -> None:
    """Phase two for one fix whose modules are imported. Caller holds the lock and rolls back on an error."""
    for symbol in state.fix.symbols:
        slot = _slots.get(str(symbol))
        current = _current(symbol)
        if slot is None or current not in (slot.original, slot.replacement):
            slot = _slots[str(symbol)] = _Slot(symbol, current)
        elif slot.symbol.body is not symbol.body:
            raise PatchError(f"{state.name} and {sorted(slot.owners)} replace {symbol} by different functions")
        state.slots.append(slot)
        slot.owners.add(state.name)
        slot.install()
    state.status = "applied"
    log.info("%s applied (%s)", state.name, state.reason)


def _revert(state: _State) -> None:
    for slot in state.slots:
        slot.owners.discard(state.name)
        if not slot.owners:
            slot.restore()
    state.slots = []
    _states.pop(state.name, None)


def _request(
    names: tuple[str, ...],
    only: _Names,
    exclude: _Names,
    strict: bool,
    force: bool,
    mask: str,
    tp: bool,
    propagate: bool,
    hold: object,
) -> PatchReport:
    for argument, value in (("strict", strict), ("force", force), ("tp", tp), ("propagate", propagate)):
        if not isinstance(value, bool):
            raise TypeError(f"{argument} must be True or False, got {value!r}")
    if mask not in MASKS:
        raise ValueError(f"mask must be one of {', '.join(map(repr, MASKS))}, got {mask!r}")
    selected = _select(names, only, exclude)
    if _env.patches_disabled():
        disabled = (Record(t.name, f.name, "disabled", "MEMLEAN_DISABLE=1", _version(t)) for t, f in selected)
        return PatchReport(tuple(disabled))
    strict = strict or _env.patch_strict()

    unseen = [(target, fix) for target, fix in selected if not _wanted(f"{target.name}.{fix.name}")]
    judged = [(target, fix, _judge(target, fix, force)) for target, fix in unseen]
    refused = PatchReport(tuple(r for _, _, r in judged if r.status in _REFUSED))
    if strict:
        refused.raise_for_status()
    for r in refused.records:
        log.warning("%s not applied to version %s: %s: %s", r.name, r.version, r.status, r.reason)

    with _lock:
        new = []
        try:
            for target, fix, record in judged:
                if record.status == "applies" and not _wanted(record.name):  # another thread may have been faster
                    state = _states[record.name] = _State(target, fix, record.reason, force, strict)
                    new.append(state)
                    if _loaded(fix):
                        _apply(state)
                    else:
                        _AfterImport.install()
        except BaseException:
            for state in reversed(new):
                _revert(state)
            raise
        records = []
        verdicts = {r.name: r for _, _, r in judged}
        for target, fix in selected:
            requested = _states.get(f"{target.name}.{fix.name}")
            if requested is None:
                records.append(verdicts.get(f"{target.name}.{fix.name}") or _judge(target, fix, force))
                continue
            requested.holds.add(hold)
            if requested.status == "pending-import" and _loaded(fix):  # its import had begun before the first request
                _settle(requested)
            if requested not in new:
                for slot in requested.slots:
                    slot.rebind()  # covers the modules imported since
            records.append(requested.record())
        _options.update(mask=mask, tp=tp)
        if propagate:
            _export([r.name for r in records if r.status in ("applied", "pending-import")], mask, tp)
    return PatchReport(tuple(records))


def _wanted(name: str) -> bool:
    """Applied or waiting; not refused at the end of an import."""
    return name in _states and _states[name].status not in _REFUSED


def _release(state: _State, hold: object) -> None:
    state.holds.discard(hold)
    if not state.holds:
        _revert(state)


def _export(fixes: list[str], mask: str, tp: bool) -> None:
    """For child processes. What the variables said before is kept for `_unexport`."""
    variables = {"MEMLEAN_PATCH": ",".join(fixes), "MEMLEAN_MASK": mask, "MEMLEAN_TP": str(int(tp))}
    if not _before_export:
        _before_export.update({name: os.environ.get(name) for name in variables})
    os.environ.update(variables)


def _unexport() -> None:
    for name, value in _before_export.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before_export.clear()


def _select(names: Iterable[str], only: _Names, exclude: _Names) -> list[tuple[Target, Fix]]:
    """The fixes that the arguments name, in the order of declaration. ValueError for a name that means nothing."""
    known = targets()
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"targets must be strings, got {name!r}")
    names = names or [name for name in known if importlib.util.find_spec(name) is not None]
    fixes = {f"{t.name}.{f.name}": (t, f) for t in known.values() for f in t.fixes}

    def expand(argument: str, asked: Iterable[str], bare: bool) -> set[str]:
        found = set()
        for name in asked:
            match = {full for full, (t, f) in fixes.items() if name in (full, t.name) or (bare and name == f.name)}
            if not match:
                raise ValueError(f"{argument} must name targets or fixes ({', '.join([*known, *fixes])}), got {name!r}")
            found |= match
        return found

    chosen = expand("targets", names, bare=False)
    if only is not None:
        chosen &= expand("only", [only] if isinstance(only, str) else only, bare=True)
    if exclude is not None:
        chosen -= expand("exclude", [exclude] if isinstance(exclude, str) else exclude, bare=True)
    return [pair for full, pair in fixes.items() if full in chosen]


def _version(target: Target) -> str | None:
    try:
        return importlib.metadata.version(target.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


class _AfterImport(importlib.abc.MetaPathFinder):
    """Applies a waiting fix at the end of the import of the last of its modules."""

    _installed: _AfterImport | None = None

    @classmethod
    def install(cls) -> None:
        # Never removed: taking an entry out of sys.meta_path while another thread walks it makes that thread skip one.
        if cls._installed is None:
            cls._installed = cls()
            sys.meta_path.insert(0, cls._installed)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if not any(symbol.module == name for state in _waiting() for symbol in state.fix.symbols):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            if module.__name__ == name:
                vars(loader).pop("exec_module", None)
                _imported(name)

        loader.exec_module = exec_module
        return spec


def _waiting() -> list[_State]:
    return [state for state in list(_states.values()) if state.status == "pending-import"]


def _imported(name: str) -> None:
    """Called at the end of the execution of a module that some fix waits for."""
    with _lock:
        for state in _waiting():
            if any(symbol.module == name for symbol in state.fix.symbols) and _loaded(state.fix, finished=name):
                _settle(state)


def _settle(state: _State) -> None:
    """Applies a fix whose modules have arrived, or refuses it after all. Caller holds the lock."""
    status, reason = _judge_live(state.target, state.fix, state.force)
    if status == "applies":
        _apply(state)
        return
    state.status, state.reason = status, reason
    if state.strict:
        raise PatchError(f"{state.name} (version {_version(state.target)}): {status}: {reason}")
    log.warning("%s not applied: %s: %s", state.name, status, reason)


# --- the public functions ---------------------------------------------------------------------------------------------


def patch(
    *targets: str,
    only: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    strict: bool = False,
    force: bool = False,
    mask: Literal["npu", "auto"] = "npu",
    tp: bool = False,
    propagate: bool = False,
) -> PatchReport:
    """Gives installed trainers memlean's fixes, from outside: ``memlean.patch("twinkle")``.

    Applied to live objects too, and to modules not imported yet at the end of their import; nothing is imported for it.
    Calling it again covers what was imported since and changes nothing else. `unpatch` undoes any number of calls.

    Example::

        report = memlean.patch("twinkle", exclude="causal_mask")
        print(report)  # what was applied where, and why not where not

    Args:
        targets: packages (``"twinkle"``) or single fixes (``"twinkle.report_logits"``); none: every known package that
            is installed. docs/integrations.md lists the fixes and what each does not cover.
        only: of these, only the fixes named here; full or short names.
        exclude: of these, not the fixes named here.
        strict: raise where a fix would be refused with a warning; also ``MEMLEAN_STRICT=1``.
        force: also wrap a function that somebody else has replaced before.
        mask: ``"npu"`` to leave out dense causal masks where the trainer itself drops them, ``"auto"`` on every device
            where each attention of the model is seen to be causal.
        tp: under tensor parallelism, memlean's vocabulary-parallel function in place of the trainer's own, which keeps
            a float32 softmax of the shard until backward and has no entropy.
        propagate: export the same choice to child processes (``MEMLEAN_PATCH``), for Ray workers and launchers.

    Returns:
        What was done, fix by fix. With ``MEMLEAN_DISABLE=1`` that is nothing, and the report says so.

    Raises:
        TypeError, ValueError: an argument that means nothing; nothing has been changed.
        PatchError: with ``strict``, a target that is not installed, moved, or was patched by others; nothing has been
            changed.
    """
    return _request(targets, only, exclude, strict, force, mask, tp, propagate, _BY_PATCH)


def unpatch(*targets: str) -> PatchReport:
    """Undoes `patch`: every function that was replaced is the original object again, wherever it is held by name.

    Example::

        memlean.patch("twinkle")
        left = memlean.unpatch("twinkle.causal_mask")  # the other fixes stay
        memlean.unpatch()

    Args:
        targets: packages or single fixes; none: everything that is patched.

    Returns:
        What is still patched.

    Raises:
        TypeError, ValueError: a name that means nothing; nothing has been changed.
    """
    names = {f"{t.name}.{f.name}" for t, f in _select(targets, None, None)} if targets else None
    with _lock:
        for state in list(_states.values()):
            if names is None or state.name in names:
                _revert(state)
        if not _states:
            _options.update(_DEFAULTS)
            _unexport()
    return report()


@contextmanager
def patched(*targets: str, **options: Unpack[_Options]) -> Iterator[PatchReport]:
    """`patch` for the length of a ``with`` block, with the same arguments; takes back what it applied itself.

    Nests, and may overlap between threads: a fix stays as long as one of the blocks, or `patch`, wants it.

    Example::

        with memlean.patched("twinkle", only="report_logits") as report:
            inside = memlean.is_patched("twinkle.report_logits")
        outside = memlean.is_patched("twinkle.report_logits")

    Args:
        targets: as in `patch`.
        options: the other arguments of `patch`.

    Returns:
        A context manager that gives the `PatchReport` of `patch`.

    Raises:
        TypeError, ValueError, PatchError: as `patch`, and TypeError for an option that it does not have; nothing has
            been changed.
    """
    hold = object()
    arguments: dict[str, Any] = {"only": None, "exclude": None, "strict": False, "force": False, "propagate": False}
    arguments |= _DEFAULTS
    unknown = options.keys() - arguments.keys()
    if unknown:
        raise TypeError(f"patched takes the arguments of patch, got {sorted(unknown)}")
    before = dict(_options)
    arguments |= options
    done = _request(targets, **arguments, hold=hold)
    try:
        yield done
    finally:
        with _lock:
            for state in list(_states.values()):
                if hold in state.holds:
                    _release(state, hold)
            _options.update(before)
            if not _states:
                _unexport()


def report() -> PatchReport:
    """What is patched now, or waits for an import, with its counters.

    Example::

        memlean.patch("twinkle")
        for record in memlean.report().records:
            print(record.name, record.status, dict(record.counters))

    Returns:
        One record for each fix that is applied or waits; none where nothing is patched. It counts in this process.
    """
    with _lock:
        return PatchReport(tuple(state.record() for state in _states.values()))


def is_patched(name: str) -> bool:
    """Whether a fix (``"twinkle.report_logits"``), or each requested fix of a target (``"twinkle"``), is applied.

    Example::

        memlean.patch("twinkle")
        applied = memlean.is_patched("twinkle")

    Args:
        name: a target or a fix.

    Returns:
        False also for what was not requested, still waits for an import, or is not known.
    """
    found = [s for s in list(_states.values()) if name in (s.name, s.target.name)]
    return bool(found) and all(s.status == "applied" for s in found)
