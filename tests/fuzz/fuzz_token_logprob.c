/*
 * Arbitrary bytes as a call of the C interface: what the check refuses must be refused without a crash, what it accepts
 * must stay within the memory that it describes (each buffer is exactly as large as it has to be, for the address
 * sanitizer), give the same bits at every level and for every split of the work, and keep what the header promises.
 *
 * With clang this is a libFuzzer target. With any other compiler, -DMEMLEAN_FUZZ_MAIN gives it a main that takes COUNT
 * inputs from a generator and the others from files: fuzz_token_logprob COUNT [FILE ...].
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/kernels/numeric.h"
#include "../../csrc/memlean.h"

#define REQUIRE(condition)                                                          \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                \
        }                                                                           \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static long long inputs, refused, computed;

/* ---- Numbers from the input; zeros when it ends -------------------------------------------------------------------
 */

typedef struct {
    const uint8_t *next, *end;
} reader;

static uint8_t byte(reader *r)
{
    return r->next < r->end ? *r->next++ : 0;
}

static int64_t below(reader *r, int64_t limit)
{
    return byte(r) % limit;
}

static int64_t word(reader *r)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value = value << 8 | byte(r);
    return (int64_t)value;
}

static float real_number(reader *r)
{
    switch (byte(r) % 4) {
    case 0:
        return (float)((int)byte(r) - 128) / 16;
    case 1:
        return ldexpf(1, (int)byte(r) - 127);
    default:
        return ml_bits_to_float((uint32_t)word(r));
    }
}

/* ---- A call -------------------------------------------------------------------------------------------------------
 */

enum { max_dims = 3, max_candidates = 4 };

static const size_t element_sizes[] = {4, 2, 2, 8};

typedef struct {
    memlean_token_logprob_params params;
    int64_t sizes[max_dims], strides[max_dims], mask_strides[max_dims];
    char *logits; /* the allocation; params.logits points into it */
    int64_t first, elements;
    uint8_t *mask, *row_mask;
    int64_t *index, *ids, *offsets;
    void *temperature;
} call;

static void *allocate(size_t bytes)
{
    void *data = calloc(bytes ? bytes : 1, 1);
    if (!data)
        abort();
    return data;
}

static size_t real_size(const memlean_token_logprob_params *p)
{
    return p->dtype == MEMLEAN_F64 ? 8 : 4;
}

static double get_real(const memlean_token_logprob_params *p, const void *data, int64_t i)
{
    return p->dtype == MEMLEAN_F64 ? ((const double *)data)[i] : (double)((const float *)data)[i];
}

static void put_real(const memlean_token_logprob_params *p, void *data, int64_t i, float value)
{
    if (p->dtype == MEMLEAN_F64)
        ((double *)data)[i] = (double)value;
    else
        ((float *)data)[i] = value;
}

static double get_logit(const memlean_token_logprob_params *p, int64_t offset)
{
    switch (p->dtype) {
    case MEMLEAN_F64:
        return ((const double *)p->logits)[offset];
    case MEMLEAN_F32:
        return (double)((const float *)p->logits)[offset];
    case MEMLEAN_BF16:
        return (double)ml_bf16_to_float(((const uint16_t *)p->logits)[offset]);
    default:
        return (double)ml_f16_to_float(((const uint16_t *)p->logits)[offset]);
    }
}

static void put_logit(const memlean_token_logprob_params *p, void *logits, int64_t i, float value)
{
    switch (p->dtype) {
    case MEMLEAN_F64:
        ((double *)logits)[i] = (double)value;
        return;
    case MEMLEAN_F32:
        ((float *)logits)[i] = value;
        return;
    case MEMLEAN_BF16:
        ((uint16_t *)logits)[i] = ml_float_to_bf16(value);
        return;
    default:
        ((uint16_t *)logits)[i] = ml_float_to_f16(value);
    }
}

/* The smallest and the number of offsets that sizes and strides reach. */
static int64_t span(const call *c, const int64_t *row_strides, int64_t vocab_stride, int64_t *lowest)
{
    int64_t low = 0, high = 0;
    for (int d = 0; d <= c->params.row_dims; d++) {
        const int64_t size = d < c->params.row_dims ? c->sizes[d] : c->params.vocab;
        const int64_t reach = (size - 1) * (d < c->params.row_dims ? row_strides[d] : vocab_stride);
        low += reach < 0 ? reach : 0;
        high += reach > 0 ? reach : 0;
    }
    *lowest = low;
    return high - low + 1;
}

static int64_t vocabulary(reader *r)
{
    static const int64_t edges[] = {2048, MEMLEAN_SEGMENT, 2 * MEMLEAN_SEGMENT};
    const int64_t kind = below(r, 32);
    return kind < 30 ? 1 + below(r, 70) : edges[kind % 3] - 2 + below(r, 70);
}

