// From torch's tensors to memlean's params, with every check that has to happen before anything is written.
#pragma once

#include <stdexcept>
#include <string>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "../memlean.h"

namespace memlean {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// std::invalid_argument and std::out_of_range arrive in Python as ValueError and IndexError.
inline void require(bool condition, const std::string &message)
{
    if (!condition)
        throw std::invalid_argument("memlean: " + message);
}

inline memlean_dtype dtype_of(const Tensor &logits)
{
    switch (logits.scalar_type()) {
    case ScalarType::Float:
        return MEMLEAN_F32;
    case ScalarType::BFloat16:
        return MEMLEAN_BF16;
    case ScalarType::Half:
        return MEMLEAN_F16;
    case ScalarType::Double:
        return MEMLEAN_F64;
    default:
        throw std::invalid_argument("memlean: logits must be float16, bfloat16, float32 or float64");
    }
}

// The dtype of results, statistics and upstream gradients.
inline ScalarType real_of(const Tensor &logits)
{
    return logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline std::string where(const Tensor &tensor, int64_t position)
{
    std::string text;
    for (int64_t d = tensor.dim() - 1; d >= 0; d--) {
        text = std::to_string(position % tensor.size(d)) + (text.empty() ? "" : ", ") + text;
        position /= tensor.size(d);
    }
    return text.empty() ? "index" : "index[" + text + "]";
}

// `index` is contiguous int64 of shape [...] or [..., candidates]; both must outlive the result, which points into them.
inline memlean_token_logprob_params describe(const Tensor &logits, const Tensor &index)
{
    const int64_t dims = logits.dim();
    require(dims >= 1, "logits must have at least one dimension, got a scalar");
    require(index.scalar_type() == ScalarType::Long && index.is_contiguous(), "index must be contiguous int64");
    require(index.dim() == dims || index.dim() == dims - 1, "index must have logits' dimensions, or one less");
    memlean_token_logprob_params params{};
    params.rows = 1;
    for (int64_t d = 0; d < dims - 1; d++) {
        require(index.size(d) == logits.size(d), "index must have the shape of logits without the last dimension");
        params.rows *= logits.size(d);
    }
    params.dtype = dtype_of(logits);
    params.logits = logits.data_ptr();
    params.vocab = logits.size(dims - 1);
    params.vocab_stride = logits.stride(dims - 1);
    params.row_dims = static_cast<int32_t>(dims - 1);
    params.row_sizes = logits.sizes().data();
    params.row_strides = logits.strides().data();
    params.candidates = index.dim() == dims ? index.size(dims - 1) : 1;
    params.index = static_cast<const int64_t *>(index.data_ptr());

    int64_t position = 0, value = 0;
    const memlean_status status = memlean_token_logprob_check(&params, &position, &value);
    if (status == MEMLEAN_EINDEX) {
        std::string message = "memlean: " + where(index, position) + " is " + std::to_string(value) +
                              ", expected 0 <= index < " + std::to_string(params.vocab) + " (the vocabulary)";
        if (value == -100)
            message += "; -100 marks ignored labels: replace it by a valid token and mask the result";
        throw std::out_of_range(message);
    }
    require(status == MEMLEAN_OK, memlean_status_string(status));
    return params;
}

// A row-wise input of the backward pass: null where absent, else contiguous, of the results' dtype, with `count` numbers.
inline const void *rowwise(const Tensor &tensor, const Tensor &logits, int64_t count, const char *name)
{
    require(tensor.scalar_type() == real_of(logits) && tensor.is_contiguous() && tensor.numel() == count,
            std::string(name) + " must be contiguous, of the results' dtype and shape");
    return tensor.data_ptr();
}

} // namespace memlean
