/*
 * The kernels' float exp over every float32 that it can meet, against libm's double exp: exp_sweep [STEP].
 *
 * A row of logits -u beside a maximum of 0, with statistics that say S = 1 and an upstream gradient of -1 for a token
 * of another shard, has the gradient exp(-u): so the sweep goes through the public interface, at every level of this
 * CPU. With STEP, every STEP-th float only.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/kernels/numeric.h"
#include "../../csrc/memlean.h"

enum { columns = MEMLEAN_SEGMENT, levels = 8 };

static float u[columns], logits[columns], e[levels][columns];

/* e[level] = exp(-u) of n columns, at every level. */
static int sweep_levels(int64_t n)
{
    static const int64_t index[1] = {columns}; /* in no column here */
    static const float upstream[1] = {-1}, statistics[MEMLEAN_STATISTICS] = {0, 0, 0};
    int level = 0;
    const char *isa;
    for (; (isa = memlean_isa_available(level)); level++) {
        const memlean_token_logprob_params p = {
            .dtype = MEMLEAN_F32,
            .logits = logits,
            .rows = 1,
            .vocab = n,
            .candidates = 1,
            .vocab_stride = 1,
            .index = index,
            .index_limit = columns + 1,
            .statistics = (void *)(uintptr_t)statistics,
            .grad_logp = upstream,
            .grad_logits = e[level],
        };
        int64_t position;
        if (memlean_isa_select(isa) != MEMLEAN_OK || memlean_token_logprob_check(&p, &position) != MEMLEAN_OK)
            abort();
        memlean_token_logprob_backward(&p, 0, 1);
    }
    return level;
}

/* Distance of a float from the exact value, in units of the float's last place. */
static double ulps(float got, double exact)
{
    int exponent;
    frexp(exact, &exponent);
    return fabs(((double)got - exact) * ldexp(1, 24 - exponent));
}

typedef struct {
    const char *name;
    float low, high;
    double worst;
    float where;
    long long count, rounded; /* all; those that are the exact value rounded once */
} range;

int main(int count, char **arguments)
{
    const int64_t step = count > 1 ? atoll(arguments[1]) : 1;
    range ranges[] = {{.name = "u <= 1", .low = 0, .high = 1},
                      {.name = "1 < u <= 10", .low = 1, .high = 10},
                      {.name = "10 < u <= 87.25", .low = 10, .high = ML_EXPF_LIMIT}};
    const uint32_t last = ml_float_to_bits(ML_EXPF_LIMIT);
    long long differing = 0, beyond = 0;
    int found = 0;
    for (int64_t bits = 0; bits <= last;) {
        int64_t n = 0;
        for (; n < columns && bits <= last; n++, bits += step) {
            u[n] = ml_bits_to_float((uint32_t)bits);
            logits[n] = -u[n];
        }
        found = sweep_levels(n);
        for (int level = 1; level < found; level++)
            differing += memcmp(e[0], e[level], (size_t)n * sizeof **e) != 0;
        for (int64_t j = 0; j < n; j++) {
            const double exact = exp(-(double)u[j]), error = ulps(e[0][j], exact);
            range *r = &ranges[u[j] <= 1 ? 0 : u[j] <= 10 ? 1 : 2];
            r->count++;
            r->rounded += e[0][j] == (float)exact;
            if (error > r->worst) {
                r->worst = error;
                r->where = u[j];
            }
        }
    }
    /* Above the limit, up to infinity: exactly 0. */
    for (int64_t bits = last + 1; bits <= 0x7f800000;) {
        int64_t n = 0;
        for (; n < columns && bits <= 0x7f800000; n++, bits += step)
            logits[n] = -ml_bits_to_float((uint32_t)bits);
        found = sweep_levels(n);
        for (int level = 0; level < found; level++)
            for (int64_t j = 0; j < n; j++)
                beyond += e[level][j] != 0;
    }
    double worst = 0;
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        const range *r = &ranges[i];
        printf("%-16s %11lld floats, at most %.3f ulp (u = %.9g), %.1f %% rounded correctly\n", r->name, r->count,
               r->worst, (double)r->where, 100.0 * (double)r->rounded / (double)r->count);
        worst = fmax(worst, r->worst);
    }
    printf("above 87.25: %lld not 0; %d levels, %lld blocks with other bits\n", beyond, found, differing);
    /* The bounds that docs/numerics.md states. */
    return differing || beyond || ranges[0].worst > 2.12 || ranges[1].worst > 3.98 || worst > 20.3;
}
