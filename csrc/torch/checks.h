// From torch's tensors to memlean's params, with every check that has to happen before anything is written.
#pragma once

#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "../memlean.h"

namespace memlean
{

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

// "name[i, j]" for the element at a flat position.
inline std::string where(const std::string &name, const Tensor &tensor, int64_t position)
{
    std::string text;
    for (int64_t d = tensor.dim() - 1; d >= 0; d--) {
        text = std::to_string(position % tensor.size(d)) + (text.empty() ? "" : ", ") + text;
        position /= tensor.size(d);
    }
    return text.empty() ? name : name + "[" + text + "]";
}

// The stable API reports every failure as a line of its own header; the one that happens is that memory has run out.
inline Tensor new_empty(const Tensor &like, torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType dtype)
{
    try {
        return torch::stable::new_empty(like, sizes, dtype);
    } catch (const std::runtime_error &) {
        std::string shape;
        for (const int64_t size : sizes)
            shape += (shape.empty() ? "" : ", ") + std::to_string(size);
        throw std::runtime_error("memlean: not enough memory for a tensor of shape [" + shape + "]");
    }
}

// A row-wise input: contiguous, of the given dtype, with `count` numbers.
inline const void *rowwise(const Tensor &tensor, ScalarType dtype, int64_t count, const char *name)
{
    require(tensor.is_cpu() && tensor.scalar_type() == dtype && tensor.is_contiguous() && tensor.numel() == count,
            std::string(name) + " must be contiguous, on the CPU, of the documented dtype, with " +
                std::to_string(count) + " elements, got " + std::to_string(tensor.numel()));
    return tensor.data_ptr();
}

// What both passes take beside logits and index.
struct Options {
    std::optional<Tensor> temperature, row_mask;
    std::optional<int64_t> ignore_index;
    int64_t first_token, index_limit;         // index_limit 0: the vocabulary of logits
    std::optional<Tensor> keep, keep_offsets; // a mask of logits' shape, or ids and the offsets of the rows in them
};

inline void check(const memlean_token_logprob_params &params, const Tensor &index, const Options &options)
{
    int64_t position = 0;
    const memlean_status status = memlean_token_logprob_check(&params, &position);
    if (status == MEMLEAN_EINDEX) {
        const int64_t value = params.index[position];
        std::string message = "memlean: " + where("index", index, position) + " is " + std::to_string(value) +
                              ", expected 0 <= index < " + std::to_string(params.index_limit) + " (the vocabulary)";
        if (value == -100)
            message += "; -100 marks ignored labels: pass ignore_index=-100 to mask them";
        throw std::out_of_range(message);
    }
    if (status == MEMLEAN_ETEMPERATURE) {
        const double value = params.dtype == MEMLEAN_F64
                                 ? static_cast<const double *>(params.temperature)[position]
                                 : static_cast<double>(static_cast<const float *>(params.temperature)[position]);
        char got[32];
        std::snprintf(got, sizeof got, "%g", value);
        require(false,
                where("temperature", *options.temperature, position) + " must be finite and positive, got " + got);
    }
    if (status == MEMLEAN_EKEPT)
        throw std::out_of_range("memlean: " + where("keep: ids", *options.keep, position) + " is " +
                                std::to_string(params.kept_ids[position]) + ", expected 0 <= id < " +
                                std::to_string(params.vocab) + " (the vocabulary)");
    if (status == MEMLEAN_EOFFSETS)
        require(false, where("keep: offsets", *options.keep_offsets, position) + " is " +
                           std::to_string(params.kept_offsets[position]) + ", expected offsets that rise from 0 to " +
                           std::to_string(params.kept_count) + " (the number of ids)");
    require(status == MEMLEAN_OK, memlean_status_string(status));
}

inline void describe_kept(const Tensor &logits, const Tensor &keep, const std::optional<Tensor> &offsets,
                          memlean_token_logprob_params &params)
{
    if (offsets) {
        params.kept_count = keep.numel();
        params.kept_ids = static_cast<const int64_t *>(rowwise(keep, ScalarType::Long, keep.numel(), "keep: ids"));
        params.kept_offsets =
            static_cast<const int64_t *>(rowwise(*offsets, ScalarType::Long, params.rows + 1, "keep: offsets"));
        return;
    }
    require(keep.is_cpu() && keep.scalar_type() == ScalarType::Bool && keep.dim() == logits.dim(),
            "keep must be a bool tensor on the CPU, of the shape of logits");
    for (int64_t d = 0; d < logits.dim(); d++)
        require(keep.size(d) == logits.size(d), "keep must have the shape of logits");
    params.kept_mask = static_cast<const uint8_t *>(keep.data_ptr());
    params.kept_mask_row_strides = keep.strides().data();
    params.kept_mask_vocab_stride = keep.stride(logits.dim() - 1);
}

// `index` is contiguous int64 of shape [...] or [..., candidates]. The arguments must outlive the result, which points
// into them.
inline memlean_token_logprob_params describe(const Tensor &logits, const Tensor &index, const Options &options)
{
    const int64_t dims = logits.dim();
    require(dims >= 1, "logits must have at least one dimension, got a scalar");
    require(index.is_cpu() && index.scalar_type() == ScalarType::Long && index.is_contiguous(),
            "index must be contiguous int64 on the CPU");
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
    params.first_token = options.first_token;
    params.index_limit = options.index_limit ? options.index_limit : params.vocab;
    params.has_ignore_index = options.ignore_index.has_value();
    params.ignore_index = options.ignore_index.value_or(0);
    if (options.row_mask)
        params.row_mask =
            static_cast<const uint8_t *>(rowwise(*options.row_mask, ScalarType::Bool, params.rows, "row_mask"));
    if (options.temperature) {
        params.temperature_step = options.temperature->numel() == 1 ? 0 : 1;
        params.temperature =
            rowwise(*options.temperature, real_of(logits), params.temperature_step ? params.rows : 1, "temperature");
    }
    if (options.keep)
        describe_kept(logits, *options.keep, options.keep_offsets, params);
    return params;
}

} // namespace memlean
