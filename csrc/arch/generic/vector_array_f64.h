/* Double on arrays, for every instruction set: this dtype is there for gradcheck and small models, not for speed. */
#define ML_REAL double
#define ML_V(op) array64_##op
#include "vector_array_tpl.h"

static inline array64_t array64_lowest(void)
{
    return array64_set1(ML_EXP_LOWEST);
}

static inline array64_t array64_fma(array64_t a, array64_t b, array64_t c)
{
    ML_EACH c.lane[i] += a.lane[i] * b.lane[i];
    return c;
}

static inline array64_t array64_exp(array64_t t)
{
    ML_EACH t.lane[i] = ml_exp(t.lane[i]);
    return t;
}

static inline array64_t array64_exp_add(array64_t t, array64_t sum)
{
    return array64_add(array64_exp(t), sum);
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
