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
 * A chunk is always 32 columns, held as 32 lanes whatever the width of a vector, and column j of every chunk goes to
 * the same lane on every instruction set: that, fused multiply-add everywhere and sums in a fixed order give the same
 * bits on all of them.
 */

/* Columns between two flushes of the lanes (sums in ML_REAL) into the row's sums in double. */
#define ML_BLOCK 2048

/* Asks for what comes a page after the chunk at x, even where no row is any more: prefetchers of processors stop at the
 * end of a page of 4 KiB. */
ML_ALWAYS_INLINE void ML_NAME(prefetch)(const ML_STORAGE *x)
{
    for (size_t line = 0; line < 32 * sizeof *x; line += 64)
        ML_PREFETCH((uintptr_t)x + 4096 + line);
}

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

/* What does not change within a row. */
typedef struct {
    ML_V(t) max, rate, limit;
} ML_NAME(row);

/*
 * One vector of u = max - y, any values: e = exp(-u / T), 0 beyond the limit, where u becomes the limit so that u * e
 * is 0 and not infinity * 0; NaN where u is NaN. Within the limit, the bits of the plain exp.
 */
static inline ML_V(t) ML_NAME(careful_exp)(ML_V(t) * u, const ML_NAME(row) * row)
{
    const ML_V(t) clamped = ML_V(min)(row->limit, *u);
    const ML_V(t) e = ML_V(zero_above)(ML_V(exp)(clamped, row->rate), *u, row->limit);
    *u = clamped;
    return e;
}

/* The lanes of a block: sums of e, of -u e, and of e squared. */
typedef struct {
    ML_V(t) e[ML_VECTORS], ue[ML_VECTORS], ee[ML_VECTORS];
} ML_NAME(lanes);

ML_ALWAYS_INLINE void ML_NAME(add)(ML_NAME(lanes) * sums, int v, ML_V(t) e, ML_V(t) u, const int wanted)
{
    if (wanted & MEMLEAN_WANT_SHIFTED)
        sums->ue[v] = ML_V(fnma)(e, u, sums->ue[v]);
    if (wanted & MEMLEAN_WANT_SQUARES)
        sums->ee[v] = ML_V(fma)(e, e, sums->ee[v]);
}

/*
 * Adds the chunk y to the lanes and returns 0, or returns 1 and adds nothing if a column is above the maximum. With
 * `count`, columns equal to the maximum are counted there instead of being added: next to a 1, a lane would lose what
 * decides log S of a peaked row.
 */
ML_ALWAYS_INLINE int ML_NAME(fwd_chunk)(const ML_V(t) y[ML_VECTORS], const ML_NAME(row) * row, ML_NAME(lanes) * sums,
                                        const int wanted, int64_t *const count)
{
    ML_V(t) u[ML_VECTORS];
    for (int v = 0; v < ML_VECTORS; v++)
        u[v] = ML_V(sub)(row->max, y[v]);
    if (ML_UNLIKELY(count ? ML_V(any_zero_or_outside)(u, row->limit) : ML_V(any_outside)(u, row->limit))) {
        if (ML_V(any_negative)(u))
            return 1;
        for (int v = 0; v < ML_VECTORS; v++) {
            ML_V(t) e = ML_NAME(careful_exp)(&u[v], row);
            if (count)
                e = ML_V(drop_zero)(e, u[v], count);
            sums->e[v] = ML_V(add)(sums->e[v], e);
            ML_NAME(add)(sums, v, e, u[v], wanted);
        }
        return 0;
    }
    for (int v = 0; v < ML_VECTORS; v++) {
        ML_V(t) scale;
        const ML_V(t) p = ML_V(exp_split)(u[v], row->rate, &scale);
        sums->e[v] = ML_V(fma)(p, scale, sums->e[v]);
        if (wanted)
            ML_NAME(add)(sums, v, ML_V(mul)(p, scale), u[v], wanted);
    }
    return 0;
}

ML_ALWAYS_INLINE void ML_NAME(flush)(const ML_NAME(lanes) * sums, const int wanted, memlean_row_state *state)
{
    state->excess += ML_V(sum)(sums->e);
    if (wanted & MEMLEAN_WANT_SHIFTED)
        state->shifted += ML_V(sum)(sums->ue);
    if (wanted & MEMLEAN_WANT_SQUARES)
        state->squares += ML_V(sum)(sums->ee);
}

ML_ALWAYS_INLINE ML_NAME(row) ML_NAME(row_of)(const ml_row_scale *scale, double max)
{
    return (ML_NAME(row)){ML_V(set1)((ML_REAL)max), ML_V(set1)((ML_REAL)scale->rate),
                          ML_V(set1)((ML_REAL)scale->limit)};
}

ML_ALWAYS_INLINE void ML_NAME(clear)(ML_NAME(lanes) * sums)
{
    for (int v = 0; v < ML_VECTORS; v++)
        sums->e[v] = sums->ue[v] = sums->ee[v] = ML_V(set1)(0);
}

