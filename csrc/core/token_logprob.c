/* The token log-probability on rows of any layout: row splitting, chosen tokens, and the double arithmetic per row. */
#include <string.h>

#include "../kernels/numeric.h"
#include "dispatch.h"

typedef memlean_token_logprob_params params;

/* Columns gathered at a time where they are not adjacent or not all kept: what the kernels take between two flushes. */
enum { gather_columns = 2048, kept_words = MEMLEAN_SEGMENT / 64 };

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static size_t element_size(memlean_dtype dtype)
{
    switch (dtype) {
    case MEMLEAN_F64:
        return 8;
    case MEMLEAN_F32:
        return 4;
    default:
        return 2;
    }
}

/* ---- Numbers in memory ---------------------------------------------------------------------------------------- */

ML_ALWAYS_INLINE double load(const memlean_dtype dtype, const void *data, int64_t i)
{
    switch (dtype) {
    case MEMLEAN_F64:
        return ((const double *)data)[i];
    case MEMLEAN_F32:
        return (double)((const float *)data)[i];
    case MEMLEAN_BF16:
        return (double)ml_bf16_to_float(((const uint16_t *)data)[i]);
    default:
        return (double)ml_f16_to_float(((const uint16_t *)data)[i]);
    }
}

static void store(memlean_dtype dtype, void *data, int64_t i, double value)
{
    switch (dtype) {
    case MEMLEAN_F64:
        ((double *)data)[i] = value;
        return;
    case MEMLEAN_F32:
        ((float *)data)[i] = (float)value;
        return;
    case MEMLEAN_BF16:
        ((uint16_t *)data)[i] = ml_float_to_bf16((float)value);
        return;
    default:
        ((uint16_t *)data)[i] = ml_float_to_f16((float)value);
    }
}

/* The dtype of results for logits of this dtype. */
static memlean_dtype real(const params *p)
{
    return p->dtype == MEMLEAN_F64 ? MEMLEAN_F64 : MEMLEAN_F32;
}

static int ignored(const params *p, int64_t token)
{
    return p->has_ignore_index && token == p->ignore_index;
}

static int64_t offset_of(const params *p, const int64_t *row_strides, int64_t row)
{
    int64_t offset = 0;
    for (int d = p->row_dims - 1; d > 0; d--) {
        offset += row % p->row_sizes[d] * row_strides[d];
        row /= p->row_sizes[d];
    }
    return p->row_dims > 0 ? offset + row * row_strides[0] : 0;
}

/* Element offset of a row of logits. */
static int64_t row_offset(const params *p, int64_t row)
{
    return offset_of(p, p->row_strides, row);
}

/* ---- Columns of a row as the kernels take them: adjacent, -inf where they are not kept ----------------------------
 */

static int all_kept(const params *p)
{
    return !p->kept_mask && !p->kept_offsets;
}

static void keep_column(uint64_t *kept, int64_t column, int64_t columns)
{
    if (column >= 0 && column < columns)
        kept[column / 64] |= UINT64_C(1) << column % 64;
}

/* Whether each of eight bytes is not 0, as bits. */
static uint64_t eight_bits(const uint8_t *mask, int64_t stride)
{
    uint64_t bytes = 0;
    if (stride == 1 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)
        memcpy(&bytes, mask, 8);
    else
        for (int j = 0; j < 8; j++)
            bytes |= (uint64_t)mask[j * stride] << 8 * j;
    const uint64_t sevens = UINT64_C(0x7f7f7f7f7f7f7f7f);
    const uint64_t ones = (((bytes & sevens) + sevens) | bytes) >> 7 & UINT64_C(0x0101010101010101);
    return ones * UINT64_C(0x0102040810204080) >> 56; /* moves bit 8 j to bit 56 + j */
}

