/* What row splitting (core) and kernels (arch) agree on. */
#ifndef MEMLEAN_KERNELS_H
#define MEMLEAN_KERNELS_H

#include "../memlean.h"

/* The temperature T of a row, in the forms that kernels use. */
typedef struct ml_row_scale {
    double inverse_temperature;
    double rate;  /* float kernels: 8 / (T ln 2); double: 1 / T */
    double limit; /* largest max - x whose exponential is not 0 */
} ml_row_scale;

/* dx_j = exp(t_j / T) * (factor + slope * t_j), t_j = x_j - max */
typedef struct ml_row_gradient {
    double max, factor, slope;
} ml_row_gradient;

/* Adds n contiguous columns to *state, which starts as the empty state of its dtype (see core). Calls on consecutive
 * multiples of 2048 columns give the same bits as one call on all of them. Sums that are not `wanted` are meaningless.
 */
typedef void ml_token_logprob_fwd_fn(const void *x, int64_t n, const ml_row_scale *scale, int wanted,
                                     memlean_row_state *state);

/* n contiguous columns of the gradient, without the chosen tokens' own terms. x == dx is allowed. */
typedef void ml_token_logprob_bwd_fn(const void *x, int64_t n, const ml_row_scale *scale,
                                     const ml_row_gradient *gradient, void *dx);

/* Every compiled kernel, by op, pass, dtype and instruction set: see kernels.def. */
#define ML_KERNEL(op, pass, dtype, dtype_enum, isa) extern ml_##op##_##pass##_fn ml_##op##_##pass##_##dtype##__##isa;
#include "kernels.def"
#undef ML_KERNEL

#endif
