"""twinkle-kit, the Megatron path: three fixes, and how each tells whether the installed version needs it.

selective_log_softmax
    The per-row loop keeps a second copy of the logits until backward (a third with entropy) and rounds
    log-probabilities to the logits' dtype. `memlean.selective_log_softmax` runs instead, in every namespace that holds
    the function. Under tensor parallelism the original runs, as the vocabulary is sharded; only an error in that branch
    is no longer swallowed, which upstream turns into a number computed from one shard.
causal_mask
    A dense ``[B, 1, S, S]`` mask is built for attention that is causal anyway, and dropped later, or not at all if the
    config does not say ``attention_mask_type``. `eligible` says for both stages where it is not needed.
report_logits
    Every micro-batch's logits stay in the schedule's results until the step ends, to be thrown away unless
    ``return_logits=True``. They are left out of the results, and so are failed micro-batches, which put None there.

What runs where: ``forward_backward`` publishes a `_Step` for the length of the call; the schedule calls the loss
function on the same thread, so `reduce_loss` and the processor find it. Other threads and other callers see no step,
and get the original behaviour.
"""

from __future__ import annotations

import ast
import functools
import logging
import sys
import types
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memlean import distributed, functional
from memlean.integrations._patch import Fix, Source, Symbol, Target, Verdict, count, names, option, parameters, strings

log = logging.getLogger("memlean")

TORCH_UTILS = "twinkle.utils.torch_utils"
MODEL = "twinkle.model.megatron.megatron"
STRATEGY = "twinkle.model.megatron.strategy.megatron"
PROCESSOR = "twinkle.processor.base"


# --- one step of the trainer ------------------------------------------------------------------------------------------


@dataclass
class _Step:
    """What one call of ``MegatronModel.forward_backward`` is about, for the functions that run inside it."""

    trainer: Any
    task: str
    return_logits: bool
    adapter_name: str | None
    micro_batches: int = 0
    failed: list[int] = field(default_factory=list)

    @property
    def optimizer_group(self) -> Any:
        name = self.trainer._get_default_group() if self.adapter_name is None else self.adapter_name
        return self.trainer.optimizer_group[name]

    @functools.cached_property
    def attention(self) -> _Attention:
        return _Attention.of(self.trainer.strategy.unwrap_model(self.trainer.model))


_step: ContextVar[_Step | None] = ContextVar("memlean_twinkle_step", default=None)


