/*
 * Every kernel of kernels.def at every level of this CPU, through the public interface: against a long double oracle,
 * and bit for bit against the generic level.
 *
 * With the argument `fingerprint`, instead: one hash of all results for each level, dtype, pass and set of outputs,
 * which is the same for every level, machine, compiler and degree of optimisation.
 */
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/kernels/numeric.h"
#include "../../csrc/memlean.h"

static int failures, checks;

#define CHECK(condition, ...)                                      \
    do {                                                           \
        checks++;                                                  \
        if (!(condition)) {                                        \
            failures++;                                            \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            printf(__VA_ARGS__);                                   \
            printf("\n");                                          \
        }                                                          \
    } while (0)

/* ---- Inputs ----------------------------------------------------------------------------------------------------- */

static const char *const dtype_names[] = {"f32", "bf16", "f16", "f64"};
static const size_t sizes[] = {4, 2, 2, 8};
/* Half a unit in the last place of each dtype, as a fraction: what one rounding of a gradient may cost. */
static const double roundings[] = {0x1p-24, 0x1p-8, 0x1p-11, 0x1p-53};

typedef enum { FLAT, PEAKED, OFFSET, MASKED, ASCENDING, PAIRS, TINY, INVALID, FAMILIES } family;
static const char *const family_names[] = {"flat",      "peaked", "offset", "masked",
                                           "ascending", "pairs",  "tiny",   "invalid"};

static uint64_t seed;

static double uniform(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(seed >> 11) * 0x1p-53;
}

static double logit(family kind, int64_t row, int64_t j, int64_t vocab)
{
    const double noise = 6 * uniform() - 3;
    switch (kind) {
    case PEAKED:
        return j == vocab / 2 ? 40 : noise;
    case OFFSET:
        return 1000 + noise;
    case MASKED:
        return j % 3 == 0 ? -INFINITY : j % 3 == 1 ? -1e4 : noise;
    case ASCENDING: /* a new maximum in every block */
        return (double)j / (double)vocab;
    case PAIRS: /* two columns of one lane, whose probabilities are 1 - 1e-6 and 1e-6 */
        return j == 0 ? 0 : j == 32 ? -13.815511 : -60000;
    case TINY: /* denormal in half precision */
        return 1e-5 * noise;
    case INVALID: /* a NaN in the first row, +inf in the second */
        return j == vocab / 2 && row < 2 ? row == 0 ? (double)NAN : (double)INFINITY : noise;
    default:
        return noise;
    }
}

static void put(memlean_dtype dtype, void *data, int64_t i, double value)
{
    if (dtype == MEMLEAN_F64)
        ((double *)data)[i] = value;
    else if (dtype == MEMLEAN_F32)
        ((float *)data)[i] = (float)value;
    else if (dtype == MEMLEAN_BF16)
        ((uint16_t *)data)[i] = ml_float_to_bf16((float)value);
    else
        ((uint16_t *)data)[i] = ml_float_to_f16((float)value);
}

static double get(memlean_dtype dtype, const void *data, int64_t i)
{
    if (dtype == MEMLEAN_F64)
        return ((const double *)data)[i];
    if (dtype == MEMLEAN_F32)
        return (double)((const float *)data)[i];
    const uint16_t bits = ((const uint16_t *)data)[i];
    return (double)(dtype == MEMLEAN_BF16 ? ml_bf16_to_float(bits) : ml_f16_to_float(bits));
}

/* ---- A problem: rows of one family, their results and gradient ----------------------------------------------------
 */

enum { rows = 3, candidates = 2 };

typedef struct {
    memlean_token_logprob_params params;
    int64_t sizes[1], strides[1], index[rows * candidates];
    void *logits;
    double logp[rows * candidates], entropy[rows], statistics[rows * MEMLEAN_STATISTICS];
    double logsumexp[rows], max[rows], sum_p2[rows], grad_logp[rows * candidates], grad_entropy[rows];
    int64_t argmax[rows];
} problem;

static memlean_dtype real(const problem *q)
{
    return q->params.dtype == MEMLEAN_F64 ? MEMLEAN_F64 : MEMLEAN_F32;
}

static void *allocate(size_t bytes)
{
    void *data = malloc(bytes ? bytes : 1);
    if (!data)
        abort();
    return data;
}

static void make(problem *q, memlean_dtype dtype, family kind, int64_t vocab, int64_t vocab_stride)
{
    memset(q, 0xff, sizeof *q); /* results that nobody writes stay NaN */
    seed = (uint64_t)vocab * 31 + (uint64_t)kind;
    q->sizes[0] = rows;
    q->strides[0] = vocab * vocab_stride + 5;
    q->logits = allocate((size_t)(rows * q->strides[0]) * sizes[dtype]);
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t j = 0; j < vocab; j++)
            put(dtype, q->logits, row * q->strides[0] + j * vocab_stride, logit(kind, row, j, vocab));
        q->index[row * candidates] = kind == PEAKED ? vocab / 2 : kind == PAIRS ? 0 : vocab - 1;
        q->index[row * candidates + 1] = row == 1 ? q->index[row * candidates] : vocab / 3; /* one duplicate */
    }
    q->params = (memlean_token_logprob_params){
        .dtype = dtype,
        .logits = q->logits,
        .rows = rows,
        .vocab = vocab,
        .candidates = candidates,
        .vocab_stride = vocab_stride,
        .row_dims = 1,
        .row_sizes = q->sizes,
        .row_strides = q->strides,
        .index = q->index,
        .index_limit = vocab,
        .logp = q->logp,
        .entropy = q->entropy,
        .statistics = q->statistics,
        .grad_logp = q->grad_logp,
        .grad_entropy = q->grad_entropy,
        .grad_logits = allocate((size_t)(rows * vocab) * sizes[dtype]),
    };
    for (int i = 0; i < rows * candidates; i++)
        put(real(q), q->grad_logp, i, (i % 2 ? -0.5 : 1.25) * (i < 4)); /* the last row has none */
    for (int i = 0; i < rows; i++)
        put(real(q), q->grad_entropy, i, i < 2 ? 0.75 : 0);
}

