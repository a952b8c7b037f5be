// memlean's torch operators on the CPU, and the Python module memlean._C. No arithmetic here: checks, allocation, a
// call.
#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "checks.h"

// The one symbol that libstdc++'s headers would import from a glibc newer than 2.28. 0: count references atomically.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

namespace
{

using memlean::new_empty;
using memlean::Options;
using memlean::ScalarType;
using memlean::Tensor;

bool hugepages_wanted = true;

// Calls f(begin, end) on all of [0, items), each item worth `elements` logits. Threads take the next piece when they
// are done with one: masked rows take no time, and stand together. The results do not depend on who computes what.
template <class F> void in_parallel(int64_t items, int64_t elements, const F &f)
{
    const int64_t piece = std::max<int64_t>(1, MEMLEAN_SEGMENT / std::max<int64_t>(1, elements));
    const int64_t pieces = (items + piece - 1) / piece;
    std::atomic<int64_t> next{0};
    const auto take = [&](int64_t, int64_t) {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces;)
            f(i * piece, std::min(items, (i + 1) * piece));
    };
    if (pieces == 1)
        take(0, 1);
    else
        torch::stable::parallel_for(0, std::min<int64_t>(pieces, torch::stable::get_num_threads()), 1, take);
}

void run_forward(const memlean_token_logprob_params &params)
{
    const int64_t segments = memlean_token_logprob_segments(params.vocab);
    const int64_t few_rows = 8 * static_cast<int64_t>(torch::stable::get_num_threads());
    if (segments == 1 || params.rows >= few_rows) {
        in_parallel(params.rows, params.vocab,
                    [&](int64_t begin, int64_t end) { memlean_token_logprob_forward(&params, begin, end); });
    } else {
        std::vector<memlean_row_state> states(static_cast<size_t>(params.rows * segments));
        in_parallel(params.rows * segments, MEMLEAN_SEGMENT, [&](int64_t begin, int64_t end) {
            memlean_token_logprob_reduce(&params, begin, end, states.data());
        });
        memlean_token_logprob_finish(&params, 0, params.rows, states.data());
    }
}

std::tuple<Tensor, Tensor, Tensor> prepare_forward(memlean_token_logprob_params &params, const Tensor &logits,
                                                   const Tensor &index, bool return_entropy)
{
    const ScalarType real = memlean::real_of(logits);
    std::vector<int64_t> rows(params.row_sizes, params.row_sizes + params.row_dims), none{0}, kept = rows;
    kept.push_back(MEMLEAN_STATISTICS);
    const Tensor logp = new_empty(logits, index.sizes(), real), statistics = new_empty(logits, kept, real);
    const Tensor entropy = new_empty(logits, return_entropy ? rows : none, real);
    params.logp = logp.data_ptr();
    params.statistics = statistics.data_ptr();
    params.entropy = return_entropy ? entropy.data_ptr() : nullptr;
    return {logp, entropy, statistics};
}

