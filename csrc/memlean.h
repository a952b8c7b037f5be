/*
 * memlean: log-probability and entropy of chosen tokens, from logits, on the CPU.
 *
 * This is the whole C interface. It is plain C11 and knows neither Python nor torch. Functions return a status and
 * never allocate, print or exit; they may be called from several threads at once on disjoint ranges of work.
 */
#ifndef MEMLEAN_H
#define MEMLEAN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MEMLEAN_VERSION "0.1.0"

typedef enum memlean_status {
    MEMLEAN_OK = 0,
    MEMLEAN_EARGUMENT,    /* a size, stride, dtype or pointer that no call can mean */
    MEMLEAN_EINDEX,       /* a chosen token outside the vocabulary */
    MEMLEAN_ETEMPERATURE, /* a temperature that is not finite and positive */
    MEMLEAN_EKEPT,        /* a kept token outside the vocabulary */
    MEMLEAN_EOFFSETS,     /* offsets of kept tokens that do not rise from 0 to their number */
    MEMLEAN_EISA,         /* an instruction set that this library or this CPU does not have */
} memlean_status;

/* One English sentence, valid forever. */
const char *memlean_status_string(memlean_status status);

typedef enum memlean_dtype {
    MEMLEAN_F32 = 0,
    MEMLEAN_BF16,
    MEMLEAN_F16,
    MEMLEAN_F64,
    MEMLEAN_DTYPE_COUNT,
} memlean_dtype;

/* ---- Instruction sets ------------------------------------------------------------------------------------------ */

/* Names from lowest to highest ("generic", "avx2", ...); NULL past the last. Only levels that this CPU and its
 * operating system can run are listed. */
const char *memlean_isa_available(int position);
const char *memlean_isa_active(void);

/* Makes `name` the active level; NULL chooses the highest available. Not to be called while kernels run. */
memlean_status memlean_isa_select(const char *name);

/* Names of the compiled kernels, "ml_token_logprob_fwd_bf16__avx2" and so on; NULL past the last. */
const char *memlean_kernel_name(int position);

/* ---- Token log-probability ------------------------------------------------------------------------------------- */

enum {
    MEMLEAN_MAX_DIMS = 64,      /* torch's own limit on the rank of a tensor */
    MEMLEAN_STATISTICS = 3,     /* numbers kept per row: maximum, excess, mean shift; see below */
    MEMLEAN_SEGMENT = 32 * 1024 /* columns per unit of work; part of the result's definition, not a tuning knob */
};

/*
 * Partial result over some columns of a row. Partial results of one row can be merged in any grouping.
 * T is the row's temperature, and u = max - x.
 */
typedef struct memlean_row_state {
    double max;      /* max x */
    double excess;   /* sum of exp(-u / T), less 1 for a column that holds max: near certainty, 1 would hide the rest */
    double shifted;  /* sum of -u exp(-u / T) */
    double squares;  /* sum of exp(-u / T)^2 */
    int64_t columns; /* number of columns */
    int64_t top;     /* a column at or before the first that holds max, at most 2048 before it */
} memlean_row_state;

/* The sums beside max and excess that a forward pass is to make. */
enum { MEMLEAN_WANT_SHIFTED = 1, MEMLEAN_WANT_SQUARES = 2 };

/*
 * Rows of logits x[rows, vocab] and the tokens chosen in them, y[rows, candidates].
 *
 * With m = max x, T the temperature, S = sum exp((x - m) / T), W = sum (x - m) / T exp((x - m) / T), over one row:
 *     logp_k  = (x[y_k] - m) / T - log S
 *     entropy = log S - W / S
 * A row with a NaN, with a +inf, or with nothing but -inf gives NaN; a chosen -inf gives logp = -inf.
 * A row where row_mask is 0, or whose tokens are all ignore_index, is not read: its results and gradient are 0.
 * With a kept set, columns that are neither in it nor chosen in their row count as -inf, whatever they hold.
 *
 * "real" below is double for MEMLEAN_F64 and float for every other dtype. All strides are in elements.
 */