/* Bit j of `kept` becomes whether column begin + j, before `end`, is kept. */
static void find_kept(const params *p, int64_t row, int64_t begin, int64_t end, uint64_t kept[kept_words])
{
    const int64_t n = end - begin;
    memset(kept, 0, kept_words * sizeof *kept);
    if (p->kept_mask) {
        const int64_t stride = p->kept_mask_vocab_stride;
        const uint8_t *mask = p->kept_mask + offset_of(p, p->kept_mask_row_strides, row) + begin * stride;
        const int64_t whole = n - n % 64;
        for (int64_t j = 0; j < whole; j += 64)
            for (int64_t i = 0; i < 64; i += 8)
                kept[j / 64] |= eight_bits(mask + (j + i) * stride, stride) << i;
        for (int64_t j = whole; j < n; j++)
            if (mask[j * stride])
                keep_column(kept, j, n);
    } else {
        for (int64_t i = p->kept_offsets[row]; i < p->kept_offsets[row + 1]; i++)
            keep_column(kept, p->kept_ids[i] - begin, n);
    }
    for (int64_t k = 0; k < p->candidates; k++) {
        const int64_t token = p->index[row * p->candidates + k];
        if (!ignored(p, token))
            keep_column(kept, token - p->first_token - begin, n);
    }
}

/*
 * Groups of 64 columns that hold a kept one go to the buffer, one after the other; a group left out would add exactly 0
 * to every sum, and a group is two chunks, so that each column keeps its lane. Returns the number of columns there.
 * `size` is a constant at each call, which makes each memcpy a move.
 */
ML_ALWAYS_INLINE int64_t gather(const char *source, int64_t step, int64_t n, const uint64_t *kept,
                                const void *minus_inf, char *buffer, const size_t size)
{
    int64_t gathered = 0;
    for (int64_t first = 0; first < n; first += 64) {
        const int64_t count = min64(64, n - first);
        uint64_t bits = kept ? kept[first / 64] : UINT64_MAX;
        if (!bits)
            continue;
        const char *from = source + first * step;
        char *to = buffer + gathered * (int64_t)size;
        gathered += count;
        if (bits == UINT64_MAX && step == (int64_t)size) {
            memcpy(to, from, (size_t)count * size);
            continue;
        }
        if (bits == UINT64_MAX) {
            for (int64_t j = 0; j < count; j++)
                memcpy(to + j * (int64_t)size, from + j * step, size);
            continue;
        }
        for (int64_t j = 0; j < count; j++)
            memcpy(to + j * (int64_t)size, minus_inf, size);
        for (; bits; bits &= bits - 1) {
            const int64_t j = __builtin_ctzll(bits);
            memcpy(to + j * (int64_t)size, from + j * step, size);
        }
    }
    return gathered;
}

/* The way back, for the gradient: 0 where nothing was gathered. */
static void spread(const char *gathered, int64_t n, const uint64_t *kept, char *destination, size_t size)
{
    for (int64_t first = 0; first < n; first += 64) {
        const size_t bytes = (size_t)min64(64, n - first) * size;
        if (kept[first / 64]) {
            memcpy(destination, gathered, bytes);
            gathered += bytes;
        } else {
            memset(destination, 0, bytes);
        }
        destination += bytes;
    }
}

/* How many columns at a time `columns` can hand out. */
static int64_t columns_at_once(const params *p)
{
    return p->vocab_stride == 1 && all_kept(p) ? MEMLEAN_SEGMENT : gather_columns;
}

/* Columns [begin, begin + n) of a row, those that `kept` (of this range; NULL: all) leaves: in place, or gathered into
 * `buffer`. *count becomes their number. */
static const void *columns(const params *p, int64_t offset, int64_t begin, int64_t n, const uint64_t *kept,
                           void *buffer, int64_t *count)
{
    const int64_t size = (int64_t)element_size(p->dtype);
    const int64_t step = p->vocab == 1 ? size : p->vocab_stride * size; /* one column may have any stride */
    const char *source = (const char *)p->logits + offset * size + begin * step;
    *count = n;
    if (!kept && step == size)
        return source;
    double minus_inf;
    store(p->dtype, &minus_inf, 0, -INFINITY);
    if (size == 2)
        *count = gather(source, step, n, kept, &minus_inf, buffer, 2);
    else if (size == 4)
        *count = gather(source, step, n, kept, &minus_inf, buffer, 4);
    else
        *count = gather(source, step, n, kept, &minus_inf, buffer, 8);
    return buffer;
}