static int64_t stride(reader *r)
{
    return below(r, 8) - 2;
}

static void make(call *c, reader *r)
{
    memlean_token_logprob_params *p = &c->params;
    memset(c, 0, sizeof *c);
    p->dtype = (memlean_dtype)below(r, MEMLEAN_DTYPE_COUNT);
    p->row_dims = (int32_t)below(r, max_dims + 1);
    p->vocab = vocabulary(r);
    p->vocab_stride = below(r, 4) ? 1 : stride(r);
    p->rows = 1;
    for (int d = p->row_dims - 1; d >= 0; d--) {
        c->sizes[d] = below(r, 64) == 0 ? 0 : 1 + below(r, p->vocab <= 100 ? 4 : d == 0 ? 2 : 1);
        c->strides[d] = below(r, 2) ? p->vocab + stride(r) : stride(r);
        c->mask_strides[d] = below(r, 2) ? p->vocab : stride(r);
        p->rows *= c->sizes[d];
    }
    p->row_sizes = c->sizes;
    p->row_strides = c->strides;
    p->candidates = below(r, max_candidates + 1);
    if (p->rows > 0) {
        c->elements = span(c, c->strides, p->vocab_stride, &c->first);
        c->logits = allocate((size_t)c->elements * element_sizes[p->dtype]);
        p->logits = c->logits - c->first * (int64_t)element_sizes[p->dtype];
        /* A short pattern again and again, so that few bytes of input fill a row, and single numbers over it. */
        float pattern[8];
        const int64_t period = 1 + below(r, 8);
        for (int64_t i = 0; i < period; i++)
            pattern[i] = real_number(r);
        for (int64_t i = 0; i < c->elements; i++)
            put_logit(p, c->logits, i, pattern[i % period]);
        for (int64_t i = below(r, 8); i > 0; i--) {
            const uint64_t where = (uint64_t)word(r) % (uint64_t)c->elements;
            put_logit(p, c->logits, (int64_t)where, real_number(r));
        }
    }
    p->first_token = below(r, 4) ? 0 : below(r, 5);
    p->index_limit = p->vocab + p->first_token + (below(r, 4) ? 0 : below(r, 5));
    p->has_ignore_index = (int32_t)below(r, 2);
    p->ignore_index = below(r, 2) ? -100 : below(r, 4);
    c->index = allocate((size_t)(p->rows * p->candidates) * sizeof *c->index);
    p->index = c->index;
    for (int64_t i = 0; i < p->rows * p->candidates; i++)
        c->index[i] = below(r, 8) == 0 ? -100 : (int64_t)((uint64_t)word(r) % (uint64_t)p->index_limit);
    if (below(r, 64) == 0 && p->rows * p->candidates > 0)
        c->index[0] = word(r);
    if (below(r, 4) == 0) {
        c->row_mask = allocate((size_t)p->rows);
        for (int64_t i = 0; i < p->rows; i++)
            c->row_mask[i] = (uint8_t)below(r, 3);
        p->row_mask = c->row_mask;
    }
    if (below(r, 2) == 0) {
        p->temperature_step = below(r, 2);
        const int64_t count = p->temperature_step ? p->rows : 1;
        c->temperature = allocate((size_t)count * real_size(p));
        for (int64_t i = 0; i < count; i++)
            put_real(p, c->temperature, i, below(r, 16) ? fabsf(real_number(r)) : real_number(r));
        p->temperature = c->temperature;
    }
    const int64_t kept = p->rows > 0 ? below(r, 4) : 0;
    if (kept == 1) {
        int64_t first;
        p->kept_mask_row_strides = c->mask_strides;
        p->kept_mask_vocab_stride = below(r, 2) ? 1 : stride(r);
        const int64_t elements = span(c, c->mask_strides, p->kept_mask_vocab_stride, &first);
        c->mask = allocate((size_t)elements);
        p->kept_mask = c->mask - first;
        const int64_t period = 1 + below(r, 9);
        for (int64_t i = 0; i < elements; i++)
            c->mask[i] = i < period ? byte(r) : c->mask[i - period];
    } else if (kept == 2) {
        c->offsets = allocate((size_t)(p->rows + 1) * sizeof *c->offsets);
        for (int64_t i = 0; i < p->rows; i++)
            c->offsets[i + 1] = c->offsets[i] + below(r, 4);
        p->kept_count = c->offsets[p->rows];
        c->ids = allocate((size_t)p->kept_count * sizeof *c->ids);
        for (int64_t i = 0; i < p->kept_count; i++)
            c->ids[i] = (int64_t)((uint64_t)word(r) % (uint64_t)p->vocab);
        if (below(r, 16) == 0)
            c->offsets[below(r, p->rows + 1)] = below(r, 2) ? word(r) : below(r, 5);
        if (below(r, 16) == 0 && p->kept_count > 0)
            c->ids[0] = word(r);
        p->kept_ids = c->ids;
        p->kept_offsets = c->offsets;
    }
}

