/*
 * Row statistics and row gradient of the token log-probability: the one place where the algorithm is written.
 *
 * Included once per dtype and instruction set, with
 *     ML_NAME(pass)   the kernel's name
 *     ML_REAL         float or double, the type of the arithmetic
 *     ML_STORAGE      the type of a logit in memory
 *     ML_MINUS_INF    -inf as an ML_STORAGE
 *     ML_LOAD(p, y)   32 logits at p into y[ML_VECTORS], ML_STORE(p, y) back, rounded to nearest even
 *     ML_V(op)        the vector operations of the instruction set, ML_V(t) their type
 *     ML_VECTORS      vectors per chunk
 * and all undefined again at the end.
 *
 * A chunk is always 32 columns, held as 32 lanes whatever the width of a vector, and column j of every chunk goes to the
 * same lane on every instruction set: that, fused multiply-add everywhere and sums in a fixed order give the same bits
 * on all of them.
 */

/* Columns between two flushes of the lanes (sums in ML_REAL) into the row's sums in double. */
#define ML_BLOCK 2048

/* The chunk at x + j of n columns; columns past the end read as -inf, which adds exactly 0 to every sum. */
static inline void ML_NAME(load)(const ML_STORAGE *x, int64_t j, int64_t n, ML_V(t) y[ML_VECTORS])
{
    if (j + 32 <= n) {
        ML_LOAD(x + j, y);
        return;
    }
    ML_STORAGE chunk[32];
    for (int lane = 0; lane < 32; lane++)
        chunk[lane] = j + lane < n ? x[j + lane] : ML_MINUS_INF;
    ML_LOAD(chunk, y);
}

/* t = y - max, clamped from below so that exp(t) is 0 there and t * exp(t) is 0 too, not -inf * 0. NaN passes. */
static inline ML_V(t) ML_NAME(shift)(ML_V(t) y, ML_V(t) max)
{
    return ML_V(max)(ML_V(lowest)(), ML_V(sub)(y, max));
}

/*
 * Sums over a block that holds a new maximum. Columns equal to the maximum are counted, not added to the lanes: next to
 * a 1 a lane would lose what decides log S of a peaked row.
 */
static void ML_NAME(fwd_raise)(const ML_STORAGE *x, int64_t begin, int64_t n, int entropy, memlean_row_state *state)
{
    ML_V(t) y[ML_VECTORS], top[ML_VECTORS], s[ML_VECTORS], w[ML_VECTORS];
    for (int v = 0; v < ML_VECTORS; v++) {
        top[v] = ML_V(set1)((ML_REAL)state->max);
        s[v] = w[v] = ML_V(set1)(0);
    }
    for (int64_t j = begin; j < n; j += 32) {
        ML_NAME(load)(x, j, n, y);
        for (int v = 0; v < ML_VECTORS; v++)
            top[v] = ML_V(max)(y[v], top[v]);
    }
    const ML_REAL raised = ML_V(largest)(top);
    const double step = state->max - (double)raised, factor = ml_exp(step);
    state->shifted = factor == 0.0 ? 0.0 * state->shifted : factor * (state->shifted + step * state->sum);
    state->sum *= factor;
    state->max = (double)raised;

    const ML_V(t) max = ML_V(set1)(raised);
    int64_t equal = 0;
    for (int64_t j = begin; j < n; j += 32) {
        ML_NAME(load)(x, j, n, y);
        for (int v = 0; v < ML_VECTORS; v++) {
            const ML_V(t) t = ML_NAME(shift)(y[v], max);
            const ML_V(t) e = ML_V(zero_equal)(ML_V(exp)(t), y[v], max, &equal);
            s[v] = ML_V(add)(s[v], e);
            if (entropy)
                w[v] = ML_V(fma)(e, t, w[v]);
        }
    }
    /* Infinity minus infinity is NaN, but it was counted as equal. */
    state->sum += raised < INFINITY ? (double)equal + ML_V(sum)(s) : NAN;
    if (entropy)
        state->shifted += ML_V(sum)(w);
}

static inline void ML_NAME(fwd_body)(const ML_STORAGE *x, int64_t n, memlean_row_state *state, const int entropy)
{
    for (int64_t block = 0; block < n; block += ML_BLOCK) {
        const int64_t end = n - block < ML_BLOCK ? n : block + ML_BLOCK;
        const ML_V(t) max = ML_V(set1)((ML_REAL)state->max);
        ML_V(t) y[ML_VECTORS], s[ML_VECTORS], w[ML_VECTORS];
        for (int v = 0; v < ML_VECTORS; v++)
            s[v] = w[v] = ML_V(set1)(0);
        int64_t j = block;
        for (; j < end; j += 32) {
            ML_NAME(load)(x, j, end, y);
            if (ML_V(any_greater)(y, max))
                break;
            for (int v = 0; v < ML_VECTORS; v++) {
                const ML_V(t) t = ML_NAME(shift)(y[v], max);
                if (entropy) {
                    const ML_V(t) e = ML_V(exp)(t);
                    s[v] = ML_V(add)(s[v], e);
                    w[v] = ML_V(fma)(e, t, w[v]);
                } else {
                    s[v] = ML_V(exp_add)(t, s[v]);
                }
            }
        }
        state->sum += ML_V(sum)(s);
        if (entropy)
            state->shifted += ML_V(sum)(w);
        if (j < end) /* rare: at most once a block, about log V times in a row in random order */
            ML_NAME(fwd_raise)(x, j, end, entropy, state);
    }
}

void ML_NAME(fwd)(const void *x, int64_t n, int entropy, memlean_row_state *state)
{
    if (entropy)
        ML_NAME(fwd_body)(x, n, state, 1);
    else
        ML_NAME(fwd_body)(x, n, state, 0);
}

static inline void ML_NAME(bwd_body)(const ML_STORAGE *x, int64_t n, const ml_row_gradient *row, ML_STORAGE *dx,
                                     const int entropy)
{
    const ML_V(t) max = ML_V(set1)((ML_REAL)row->max), factor = ML_V(set1)((ML_REAL)row->factor);
    const ML_V(t) slope = ML_V(set1)((ML_REAL)row->slope);
    for (int64_t j = 0; j < n; j += 32) {
        ML_V(t) y[ML_VECTORS];
        ML_NAME(load)(x, j, n, y);
        for (int v = 0; v < ML_VECTORS; v++) {
            const ML_V(t) t = ML_NAME(shift)(y[v], max);
            y[v] = ML_V(mul)(ML_V(exp)(t), entropy ? ML_V(fma)(slope, t, factor) : factor);
        }
        if (j + 32 <= n) {
            ML_STORE(dx + j, y);
        } else {
            ML_STORAGE chunk[32];
            ML_STORE(chunk, y);
            memcpy(dx + j, chunk, (size_t)(n - j) * sizeof *chunk);
        }
    }
}

void ML_NAME(bwd)(const void *x, int64_t n, const ml_row_gradient *row, void *dx)
{
    if (row->slope == 0.0)
        ML_NAME(bwd_body)(x, n, row, dx, 0);
    else
        ML_NAME(bwd_body)(x, n, row, dx, 1);
}

#undef ML_BLOCK
#undef ML_NAME
#undef ML_REAL
#undef ML_STORAGE
#undef ML_MINUS_INF
#undef ML_LOAD
#undef ML_STORE
#undef ML_V
#undef ML_VECTORS