def forward_backward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Publishes the step, and after it takes the failed micro-batches out of what the metrics will read."""
    step = _Step(
        self, kwargs.get("task", "causal_lm"), bool(kwargs.get("return_logits", False)), kwargs.get("adapter_name")
    )
    token = _step.set(step)
    try:
        outputs = original(self, *args, **kwargs)
    finally:
        _step.reset(token)
    if step.failed:
        _forget_failed(step, forward_only=bool(kwargs.get("forward_only", False)))
    return outputs


# --- selective_log_softmax --------------------------------------------------------------------------------------------

# Errors inside the tensor-parallel branch of the call in progress; the original would swallow some of them.
_branch_errors: ContextVar[list[Exception] | None] = ContextVar("memlean_twinkle_branch_errors", default=None)


def selective_log_softmax(
    original: Callable[..., Any], logits: Tensor, index: Tensor, return_entropy: bool = False
) -> Any:
    """memlean's, or the original under tensor parallelism without ``tp`` and for what memlean's does not take."""
    arguments = {"return_entropy": True} if return_entropy else {}  # versions before 0.4 do not know the argument
    if _tensor_parallel() and option("tp"):
        count("twinkle.selective_log_softmax", "calls: tensor-parallel memlean")
        group = sys.modules["megatron.core.parallel_state"].get_tensor_model_parallel_group()
        return distributed.vocab_parallel_selective_log_softmax(logits, index, group, return_entropy=return_entropy)
    if _tensor_parallel():
        count("twinkle.selective_log_softmax", "calls: tensor-parallel original")
        token = _branch_errors.set([])
        try:
            result = original(logits, index, **arguments)
            for error in _branch_errors.get() or ():
                raise error
            return result
        finally:
            _branch_errors.reset(token)
    if type(logits) not in (Tensor, torch.nn.Parameter):  # a DTensor, say: its shard is not the whole vocabulary
        count("twinkle.selective_log_softmax", f"calls: original, for {type(logits).__name__}")
        return original(logits, index, **arguments)
    count("twinkle.selective_log_softmax", "calls: memlean")
    return functional.selective_log_softmax(logits, index, return_entropy=return_entropy)


def vocab_parallel_selective_log_softmax(original: Callable[..., Any], logits: Tensor, index: Tensor) -> Any:
    """Notes an error on its way up, as the caller catches ImportError, AssertionError and OSError."""
    try:
        return original(logits, index)
    except Exception as error:
        errors = _branch_errors.get()
        if errors is not None:
            errors.append(error)
        raise


def _tensor_parallel() -> bool:
    # Never imported: never initialised. Importing it here would cost the transformers path seconds.
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None:
        return False
    try:
        return parallel_state.get_tensor_model_parallel_world_size() > 1
    except AssertionError:  # how megatron-core says "not initialised"; upstream reads it the same way
        return False


def _detect_log_softmax(source: Source) -> Verdict:
    function = source.function(TORCH_UTILS, "selective_log_softmax")
    branch = source.function(TORCH_UTILS, "_vocab_parallel_selective_log_softmax")
    if function is None or branch is None:
        return _unsupported(TORCH_UTILS, "selective_log_softmax or its tensor-parallel branch is not defined there")
    if parameters(function) not in (["logits", "index"], ["logits", "index", "return_entropy"]):
        return _unsupported(TORCH_UTILS, f"selective_log_softmax takes {_list(parameters(function))}")
    if "apply" in names(function):
        return Verdict("already-fixed", f"line {function.lineno}: calls an autograd.Function")
    loops = [n for n in ast.walk(function) if isinstance(n, ast.For | ast.comprehension) and "logits" in names(n.iter)]
    if not loops:
        return _unsupported(TORCH_UTILS, f"line {function.lineno}: neither the known row loop nor an autograd.Function")
    return Verdict("applies", f"{TORCH_UTILS} line {function.lineno}: loops over the rows of logits under autograd")


# --- causal_mask ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attention:
    """What the live model says about its attention. ``other``: the first mask type that is not causal."""

    layers: int
    other: str | None
    config: Any

    @classmethod
    def of(cls, chunks: list[torch.nn.Module]) -> _Attention:
        kinds = [m.attn_mask_type for chunk in chunks for m in chunk.modules() if getattr(m, "attn_mask_type", None)]
        other = next((str(kind) for kind in kinds if not _is_causal(kind)), None)
        return cls(len(kinds), other, getattr(chunks[0], "config", None))


def _is_causal(kind: Any) -> bool:
    return getattr(kind, "name", kind) == "causal"


def eligible(processor: Any, inputs: list[dict[str, Any]], kwargs: dict[str, Any]) -> bool:
    """Whether these inputs can go without a dense mask. Both stages ask here, so they cannot disagree."""
    return why_mask_stays(processor, inputs, kwargs) is None


def why_mask_stays(processor: Any, inputs: list[dict[str, Any]], kwargs: dict[str, Any]) -> str | None:
    """The first condition that keeps the dense mask, or None.

    ``inputs`` are feature dicts, before collation or after it; ``kwargs`` are those of the pipeline, of which
    ``attention_mask_type`` matters. An explicit type other than causal always keeps the mask. A missing one counts as
    causal only inside ``forward_backward``, for ``causal_lm``, if each attention layer of the model says causal.
    """
    why = _why_step_needs_mask(processor, kwargs)
    if why is None and (processor.padding_free or processor._any_packing(inputs)):
        return "packed input"
    return why


def _why_step_needs_mask(processor: Any, kwargs: dict[str, Any]) -> str | None:
    """The part that does not look at the inputs."""
    device = sys.modules["twinkle.utils"].Platform.device_prefix()
    step = _step.get()
    if device != "npu" and (option("mask") != "auto" or step is None):
        return f"device {device}"
    if processor.framework != "megatron":
        return f"framework {processor.framework}"
    if processor.padding_side != "right":
        return f"padding side {processor.padding_side}"
    kind = kwargs.get("attention_mask_type")
    if kind is not None and not _is_causal(kind):
        return f"attention_mask_type {getattr(kind, 'name', kind)}"
    if step is None:
        return "attention_mask_type unknown outside forward_backward" if kind is None else None
    if step.task not in (None, "causal_lm"):
        return f"task {step.task}"
    return _why_model_needs_mask(step.attention, explicit=kind is not None and device == "npu")


def _why_model_needs_mask(attention: _Attention, explicit: bool) -> str | None:
    if attention.other is not None:
        return f"a layer's attn_mask_type is {attention.other}"
    config = attention.config
    task_type = getattr(config, "task_type", None) or "causal_lm"
    if task_type != "causal_lm":
        return f"task_type {task_type}"
    if getattr(config, "mlp_padding_free", False):
        return "mlp_padding_free reads the mask"
    variant = getattr(config, "experimental_attention_variant", None)
    if variant not in (None, "gated_delta_net"):
        return f"attention variant {variant} may read the mask"
    if explicit:
        return None
    # From here on the trainer itself did not say causal for this device.
    if attention.layers == 0:
        return "no layer says its attn_mask_type"
    if getattr(config, "window_size", None) is not None:
        return "sliding window"
    return None


def process(original: Callable[..., Any], self: Any, inputs: Any, **kwargs: Any) -> Any:
    """``InputProcessor.__call__`` with two stages of its pipeline replaced, for this call only.

    The pipeline holds bound methods that ``__init__`` took from the class, so a replacement on the class would not
    reach live processors, and would stay in those created meanwhile. A copy of the processor carries the replaced list;
    the stages stay bound to the processor itself. A stage that a subclass overrides is left alone.
    """
    if "process_pipeline" not in vars(self):  # a Ray driver's handle; the pipeline runs in the workers
        return original(self, inputs, **kwargs)
    base = sys.modules[PROCESSOR].InputProcessor
    replaced: dict[Any, Callable[..., Any]] = {
        base.collate_fn: collate_without_mask,
        base.drop_causal_4d_mask: drop_mask,
    }
    shadow = type(self).__new__(type(self))  # type: ignore[call-overload]  # of the caller's own class
    vars(shadow).update(vars(self))
    shadow.process_pipeline = [
        functools.partial(replaced[stage.__func__], stage)
        if isinstance(stage, types.MethodType) and stage.__func__ in replaced
        else stage
        for stage in self.process_pipeline
    ]
    if kwargs.get("attention_mask_type") is None and _why_step_needs_mask(self, kwargs) is None:
        kwargs["attention_mask_type"] = "causal"  # for the stages that are not ours, too
    return original(shadow, inputs, **kwargs)


def collate_without_mask(collate_fn: Any, inputs: list[dict[str, Any]], **kwargs: Any) -> Any:
    """Collates without ``attention_mask`` where the model makes its own; the key stays, with None."""
    why = why_mask_stays(collate_fn.__self__, inputs, kwargs)
    if why is not None or not any("attention_mask" in feature for feature in inputs):
        if why is not None:
            count("twinkle.causal_mask", f"masks kept: {why}")
        return collate_fn(inputs, **kwargs)
    without = [{key: value for key, value in feature.items() if key != "attention_mask"} for feature in inputs]
    outputs = collate_fn(without, **kwargs)
    for output in outputs:
        output["attention_mask"] = None
    shapes = [output["input_ids"].shape for output in outputs if output.get("input_ids") is not None]
    one_per_output = kwargs.get("variable_seq_lengths", False) or len(outputs) == 1
    count("twinkle.causal_mask", "masks skipped", len(outputs) if one_per_output else 1)
    # Each would have been [rows, 1, length, length] of bool.
    count("twinkle.causal_mask", "mask bytes skipped", sum(rows * length**2 for rows, length in shapes))
    return outputs


def drop_mask(drop_causal_4d_mask: Any, inputs: list[dict[str, Any]], **kwargs: Any) -> Any:
    """Drops a dense mask that came from elsewhere: built by a subclass, or handed in by the caller."""
    if not eligible(drop_causal_4d_mask.__self__, inputs, kwargs):
        return inputs
    for features in inputs:
        mask = features.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 4:
            features["attention_mask"] = None
            count("twinkle.causal_mask", "masks dropped")
    return inputs


def _detect_mask(source: Source) -> Verdict:
    drop = source.function(PROCESSOR, "InputProcessor.drop_causal_4d_mask")
    if drop is None:
        return _unsupported(PROCESSOR, "InputProcessor has no stage drop_causal_4d_mask")
    init, call, collate, macro, build = (
        source.function(PROCESSOR, f"InputProcessor.{name}")
        for name in ("__init__", "__call__", "collate_fn", "_collate_macro_batch", "_create_4d_attention_mask")
    )
    if init is None or call is None or collate is None or macro is None or build is None:
        return _unsupported(PROCESSOR, "InputProcessor has changed: a method of the pipeline is not defined there")
    for function in (collate, macro):
        if "attention_mask_type" in names(function) | strings(function) | set(parameters(function)):
            return Verdict("already-fixed", f"line {function.lineno}: {function.name} looks at attention_mask_type")
    if not {"process_pipeline", "collate_fn", "drop_causal_4d_mask"} <= names(init):
        return _unsupported(PROCESSOR, "process_pipeline does not hold collate_fn and drop_causal_4d_mask")
    if "process_pipeline" not in names(call) or parameters(call) != ["self", "inputs", "**kwargs"]:
        return _unsupported(PROCESSOR, f"InputProcessor.__call__ takes {_list(parameters(call))}")
    expected = ["self", "inputs", "micro_batch_size", "variable_seq_lengths", "**kwargs"]
    if parameters(collate) != expected:
        return _unsupported(PROCESSOR, f"collate_fn takes {_list(parameters(collate))}, not {_list(expected)}")
    step = source.function(MODEL, "MegatronModel.forward_backward")
    if step is None or "attention_mask_type" not in names(step):
        return _unsupported(MODEL, "MegatronModel.forward_backward does not hand attention_mask_type to the processor")
    return Verdict("applies", f"{PROCESSOR} line {collate.lineno}: collate_fn builds the mask whatever its type")


# --- report_logits ----------------------------------------------------------------------------------------------------


def reduce_loss(
    original: Callable[..., Any], self: Any, local_loss: Any, local_count: Any, logits: Any, logps: Any
) -> Any:
    """The schedule's record of one micro-batch, without the keys that nobody asked for or that failed to be computed.

    The collection loop looks for the key, not for a value, so a missing key is what it skips. The original gets the
    loss in place of what will not be reported: up to version 0.4 it calls ``.detach()`` on both without a look.
    """
    step = _step.get()
    if step is None:
        return original(self, local_loss, local_count, logits, logps)
    failed = logps is None and _should_have_logps(step)
    report_logits = step.return_logits and logits is not None and not failed
    result = original(
        self, local_loss, local_count, logits if report_logits else local_loss, local_loss if logps is None else logps
    )
    reported = result[-1]
    if not report_logits:
        del reported["logits"]
    if logps is None:
        del reported["logps"]
    if not step.return_logits and logits is not None:
        count("twinkle.report_logits", "logits dropped")
        count("twinkle.report_logits", "logits bytes dropped", logits.numel() * logits.element_size())
    if failed:
        step.failed.append(step.micro_batches)
        count("twinkle.report_logits", "micro-batches skipped")
    step.micro_batches += 1
    return result


def _should_have_logps(step: _Step) -> bool:
    """With TWINKLE_FAIL_FAST=0 a failure leaves None; embeddings, and losses without logps, have None by design."""
    safe = sys.modules.get("twinkle.utils.nccl_safe")
    if safe is None or safe._is_fail_fast():
        return False
    return step.task != "embedding" and getattr(step.optimizer_group.loss_instance, "require_logps", True)


def _forget_failed(step: _Step, forward_only: bool) -> None:
    """Takes the failed micro-batches out of the metrics' inputs and arguments, as they are missing from the outputs."""
    log.warning(
        "%d of %d micro-batches failed and are missing from the logps and logits of this step: %s",
        len(step.failed),
        step.micro_batches,
        step.failed,
    )
    status = step.optimizer_group.eval_status if forward_only else step.optimizer_group.train_status
    if len(step.failed) == step.micro_batches:
        status.inputs = None  # what twinkle's accumulate_metrics takes for "nothing to measure"
        return
    rows = [len(batch["input_ids"] if batch.get("labels") is None else batch["labels"]) for batch in status.inputs]
    keep_batches = [i for i in range(len(rows)) if i not in step.failed]
    starts = [sum(rows[:i]) for i in range(len(rows))]
    keep_rows = [row for i in keep_batches for row in range(starts[i], starts[i] + rows[i])]

    def select(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: select(item) for key, item in value.items()}
        if not hasattr(value, "__len__") or isinstance(value, str) or getattr(value, "ndim", 1) == 0:
            return value
        keep = keep_rows if len(value) == sum(rows) else keep_batches if len(value) == len(rows) else None
        if keep is None:
            return value
        return type(value)(value[i] for i in keep) if isinstance(value, list | tuple) else value[keep]

    status.inputs = [status.inputs[i] for i in keep_batches]
    status.forward_kwargs = select(status.forward_kwargs)