std::tuple<Tensor, Tensor, Tensor>
token_logprob_forward(Tensor logits, Tensor index, bool return_entropy, std::optional<Tensor> temperature,
                      std::optional<Tensor> row_mask, std::optional<int64_t> ignore_index, int64_t first_token,
                      int64_t index_limit, std::optional<Tensor> keep, std::optional<Tensor> keep_offsets, int64_t)
{
    const Options options{temperature, row_mask, ignore_index, first_token, index_limit, keep, keep_offsets};
    memlean_token_logprob_params params = memlean::describe(logits, index, options);
    memlean::check(params, index, options);
    const auto results = prepare_forward(params, logits, index, return_entropy);
    run_forward(params);
    return results;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
token_stats_forward(Tensor logits, Tensor index, bool return_entropy, bool extras, std::optional<Tensor> temperature,
                    std::optional<Tensor> row_mask, std::optional<int64_t> ignore_index, int64_t)
{
    const Options options{temperature, row_mask, ignore_index, 0, 0, {}, {}};
    memlean_token_logprob_params params = memlean::describe(logits, index, options);
    memlean::check(params, index, options);
    const auto [logp, entropy, statistics] = prepare_forward(params, logits, index, return_entropy);
    const ScalarType real = memlean::real_of(logits);
    const std::vector<int64_t> rows(params.row_sizes, params.row_sizes + params.row_dims), none{0};
    const Tensor logsumexp = new_empty(logits, rows, real), max = new_empty(logits, rows, real);
    const Tensor sum_p2 = new_empty(logits, extras ? rows : none, real);
    const Tensor argmax = new_empty(logits, extras ? rows : none, ScalarType::Long);
    params.logsumexp = logsumexp.data_ptr();
    params.max = max.data_ptr();
    if (extras) {
        params.sum_p2 = sum_p2.data_ptr();
        params.argmax = static_cast<int64_t *>(argmax.data_ptr());
    }
    run_forward(params);
    return {logp, entropy, statistics, logsumexp, max, sum_p2, argmax};
}

void backward(const Tensor &logits, const Tensor &index, const Tensor &statistics,
              const std::optional<Tensor> &grad_logp, const std::optional<Tensor> &grad_entropy, const Options &options,
              const Tensor &grad_logits)
{
    memlean_token_logprob_params params = memlean::describe(logits, index, options);
    const ScalarType real = memlean::real_of(logits);
    params.grad_logits = grad_logits.data_ptr();
    memlean::check(params, index, options);
    params.statistics =
        const_cast<void *>(memlean::rowwise(statistics, real, params.rows * MEMLEAN_STATISTICS, "statistics"));
    if (grad_logp)
        params.grad_logp = memlean::rowwise(*grad_logp, real, params.rows * params.candidates, "grad_logp");
    if (grad_entropy)
        params.grad_entropy = memlean::rowwise(*grad_entropy, real, params.rows, "grad_entropy");
    if (hugepages_wanted && params.grad_logits != params.logits)
        memlean_advise_hugepages(params.grad_logits, static_cast<size_t>(grad_logits.numel()) * logits.element_size());
    in_parallel(params.rows * memlean_token_logprob_segments(params.vocab),
                std::min<int64_t>(params.vocab, MEMLEAN_SEGMENT),
                [&](int64_t begin, int64_t end) { memlean_token_logprob_backward(&params, begin, end); });
}

Tensor token_logprob_backward(Tensor logits, Tensor index, Tensor statistics, std::optional<Tensor> grad_logp,
                              std::optional<Tensor> grad_entropy, std::optional<Tensor> temperature,
                              std::optional<Tensor> row_mask, std::optional<int64_t> ignore_index, int64_t first_token,
                              int64_t index_limit, std::optional<Tensor> keep, std::optional<Tensor> keep_offsets,
                              int64_t)
{
    const Tensor grad_logits = new_empty(logits, logits.sizes(), logits.scalar_type());
    backward(logits, index, statistics, grad_logp, grad_entropy,
             {temperature, row_mask, ignore_index, first_token, index_limit, keep, keep_offsets}, grad_logits);
    return grad_logits;
}

void token_logprob_backward_(Tensor logits, Tensor index, Tensor statistics, std::optional<Tensor> grad_logp,
                             std::optional<Tensor> grad_entropy, std::optional<Tensor> temperature,
                             std::optional<Tensor> row_mask, std::optional<int64_t> ignore_index, int64_t first_token,
                             int64_t index_limit, std::optional<Tensor> keep, std::optional<Tensor> keep_offsets)
{
    backward(logits, index, statistics, grad_logp, grad_entropy,
             {temperature, row_mask, ignore_index, first_token, index_limit, keep, keep_offsets}, logits);
}

std::vector<std::string> names(const char *(*at)(int))
{
    std::vector<std::string> all;
    for (int i = 0; const char *name = at(i); i++)
        all.emplace_back(name);
    return all;
}

void select_isa(std::optional<std::string> name)
{
    if (memlean_isa_select(name ? name->c_str() : nullptr) == MEMLEAN_OK)
        return;
    std::string known;
    for (const std::string &available : names(memlean_isa_available))
        known += (known.empty() ? "" : ", ") + available;
    throw std::invalid_argument("instruction set must be one that this CPU has (" + known + "), got '" + *name + "'");
}

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif
// Also found by memlean/_native.py in the file of a library that does not load.
constexpr char BUILD[] = "built with torch " MEMLEAN_BUILT_WITH_TORCH ", " COMPILER ", " MEMLEAN_BUILD_FLAGS;

} // namespace

// The schemas are defined in Python (memlean/_ops.py), so that they exist without this library.
STABLE_TORCH_LIBRARY_IMPL(memlean, CPU, library)
{
    library.impl("token_logprob_forward", TORCH_BOX(&token_logprob_forward));
    library.impl("token_logprob_backward", TORCH_BOX(&token_logprob_backward));
    library.impl("token_logprob_backward_", TORCH_BOX(&token_logprob_backward_));
    library.impl("token_stats_forward", TORCH_BOX(&token_stats_forward));
}

PYBIND11_MODULE(_C, module)
{
    module.attr("version") = MEMLEAN_VERSION;
    module.attr("build") = BUILD;
    module.def("kernel_names", [] { return names(memlean_kernel_name); });
    module.def("isa_available", [] { return names(memlean_isa_available); });
    module.def("isa_active", [] { return std::string(memlean_isa_active()); });
    module.def("isa_select", select_isa, pybind11::arg("name") = pybind11::none());
    module.def("use_hugepages", [](bool wanted) { hugepages_wanted = wanted; });
}