/* ---- Checks ----------------------------------------------------------------------------------------------------- */

/* The farthest element that any stride reaches is an int64_t of bytes away. One element has any stride. */
static int offsets_fit(const params *p, const int64_t *row_strides, int64_t vocab_stride)
{
    int64_t reach = 0;
    for (int d = 0; d <= p->row_dims; d++) {
        const int64_t size = d < p->row_dims ? p->row_sizes[d] : p->vocab;
        const int64_t stride = d < p->row_dims ? row_strides[d] : vocab_stride;
        const int64_t distance = stride < 0 ? -(stride + 1) : stride;
        const int64_t limit = INT64_MAX / 16;
        if (size == 1)
            continue;
        if (distance > limit || (distance > 0 && size - 1 > (limit - reach) / distance))
            return 0;
        reach += (size - 1) * distance;
    }
    return 1;
}

static memlean_status check_kept(const params *p, int64_t *position)
{
    if (!p->kept_offsets)
        return MEMLEAN_OK;
    for (*position = 0; *position <= p->rows; ++*position) {
        const int64_t lowest = *position == 0 ? 0 : p->kept_offsets[*position - 1];
        const int64_t highest = *position == 0 ? 0 : p->kept_count;
        if (p->kept_offsets[*position] < lowest || p->kept_offsets[*position] > highest)
            return MEMLEAN_EOFFSETS;
    }
    if (p->kept_offsets[p->rows] != p->kept_count) {
        *position = p->rows;
        return MEMLEAN_EOFFSETS;
    }
    for (*position = 0; *position < p->kept_count; ++*position)
        if (p->kept_ids[*position] < 0 || p->kept_ids[*position] >= p->vocab)
            return MEMLEAN_EKEPT;
    return MEMLEAN_OK;
}

memlean_status memlean_token_logprob_check(const params *p, int64_t *position)
{
    if ((unsigned)p->dtype >= MEMLEAN_DTYPE_COUNT || p->rows < 0 || p->vocab < 1 || p->candidates < 0)
        return MEMLEAN_EARGUMENT;
    if (p->row_dims < 0 || p->row_dims > MEMLEAN_MAX_DIMS || (p->candidates > 0 && p->rows > INT64_MAX / p->candidates))
        return MEMLEAN_EARGUMENT;
    if (p->first_token < 0 || p->index_limit < p->vocab || p->first_token > p->index_limit - p->vocab)
        return MEMLEAN_EARGUMENT;
    if (p->grad_logits == p->logits && p->logits &&
        ((p->vocab_stride != 1 && p->vocab > 1) || p->candidates > MEMLEAN_INPLACE_CANDIDATES))
        return MEMLEAN_EARGUMENT;
    int64_t rows = 1;
    for (int d = 0; d < p->row_dims; d++) {
        if (p->row_sizes[d] < 0 || (p->row_sizes[d] > 0 && rows > INT64_MAX / p->row_sizes[d]))
            return MEMLEAN_EARGUMENT;
        rows *= p->row_sizes[d];
    }
    if (rows != p->rows)
        return MEMLEAN_EARGUMENT;
    if (rows > 0 && !offsets_fit(p, p->row_strides, p->vocab_stride))
        return MEMLEAN_EARGUMENT;
    if (rows > 0 && p->kept_mask && !offsets_fit(p, p->kept_mask_row_strides, p->kept_mask_vocab_stride))
        return MEMLEAN_EARGUMENT;
    if (p->kept_count < 0 || (p->kept_mask && p->kept_offsets) || (!all_kept(p) && p->argmax))
        return MEMLEAN_EARGUMENT;
    for (*position = 0; *position < rows * p->candidates; ++*position) {
        const int64_t y = p->index[*position];
        if ((y < 0 || y >= p->index_limit) && !ignored(p, y))
            return MEMLEAN_EINDEX;
    }
    const int64_t temperatures = !p->temperature ? 0 : p->temperature_step ? rows : 1;
    for (*position = 0; *position < temperatures; ++*position) {
        const double temperature = load(real(p), p->temperature, *position);
        if (!(temperature > 0 && temperature < INFINITY))
            return MEMLEAN_ETEMPERATURE;
    }
    return check_kept(p, position);
}