static void destroy(problem *q)
{
    free(q->logits);
    free(q->params.grad_logits);
}

static void want_all(problem *q)
{
    q->params.logsumexp = q->logsumexp;
    q->params.max = q->max;
    q->params.sum_p2 = q->sum_p2;
    q->params.argmax = q->argmax;
}

static void run(problem *q, int split)
{
    int64_t position;
    const int64_t segments = memlean_token_logprob_segments(q->params.vocab), units = rows * segments;
    CHECK(memlean_token_logprob_check(&q->params, &position) == MEMLEAN_OK, "vocab %d", (int)q->params.vocab);
    if (split) {
        memlean_row_state *states = allocate((size_t)units * sizeof *states);
        for (int64_t unit = units - 1; unit >= 0; unit--)
            memlean_token_logprob_reduce(&q->params, unit, unit + 1, states);
        memlean_token_logprob_finish(&q->params, 0, rows, states);
        free(states);
        for (int64_t unit = units - 1; unit >= 0; unit--)
            memlean_token_logprob_backward(&q->params, unit, unit + 1);
    } else {
        memlean_token_logprob_forward(&q->params, 0, rows);
        memlean_token_logprob_backward(&q->params, 0, units);
    }
}

/* ---- Against long double ------------------------------------------------------------------------------------------
 */

static void compare_with_oracle(const problem *q, const char *label)
{
    const memlean_token_logprob_params *p = &q->params;
    const int is_double = p->dtype == MEMLEAN_F64;
    long double *e = allocate((size_t)p->vocab * sizeof *e);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t offset = row * q->strides[0];
        long double m = -INFINITY, excess = 0, mean = 0, total = 0;
        int64_t top = -1;
        for (int64_t j = 0; j < p->vocab; j++) {
            const long double x = get(p->dtype, q->logits, offset + j * p->vocab_stride);
            top = x > m ? j : top;
            m = x > m ? x : m;
        }
        for (int64_t j = 0; j < p->vocab; j++) {
            const long double t = (long double)get(p->dtype, q->logits, offset + j * p->vocab_stride) - m;
            e[j] = expl(t);
            excess += j == top ? e[j] - 1 : e[j]; /* long double may be no wider than double */
            mean += e[j] > 0 ? e[j] * t : 0;
        }
        const long double sum = 1 + excess;
        if (isnan(sum)) { /* no distribution: NaN, and zeros where no gradient was asked for */
            CHECK(isnan(get(real(q), q->entropy, row)) && isnan(get(real(q), q->logp, row * candidates)), "%s", label);
            int64_t wrong = 0;
            for (int64_t j = 0; j < p->vocab; j++) {
                const double got = get(p->dtype, p->grad_logits, row * p->vocab + j);
                wrong += !(row < 2 ? isnan(got) : got == 0);
            }
            CHECK(wrong == 0, "%s: row %d: gradient of %d columns", label, (int)row, (int)wrong);
            continue;
        }
        mean /= sum;
        const long double log_sum = log1pl(excess), entropy = log_sum - mean;
        const double got_entropy = get(real(q), q->entropy, row);
        CHECK(fabsl(got_entropy - entropy) <= (is_double ? 1e-13L : 1e-6L), "%s: entropy %.9g, expected %.9Lg", label,
              got_entropy, entropy);
        CHECK(got_entropy >= 0 && got_entropy <= nextafterf((float)log((double)p->vocab), INFINITY), "%s", label);
        for (int k = 0; k < candidates; k++) {
            const int64_t i = row * candidates + k;
            const long double x = get(p->dtype, q->logits, offset + p->index[i] * p->vocab_stride);
            const long double logp = (x - m) - log_sum;
            const double got = get(real(q), q->logp, i), ulp = is_double ? 0x1p-46 : 0x1p-21;
            /* Near certainty log S is the exponential of the second column, as far below as -log of it. */
            const long double bound = fabsl(logp) * ulp + log_sum * ulp * fmaxl(1, -logl(excess) / 4);
            CHECK(got == (double)logp || fabsl(got - logp) <= bound, "%s: logp %.9g, expected %.9Lg", label, got, logp);
            CHECK(got <= 0, "%s: logp %.9g", label, got);
            total += get(real(q), q->grad_logp, i);
        }
        const long double h = get(real(q), q->grad_entropy, row);
        for (int64_t j = 0; j < p->vocab; j++) {
            const long double t = (long double)get(p->dtype, q->logits, offset + j * p->vocab_stride) - m;
            const long double probability = e[j] / sum;
            long double expected = -probability * (total + (probability > 0 ? h * (t - mean) : 0));
            for (int k = 0; k < candidates; k++)
                if (p->index[row * candidates + k] == j)
                    expected += get(real(q), q->grad_logp, row * candidates + k);
            const double got = get(p->dtype, p->grad_logits, row * p->vocab + j);
            const long double error = fabsl(got - expected);
            /* One rounding to the dtype, the arithmetic's own error (x - m is rounded to |t| ulps), and underflow. */
            const long double distance = isinf(t) ? 0 : fabsl(t), epsilon = is_double ? 0x1p-44L : 0x1p-21L;
            const long double bound = fabsl(expected) * (long double)roundings[p->dtype] * 1.01L +
                                      probability * (fabsl(total) + h * (1 + distance)) * (1 + distance) * epsilon +
                                      0x1p-50L * is_double + (p->dtype == MEMLEAN_F16 ? 6e-8L : 2e-38L);
            if (!(error <= bound) || j == 0) {
                CHECK(error <= bound, "%s: row %d column %d: gradient %.9g, expected %.9Lg", label, (int)row, (int)j,
                      got, expected);
            }
        }
    }
    free(e);
}

/* ---- The same bits ------------------------------------------------------------------------------------------------
 */

static void one_nan(memlean_dtype dtype, void *data, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (isnan(get(dtype, data, i)))
            put(dtype, data, i, NAN);
}

