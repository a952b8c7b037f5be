"""Fix 3, through the real MegatronModel.forward_backward, a real GPT and the real schedules."""

import logging

import pytest
import torch
from rig import FactoriesOnCPU, Trainer, as_tensors, features, same
from twinkle.loss import GRPOLoss
from twinkle.metric import DPOMetric, LossMetric
from twinkle.metric.grpo import GRPOMetric

import memlean

KEEPS_DTYPE = {"exclude": "selective_log_softmax"}  # without memlean's operator nothing may change by one bit


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variable", [True, False], ids=["variable", "fixed"])
def test_same_step_without_logits_in_the_results(variable, dtype, forward_only):
    trainer, inputs = Trainer(variable=variable, dtype=dtype), features()
    before, gradients, kept = trainer.step(inputs, forward_only=forward_only)
    assert kept == (2 * (8 + 8 + 7) if variable else 6 * 8) * 512
    assert (gradients == []) == forward_only

    with memlean.patched("twinkle", **KEEPS_DTYPE) as report:
        after, gradients_after, kept = trainer.step(inputs, forward_only=forward_only)
    assert kept == 0
    assert after["loss"] == before["loss"]
    assert same(after["logps"], before["logps"]) and same(gradients_after, gradients)
    assert after["logits"] is None and before["logits"] is None
    counters = report["report_logits"].counters
    tokens = 2 * (8 + 8 + 7) if variable else 6 * 8
    assert dict(counters) == {"logits dropped": 3, "logits bytes dropped": tokens * 512 * dtype.itemsize}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variable", [True, False], ids=["variable", "fixed"])
def test_all_fixes_agree_within_the_rounding_of_the_original(variable, dtype):
    trainer, inputs = Trainer(variable=variable, dtype=dtype), features()
    before, gradients, _ = trainer.step(inputs)
    with memlean.patched("twinkle"):
        after, gradients_after, kept = trainer.step(inputs)
    assert kept == 0
    worst = max((new - old).abs().max().item() for old, new in zip(gradients, gradients_after, strict=True))
    print(f"loss {before['loss']:.7f} -> {after['loss']:.7f}, worst gradient difference {worst:.3g}")
    # float32: the order of a sum over the vocabulary. bfloat16: upstream rounds each log-probability to 8 bits.
    tolerance = {"rtol": 2e-5, "atol": 2e-6} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    assert after["loss"] == pytest.approx(before["loss"], rel=1e-6 if dtype is torch.float32 else 2e-3)
    for old, new in zip(as_tensors(before["logps"]), as_tensors(after["logps"]), strict=True):
        torch.testing.assert_close(new, old.float(), **tolerance)
    for old, new in zip(gradients, gradients_after, strict=True):
        torch.testing.assert_close(new, old, **tolerance)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("variable", [True, False], ids=["variable", "fixed"])
def test_return_logits_is_as_it_was(variable, forward_only):
    trainer, inputs = Trainer(variable=variable), features()
    before, gradients, kept = trainer.step(inputs, return_logits=True, forward_only=forward_only)
    with memlean.patched("twinkle", **KEEPS_DTYPE) as report:
        after, gradients_after, kept_after = trainer.step(inputs, return_logits=True, forward_only=forward_only)
        assert dict(report["report_logits"].counters) == {}
    assert kept == kept_after > 0
    assert after["loss"] == before["loss"]
    assert same(after["logits"], before["logits"]) and as_tensors(after["logits"])
    assert same(after["logps"], before["logps"]) and same(gradients_after, gradients)


def test_a_live_trainer_and_public_forward_only():
    trainer, inputs = Trainer(), features()
    memlean.patch("twinkle")  # after everything was built
    with FactoriesOnCPU():
        assert trainer.model.forward_only(inputs=inputs, micro_batch_size=2)["logits"] is None
    assert memlean.report()["report_logits"].counters["logits dropped"] == 3