/* ---- Rows ------------------------------------------------------------------------------------------------------- */

static int skipped(const params *p, int64_t row)
{
    if (p->row_mask && !p->row_mask[row])
        return 1;
    int64_t k = 0;
    while (k < p->candidates && ignored(p, p->index[row * p->candidates + k]))
        k++;
    return p->has_ignore_index && p->candidates > 0 && k == p->candidates;
}

static ml_row_scale row_scale(const params *p, int64_t row)
{
    const int is_double = p->dtype == MEMLEAN_F64;
    const double temperature = p->temperature ? load(real(p), p->temperature, row * p->temperature_step) : 1;
    const double inverse = 1 / temperature, highest = is_double ? DBL_MAX : (double)FLT_MAX;
    const double rate = is_double ? inverse : ML_EXPF_EIGHTHS * inverse;
    const double limit = (is_double ? ML_EXP_LIMIT : (double)ML_EXPF_LIMIT) * temperature;
    /* Finite also for the least and the greatest temperature, so that 0 * rate is 0 and infinity is above the limit. */
    return (ml_row_scale){inverse < highest ? inverse : highest, rate < highest ? rate : highest,
                          limit < highest ? limit : highest};
}

/* ---- Forward ---------------------------------------------------------------------------------------------------- */

int64_t memlean_token_logprob_segments(int64_t vocab)
{
    return (vocab + MEMLEAN_SEGMENT - 1) / MEMLEAN_SEGMENT;
}

static memlean_row_state empty_state(memlean_dtype dtype)
{
    /* The lowest finite number, not -inf, so that x - max is never -inf - -inf. */
    return (memlean_row_state){.max = dtype == MEMLEAN_F64 ? -DBL_MAX : (double)-FLT_MAX, .excess = -1};
}

static memlean_row_state reduce_segment(const params *p, int64_t row, const ml_row_scale *scale, int64_t segment)
{
    ml_token_logprob_fwd_fn *kernel = ml_kernels()->token_logprob_fwd[p->dtype];
    double buffer[gather_columns];
    uint64_t kept[kept_words];
    memlean_row_state state = empty_state(p->dtype);
    const int wanted = (p->entropy ? MEMLEAN_WANT_SHIFTED : 0) | (p->sum_p2 ? MEMLEAN_WANT_SQUARES : 0);
    const int64_t begin = segment * MEMLEAN_SEGMENT, end = min64(p->vocab, begin + MEMLEAN_SEGMENT);
    const int64_t offset = row_offset(p, row), step = columns_at_once(p);
    if (!all_kept(p))
        find_kept(p, row, begin, end, kept);
    for (int64_t j = begin; j < end; j += step) {
        int64_t n;
        const uint64_t *kept_here = all_kept(p) ? NULL : kept + (j - begin) / 64;
        const void *x = columns(p, offset, j, min64(step, end - j), kept_here, buffer, &n);
        kernel(x, n, scale, wanted, &state);
    }
    return state;
}

/* b holds the columns after those of a. */
static memlean_row_state merge(memlean_row_state a, memlean_row_state b, const ml_row_scale *scale)
{
    const int64_t top = b.max > a.max ? a.columns + b.top : a.top;
    if (a.max < b.max)
        ml_row_state_raise(&a, b.max, scale->inverse_temperature);
    else
        ml_row_state_raise(&b, a.max, scale->inverse_temperature);
    return (memlean_row_state){.max = a.max,
                               .excess = a.excess + b.excess,
                               .shifted = a.shifted + b.shifted,
                               .squares = a.squares + b.squares,
                               .columns = a.columns + b.columns,
                               .top = top};
}

