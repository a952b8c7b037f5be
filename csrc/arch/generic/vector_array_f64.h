/* Double on arrays, for every instruction set: this dtype is there for gradcheck and small models, not for speed. */
#define ML_REAL double
#define ML_V(op) array64_##op
#include "vector_array_tpl.h"

static inline array64_t array64_fma(array64_t a, array64_t b, array64_t c)
{
    ML_EACH c.lane[i] += a.lane[i] * b.lane[i];
    return c;
}

static inline array64_t array64_fnma(array64_t a, array64_t b, array64_t c)
{
    ML_EACH c.lane[i] -= a.lane[i] * b.lane[i];
    return c;
}

/* rate is 1 / T */
static inline array64_t array64_exp(array64_t u, array64_t rate)
{
    ML_EACH u.lane[i] = ml_exp(-u.lane[i] * rate.lane[i]);
    return u;
}

static inline array64_t array64_exp_split(array64_t u, array64_t rate, array64_t *scale)
{
    *scale = array64_set1(1.0);
    return array64_exp(u, rate);
}

static inline void array64_load(const double *p, array64_t y[1])
{
    memcpy(y, p, sizeof *y);
}

static inline void array64_store(double *p, const array64_t y[1])
{
    memcpy(p, y, sizeof *y);
}
#undef ML_EACH
#undef ML_V
#undef ML_REAL