def test_loss_that_needs_no_logps_in_fixed_length():
    """Upstream collects a None per micro-batch and concatenates them."""

    class FromLogits(GRPOLoss):
        require_logps = False

        def __call__(self, inputs, outputs, **kwargs):
            result = super().__call__(inputs, outputs, advantages=[1.0] * len(inputs["labels"]))
            assert outputs["logps"] is None
            return result

    trainer, inputs = Trainer(variable=False, loss=FromLogits()), features()
    with pytest.raises(TypeError, match="NoneType"):
        trainer.step(inputs)
    with memlean.patched("twinkle", **KEEPS_DTYPE) as report:
        outputs, gradients, _ = trainer.step(inputs)
        assert "micro-batches skipped" not in report["report_logits"].counters
    assert outputs["logps"] is None and gradients


def break_micro_batches(monkeypatch, trainer, broken):
    """The unpacking of these micro-batches fails, as it does for a batch whose lengths do not fit."""
    calls = []
    unpack = trainer.processor.unpack_packed_sequences

    def unpack_packed_sequences(inputs, outputs=None, task="causal_lm"):
        if outputs is not None:
            calls.append(None)
            if len(calls) - 1 in broken:
                raise RuntimeError("injected")
        return unpack(inputs, outputs, task=task)

    monkeypatch.setattr(trainer.processor, "unpack_packed_sequences", unpack_packed_sequences)
    monkeypatch.setenv("TWINKLE_FAIL_FAST", "0")


FAILURES = pytest.mark.parametrize("broken", [{0}, {1}, {2}, {0, 1, 2}, set()], ids=str)


@FAILURES
@pytest.mark.parametrize("variable", [True, False], ids=["variable", "fixed"])
def test_failed_micro_batches_before(monkeypatch, variable, broken):
    """What upstream does, so that the test after this one shows a difference."""
    trainer = Trainer(variable=variable)
    break_micro_batches(monkeypatch, trainer, broken)
    if variable or not broken:
        outputs, _, _ = trainer.step(features())
        holes = [i for i, logps in enumerate(as_tensors(outputs["logps"])) if logps is None]
        assert holes == sorted(broken)
    else:
        with pytest.raises(TypeError, match="NoneType"):
            trainer.step(features())


@FAILURES
@pytest.mark.parametrize("return_logits", [False, True])
@pytest.mark.parametrize("variable", [True, False], ids=["variable", "fixed"])
def test_failed_micro_batches_after(monkeypatch, caplog, variable, return_logits, broken):
    whole, _, _ = Trainer(variable=variable).step(features(), return_logits=True)
    trainer = Trainer(variable=variable)
    break_micro_batches(monkeypatch, trainer, broken)
    with memlean.patched("twinkle", **KEEPS_DTYPE) as report, caplog.at_level(logging.WARNING, "memlean"):
        outputs, gradients, kept = trainer.step(features(), return_logits=return_logits)

    survivors = [i for i in range(3) if i not in broken]
    for name in ("logps", "logits") if return_logits else ("logps",):
        parts = as_tensors(whole[name]) if variable else list(whole[name].split(2))
        expected = [parts[i] for i in survivors]
        if not survivors:
            assert not as_tensors(outputs[name])
        else:
            assert same(outputs[name], expected if variable else torch.cat(expected))
    assert return_logits or kept == 0
    assert gradients
    assert report["report_logits"].counters.get("micro-batches skipped", 0) == len(broken)
    warnings = [r.message for r in caplog.records if r.name == "memlean"]
    assert len(warnings) == (1 if broken else 0)
    assert all(f"{len(broken)} of 3 micro-batches failed" in text for text in warnings)