/* `dtype` is a constant at each call: up to 2,048 columns are compared, which is no place for a switch in the loop. */
ML_ALWAYS_INLINE int64_t find_maximum(const params *p, int64_t offset, const memlean_row_state *state,
                                      const memlean_dtype dtype)
{
    for (int64_t j = state->top; j < p->vocab; j++)
        if (load(dtype, p->logits, offset + j * p->vocab_stride) == state->max)
            return j;
    return -1;
}

static int64_t first_maximum(const params *p, int64_t offset, const memlean_row_state *state)
{
    switch (p->dtype) {
    case MEMLEAN_F64:
        return find_maximum(p, offset, state, MEMLEAN_F64);
    case MEMLEAN_F32:
        return find_maximum(p, offset, state, MEMLEAN_F32);
    case MEMLEAN_BF16:
        return find_maximum(p, offset, state, MEMLEAN_BF16);
    default:
        return find_maximum(p, offset, state, MEMLEAN_F16);
    }
}

static void finish_row(const params *p, int64_t row, int64_t offset, const ml_row_scale *scale, memlean_row_state state)
{
    const int valid = state.excess >= 0; /* -1: nothing but -inf. NaN: a NaN or +inf. */
    const double sum = 1 + state.excess, log_sum = valid ? ml_log1p(state.excess) : NAN;
    const double mean_shift = state.shifted / sum * scale->inverse_temperature;
    for (int64_t k = 0; k < p->candidates; k++) {
        const int64_t i = row * p->candidates + k, column = p->index[i] - p->first_token;
        if (ignored(p, p->index[i])) {
            store(real(p), p->logp, i, 0);
        } else if (column < 0 || column >= p->vocab) {
            store(real(p), p->logp, i, NAN);
        } else {
            const double chosen = load(p->dtype, p->logits, offset + column * p->vocab_stride);
            store(real(p), p->logp, i, (chosen - state.max) * scale->inverse_temperature - log_sum);
        }
    }
    if (p->entropy) {
        const double highest = ml_log1p((double)(p->vocab - 1)), entropy = log_sum - mean_shift;
        store(real(p), p->entropy, row, entropy > highest ? highest : entropy);
    }
    const double none = state.excess == -1 ? -INFINITY : NAN;
    /* + 0: which of 0 and -0 is the maximum depends on the width of a vector. */
    if (p->max)
        store(real(p), p->max, row, valid ? state.max + 0.0 : none);
    if (p->logsumexp)
        store(real(p), p->logsumexp, row, valid ? state.max * scale->inverse_temperature + log_sum : none);
    if (p->sum_p2)
        store(real(p), p->sum_p2, row, valid ? state.squares / (sum * sum) : NAN);
    if (p->argmax)
        p->argmax[row] = valid ? first_maximum(p, offset, &state) : -1;
    if (p->statistics) {
        store(real(p), p->statistics, row * MEMLEAN_STATISTICS, state.max + 0.0);
        store(real(p), p->statistics, row * MEMLEAN_STATISTICS + 1, state.excess);
        store(real(p), p->statistics, row * MEMLEAN_STATISTICS + 2, p->entropy ? mean_shift : 0);
    }
}

static void skip_row(const params *p, int64_t row)
{
    for (int64_t k = 0; k < p->candidates; k++)
        store(real(p), p->logp, row * p->candidates + k, 0);
    for (int64_t i = 0; p->statistics && i < MEMLEAN_STATISTICS; i++)
        store(real(p), p->statistics, row * MEMLEAN_STATISTICS + i, 0);
    void *const of_rows[] = {p->entropy, p->logsumexp, p->max, p->sum_p2};
    for (size_t i = 0; i < sizeof of_rows / sizeof *of_rows; i++)
        if (of_rows[i])
            store(real(p), of_rows[i], row, 0);
    if (p->argmax)
        p->argmax[row] = -1;
}