def _detect_report_logits(source: Source) -> Verdict:
    step = source.function(MODEL, "MegatronModel.forward_backward")
    reduce = source.function(STRATEGY, "MegatronStrategy.reduce_loss")
    if step is None or reduce is None:
        return _unsupported(MODEL, "forward_backward or MegatronStrategy.reduce_loss is not defined where expected")
    if "return_logits" not in strings(step):
        return _unsupported(MODEL, "forward_backward has no return_logits: this version always returns them")
    inner = [n for n in ast.walk(step) if isinstance(n, ast.FunctionDef) and n is not step]
    loss = next((function for function in inner if "reduce_loss" in names(function)), None)
    if loss is None:
        return _unsupported(MODEL, "no function inside forward_backward calls reduce_loss")
    if "return_logits" in names(loss):
        return Verdict("already-fixed", f"line {loss.lineno}: {loss.name} looks at return_logits")
    expected = ["self", "local_loss", "local_count", "logits", "logps"]
    if parameters(reduce) != expected:
        return _unsupported(STRATEGY, f"reduce_loss takes {_list(parameters(reduce))}, not {_list(expected)}")
    results = [n.value for n in ast.walk(reduce) if isinstance(n, ast.Return)]
    if not all(
        isinstance(r, ast.Tuple) and isinstance(r.elts[-1], ast.Dict) and {"logits", "logps"} <= strings(r.elts[-1])
        for r in results
    ):
        return _unsupported(STRATEGY, "reduce_loss does not return a tuple that ends in {'logits': ..., 'logps': ...}")
    collected = {
        n.left.value
        for n in ast.walk(step)
        if isinstance(n, ast.Compare) and isinstance(n.left, ast.Constant) and isinstance(n.ops[0], ast.In)
    }
    if not {"logits", "logps"} <= collected:
        return _unsupported(MODEL, "forward_backward does not collect by 'logits' in ... and 'logps' in ...")
    return Verdict("applies", f"{MODEL} line {loss.lineno}: {loss.name} reports logits whatever return_logits says")


def _list(parameters: list[str]) -> str:
    return f"({', '.join(parameters)})"


def _unsupported(module: str, what: str) -> Verdict:
    return Verdict("unsupported", f"{module}: {what}")


_FORWARD_BACKWARD = Symbol(MODEL, "MegatronModel.forward_backward", forward_backward)

TARGET = Target(
    name="twinkle",
    distribution="twinkle-kit",
    fixes=(
        Fix(
            "selective_log_softmax",
            (
                Symbol(TORCH_UTILS, "selective_log_softmax", selective_log_softmax, everywhere=True),
                Symbol(TORCH_UTILS, "_vocab_parallel_selective_log_softmax", vocab_parallel_selective_log_softmax),
            ),
            _detect_log_softmax,
        ),
        Fix("causal_mask", (_FORWARD_BACKWARD, Symbol(PROCESSOR, "InputProcessor.__call__", process)), _detect_mask),
        Fix(
            "report_logits",
            (_FORWARD_BACKWARD, Symbol(STRATEGY, "MegatronStrategy.reduce_loss", reduce_loss)),
            _detect_report_logits,
        ),
    ),
)
