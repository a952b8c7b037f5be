"""The real ``MegatronModel.forward_backward`` around a small real GPT, on a CPU with gloo: for the tests and the demo.

What is not real: the constructors of MegatronModel and MegatronStrategy, which want a checkpoint and mcore-bridge
(CUDA); the optimizer, which is never stepped; and the device, as megatron-core asks for "cuda" in two factory calls.
"""

import contextlib
import os
import tempfile
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

# megatron-core decorates with torch.compile at import. Off for these imports only, for others' sake.
_before = os.environ.get("TORCHDYNAMO_DISABLE")
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import megatron.core.pipeline_parallel as pipeline  # noqa: E402
import twinkle  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from twinkle import DeviceMesh  # noqa: E402
from twinkle.loss import CrossEntropyLoss  # noqa: E402
from twinkle.model.megatron.megatron import MegatronModel, MegatronOptimizerGroup  # noqa: E402
from twinkle.model.megatron.strategy.megatron import MegatronStrategy, finalize_model_grads_for_lora  # noqa: E402
from twinkle.processor.base import InputProcessor  # noqa: E402
from twinkle.utils import Platform  # noqa: E402

if _before is None:
    del os.environ["TORCHDYNAMO_DISABLE"]
else:
    os.environ["TORCHDYNAMO_DISABLE"] = _before


class FactoriesOnCPU(TorchFunctionMode):
    """``device="cuda"`` in a factory call means CPU: one zeros() in each schedule, one ones() in the default mask."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


@contextlib.contextmanager
def replaced(owner, **attributes):
    """Sets attributes for the length of the block."""
    before = {name: vars(owner).get(name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextlib.contextmanager
def cpu_instead_of_cuda():
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            replaced(torch.cuda, current_device=lambda: torch.device("cpu"), synchronize=lambda *_, **__: None)
        )
        for platform in [Platform, *Platform.__subclasses__()]:
            stack.enter_context(replaced(platform, get_local_device=staticmethod(lambda *_, **__: "cpu")))
        yield


@contextlib.contextmanager
def device_prefix(prefix):
    """Makes twinkle believe it runs on another kind of device; nothing computes there."""
    with replaced(Platform, device_prefix=staticmethod(lambda *_: prefix)):
        yield


@contextlib.contextmanager
def process_group(tp=1, pp=1, vpp=None, rank=0, world_size=1, store=None):
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(  # type: ignore[attr-defined]
            store or os.path.join(folder, "store"), world_size
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        parallel_state.initialize_model_parallel(tp, pp, vpp)
        model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)  # this tracker's fork() needs no CUDA generator
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


class Trainer:
    """A MegatronModel and what tests want to see of it."""

    def __init__(
        self, *, vocab=512, variable=True, tp=1, pp=1, vpp=None, loss=None, dtype=torch.float32, layers=2, **config
    ):
        mesh = DeviceMesh.from_sizes(dp_size=1, tp_size=tp, pp_size=pp, vpp_size=vpp)
        twinkle.initialize(mode="local", global_device_mesh=mesh)  # before the processor: it drops the mesh otherwise
        self.config = TransformerConfig(
            num_layers=layers,
            hidden_size=32,
            num_attention_heads=4,
            use_cpu_initialization=True,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            apply_rope_fusion=False,
            attention_softmax_in_fp32=True,
            calculate_per_token_loss=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            variable_seq_lengths=variable,
            moe_token_dispatcher_type="alltoall",
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            batch_p2p_comm=True,
            overlap_p2p_comm=False,
        )
        for (
            name,
            value,
        ) in config.items():  # fields of mcore-bridge's ModelConfig or MindSpeed's, not of megatron-core's
            setattr(self.config, name, value)
        self.config.finalize_model_grads_func = finalize_model_grads_for_lora
        torch.manual_seed(0)
        self.chunks = [self._chunk(vocab, stage) for stage in range(vpp)] if vpp else [self._chunk(vocab, None)]
        if dtype is not torch.float32:
            for chunk in self.chunks:
                chunk.to(dtype)

        strategy = MegatronStrategy.__new__(MegatronStrategy)
        strategy.device_mesh, strategy.config, strategy.ddp_config = mesh, self.config, {}
        self.processor = InputProcessor(mesh, framework="megatron")
        self.group = MegatronOptimizerGroup(
            loss_instance=loss or CrossEntropyLoss(), processor=self.processor, _device_mesh=mesh
        )
        self.group.optimizer = SimpleNamespace(
            param_groups=[{"lr": 1e-4}], chained_optimizers=[SimpleNamespace(config=SimpleNamespace(lr=1e-4))]
        )
        model = self.model = MegatronModel.__new__(MegatronModel)
        torch.nn.Module.__init__(model)
        vars(model)["model"] = self.chunks
        model.device_mesh, model.strategy, model.variable_seq_lengths = mesh, strategy, variable
        model._model_wrapped = model._finish_config = True
        model.optimizer_group, model.active_group = {"default": self.group}, "default"

    def _chunk(self, vocab, vp_stage):
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
        chunk = GPTModel(
            self.config,
            get_gpt_layer_local_spec(),
            vocab_size=vocab,
            max_sequence_length=64,
            pre_process=first,
            post_process=last,
            position_embedding_type="rope",
            parallel_output=True,
            share_embeddings_and_output_weights=False,
            vp_stage=vp_stage,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        return chunk

    def step(self, inputs, micro_batch_size=2, **kwargs):
        """One forward_backward from zero gradients: outputs, gradients, logits elements left in its results."""
        for chunk in self.chunks:
            chunk.zero_grad()
        kept = []
        get_schedule = pipeline.get_forward_backward_func

        def get():
            schedule = get_schedule()

            def run(**arguments):
                results = schedule(**arguments)
                kept.append(sum(r["logits"].numel() for r in results if r.get("logits") is not None))
                return results

            return run

        with replaced(pipeline, get_forward_backward_func=get), FactoriesOnCPU():
            outputs = self.model.forward_backward(inputs=inputs, micro_batch_size=micro_batch_size, **kwargs)
        gradients = [p.grad for chunk in self.chunks for p in chunk.parameters() if p.grad is not None]
        return outputs, gradients, kept[0]


def forward(chunk, *args, **kwargs):
    """The bare GPT model, as its schedule would call it."""
    with FactoriesOnCPU():
        return chunk(*args, **kwargs)