void memlean_token_logprob_forward(const params *p, int64_t begin, int64_t end)
{
    const int64_t segments = memlean_token_logprob_segments(p->vocab);
    for (int64_t row = begin; row < end; row++) {
        if (skipped(p, row)) {
            skip_row(p, row);
            continue;
        }
        const int64_t offset = row_offset(p, row);
        const ml_row_scale scale = row_scale(p, row);
        memlean_row_state state = reduce_segment(p, row, &scale, 0);
        for (int64_t s = 1; s < segments; s++)
            state = merge(state, reduce_segment(p, row, &scale, s), &scale);
        finish_row(p, row, offset, &scale, state);
    }
}

void memlean_token_logprob_reduce(const params *p, int64_t begin, int64_t end, memlean_row_state *states)
{
    const int64_t segments = memlean_token_logprob_segments(p->vocab);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t row = unit / segments;
        const ml_row_scale scale = row_scale(p, row);
        if (!skipped(p, row))
            states[unit] = reduce_segment(p, row, &scale, unit % segments);
    }
}

void memlean_token_logprob_finish(const params *p, int64_t begin, int64_t end, const memlean_row_state *states)
{
    const int64_t segments = memlean_token_logprob_segments(p->vocab);
    for (int64_t row = begin; row < end; row++) {
        if (skipped(p, row)) {
            skip_row(p, row);
            continue;
        }
        const ml_row_scale scale = row_scale(p, row);
        memlean_row_state state = states[row * segments];
        for (int64_t s = 1; s < segments; s++)
            state = merge(state, states[row * segments + s], &scale);
        finish_row(p, row, row_offset(p, row), &scale, state);
    }
}

/* ---- Backward --------------------------------------------------------------------------------------------------- */

/*
 * With t_j = (x_j - m) / T, p_j = exp(t_j) / S, g_k and h the upstream gradients, G = sum g_k:
 *     dx_j = (-p_j G - h p_j (t_j - W / S) + sum of g_k with y_k = j) / T
 */
typedef struct {
    double max, log_sum, inverse_sum, mean_shift; /* m, log S, 1 / S, W / S */
    double grad_logp, grad_entropy;               /* G, h */
    ml_row_scale scale;
} row_gradient;

static double upstream(const params *p, int64_t i)
{
    return p->grad_logp && !ignored(p, p->index[i]) ? load(real(p), p->grad_logp, i) : 0;
}

/* Returns 0 where every upstream gradient of the row is 0. */
static int prepare_row(const params *p, int64_t row, row_gradient *g)
{
    if (skipped(p, row))
        return 0;
    g->grad_entropy = p->grad_entropy ? load(real(p), p->grad_entropy, row) : 0;
    g->grad_logp = 0;
    int needed = g->grad_entropy != 0;
    for (int64_t k = 0; k < p->candidates; k++) {
        const double grad = upstream(p, row * p->candidates + k);
        g->grad_logp += grad;
        needed |= grad != 0;
    }
    const double excess = load(real(p), p->statistics, row * MEMLEAN_STATISTICS + 1);
    g->max = load(real(p), p->statistics, row * MEMLEAN_STATISTICS);
    g->log_sum = ml_log1p(excess);
    g->inverse_sum = 1 / (1 + excess);
    g->mean_shift = load(real(p), p->statistics, row * MEMLEAN_STATISTICS + 2);
    g->scale = row_scale(p, row);
    return needed;
}

/* The gradient at a chosen column that holds x, in double: near p = 1 the kernel's -p G + g would lose all digits where
 * -expm1(logp) g keeps them. `own` is the sum of the upstream gradients of all candidates there, `others` that of the
 * rest: G - own would keep the rounding of both sums. */
static double chosen_gradient(const params *p, const row_gradient *g, double x, double own, double others)
{
    const double lowest = p->dtype == MEMLEAN_F64 ? -ML_EXP_LIMIT : (double)-ML_EXPF_LIMIT;
    const double distance = (x - g->max) * g->scale.inverse_temperature;
    const double t = lowest > distance ? lowest : distance; /* as in the kernel: 0 * t stays 0 */
    const double logp = t - g->log_sum, probability = distance < lowest ? 0 : ml_exp(logp);
    const double rest = others + g->grad_entropy * (t - g->mean_shift);
    return (-ml_expm1(logp) * own - probability * rest) * g->scale.inverse_temperature;
}