/* The sign and payload of a NaN are the processor's choice; one NaN is as good as another. */
static void run_with_one_nan(problem *q, int split)
{
    run(q, split);
    one_nan(real(q), q->logp, rows * candidates);
    one_nan(real(q), q->entropy, rows);
    one_nan(real(q), q->statistics, rows * MEMLEAN_STATISTICS);
    one_nan(real(q), q->logsumexp, rows);
    one_nan(real(q), q->max, rows);
    one_nan(real(q), q->sum_p2, rows);
    one_nan(q->params.dtype, q->params.grad_logits, rows * q->params.vocab);
}

static void compare_bits(const problem *a, const problem *b, const char *label)
{
    CHECK(!memcmp(a->logp, b->logp, sizeof a->logp), "%s: logp", label);
    CHECK(!memcmp(a->entropy, b->entropy, sizeof a->entropy), "%s: entropy", label);
    CHECK(!memcmp(a->statistics, b->statistics, sizeof a->statistics), "%s: statistics", label);
    CHECK(!memcmp(a->params.grad_logits, b->params.grad_logits,
                  (size_t)(rows * a->params.vocab) * sizes[a->params.dtype]),
          "%s: gradient", label);
}

static void test_problem(memlean_dtype dtype, family kind, int64_t vocab)
{
    char label[160];
    problem first, other;
    memlean_isa_select("generic");
    make(&first, dtype, kind, vocab, 1);
    run_with_one_nan(&first, 0);
    snprintf(label, sizeof label, "generic %s %s vocab %d", dtype_names[dtype], family_names[kind], (int)vocab);
    compare_with_oracle(&first, label);
    const char *isa;
    for (int level = 0; (isa = memlean_isa_available(level)); level++) {
        memlean_isa_select(isa);
        for (int variant = 0; variant < 3; variant++) { /* whole rows, units in reverse, columns apart */
            snprintf(label, sizeof label, "%s %s %s vocab %d variant %d", isa, dtype_names[dtype], family_names[kind],
                     (int)vocab, variant);
            make(&other, dtype, kind, vocab, variant == 2 ? 3 : 1);
            run_with_one_nan(&other, variant == 1);
            compare_bits(&first, &other, label);
            destroy(&other);
        }
    }
    destroy(&first);
}

/* ---- Options ------------------------------------------------------------------------------------------------------
 */

/* The same problem in double, the reference for options: every path of it is compared with long double above. */
static void test_temperature(const char *isa)
{
    static const double temperatures[rows] = {0.5, 2, 1.75};
    float as_float[rows];
    problem q, scaled;
    make(&q, MEMLEAN_F32, FLAT, 4129, 1);
    make(&scaled, MEMLEAN_F64, FLAT, 4129, 1);
    for (int64_t row = 0; row < rows; row++) {
        as_float[row] = (float)temperatures[row];
        for (int64_t j = 0; j < 4129; j++) {
            const int64_t i = row * q.strides[0] + j;
            put(MEMLEAN_F64, scaled.logits, i, get(MEMLEAN_F32, q.logits, i) / temperatures[row]);
        }
    }
    q.params.temperature = as_float;
    q.params.temperature_step = 1;
    run(&q, 0);
    run(&scaled, 0);
    for (int64_t row = 0; row < rows; row++) {
        const double t = temperatures[row];
        CHECK(fabs(get(MEMLEAN_F32, q.entropy, row) - scaled.entropy[row]) < 2e-6, "%s: entropy", isa);
        CHECK(fabs(get(MEMLEAN_F32, q.logp, 2 * row) - scaled.logp[2 * row]) < 2e-6, "%s: logp", isa);
        double worst = 0;
        for (int64_t j = 0; j < 4129; j++)
            worst = fmax(worst, fabs(get(MEMLEAN_F32, q.params.grad_logits, row * 4129 + j) -
                                     get(MEMLEAN_F64, scaled.params.grad_logits, row * 4129 + j) / t));
        CHECK(worst < 5e-7, "%s: gradient off by %g", isa, worst);
    }
    destroy(&q);
    destroy(&scaled);
}

static void test_extreme_temperatures(const char *isa)
{
    static const float temperatures[] = {1e-45f, 1e-38f, 1e-6f, 1e30f, FLT_MAX};
    for (size_t i = 0; i < sizeof temperatures / sizeof *temperatures; i++) {
        problem q;
        make(&q, MEMLEAN_F32, MASKED, 4129, 1);
        q.params.temperature = &temperatures[i];
        run(&q, 0);
        for (int row = 0; row < rows; row++)
            CHECK(get(MEMLEAN_F32, q.entropy, row) >= 0 && get(MEMLEAN_F32, q.logp, 2 * row) <= 0, "%s: T = %g", isa,
                  (double)temperatures[i]);
        CHECK(temperatures[i] < 1e-30f || isfinite(get(MEMLEAN_F32, q.params.grad_logits, 5)), "%s: T = %g", isa,
              (double)temperatures[i]); /* gradients have the scale of 1 / T */
        destroy(&q);
    }
    /* 1 / T is infinite, also where it meets the distance 0 of equal maxima in two blocks and in two segments. */
    static const double twice = 5e-324;
    static const float once = 1e-45f;
    for (int dtype = 0; dtype < MEMLEAN_DTYPE_COUNT; dtype++) {
        problem q;
        make(&q, (memlean_dtype)dtype, FLAT, 70001, 1);
        for (int64_t i = 0; i < rows * q.strides[0]; i += 30000)
            put(q.params.dtype, q.logits, i, 50);
        q.index[0] = 60000;
        q.params.temperature = dtype == MEMLEAN_F64 ? (const void *)&twice : (const void *)&once;
        run(&q, 0);
        CHECK(fabs(get(real(&q), q.logp, 0) + log(3)) < 1e-6, "%s %s: %g", isa, dtype_names[dtype],
              get(real(&q), q.logp, 0));
        CHECK(fabs(get(real(&q), q.entropy, 0) - log(3)) < 1e-6, "%s %s: %g", isa, dtype_names[dtype],
              get(real(&q), q.entropy, 0));
        destroy(&q);
    }
}

