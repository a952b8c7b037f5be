"""Docstrings say everything, and what they say runs: each "Equivalent to" is compared with the function itself."""

import inspect

import docstrings
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

import memlean
from memlean.distributed import vocab_parallel_selective_log_softmax

FUNCTIONS = {name: value for name, value in docstrings.PUBLIC.items() if inspect.isfunction(value)}


def run(block, **names):
    """The names that the block leaves behind."""
    names = {"torch": torch, "dist": dist, "memlean": memlean, **names}
    exec(compile(block, "docstring", "exec"), names)
    return names


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(3, 5, 96, generator=generator)).to(dtype)
    return logits, torch.randint(96, (3, 5), generator=generator)


def test_each_public_name_has_an_equivalent_or_an_example():
    print(f"{len(docstrings.EQUIVALENTS)} equivalents, {len(docstrings.EXAMPLES)} examples")
    assert docstrings.EQUIVALENTS.keys() | docstrings.EXAMPLES.keys() == docstrings.PUBLIC.keys()
    assert docstrings.EQUIVALENTS.keys() == COMPARED.keys() | {
        "memlean.distributed.vocab_parallel_selective_log_softmax"
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sections_and_arguments(name):
    text = inspect.getdoc(FUNCTIONS[name])
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    _, _, arguments = text.partition("\nArgs:\n")
    arguments, _, _ = arguments.partition("\nReturns:\n")
    described = {word for line in arguments.splitlines() for word in line.partition(":")[0].replace(",", " ").split()}
    assert parameters.keys() <= described
    assert "\nReturns:\n" in text
    can_raise = parameters and name != "memlean.is_patched"
    assert bool(can_raise) == ("\nRaises:\n" in text)


def selective_log_softmax(logits, index, temperature):
    logps, entropy = memlean.selective_log_softmax(logits, index, return_entropy=True, temperature=temperature)
    return {"logps": logps, "entropy": entropy}


COMPARED = {
    "memlean.selective_log_softmax": selective_log_softmax,
    "memlean.token_stats": lambda logits, index, t: memlean.token_stats(logits, index, temperature=t)._asdict(),
    "memlean.entropy_from_logits": lambda x, _, t: {"entropy": memlean.entropy_from_logits(x, temperature=t)},
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", COMPARED)
def test_equivalent(name, dtype, temperature):
    logits, index = inputs(dtype)
    expected = run(docstrings.EQUIVALENTS[name], logits=logits, index=index, temperature=temperature)
    results = COMPARED[name](logits, index, temperature)
    assert results
    for field, result in results.items():
        assert result.dtype == expected[field].dtype
        torch.testing.assert_close(result, expected[field], rtol=1e-5, atol=1e-5)


def _vocab_parallel(rank):
    """On each rank: the largest differences of logps and entropy."""
    logits, index = inputs()
    shard = logits.chunk(2, -1)[rank].contiguous()
    block = docstrings.EQUIVALENTS["memlean.distributed.vocab_parallel_selective_log_softmax"]
    expected = run(block, logits_shard=shard, index=index, group=None)
    results = vocab_parallel_selective_log_softmax(shard, index, return_entropy=True)
    return [(a - expected[name]).abs().max().item() for a, name in zip(results, ("logps", "entropy"), strict=True)]


def test_equivalent_of_the_vocab_parallel_function():
    with Ranks(2) as ranks:
        for differences in ranks(_vocab_parallel):
            assert max(differences) < 2e-6


@pytest.mark.parametrize("name", docstrings.EXAMPLES_HERE)
def test_example(name):
    logits, index = inputs()
    names = run(docstrings.EXAMPLES[name], logits=logits, index=index)
    CHECKS[name](names)


def check_token_stats(names):
    logps, entropy = memlean.selective_log_softmax(*inputs(), return_entropy=True)
    assert names["loss"].item() == pytest.approx(-(logps + 0.01 * entropy).mean().item(), rel=1e-6)


def check_estimate(names):
    assert names["retained"] == 16384 * 151936 * 2


CHECKS = {"memlean.TokenStats": check_token_stats, "memlean.estimate.estimate": check_estimate}
