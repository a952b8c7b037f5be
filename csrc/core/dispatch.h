/* The table of kernels, and the level of it in use. */
#ifndef MEMLEAN_DISPATCH_H
#define MEMLEAN_DISPATCH_H

#include "../arch/kernels.h"

typedef struct ml_kernel_table {
    const char *isa;
    int (*runs_here)(void);
    ml_token_logprob_fwd_fn *token_logprob_fwd[MEMLEAN_DTYPE_COUNT];
    ml_token_logprob_bwd_fn *token_logprob_bwd[MEMLEAN_DTYPE_COUNT];
} ml_kernel_table;

const ml_kernel_table *ml_kernels(void);

#endif