typedef struct memlean_token_logprob_params {
    memlean_dtype dtype;
    const void *logits;
    int64_t rows, vocab, candidates;
    int64_t vocab_stride;
    int32_t row_dims;           /* the rows are the last-fastest enumeration of row_sizes[row_dims] */
    const int64_t *row_sizes;   /* [row_dims]; their product is rows */
    const int64_t *row_strides; /* [row_dims] */
    const int64_t *index;       /* [rows, candidates], contiguous, in [0, index_limit), or ignore_index */

    /* Column 0 is token first_token of index_limit: a shard of a vocabulary has statistics and gradient of its own, and
     * tokens elsewhere. For a whole vocabulary: 0 and vocab. */
    int64_t first_token, index_limit;

    int32_t has_ignore_index;
    int64_t ignore_index;
    const uint8_t *row_mask;  /* [rows], or NULL for no row masked */
    const void *temperature;  /* real [rows] or [1], finite and positive, or NULL for 1 */
    int64_t temperature_step; /* 1 for [rows], 0 for [1] */

    /* The kept set: a mask, or the kept columns of each row, or neither. */
    const uint8_t *kept_mask;             /* [rows, vocab], not 0: kept; or NULL */
    const int64_t *kept_mask_row_strides; /* [row_dims] */
    int64_t kept_mask_vocab_stride;
    const int64_t *kept_ids; /* [kept_count], in [0, vocab), in any order */
    const int64_t
        *kept_offsets; /* [rows + 1], or NULL: row i keeps kept_ids[kept_offsets[i]] to the next row's first */
    int64_t kept_count;

    /* forward */
    void *logp;       /* real [rows, candidates]; NaN for a token outside the shard */
    void *statistics; /* real [rows, MEMLEAN_STATISTICS], or NULL: m, S - 1, W / S; S - 1 is -1 for nothing but -inf */
    void *entropy;    /* real [rows], or NULL */
    void *logsumexp;  /* real [rows], or NULL: m / T + log S; -inf for nothing but -inf */
    void *max;        /* real [rows], or NULL: m; -inf for nothing but -inf */
    void *sum_p2;     /* real [rows], or NULL: sum of squared probabilities */
    int64_t *argmax;  /* [rows], or NULL: first column that holds m; -1 where there is none; not with a kept set */

    /* backward; reads `statistics` */
    const void *grad_logp;    /* real [rows, candidates], or NULL for zeros */
    const void *grad_entropy; /* real [rows], or NULL for zeros */
    void *grad_logits;        /* dtype [rows, vocab], contiguous; or `logits` itself, with its strides */
} memlean_token_logprob_params;

/* At most so many candidates with grad_logits == logits. */
enum { MEMLEAN_INPLACE_CANDIDATES = 64 };

/* Sizes, strides, temperature, kept set and index, before anything is read or written. For MEMLEAN_EINDEX,
 * MEMLEAN_ETEMPERATURE, MEMLEAN_EKEPT and MEMLEAN_EOFFSETS, *position is the flat position of the first bad number. */
memlean_status memlean_token_logprob_check(const memlean_token_logprob_params *params, int64_t *position);

/* Units of work are (row, segment) pairs, row * segments + segment. Their cut depends on vocab only, which is why the
 * result has the same bits however the units are shared out. */
int64_t memlean_token_logprob_segments(int64_t vocab);

/* Whole rows [begin, end): logp, entropy, statistics. */
void memlean_token_logprob_forward(const memlean_token_logprob_params *params, int64_t begin, int64_t end);

/* The same in two steps, for few long rows: the units [begin, end) into states[rows * segments], then whole rows. */
void memlean_token_logprob_reduce(const memlean_token_logprob_params *params, int64_t begin, int64_t end,
                                  memlean_row_state *states);
void memlean_token_logprob_finish(const memlean_token_logprob_params *params, int64_t begin, int64_t end,
                                  const memlean_row_state *states);

/* The units [begin, end) of grad_logits. A row whose upstream gradients are all 0 is filled with zeros and not read. */
void memlean_token_logprob_backward(const memlean_token_logprob_params *params, int64_t begin, int64_t end);

/* ---- Memory ---------------------------------------------------------------------------------------------------- */

/* Asks the operating system to back a large, not yet touched allocation by huge pages. Does nothing where that is not
 * on offer, and never fails. */
void memlean_advise_hugepages(void *data, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
