"""Every refusal: its type, and a message that names the argument, what was expected and what came."""

import re

import pytest
import torch
from memory import needs_high_water_mark, peak_growth

from memlean import selective_log_softmax

LOGITS = torch.zeros(2, 3, 10)
INDEX = torch.zeros(2, 3, dtype=torch.long)

TYPE_ERRORS = {
    "logits a list": ([[0.0]], INDEX, ["logits", "torch.Tensor", "list"]),
    "index an int": (LOGITS, 3, ["index", "torch.Tensor", "int"]),
    "index None": (LOGITS, None, ["index", "torch.Tensor", "NoneType"]),
    "integer logits": (LOGITS.long(), INDEX, ["logits", "float32", "torch.int64"]),
    "bool logits": (LOGITS.bool(), INDEX, ["logits", "float32", "torch.bool"]),
    "complex logits": (LOGITS.to(torch.complex64), INDEX, ["logits", "float32", "torch.complex64"]),
    "float8 logits": (LOGITS.to(torch.float8_e4m3fn), INDEX, ["logits", "float32", "torch.float8_e4m3fn"]),
    "bool index": (LOGITS, INDEX.bool(), ["index", "int64", "torch.bool"]),
    "float index": (LOGITS, INDEX.float(), ["index", "int64", "torch.float32"]),
    "uint16 index": (LOGITS, INDEX.to(torch.uint16), ["index", "int64", "torch.uint16"]),
    "sparse logits": (LOGITS.to_sparse(), INDEX, ["logits", "strided", "torch.sparse_coo"]),
    "CSR logits": (LOGITS[0].to_sparse_csr(), INDEX[0], ["logits", "strided", "torch.sparse_csr"]),
    "sparse index": (LOGITS, INDEX.to_sparse(), ["index", "strided", "torch.sparse_coo"]),
}
VALUE_ERRORS = {
    "no dimension": (torch.zeros(()), torch.tensor(0), ["logits", "[..., vocab]", "without dimensions"]),
    "empty vocabulary": (LOGITS[..., :0], INDEX, ["logits", "vocabulary", "at least one", "[2, 3, 0]"]),
    "empty vocabulary, no rows": (torch.zeros(0, 0), torch.zeros(0, dtype=torch.long), ["vocabulary", "[0, 0]"]),
    "index one row short": (LOGITS, INDEX[:, :2], ["index", "[2, 3]", "[2, 3, 10]", "[2, 2]"]),
    "index one row short with K": (LOGITS, INDEX[:, :2, None], ["index", "[2, 3, 10]", "[2, 2, 1]"]),
    "index to be broadcast": (LOGITS, INDEX[:1], ["index", "[2, 3]", "[2, 3, 10]", "[1, 3]"]),
    "index to be broadcast with K": (LOGITS, INDEX[:, :1, None], ["index", "[2, 3, 10]", "[2, 1, 1]"]),
    "index without the first dimension": (LOGITS, INDEX[0], ["index", "[2, 3]", "[2, 3, 10]", "got [3]"]),
    "index of too many dimensions": (LOGITS, INDEX[..., None, None], ["index", "[2, 3, 10]", "[2, 3, 1, 1]"]),
    "0-d index for a batch": (LOGITS, torch.tensor(0), ["index", "[2, 3]", "[2, 3, 10]", "got []"]),
    "transposed index": (LOGITS, INDEX.t(), ["index", "[2, 3]", "[3, 2]"]),
    "index on another device": (LOGITS, INDEX.to("meta"), ["one device", "cpu", "meta"]),
    "logits on another device": (LOGITS.to("meta"), INDEX, ["one device", "meta", "cpu"]),
}


CASES = [pytest.param(TypeError, *case, id=name) for name, case in TYPE_ERRORS.items()]
CASES += [pytest.param(ValueError, *case, id=name) for name, case in VALUE_ERRORS.items()]


@pytest.mark.parametrize(("error", "logits", "index", "facts"), CASES)
def test_wrong_arguments(error, logits, index, facts):
    with pytest.raises(error) as caught:
        selective_log_softmax(logits, index)
    for fact in facts:
        assert fact in str(caught.value)