/* Columns [begin, n) of a block, some of them above the maximum so far. */
static void ML_NAME(fwd_raise)(const ML_STORAGE *x, int64_t begin, int64_t n, const ml_row_scale *scale, int wanted,
                               memlean_row_state *state)
{
    ML_V(t) y[ML_VECTORS], top[ML_VECTORS];
    for (int v = 0; v < ML_VECTORS; v++)
        top[v] = ML_V(set1)((ML_REAL)state->max);
    for (int64_t j = begin; j < n; j += 32) {
        ML_NAME(load)(x, j, n, y);
        for (int v = 0; v < ML_VECTORS; v++)
            top[v] = ML_V(max)(y[v], top[v]);
    }
    ml_row_state_raise(state, (double)ML_V(largest)(top), scale->inverse_temperature);
    state->top = state->columns + begin;

    const ML_NAME(row) row = ML_NAME(row_of)(scale, state->max);
    ML_NAME(lanes) sums;
    ML_NAME(clear)(&sums);
    int64_t equal = 0;
    for (int64_t j = begin; j < n; j += 32) {
        ML_NAME(load)(x, j, n, y);
        (void)ML_NAME(fwd_chunk)(y, &row, &sums, wanted, &equal); /* nothing is above the maximum now */
    }
    ML_NAME(flush)(&sums, wanted, state);
    state->excess += (double)(equal - 1);
    state->squares += (double)equal;
}

ML_ALWAYS_INLINE void ML_NAME(fwd_body)(const ML_STORAGE *x, int64_t n, const ml_row_scale *scale, const int wanted,
                                        memlean_row_state *state)
{
    for (int64_t block = 0; block < n; block += ML_BLOCK) {
        const int64_t end = n - block < ML_BLOCK ? n : block + ML_BLOCK, whole = end - (end - block) % 32;
        ML_V(t) y[ML_VECTORS];
        const ML_NAME(row) row = ML_NAME(row_of)(scale, state->max);
        ML_NAME(lanes) sums;
        ML_NAME(clear)(&sums);
        int raise = 0;
        int64_t j = block;
        for (; j < whole; j += 32) {
            ML_NAME(prefetch)(x + j);
            ML_LOAD(x + j, y);
            raise = ML_NAME(fwd_chunk)(y, &row, &sums, wanted, NULL);
            if (ML_UNLIKELY(raise))
                break;
        }
        if (whole < end && !raise) {
            ML_NAME(load)(x, j, end, y);
            raise = ML_NAME(fwd_chunk)(y, &row, &sums, wanted, NULL);
        }
        ML_NAME(flush)(&sums, wanted, state);
        if (raise) /* at most once a block, about log V times in a row in random order */
            ML_NAME(fwd_raise)(x, j, end, scale, wanted, state);
    }
    state->columns += n;
}

void ML_NAME(fwd)(const void *x, int64_t n, const ml_row_scale *scale, int wanted, memlean_row_state *state)
{
    if (wanted & MEMLEAN_WANT_SQUARES)
        ML_NAME(fwd_body)(x, n, scale, MEMLEAN_WANT_SHIFTED | MEMLEAN_WANT_SQUARES, state);
    else if (wanted & MEMLEAN_WANT_SHIFTED)
        ML_NAME(fwd_body)(x, n, scale, MEMLEAN_WANT_SHIFTED, state);
    else
        ML_NAME(fwd_body)(x, n, scale, 0, state);
}

/* y becomes the gradient. */
ML_ALWAYS_INLINE void ML_NAME(bwd_chunk)(ML_V(t) y[ML_VECTORS], const ML_NAME(row) * row, ML_V(t) factor, ML_V(t) slope,
                                         const int entropy)
{
    ML_V(t) u[ML_VECTORS];
    for (int v = 0; v < ML_VECTORS; v++)
        u[v] = ML_V(sub)(row->max, y[v]);
    if (ML_UNLIKELY(ML_V(any_outside)(u, row->limit))) {
        for (int v = 0; v < ML_VECTORS; v++)
            y[v] = ML_NAME(careful_exp)(&u[v], row);
    } else {
        for (int v = 0; v < ML_VECTORS; v++)
            y[v] = ML_V(exp)(u[v], row->rate);
    }
    for (int v = 0; v < ML_VECTORS; v++)
        y[v] = ML_V(mul)(y[v], entropy ? ML_V(fnma)(slope, u[v], factor) : factor);
}

ML_ALWAYS_INLINE void ML_NAME(bwd_body)(const ML_STORAGE *x, int64_t n, const ml_row_scale *scale,
                                        const ml_row_gradient *gradient, ML_STORAGE *dx, const int entropy)
{
    const ML_V(t) factor = ML_V(set1)((ML_REAL)gradient->factor), slope = ML_V(set1)((ML_REAL)gradient->slope);
    const int64_t whole = n - n % 32;
    ML_V(t) y[ML_VECTORS];
    const ML_NAME(row) row = ML_NAME(row_of)(scale, gradient->max);
    for (int64_t j = 0; j < whole; j += 32) {
        ML_NAME(prefetch)(x + j);
        ML_LOAD(x + j, y);
        ML_NAME(bwd_chunk)(y, &row, factor, slope, entropy);
        ML_STORE(dx + j, y);
    }
    if (whole < n) {
        ML_STORAGE chunk[32];
        ML_NAME(load)(x, whole, n, y);
        ML_NAME(bwd_chunk)(y, &row, factor, slope, entropy);
        ML_STORE(chunk, y);
        memcpy(dx + whole, chunk, (size_t)(n - whole) * sizeof *chunk);
    }
}

void ML_NAME(bwd)(const void *x, int64_t n, const ml_row_scale *scale, const ml_row_gradient *gradient, void *dx)
{
    if (gradient->slope == 0.0)
        ML_NAME(bwd_body)(x, n, scale, gradient, dx, 0);
    else
        ML_NAME(bwd_body)(x, n, scale, gradient, dx, 1);
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