/* Skipped rows hold NaN and are not read; the others keep their bits. */
static void test_masks(const char *isa)
{
    static const uint8_t mask[rows] = {1, 0, 1};
    problem q, plain;
    make(&plain, MEMLEAN_F32, FLAT, 40000, 1);
    run(&plain, 0);
    for (int split = 0; split < 2; split++) {
        make(&q, MEMLEAN_F32, FLAT, 40000, 1);
        for (int64_t j = 0; j < 40000; j++)
            put(MEMLEAN_F32, q.logits, q.strides[0] + j, NAN);
        q.params.row_mask = mask;
        want_all(&q);
        run(&q, split);
        CHECK(get(MEMLEAN_F32, q.logp, 2) == 0 && get(MEMLEAN_F32, q.entropy, 1) == 0, "%s: masked row", isa);
        CHECK(get(MEMLEAN_F32, q.sum_p2, 1) == 0 && q.argmax[1] == -1, "%s: masked row", isa);
        CHECK(get(MEMLEAN_F32, q.max, 1) == 0 && get(MEMLEAN_F32, q.logsumexp, 1) == 0, "%s: masked row", isa);
        CHECK(get(MEMLEAN_F32, q.params.grad_logits, 40000 + 7) == 0, "%s: masked gradient", isa);
        CHECK(!memcmp(q.logp, plain.logp, 2 * sizeof(float)), "%s: first row", isa);
        CHECK(!memcmp(q.params.grad_logits, plain.params.grad_logits, 40000 * sizeof(float)), "%s: first row", isa);
        destroy(&q);
    }
    /* One ignored candidate of row 0, both of row 1, the first of row 2. */
    make(&q, MEMLEAN_F32, FLAT, 40000, 1);
    q.params.has_ignore_index = 1;
    q.params.ignore_index = -100;
    q.index[1] = q.index[2] = q.index[3] = q.index[4] = -100;
    for (int64_t j = 0; j < 40000; j++)
        put(MEMLEAN_F32, q.logits, q.strides[0] + j, NAN);
    run(&q, 0);
    /* What comes from above for an ignored candidate goes nowhere. */
    for (int64_t i = 1; i < 5; i++)
        put(MEMLEAN_F32, plain.grad_logp, i, 0);
    plain.params.index = q.index;
    memlean_token_logprob_backward(&plain.params, 0, 2);
    CHECK(!memcmp(q.params.grad_logits, plain.params.grad_logits, 40000 * sizeof(float)), "%s: ignored upstream", isa);
    for (int64_t k = 0; k < 6; k += 5)
        CHECK(get(MEMLEAN_F32, q.logp, k) == get(MEMLEAN_F32, plain.logp, k), "%s: kept candidate", isa);
    CHECK(get(MEMLEAN_F32, q.logp, 1) == 0 && get(MEMLEAN_F32, q.logp, 2) == 0, "%s: ignored candidates", isa);
    CHECK(get(MEMLEAN_F32, q.entropy, 0) == get(MEMLEAN_F32, plain.entropy, 0), "%s: entropy of a read row", isa);
    CHECK(get(MEMLEAN_F32, q.params.grad_logits, 40000 + 7) == 0, "%s: ignored row's gradient", isa);
    destroy(&q);
    destroy(&plain);
}

/* A kept set, as a mask with strides or as lists, gives what -inf in all other columns gives; an ignored token, 7 in
 * the first row, is not in it. */
static void test_kept_set(const char *isa)
{
    enum { vocab = 40009, every = 701, ignored = 7 };
    static uint8_t mask[rows * vocab * 2];
    static int64_t ids[rows * vocab];
    const int64_t mask_strides[1] = {2 * vocab};
    for (int dtype = 0; dtype < MEMLEAN_DTYPE_COUNT; dtype++) {
        problem dropped, q;
        make(&dropped, (memlean_dtype)dtype, PEAKED, vocab, 1);
        dropped.params.has_ignore_index = 1;
        dropped.params.ignore_index = dropped.index[1] = ignored;
        int64_t offsets[rows + 1] = {0};
        for (int64_t row = 0; row < rows; row++) {
            offsets[row + 1] = offsets[row];
            /* The first half of row 1 alone; every column in a part of row 2; one of the last, incomplete 64. */
            for (int64_t j = vocab - 1; j >= 0; j--) {
                const int kept =
                    row == 1 ? j < vocab / 2 : j % every == 5 || j == vocab - 2 || (row == 2 && j / 64 == 7);
                mask[row * mask_strides[0] + 2 * j] = (uint8_t)(kept ? 0x80 >> row : 0);
                if (kept)
                    ids[offsets[row + 1]++] = j;
                const int64_t *chosen = dropped.index + row * candidates;
                if (!kept && j != chosen[0] && (j != chosen[1] || chosen[1] == ignored))
                    put((memlean_dtype)dtype, dropped.logits, row * dropped.strides[0] + j, -INFINITY);
            }
        }
        run(&dropped, 0);
        for (int variant = 0; variant < 4; variant++) {
            make(&q, (memlean_dtype)dtype, PEAKED, vocab, 1 + variant % 2);
            q.params.has_ignore_index = 1;
            q.params.ignore_index = q.index[1] = ignored;
            if (variant < 2) {
                q.params.kept_mask = mask;
                q.params.kept_mask_row_strides = mask_strides;
                q.params.kept_mask_vocab_stride = 2;
            } else {
                q.params.kept_ids = ids;
                q.params.kept_offsets = offsets;
                q.params.kept_count = offsets[rows];
            }
            run(&q, variant % 2);
            CHECK(!memcmp(q.logp, dropped.logp, sizeof q.logp), "%s %s %d: logp", isa, dtype_names[dtype], variant);
            CHECK(!memcmp(q.entropy, dropped.entropy, sizeof q.entropy), "%s %s %d: entropy", isa, dtype_names[dtype],
                  variant);
            int64_t other = 0; /* 0 and -0 are equal */
            for (int64_t i = 0; i < rows * vocab; i++)
                other += get((memlean_dtype)dtype, q.params.grad_logits, i) !=
                         get((memlean_dtype)dtype, dropped.params.grad_logits, i);
            CHECK(other == 0, "%s %s %d: %d gradients", isa, dtype_names[dtype], variant, (int)other);
            destroy(&q);
        }
        destroy(&dropped);
    }
}