def test_wrong_shapes_when_a_gradient_is_wanted():
    with pytest.raises(ValueError, match=r"got \[1, 3\]"):
        selective_log_softmax(LOGITS.clone().requires_grad_(), INDEX[:1], return_entropy=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_logits(layout):
    nested = torch.nested.nested_tensor([torch.zeros(2, 5), torch.zeros(3, 5)], layout=layout)
    with pytest.raises(TypeError, match=r"logits must be a dense \(strided\) tensor, got a nested tensor"):
        selective_log_softmax(nested, INDEX)


@pytest.fixture
def one_process_mesh():
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import DeviceMesh

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    destroy_process_group()


def test_dtensor_is_refused_by_a_sentence_that_names_the_way_out(one_process_mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded = distribute_tensor(LOGITS, one_process_mesh, [Shard(2)])
    with pytest.raises(TypeError, match=r"logits must be a plain tensor, got a DTensor.*to_local\(\)"):
        selective_log_softmax(sharded, INDEX)


@pytest.mark.parametrize("value", ["float32", torch.float32, "", 1])
def test_unknown_out_dtype(value):
    with pytest.raises(ValueError, match=f"out_dtype must be None or 'input', got {re.escape(repr(value))}"):
        selective_log_softmax(LOGITS, INDEX, out_dtype=value)


@pytest.mark.parametrize("value", [0, -1, 1.5, "64"])
def test_unusable_chunk_bytes(value):
    with pytest.raises(ValueError, match=f"chunk_bytes must be a positive .*, got {re.escape(repr(value))}"):
        selective_log_softmax(LOGITS, INDEX, chunk_bytes=value)


@pytest.mark.usefixtures("each_path")
def test_a_budget_beyond_int64_is_no_limit():
    assert torch.equal(selective_log_softmax(LOGITS, INDEX, chunk_bytes=2**70), selective_log_softmax(LOGITS, INDEX))


def test_options_are_keywords():
    with pytest.raises(TypeError, match="positional"):
        selective_log_softmax(LOGITS, INDEX, False, "input")


OUT_OF_RANGE = [10, 11, -1, -10, -100, 2**31, 2**32, 2**32 + 1, -(2**63), 2**63 - 1]


@pytest.mark.parametrize("grad", ["no_grad", "frozen", "grad"])
@pytest.mark.parametrize("value", OUT_OF_RANGE)
@pytest.mark.usefixtures("each_path")
def test_index_out_of_range_names_value_position_and_vocabulary(value, grad):
    index = INDEX.clone()
    index[1, 2] = value
    logits = LOGITS.clone().requires_grad_(grad != "frozen")
    with torch.set_grad_enabled(grad != "no_grad"), pytest.raises(IndexError) as caught:
        selective_log_softmax(logits, index, return_entropy=True)
    assert f"index[1, 2] is {value}, expected 0 <= index < 10" in str(caught.value)
    assert ("mask" in str(caught.value)) == (value == -100)


@pytest.mark.usefixtures("each_path")
def test_the_first_bad_index_is_named():
    index = torch.zeros(2, 3, 4, dtype=torch.long)
    index[0, 2, 3], index[1, 0, 0] = 77, -5
    with pytest.raises(IndexError, match=r"index\[0, 2, 3\] is 77, expected 0 <= index < 10"):
        selective_log_softmax(LOGITS, index)


@pytest.mark.usefixtures("each_path")
@pytest.mark.parametrize(("dtype", "value"), [(torch.int8, -1), (torch.int16, -100), (torch.uint8, 255)], ids=str)
def test_a_narrow_index_is_checked_too(dtype, value):
    index = torch.tensor(value, dtype=dtype)
    with pytest.raises(IndexError, match=f"index is {value}, expected 0 <= index < 10"):
        selective_log_softmax(torch.zeros(10), index)


@needs_high_water_mark
@pytest.mark.usefixtures("each_path")
def test_nothing_is_allocated_before_a_bad_index_is_found():
    index = torch.zeros(2**24, dtype=torch.long)
    index[-1] = 1
    logits = torch.zeros(1).expand(2**24, 1)

    def call():
        with torch.no_grad(), pytest.raises(IndexError):
            selective_log_softmax(logits, index)

    call()
    # Results and statistics would be 16 bytes a row. The generic path's check itself takes up to three bytes a row.
    assert peak_growth(call) <= 60 * 2**20


@pytest.mark.usefixtures("each_path")
def test_an_error_leaves_nothing_behind():
    logits = torch.randn(2, 3, 10, requires_grad=True)
    good = selective_log_softmax(logits, INDEX)
    with pytest.raises(IndexError):
        selective_log_softmax(logits, INDEX - 1)
    assert torch.equal(selective_log_softmax(logits, INDEX), good)