static void destroy(call *c)
{
    free(c->logits);
    free(c->mask);
    free(c->row_mask);
    free(c->index);
    free(c->ids);
    free(c->offsets);
    free(c->temperature);
}

/* ---- Results --------------------------------------------------------------------------------------------------------
 */

typedef struct {
    void *logp, *statistics, *entropy, *logsumexp, *max, *sum_p2, *gradient;
    int64_t *argmax;
} results;

static results allocate_results(const memlean_token_logprob_params *p)
{
    const size_t rows = (size_t)p->rows, real = real_size(p);
    return (results){.logp = allocate(rows * (size_t)p->candidates * real),
                     .statistics = allocate(rows * MEMLEAN_STATISTICS * real),
                     .entropy = allocate(rows * real),
                     .logsumexp = allocate(rows * real),
                     .max = allocate(rows * real),
                     .sum_p2 = allocate(rows * real),
                     .gradient = allocate(rows * (size_t)p->vocab * element_sizes[p->dtype]),
                     .argmax = allocate(rows * sizeof(int64_t))};
}

static void free_results(results *x)
{
    free(x->logp);
    free(x->statistics);
    free(x->entropy);
    free(x->logsumexp);
    free(x->max);
    free(x->sum_p2);
    free(x->gradient);
    free(x->argmax);
}

static void run(memlean_token_logprob_params p, results *x, const void *grad_logp, const void *grad_entropy, int extras,
                int split)
{
    const int64_t units = p.rows * memlean_token_logprob_segments(p.vocab);
    p.logp = x->logp;
    p.statistics = x->statistics;
    p.entropy = x->entropy;
    p.logsumexp = extras ? x->logsumexp : NULL;
    p.max = extras ? x->max : NULL;
    p.sum_p2 = extras ? x->sum_p2 : NULL;
    p.argmax = extras && !p.kept_mask && !p.kept_offsets ? x->argmax : NULL;
    if (split) {
        memlean_row_state *states = allocate((size_t)units * sizeof *states);
        for (int64_t unit = units - 1; unit >= 0; unit--)
            memlean_token_logprob_reduce(&p, unit, unit + 1, states);
        memlean_token_logprob_finish(&p, 0, p.rows, states);
        free(states);
    } else {
        memlean_token_logprob_forward(&p, 0, p.rows);
    }
    p.grad_logp = grad_logp;
    p.grad_entropy = grad_entropy;
    p.grad_logits = x->gradient;
    memlean_token_logprob_backward(&p, 0, split ? units / 2 : units);
    if (split)
        memlean_token_logprob_backward(&p, units / 2, units);
}

/* Equal bits, or NaN in both: the sign and payload of a NaN are no part of any promise. */
static void require_same_reals(const memlean_token_logprob_params *p, const void *a, const void *b, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        const size_t at = (size_t)i * real_size(p);
        REQUIRE(memcmp((const char *)a + at, (const char *)b + at, real_size(p)) == 0 ||
                (isnan(get_real(p, a, i)) && isnan(get_real(p, b, i))));
    }
}

static void require_same_gradients(const memlean_token_logprob_params *p, const void *a, const void *b)
{
    memlean_token_logprob_params first = *p, second = *p;
    const size_t size = element_sizes[p->dtype];
    first.logits = a;
    second.logits = b;
    for (int64_t i = 0; i < p->rows * p->vocab; i++)
        REQUIRE(memcmp((const char *)a + (size_t)i * size, (const char *)b + (size_t)i * size, size) == 0 ||
                (isnan(get_logit(&first, i)) && isnan(get_logit(&second, i))));
}

static void require_promises(const memlean_token_logprob_params *p, const results *x)
{
    const double highest = log((double)p->vocab) * (1 + 2e-7);
    for (int64_t i = 0; i < p->rows * p->candidates; i++)
        REQUIRE(!(get_real(p, x->logp, i) > 0));
    for (int64_t i = 0; i < p->rows; i++) {
        const double entropy = get_real(p, x->entropy, i);
        REQUIRE(isnan(entropy) || (entropy >= 0 && entropy <= highest));
    }
}