static void test_inplace(const char *isa)
{
    for (int dtype = 0; dtype < MEMLEAN_DTYPE_COUNT; dtype++) {
        problem q, plain;
        make(&plain, (memlean_dtype)dtype, PEAKED, 40000, 1);
        make(&q, (memlean_dtype)dtype, PEAKED, 40000, 1);
        run(&plain, 0);
        free(q.params.grad_logits);
        q.params.grad_logits = q.logits;
        run(&q, 1);
        for (int64_t row = 0; row < rows; row++)
            CHECK(!memcmp((char *)q.logits + (size_t)(row * q.strides[0]) * sizes[dtype],
                          (char *)plain.params.grad_logits + (size_t)(row * 40000) * sizes[dtype],
                          40000 * sizes[dtype]),
                  "%s %s: row %d", isa, dtype_names[dtype], (int)row);
        q.params.grad_logits = NULL;
        destroy(&q);
        destroy(&plain);
    }
}

/* Two shards with the statistics of the whole have the slices of its gradient. */
static void test_shards(const char *isa)
{
    enum { vocab = 5000, cut = 1777 };
    problem whole;
    make(&whole, MEMLEAN_F32, FLAT, vocab, 1);
    run(&whole, 0);
    for (int shard = 0; shard < 2; shard++) {
        const int64_t begin = shard ? cut : 0, size = shard ? vocab - cut : cut;
        memlean_token_logprob_params p = whole.params;
        float *gradient = allocate((size_t)(rows * size) * sizeof *gradient);
        p.logits = (const float *)whole.logits + begin;
        p.vocab = size;
        p.first_token = begin;
        p.index_limit = vocab;
        p.grad_logits = gradient;
        memlean_token_logprob_backward(&p, 0, rows * memlean_token_logprob_segments(size));
        for (int64_t row = 0; row < rows; row++)
            CHECK(!memcmp(gradient + row * size, (float *)whole.params.grad_logits + row * vocab + begin,
                          (size_t)size * sizeof *gradient),
                  "%s: shard %d row %d", isa, shard, (int)row);
        free(gradient);
    }
    destroy(&whole);
}

/* A chosen token with 1 - p = e^-gap, which is its gradient and, but for the sign, its logp: to the precision of float,
 * also where 1 - p is less than what a double near 1 holds. And a row whose entropy alone has an upstream gradient. */
static void test_certain(const char *isa, memlean_dtype dtype)
{
    const int is_double = dtype == MEMLEAN_F64;
    const double exact = is_double ? 1e-12 : 2e-6;
    for (int gap = 14; gap < 80; gap += 5) {
        problem q;
        make(&q, dtype, FLAT, 2, 1);
        for (int64_t row = 0; row < rows; row++) {
            put(dtype, q.logits, row * q.strides[0], row == 0 ? gap : 1);
            put(dtype, q.logits, row * q.strides[0] + 1, 0);
            q.index[row * candidates] = q.index[row * candidates + 1] = 0;
            put(real(&q), q.grad_logp, row * candidates, row == 0);
            put(real(&q), q.grad_logp, row * candidates + 1, 0);
            put(real(&q), q.grad_entropy, row, row == 1);
        }
        run(&q, 0);
        const double logp = -log1p(exp(-gap)), rest = 1 / (1 + exp(gap));
        CHECK(fabs(get(real(&q), q.logp, 0) / logp - 1) < exact, "%s: %g", isa, get(real(&q), q.logp, 0));
        const double got = get(dtype, q.params.grad_logits, 0);
        CHECK(fabs(got / rest - 1) < exact, "%s: %g, expected %g", isa, got, rest);
        const double p = 1 / (1 + exp(-1)), slope = -p * (1 - p); /* d entropy / d x_0 where x_0 - x_1 = 1 */
        const double got_slope = get(dtype, q.params.grad_logits, 2);
        CHECK(fabs(got_slope / slope - 1) < exact, "%s: %g", isa, got_slope);
        destroy(&q);
    }
}

/* Rows that are almost flat: rounding does not lift the entropy above log V. */
static void test_entropy_limit(const char *isa)
{
    for (int64_t vocab = 2; vocab < 200; vocab++) {
        problem q;
        make(&q, MEMLEAN_F32, FLAT, vocab, 1);
        for (int64_t i = 0; i < rows * q.strides[0]; i++)
            put(MEMLEAN_F32, q.logits, i, 1e-5 * uniform());
        run(&q, 0);
        for (int64_t row = 0; row < rows; row++)
            CHECK(get(MEMLEAN_F32, q.entropy, row) <= (double)(float)log((double)vocab), "%s: %d tokens", isa,
                  (int)vocab);
        destroy(&q);
    }
}

/* The same rows as the elements of two dimensions. */
static void test_row_dimensions(const char *isa)
{
    problem q;
    make(&q, MEMLEAN_F32, FLAT, 70, 1);
    run(&q, 0);
    for (int outer = 1; outer <= rows; outer += rows - 1) {
        const int64_t row_sizes[2] = {outer, rows / outer};
        const int64_t row_strides[2] = {outer == 1 ? 1000 : q.strides[0], outer == 1 ? q.strides[0] : 1000};
        float logp[rows * candidates];
        memlean_token_logprob_params p = q.params;
        p.row_dims = 2;
        p.row_sizes = row_sizes;
        p.row_strides = row_strides;
        p.logp = logp;
        memlean_token_logprob_forward(&p, 0, rows);
        CHECK(!memcmp(logp, q.logp, sizeof logp), "%s: %d rows of %d", isa, outer, rows / outer);
    }
    destroy(&q);
}