@pytest.mark.parametrize("broken", [{0}, {1}, {2}], ids=str)
@pytest.mark.parametrize("variable", [True, False], ids=["variable", "fixed"])
def test_metrics_stay_paired_with_their_labels(monkeypatch, variable, broken):
    """After a failure the metrics are those of a step over the surviving micro-batches alone."""
    survivors = [row for row in range(6) if row // 2 not in broken]
    inputs = features(lengths=LENGTHS)
    old = [torch.linspace(-7, -5, n - 1).tolist() for n in LENGTHS]
    advantages = [0.5, -1.0, 1.5, -0.25, 2.0, -2.0]

    def metrics(rows, broken):
        trainer = Trainer(variable=variable, loss=GRPOLoss())
        trainer.group.train_status.metrics = [GRPOMetric(), LossMetric(None, None)]
        if broken:
            break_micro_batches(monkeypatch, trainer, broken)
        trainer.step(
            [inputs[row] for row in rows],
            old_logps=[old[row] for row in rows],
            advantages=[advantages[row] for row in rows],
            temperature=1.0,
        )
        return trainer.model.calculate_metric(is_training=True)

    with memlean.patched("twinkle", **KEEPS_DTYPE):
        expected = metrics(survivors, set())
        found = metrics(range(6), broken)
    assert "train/approx_kl" in expected
    for name in expected.keys() - {"loss"}:  # the loss of the failed micro-batch counts, computed from its logits
        assert found[name] == pytest.approx(expected[name], rel=1e-6), name


LENGTHS = (8, 6, 8, 8, 7, 8)  # every pair has one of 8, so that leaving a pair out does not change the padded length


def test_dpo_metric_after_a_failure(monkeypatch):
    inputs = features(lengths=LENGTHS)

    def metrics(rows, broken):
        trainer = Trainer(variable=False)
        trainer.group.train_status.metrics = [DPOMetric(None, None)]
        if broken:
            break_micro_batches(monkeypatch, trainer, broken)
        reference = torch.linspace(-7, -5, 48).view(6, 8)[list(rows)]
        trainer.step([inputs[row] for row in rows], ref_outputs={"logps": reference})
        return trainer.model.calculate_metric(is_training=True)

    with memlean.patched("twinkle", **KEEPS_DTYPE):
        assert metrics(range(6), {1}) == metrics([0, 1, 4, 5], set())


@pytest.mark.parametrize("variable", [True, False], ids=["variable", "fixed"])
def test_metrics_of_a_step_that_failed_altogether(monkeypatch, variable):
    trainer = Trainer(variable=variable, loss=GRPOLoss())
    trainer.group.train_status.metrics = [GRPOMetric()]
    break_micro_batches(monkeypatch, trainer, {0, 1, 2})
    with memlean.patched("twinkle"):
        trainer.step(features(), advantages=[1.0] * 6)
        assert trainer.model.calculate_metric(is_training=True) == {}


def test_fail_fast_still_raises(monkeypatch):
    trainer = Trainer()
    break_micro_batches(monkeypatch, trainer, {1})
    monkeypatch.setenv("TWINKLE_FAIL_FAST", "1")
    with memlean.patched("twinkle"), pytest.raises(RuntimeError, match="injected"):
        trainer.step(features())


def test_reduce_loss_of_a_caller_outside_a_step_is_untouched():
    strategy = Trainer().model.strategy
    logits = torch.randn(2, 3, 8)
    with memlean.patched("twinkle"):
        _, _, reported = strategy.reduce_loss(torch.tensor(1.0), torch.tensor(1), logits, None)
    assert torch.equal(reported["logits"], logits) and reported["logps"] is None


def test_old_reduce_loss_that_detaches_whatever_it_gets():
    """Versions up to 0.4.0 call .detach() on both; the stand-in must be a tensor."""
    trainer = Trainer(variable=True)

    def reduce_loss(self, local_loss, local_count, logits, logps):
        loss, count, reported = type(self).reduce_loss.__wrapped__(self, local_loss, local_count, logits, logps)
        return loss, count, reported | {"logits": logits.detach(), "logps": logps.detach()}

    from memlean.integrations.twinkle import reduce_loss as body

    strategy = trainer.model.strategy
    memlean.patch("twinkle", **KEEPS_DTYPE)
    strategy.reduce_loss = lambda *args: body(reduce_loss, strategy, *args)
    outputs, _, kept = trainer.step(features())
    assert kept == 0 and len(outputs["logps"]) == 3