static void compute(const call *c, const void *grad_logp, const void *grad_entropy, int extras)
{
    const memlean_token_logprob_params *p = &c->params;
    results first = allocate_results(p), other = allocate_results(p);
    const char *isa;
    for (int level = 0; (isa = memlean_isa_available(level)); level++) {
        REQUIRE(memlean_isa_select(isa) == MEMLEAN_OK);
        for (int split = 0; split < 2; split++) {
            results *x = level == 0 && split == 0 ? &first : &other;
            run(*p, x, grad_logp, grad_entropy, extras, split);
            require_same_reals(p, first.logp, x->logp, p->rows * p->candidates);
            require_same_reals(p, first.statistics, x->statistics, p->rows * MEMLEAN_STATISTICS);
            require_same_reals(p, first.entropy, x->entropy, p->rows);
            require_same_reals(p, first.logsumexp, x->logsumexp, p->rows);
            require_same_reals(p, first.max, x->max, p->rows);
            require_same_reals(p, first.sum_p2, x->sum_p2, p->rows);
            REQUIRE(memcmp(first.argmax, x->argmax, (size_t)p->rows * sizeof *x->argmax) == 0);
            require_same_gradients(p, first.gradient, x->gradient);
        }
    }
    require_promises(p, &first);
    free_results(&first);
    free_results(&other);
}

/* Sizes and strides that no memory could hold: the check alone, which reads nothing of logits. */
static void check_wild(reader *r)
{
    int64_t sizes[MEMLEAN_MAX_DIMS], strides[MEMLEAN_MAX_DIMS], position, none[1] = {0};
    memlean_token_logprob_params p = {
        .dtype = (memlean_dtype)((int)byte(r) % 6 - 1),
        .logits = none,
        .rows = below(r, 2) ? word(r) : below(r, 10),
        .vocab = below(r, 2) ? word(r) : below(r, 10) - 1,
        .vocab_stride = word(r),
        .row_dims = (int32_t)byte(r) - 100,
        .row_sizes = sizes,
        .row_strides = strides,
        .first_token = word(r) >> below(r, 64),
        .index_limit = word(r) >> below(r, 64),
        .kept_count = below(r, 8) ? 0 : word(r),
        .grad_logits = below(r, 2) ? none : NULL,
    };
    int64_t rows = 1;
    for (int d = 0; d < MEMLEAN_MAX_DIMS; d++) {
        sizes[d] = below(r, 4) ? below(r, 3) : word(r);
        strides[d] = below(r, 4) ? below(r, 3) : word(r);
        if (d < p.row_dims && sizes[d] >= 0 && (sizes[d] == 0 || rows <= INT64_MAX / sizes[d]))
            rows *= sizes[d];
    }
    if (below(r, 2))
        p.rows = rows; /* far more often a product that fits */
    refused += memlean_token_logprob_check(&p, &position) != MEMLEAN_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    reader r = {data, data + size};
    int64_t position;
    call c;
    inputs++;
    if (below(&r, 8) == 7) {
        check_wild(&r);
        return 0;
    }
    make(&c, &r);
    const memlean_token_logprob_params *p = &c.params;
    if (memlean_token_logprob_check(p, &position) != MEMLEAN_OK) {
        refused++;
    } else {
        computed++;
        void *grad_logp = allocate((size_t)(p->rows * p->candidates) * real_size(p));
        void *grad_entropy = allocate((size_t)p->rows * real_size(p));
        for (int64_t i = 0; i < p->rows * p->candidates; i++)
            put_real(p, grad_logp, i, below(&r, 4) ? real_number(&r) : 0);
        for (int64_t i = 0; i < p->rows; i++)
            put_real(p, grad_entropy, i, below(&r, 2) ? real_number(&r) : 0);
        const int64_t upstream = below(&r, 4);
        compute(&c, upstream == 1 ? NULL : grad_logp, upstream == 2 ? NULL : grad_entropy, (int)below(&r, 2));
        free(grad_logp);
        free(grad_entropy);
    }
    destroy(&c);
    return 0;
}

#ifdef MEMLEAN_FUZZ_MAIN

int main(int count, char **arguments)
{
    const long long wanted = count > 1 ? atoll(arguments[1]) : 1000;
    uint64_t seed = 1;
    uint8_t data[512];
    for (int i = 2; i < count; i++) {
        FILE *file = fopen(arguments[i], "rb");
        if (!file) {
            perror(arguments[i]);
            return 2;
        }
        LLVMFuzzerTestOneInput(data, fread(data, 1, sizeof data, file));
        fclose(file);
    }
    for (long long i = 0; i < wanted; i++) {
        for (size_t j = 0; j < sizeof data; j++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            data[j] = (uint8_t)(seed >> 56);
        }
        LLVMFuzzerTestOneInput(data, sizeof data);
    }
    printf("%lld inputs: %lld computed, %lld refused\n", inputs, computed, refused);
    return computed == 0; /* a fuzzer that computes nothing has found nothing */
}

#endif