static void test_extras(const char *isa)
{
    const double temperature = 0.75;
    problem q;
    for (int split = 0; split < 2; split++) {
        make(&q, MEMLEAN_F64, FLAT, 70001, 1);
        put(MEMLEAN_F64, q.logits, 30000, 5); /* the first row's maximum, in two segments */
        put(MEMLEAN_F64, q.logits, 69000, 5);
        want_all(&q);
        q.params.temperature = &temperature;
        run(&q, split);
        for (int64_t row = 0; row < rows; row++) {
            const double *x = (const double *)q.logits + row * q.strides[0];
            int64_t first = 0;
            long double sum = 0, squares = 0;
            for (int64_t j = 1; j < 70001; j++)
                first = x[j] > x[first] ? j : first;
            for (int64_t j = 0; j < 70001; j++) {
                const long double e = expl(((long double)x[j] - x[first]) / 0.75L);
                sum += e;
                squares += e * e;
            }
            CHECK(q.argmax[row] == first, "%s: arg-max %d, expected %d", isa, (int)q.argmax[row], (int)first);
            CHECK(q.max[row] == x[first], "%s: maximum %g, expected %g", isa, q.max[row], x[first]);
            const long double logsumexp = x[first] / 0.75L + logl(sum);
            CHECK(fabsl(q.logsumexp[row] - logsumexp) < 1e-14L, "%s: logsumexp %.17g", isa, q.logsumexp[row]);
            CHECK(fabsl(q.sum_p2[row] - squares / (sum * sum)) < 1e-15L, "%s: sum of squares %g", isa, q.sum_p2[row]);
        }
        destroy(&q);
    }
    /* Rows of nothing but -inf, with a NaN, and of nothing but -0, one of two zeros. */
    make(&q, MEMLEAN_F32, FLAT, 70001, 1);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t j = 0; j < 70001; j++)
            put(MEMLEAN_F32, q.logits, row * q.strides[0] + j,
                row == 1 && j == 50000 ? NAN
                : row == 2             ? -0.0
                                       : -INFINITY);
    want_all(&q);
    run(&q, 0);
    const double none = get(MEMLEAN_F32, q.max, 0), log_sum = get(MEMLEAN_F32, q.logsumexp, 0);
    CHECK(none == -INFINITY && log_sum == -INFINITY, "%s: %g %g without a maximum", isa, none, log_sum);
    CHECK(isnan(get(MEMLEAN_F32, q.max, 1)) && isnan(get(MEMLEAN_F32, q.logsumexp, 1)), "%s: NaN", isa);
    CHECK(!signbit(get(MEMLEAN_F32, q.max, 2)), "%s: the maximum is -0", isa);
    destroy(&q);
}

static void test_upstream_not_finite(const char *isa)
{
    problem q;
    make(&q, MEMLEAN_BF16, FLAT, 100, 1);
    put(MEMLEAN_F32, q.grad_logp, 0, INFINITY);
    run(&q, 0);
    CHECK(isnan(get(MEMLEAN_BF16, q.params.grad_logits, 3)), "%s: infinite upstream gradient", isa);
    CHECK(isfinite(get(MEMLEAN_BF16, q.params.grad_logits, 103)), "%s: the next row", isa);
    destroy(&q);
}

/* Probabilities far below what the comparisons with long double could tell from 0. */
static void test_small_probabilities(const char *isa)
{
    for (int u = 1; u < 700; u += 37) {
        problem q;
        make(&q, MEMLEAN_F64, FLAT, 40, 1);
        for (int64_t i = 0; i < rows * q.strides[0]; i++)
            put(MEMLEAN_F64, q.logits, i, -1e6);
        for (int64_t row = 0; row < rows; row++) {
            put(MEMLEAN_F64, q.logits, row * q.strides[0], 0);
            put(MEMLEAN_F64, q.logits, row * q.strides[0] + 1, -u);
            q.grad_entropy[row] = 0;
        }
        run(&q, 0);
        const double expected = -exp(-u) / (1 + exp(-u)) * (q.grad_logp[0] + q.grad_logp[1]);
        const double got = get(MEMLEAN_F64, q.params.grad_logits, 1);
        CHECK(fabs(got / expected - 1) < 1e-12, "%s: u %d gradient %g, expected %g", isa, u, got, expected);
        destroy(&q);
    }
}

/* The greatest logit of a dtype beside the least: their difference is beyond double, or NaN with the empty sum. */
static void test_extreme_logits(const char *isa)
{
    static const double highest[] = {(double)FLT_MAX, 0x1.fep127, 65504, DBL_MAX};
    for (int dtype = 0; dtype < MEMLEAN_DTYPE_COUNT; dtype++) {
        problem q;
        make(&q, (memlean_dtype)dtype, FLAT, 40000, 1);
        for (int64_t i = 0; i < rows * q.strides[0]; i++)
            put((memlean_dtype)dtype, q.logits, i, -highest[dtype]);
        for (int64_t row = 0; row < rows; row++) {
            put((memlean_dtype)dtype, q.logits, row * q.strides[0] + 39999, highest[dtype]);
            q.index[row * candidates] = 39999;
        }
        run(&q, 0);
        for (int64_t row = 0; row < rows; row++)
            CHECK(get(real(&q), q.logp, row * candidates) == 0 && get(real(&q), q.entropy, row) == 0, "%s %s: %g %g",
                  isa, dtype_names[dtype], get(real(&q), q.logp, row * candidates), get(real(&q), q.entropy, row));
        destroy(&q);
    }
}

/* ---- Conversions ---------------------------------------------------------------------------------------------------
 */