static double within(double value, double highest)
{
    return value > highest ? highest : value < -highest ? -highest : value;
}

static void backward_segment(const params *p, int64_t row, const row_gradient *g, int64_t begin, int64_t end,
                             void *gradient)
{
    ml_token_logprob_bwd_fn *kernel = ml_kernels()->token_logprob_bwd[p->dtype];
    const int64_t offset = row_offset(p, row), size = (int64_t)element_size(p->dtype);
    const double inverse = g->scale.inverse_temperature;
    const double factor = g->inverse_sum * (g->grad_entropy * g->mean_shift - g->grad_logp);
    const double slope = -g->inverse_sum * g->grad_entropy;
    /* A very low temperature must not make them infinite: 0 * infinity is NaN. */
    const double highest = p->dtype == MEMLEAN_F64 ? DBL_MAX : (double)FLT_MAX;
    const ml_row_gradient factors = {
        .max = g->max,
        .factor = within(factor * inverse, highest),
        .slope = within(slope * inverse * inverse, highest),
    };
    if (!isfinite(factor) || !isfinite(slope)) { /* a NaN row, or upstream gradients that are not finite */
        for (int64_t j = begin; j < end; j++)
            store(p->dtype, gradient, j - begin, NAN);
        return;
    }
    /* In place, the chosen logits are gone after the kernel. */
    const int64_t *index = p->index + row * p->candidates;
    const int in_place = p->grad_logits == p->logits;
    double chosen[MEMLEAN_INPLACE_CANDIDATES];
    for (int64_t k = 0; in_place && k < p->candidates; k++) {
        const int64_t column = index[k] - p->first_token;
        chosen[k] = column >= begin && column < end ? load(p->dtype, p->logits, offset + column) : 0;
    }

    const int64_t step = columns_at_once(p);
    double buffer[gather_columns], gathered_gradient[gather_columns];
    uint64_t kept[kept_words];
    if (!all_kept(p))
        find_kept(p, row, begin, end, kept);
    for (int64_t j = begin; j < end; j += step) {
        const int64_t columns_here = min64(step, end - j);
        int64_t n;
        const uint64_t *kept_here = all_kept(p) ? NULL : kept + (j - begin) / 64;
        const void *x = columns(p, offset, j, columns_here, kept_here, buffer, &n);
        char *dx = (char *)gradient + (j - begin) * size;
        kernel(x, n, &g->scale, &factors, n == columns_here ? (void *)dx : gathered_gradient);
        if (n != columns_here)
            spread((const char *)gathered_gradient, columns_here, kept_here, dx, (size_t)size);
    }

    /* Quadratic in the candidates of a row that fall into the segment. */
    for (int64_t k = 0; k < p->candidates; k++) {
        const int64_t column = index[k] - p->first_token;
        if (ignored(p, index[k]) || column < begin || column >= end)
            continue;
        double own = 0, others = 0;
        for (int64_t l = 0; l < p->candidates; l++)
            *(index[l] == index[k] ? &own : &others) += upstream(p, row * p->candidates + l);
        const double x = in_place ? chosen[k] : load(p->dtype, p->logits, offset + column * p->vocab_stride);
        store(p->dtype, gradient, column - begin, chosen_gradient(p, g, x, own, others));
    }
}

void memlean_token_logprob_backward(const params *p, int64_t begin, int64_t end)
{
    const int64_t segments = memlean_token_logprob_segments(p->vocab), size = (int64_t)element_size(p->dtype);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t row = unit / segments, first = unit % segments * MEMLEAN_SEGMENT;
        const int64_t last = min64(p->vocab, first + MEMLEAN_SEGMENT);
        const int64_t row_start = p->grad_logits == p->logits ? row_offset(p, row) : row * p->vocab;
        char *gradient = (char *)p->grad_logits + (row_start + first) * size;
        row_gradient g;
        if (prepare_row(p, row, &g))
            backward_segment(p, row, &g, first, last, gradient);
        else
            memset(gradient, 0, (size_t)((last - first) * size));
    }
}
