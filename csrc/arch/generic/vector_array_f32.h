/* Float on arrays, for machines without a kernel of their own. */
#define ML_REAL float
#define ML_V(op) array32_##op
#include "vector_array_tpl.h"

static inline array32_t array32_fma(array32_t a, array32_t b, array32_t c)
{
    ML_EACH c.lane[i] = fmaf(a.lane[i], b.lane[i], c.lane[i]);
    return c;
}

static inline array32_t array32_fnma(array32_t a, array32_t b, array32_t c)
{
    ML_EACH c.lane[i] = fmaf(-a.lane[i], b.lane[i], c.lane[i]);
    return c;
}

/* 2^(n/8), n in the low bits. */
static inline array32_t array32_exp2_eighths(array32_t shifted)
{
    static const uint32_t table[8] = {ML_EXPF_TABLE};
    ML_EACH
    {
        const uint32_t n = ml_float_to_bits(shifted.lane[i]);
        shifted.lane[i] = ml_bits_to_float(table[n & 7] + (n << 20));
    }
    return shifted;
}

#include "../../kernels/exp_tpl.h"

static inline void array32_load_f32(const float *p, array32_t y[1])
{
    memcpy(y, p, sizeof *y);
}

static inline void array32_store_f32(float *p, const array32_t y[1])
{
    memcpy(p, y, sizeof *y);
}

/* Even columns in lanes 0 to 15, odd ones in 16 to 31: what a vector of pairs unpacks to without a shuffle. */
static inline void array32_load_bf16(const uint16_t *p, array32_t y[1])
{
    ML_EACH y->lane[(i & 1) * 16 + i / 2] = ml_bf16_to_float(p[i]);
}

static inline void array32_store_bf16(uint16_t *p, const array32_t y[1])
{
    ML_EACH p[i] = ml_float_to_bf16(y->lane[(i & 1) * 16 + i / 2]);
}

static inline void array32_load_f16(const uint16_t *p, array32_t y[1])
{
    ML_EACH y->lane[i] = ml_f16_to_float(p[i]);
}

static inline void array32_store_f16(uint16_t *p, const array32_t y[1])
{
    ML_EACH p[i] = ml_float_to_f16(y->lane[i]);
}
#undef ML_EACH
#undef ML_V
#undef ML_REAL