/* Rounding to nearest even, from the definition: between any two neighbours, at their middle and beside it. */
static void test_conversions(memlean_dtype dtype)
{
    const int bf16 = dtype == MEMLEAN_BF16;
    const uint16_t infinity = bf16 ? 0x7f80 : 0x7c00;
    for (int sign = 0; sign < 2; sign++) {
        for (uint16_t i = 0; i < infinity; i++) {
            const uint16_t low = (uint16_t)(i | sign << 15), high = (uint16_t)(low + 1);
            uint16_t got[5];
            const double a = get(dtype, &low, 0);
            /* The step to infinity is as long as the one before it. */
            const uint16_t below = (uint16_t)(low - 1);
            const double b = i + 1 < infinity ? get(dtype, &high, 0) : 2 * a - get(dtype, &below, 0);
            const float middle = (float)((a + b) / 2), out = sign ? -INFINITY : INFINITY;
            const float values[] = {(float)a, nextafterf(middle, -out), middle, nextafterf(middle, out)};
            for (int k = 0; k < 4; k++)
                got[k] = bf16 ? ml_float_to_bf16(values[k]) : ml_float_to_f16(values[k]);
            const int right = got[0] == low && got[1] == low && got[2] == (i & 1 ? high : low) && got[3] == high;
            if (!right || i % 1000 == 0)
                CHECK(right, "%s %04x: %04x %04x %04x %04x", dtype_names[dtype], low, got[0], got[1], got[2], got[3]);
        }
        const float special[] = {INFINITY, FLT_MAX, ml_bits_to_float(0x7f800001), ml_bits_to_float(0x7fffffff)};
        for (int k = 0; k < 4; k++) {
            const float x = sign ? -special[k] : special[k];
            const uint16_t got = bf16 ? ml_float_to_bf16(x) : ml_float_to_f16(x);
            CHECK(k < 2 ? got == (infinity | sign << 15) : isnan(get(dtype, &got, 0)), "%s: %g is %04x",
                  dtype_names[dtype], (double)x, got);
        }
    }
}

/* Lanes so far apart that each order of adding them up in double rounds otherwise: the partial results, which are not
 * rounded to float, show the order. */
static void test_order_of_lanes(memlean_dtype dtype)
{
    enum { vocab = 4096 };
    memlean_row_state expected[rows], states[rows];
    for (int scramble = 1; scramble < 32; scramble += 2) {
        problem q;
        make(&q, dtype, FLAT, vocab, 1);
        for (int64_t i = 0; i < rows * q.strides[0]; i++)
            put(dtype, q.logits, i, -2.0 * (double)(i * scramble % 32) - uniform());
        q.params.sum_p2 = q.sum_p2;
        const char *isa;
        for (int level = 0; (isa = memlean_isa_available(level)); level++) { /* the first is generic */
            memlean_isa_select(isa);
            memlean_token_logprob_reduce(&q.params, 0, rows, level == 0 ? expected : states);
            for (int row = 0; row < rows && level > 0; row++)
                CHECK(states[row].excess == expected[row].excess && states[row].shifted == expected[row].shifted &&
                          states[row].squares == expected[row].squares,
                      "%s %s: times %d, row %d", isa, dtype_names[dtype], scramble, row);
        }
        destroy(&q);
    }
}

/* 1 / T^2 is beyond float32: where it meets a 0, the gradient must not become NaN. */
static void test_low_temperature(memlean_dtype dtype)
{
    const float single = 1e-30f;
    const double twice = 1e-300;
    const char *isa;
    for (int level = 0; (isa = memlean_isa_available(level)); level++) {
        problem q;
        memlean_isa_select(isa);
        make(&q, dtype, FLAT, 2049, 1);
        q.params.temperature = dtype == MEMLEAN_F64 ? (const void *)&twice : (const void *)&single;
        run(&q, 0);
        int64_t nans = 0;
        for (int64_t i = 0; i < rows * q.params.vocab; i++)
            nans += isnan(get(dtype, q.params.grad_logits, i)) != 0;
        CHECK(nans == 0, "%s %s: %d columns", isa, dtype_names[dtype], (int)nans);
        destroy(&q);
    }
}

/* The kept maximum of zeros of both signs has the same bits everywhere, wherever the signs stand. */
static void test_signed_zeros(memlean_dtype dtype)
{
    const char *isa;
    for (int level = 0; (isa = memlean_isa_available(level)); level++) {
        for (int64_t minus = 0; minus < 70; minus++) {
            problem q;
            memlean_isa_select(isa);
            make(&q, dtype, FLAT, 70, 1);
            for (int64_t j = 0; j < 70; j++)
                put(dtype, q.logits, j, j % 2 == 0 || j == minus ? -0.0 : 0.0);
            run(&q, 0);
            CHECK(!signbit(get(real(&q), q.statistics, 0)), "%s %s: -0 at %d", isa, dtype_names[dtype], (int)minus);
            destroy(&q);
        }
    }
}

/* ---- Refusals -----------------------------------------------------------------------------------------------------
 */

static memlean_status check(const problem *q)
{
    int64_t position;
    return memlean_token_logprob_check(&q->params, &position);
}

static void test_refusals(void)
{
    problem q;
    float temperature = 0;
    make(&q, MEMLEAN_F32, FLAT, 10, 1);
    CHECK(check(&q) == MEMLEAN_OK, "valid");
    q.index[3] = 10;
    int64_t position = -1;
    CHECK(memlean_token_logprob_check(&q.params, &position) == MEMLEAN_EINDEX && position == 3, "index 10 of 10");
    q.index[3] = -1;
    CHECK(check(&q) == MEMLEAN_EINDEX, "index -1");
    q.index[3] = 0;
    q.params.temperature = &temperature;
    for (int i = 0; i < 4; i++) {
        static const float bad[] = {0.0f, -1.0f, NAN, INFINITY};
        temperature = bad[i];
        CHECK(check(&q) == MEMLEAN_ETEMPERATURE, "temperature %g", (double)temperature);
    }
    q.params.temperature = NULL;
    static const int64_t ids[3] = {1, 9, 10}, offsets[][rows + 1] = {{0, 1, 2, 3}, {1, 1, 2, 3}, {0, 2, 1, 3},
                                                                     {0, 1, 4, 3}, {0, 1, 2, 2}, {0, 1, 2, 4}};
    static const int64_t first_bad[] = {0, 0, 2, 2, 3, 3};
    q.params.kept_ids = ids;
    q.params.kept_count = 3;
    for (int i = 0; i < 6; i++) {
        q.params.kept_offsets = offsets[i];
        const memlean_status status = memlean_token_logprob_check(&q.params, &position);
        CHECK(i == 0 ? status == MEMLEAN_EKEPT && position == 2
                     : status == MEMLEAN_EOFFSETS && position == first_bad[i],
              "offsets %d: %d at %d", i, (int)status, (int)position);
    }
    q.params.kept_offsets = NULL;
    q.params.vocab = 0;
    CHECK(check(&q) == MEMLEAN_EARGUMENT, "empty vocabulary");
    q.params.vocab = 10;
    q.sizes[0] = rows + 1;
    CHECK(check(&q) == MEMLEAN_EARGUMENT, "other rows than the sizes have");
    q.sizes[0] = rows;
    q.strides[0] = INT64_MAX / 4;
    CHECK(check(&q) == MEMLEAN_EARGUMENT, "rows * stride beyond 64 bits");
    q.strides[0] = 10;
    q.params.dtype = (memlean_dtype)17;
    CHECK(check(&q) == MEMLEAN_EARGUMENT, "unknown dtype");
    destroy(&q);

    CHECK(memlean_isa_select("sse9") == MEMLEAN_EISA, "unknown instruction set");
    CHECK(memlean_isa_select(NULL) == MEMLEAN_OK && memlean_isa_active(), "highest instruction set");
    CHECK(!memlean_isa_available(-1) && !memlean_isa_available(99) && !memlean_kernel_name(-1), "positions");
    for (int status = 0; status < 9; status++)
        CHECK(strlen(memlean_status_string((memlean_status)status)) > 0, "status %d", status);
}

