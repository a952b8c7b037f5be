// memlean's torch operators on the CPU, and the Python module memlean._C. No arithmetic here: checks, allocation, a call.
#include <optional>
#include <tuple>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "checks.h"

namespace {

using memlean::ScalarType;
using memlean::Tensor;

// Work below this many logits is not worth another thread.
constexpr int64_t grain_elements = MEMLEAN_SEGMENT;

int64_t grain(int64_t elements_per_item)
{
    return std::max<int64_t>(1, grain_elements / std::max<int64_t>(1, elements_per_item));
}

bool hugepages_wanted = true;

std::tuple<Tensor, Tensor, Tensor> token_logprob_forward(Tensor logits, Tensor index, bool return_entropy, int64_t)
{
    memlean_token_logprob_params params = memlean::describe(logits, index);
    const ScalarType real = memlean::real_of(logits);
    std::vector<int64_t> shape(params.row_sizes, params.row_sizes + params.row_dims);
    Tensor logp = torch::stable::new_empty(logits, index.sizes(), real);
    Tensor entropy = return_entropy ? torch::stable::new_empty(logits, shape, real)
                                    : torch::stable::new_empty(logits, {0}, real);
    shape.push_back(MEMLEAN_STATISTICS);
    Tensor statistics = torch::stable::new_empty(logits, shape, real);
    params.logp = logp.data_ptr();
    params.entropy = return_entropy ? entropy.data_ptr() : nullptr;
    params.statistics = statistics.data_ptr();

    const int64_t segments = memlean_token_logprob_segments(params.vocab);
    const int64_t few_rows = 16 * static_cast<int64_t>(torch::stable::get_num_threads());
    if (segments == 1 || params.rows >= few_rows) {
        torch::stable::parallel_for(0, params.rows, grain(params.vocab), [&](int64_t begin, int64_t end) {
            memlean_token_logprob_forward(&params, begin, end);
        });
    } else {
        std::vector<memlean_row_state> states(static_cast<size_t>(params.rows * segments));
        torch::stable::parallel_for(0, params.rows * segments, 1, [&](int64_t begin, int64_t end) {
            memlean_token_logprob_reduce(&params, begin, end, states.data());
        });
        memlean_token_logprob_finish(&params, 0, params.rows, states.data());
    }
    return {logp, entropy, statistics};
}

Tensor token_logprob_backward(Tensor logits, Tensor index, Tensor statistics, std::optional<Tensor> grad_logp,
                              std::optional<Tensor> grad_entropy, int64_t)
{
    memlean_token_logprob_params params = memlean::describe(logits, index);
    params.statistics = const_cast<void *>(
        memlean::rowwise(statistics, logits, params.rows * MEMLEAN_STATISTICS, "statistics"));
    if (grad_logp)
        params.grad_logp = memlean::rowwise(*grad_logp, logits, params.rows * params.candidates, "grad_logp");
    if (grad_entropy)
        params.grad_entropy = memlean::rowwise(*grad_entropy, logits, params.rows, "grad_entropy");
    Tensor grad_logits = torch::stable::new_empty(logits, logits.sizes());
    params.grad_logits = grad_logits.data_ptr();
    if (hugepages_wanted)
        memlean_advise_hugepages(params.grad_logits, static_cast<size_t>(grad_logits.numel()) * logits.element_size());

    const int64_t segments = memlean_token_logprob_segments(params.vocab);
    torch::stable::parallel_for(0, params.rows * segments, grain(std::min<int64_t>(params.vocab, MEMLEAN_SEGMENT)),
                                [&](int64_t begin, int64_t end) {
                                    memlean_token_logprob_backward(&params, begin, end);
                                });
    return grad_logits;
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

} // namespace

// The schemas are defined in Python (memlean/_ops.py), so that they exist without this library.
STABLE_TORCH_LIBRARY_IMPL(memlean, CPU, library)
{
    library.impl("token_logprob_forward", TORCH_BOX(&token_logprob_forward));
    library.impl("token_logprob_backward", TORCH_BOX(&token_logprob_backward));
}

PYBIND11_MODULE(_C, module)
{
    module.attr("version") = MEMLEAN_VERSION;
    module.attr("built_with_torch") = MEMLEAN_BUILT_WITH_TORCH;
#if defined(__clang__)
    module.attr("compiler") = "clang " __clang_version__;
#else
    module.attr("compiler") = "gcc " __VERSION__;
#endif
    module.def("kernel_names", [] { return names(memlean_kernel_name); });
    module.def("isa_available", [] { return names(memlean_isa_available); });
    module.def("isa_active", [] { return std::string(memlean_isa_active()); });
    module.def("isa_select", select_isa, pybind11::arg("name") = pybind11::none());
    module.def("use_hugepages", [](bool wanted) { hugepages_wanted = wanted; });
}