/* ---- Fingerprint --------------------------------------------------------------------------------------------------
 */

/* FNV-1a */
static void hash(uint64_t *state, const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        *state = (*state ^ ((const unsigned char *)data)[i]) * 0x100000001b3u;
}

typedef enum { LOGP, ENTROPY, ALL, OUTPUTS } outputs;
static const char *const output_names[] = {"logp", "entropy", "all"};

static void fingerprint_problem(memlean_dtype dtype, family kind, int64_t vocab, outputs wanted, int tempered,
                                uint64_t *forward, uint64_t *backward)
{
    double temperatures[rows] = {0};
    problem q;
    make(&q, dtype, kind, vocab, 1);
    for (int row = 0; row < rows; row++)
        put(real(&q), temperatures, row, 0.3 + 0.85 * row);
    if (tempered) {
        q.params.temperature = temperatures;
        q.params.temperature_step = 1;
    }
    if (wanted == LOGP) {
        q.params.entropy = NULL;
        q.params.grad_entropy = NULL;
    } else if (wanted == ALL) {
        want_all(&q);
    }
    run_with_one_nan(&q, 0);
    hash(forward, q.logp, sizeof q.logp);
    hash(forward, q.entropy, sizeof q.entropy);
    hash(forward, q.statistics, sizeof q.statistics);
    hash(forward, q.logsumexp, sizeof q.logsumexp);
    hash(forward, q.max, sizeof q.max);
    hash(forward, q.sum_p2, sizeof q.sum_p2);
    hash(forward, q.argmax, sizeof q.argmax);
    hash(backward, q.params.grad_logits, (size_t)(rows * vocab) * sizes[dtype]);
    destroy(&q);
}

static int print_fingerprint(void)
{
    static const int64_t vocabs[] = {1, 33, 2049, 70001};
    const uint64_t start = 0xcbf29ce484222325u;
    const char *isa;
    for (int level = 0; (isa = memlean_isa_available(level)); level++) {
        memlean_isa_select(isa);
        for (int dtype = 0; dtype < MEMLEAN_DTYPE_COUNT; dtype++)
            for (int wanted = 0; wanted < OUTPUTS; wanted++) {
                uint64_t forward = start, backward = start;
                for (int kind = 0; kind < FAMILIES; kind++)
                    for (size_t v = 0; v < sizeof vocabs / sizeof *vocabs; v++)
                        for (int tempered = 0; tempered < 2; tempered++)
                            fingerprint_problem((memlean_dtype)dtype, (family)kind, vocabs[v], (outputs)wanted,
                                                tempered, &forward, &backward);
                const char *const format = "%s %s %s %s %016" PRIx64 "\n";
                printf(format, isa, dtype_names[dtype], "forward", output_names[wanted], forward);
                printf(format, isa, dtype_names[dtype], "backward", output_names[wanted], backward);
            }
    }
    return failures != 0;
}

int main(int argc, char **argv)
{
    if (argc == 2 && !strcmp(argv[1], "fingerprint"))
        return print_fingerprint();
    static const int64_t vocabs[] = {1, 2, 7, 31, 32, 33, 70, 2047, 2048, 2049, 4129, 32767, 32768, 32769, 70001};
    for (int dtype = 0; dtype < MEMLEAN_DTYPE_COUNT; dtype++)
        for (int kind = 0; kind < FAMILIES; kind++)
            for (size_t v = 0; v < sizeof vocabs / sizeof *vocabs; v++)
                test_problem((memlean_dtype)dtype, (family)kind, vocabs[v]);
    for (int dtype = 0; dtype < MEMLEAN_DTYPE_COUNT; dtype++) {
        test_low_temperature((memlean_dtype)dtype);
        test_signed_zeros((memlean_dtype)dtype);
        test_order_of_lanes((memlean_dtype)dtype);
    }
    const char *isa;
    for (int level = 0; (isa = memlean_isa_available(level)); level++) {
        memlean_isa_select(isa);
        test_temperature(isa);
        test_extreme_temperatures(isa);
        test_masks(isa);
        test_kept_set(isa);
        test_inplace(isa);
        test_shards(isa);
        test_row_dimensions(isa);
        test_certain(isa, MEMLEAN_F32);
        test_certain(isa, MEMLEAN_F64);
        test_entropy_limit(isa);
        test_extras(isa);
        test_upstream_not_finite(isa);
        test_small_probabilities(isa);
        test_extreme_logits(isa);
    }
    test_conversions(MEMLEAN_BF16);
    test_conversions(MEMLEAN_F16);
    test_refusals();
    printf("%d passed, %d failed at the levels", checks - failures, failures);
    for (int level = 0; (isa = memlean_isa_available(level)); level++)
        printf(" %s", isa);
    printf("\n");
    return failures != 0;
}
