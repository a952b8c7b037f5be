/* Float vectors for NEON as every AArch64 has it: a chunk of 32 lanes is 8 vectors of 4. */
#include <arm_neon.h>

#define ML_V(op) neon_##op

typedef float32x4_t neon_t;

static inline neon_t neon_set1(float a)
{
    return vdupq_n_f32(a);
}

static inline neon_t neon_add(neon_t a, neon_t b)
{
    return vaddq_f32(a, b);
}

static inline neon_t neon_sub(neon_t a, neon_t b)
{
    return vsubq_f32(a, b);
}

static inline neon_t neon_mul(neon_t a, neon_t b)
{
    return vmulq_f32(a, b);
}

static inline neon_t neon_fma(neon_t a, neon_t b, neon_t c)
{
    return vfmaq_f32(c, a, b);
}

static inline neon_t neon_fnma(neon_t a, neon_t b, neon_t c)
{
    return vfmsq_f32(c, a, b);
}

/* A comparison and a selection: the instruction for it has other results for NaN and for zeros of both signs. */
static inline neon_t neon_max(neon_t a, neon_t b)
{
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}

static inline neon_t neon_min(neon_t a, neon_t b)
{
    return vbslq_f32(vcltq_f32(a, b), a, b);
}

/* 2^(n/8), n in the low bits. The lookup is by bytes: 4 (n mod 8) + 0, 1, 2, 3 in each lane. */
static inline neon_t neon_exp2_eighths(neon_t shifted)
{
    static const uint32_t entries[8] = {ML_EXPF_TABLE};
    const uint8x16x2_t table = {
        {vreinterpretq_u8_u32(vld1q_u32(entries)), vreinterpretq_u8_u32(vld1q_u32(entries + 4))}};
    const uint32x4_t n = vreinterpretq_u32_f32(shifted), entry = vandq_u32(n, vdupq_n_u32(7));
    const uint32x4_t bytes = vmlaq_u32(vdupq_n_u32(0x03020100), entry, vdupq_n_u32(0x04040404));
    const uint32x4_t found = vreinterpretq_u32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(bytes)));
    return vreinterpretq_f32_u32(vaddq_u32(found, vshlq_n_u32(n, 20)));
}

#include "../../kernels/exp_tpl.h"

/* As unsigned integers, negative numbers and NaN are above every number in [0, limit]; less 1, zero is too. */
static inline int neon_any_above(const neon_t u[8], neon_t limit, uint32x4_t less)
{
    uint32x4_t highest = vsubq_u32(vreinterpretq_u32_f32(u[0]), less);
    for (int v = 1; v < 8; v++)
        highest = vmaxq_u32(highest, vsubq_u32(vreinterpretq_u32_f32(u[v]), less));
    return vmaxvq_u32(highest) > vgetq_lane_u32(vsubq_u32(vreinterpretq_u32_f32(limit), less), 0);
}

static inline int neon_any_outside(const neon_t u[8], neon_t limit)
{
    return neon_any_above(u, limit, vdupq_n_u32(0));
}

static inline int neon_any_zero_or_outside(const neon_t u[8], neon_t limit)
{
    return neon_any_above(u, limit, vdupq_n_u32(1));
}

static inline int neon_any_negative(const neon_t u[8])
{
    uint32x4_t any = vcltzq_f32(u[0]);
    for (int v = 1; v < 8; v++)
        any = vorrq_u32(any, vcltzq_f32(u[v]));
    return vmaxvq_u32(any) != 0;
}

static inline neon_t neon_zero_above(neon_t e, neon_t u, neon_t limit)
{
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(e), vcgtq_f32(u, limit)));
}

static inline neon_t neon_drop_zero(neon_t e, neon_t u, int64_t *count)
{
    const uint32x4_t mask = vceqzq_f32(u);
    *count += vaddvq_u32(vshrq_n_u32(mask, 31));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(e), mask));
}

static inline float neon_largest(const neon_t y[8])
{
    neon_t four = y[0];
    for (int v = 1; v < 8; v++)
        four = neon_max(y[v], four);
    return vmaxvq_f32(four);
}

static inline double neon_sum(const neon_t y[8])
{
    float64x2_t d[4]; /* pairs of eight numbers: each the sum of lanes 8 apart */
    for (int i = 0; i < 2; i++) {
        float64x2_t low[4], high[4];
        for (int v = 0; v < 4; v++) {
            low[v] = vcvt_f64_f32(vget_low_f32(y[2 * v + i]));
            high[v] = vcvt_high_f64_f32(y[2 * v + i]);
        }
        d[2 * i] = vaddq_f64(vaddq_f64(low[0], low[1]), vaddq_f64(low[2], low[3]));
        d[2 * i + 1] = vaddq_f64(vaddq_f64(high[0], high[1]), vaddq_f64(high[2], high[3]));
    }
    return vaddvq_f64(vaddq_f64(vaddq_f64(d[0], d[2]), vaddq_f64(d[1], d[3])));
}

static inline void neon_load_f32(const float *p, neon_t y[8])
{
    for (int v = 0; v < 8; v++)
        y[v] = vld1q_f32(p + 4 * v);
}

static inline void neon_store_f32(float *p, const neon_t y[8])
{
    for (int v = 0; v < 8; v++)
        vst1q_f32(p + 4 * v, y[v]);
}

/* Even columns in y[0] to y[3] (lanes 0 to 15), odd ones in y[4] to y[7]. */
static inline void neon_load_bf16(const uint16_t *p, neon_t y[8])
{
    for (int v = 0; v < 4; v++) {
        const uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(p + 8 * v));
        y[v] = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
        y[v + 4] = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
    }
}

/*
 * A bf16 in the high half of each 32-bit lane, rounded to nearest even; the low half is not cleared. The only NaN that
 * can come is the processor's default one (core fills rows that are NaN as a whole), which rounding leaves a NaN.
 */
static inline uint32x4_t neon_round_bf16(neon_t y)
{
    const uint32x4_t bits = vreinterpretq_u32_f32(y);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
}

static inline void neon_store_bf16(uint16_t *p, const neon_t y[8])
{
    for (int v = 0; v < 4; v++) {
        const uint32x4_t even = neon_round_bf16(y[v]), odd = neon_round_bf16(y[v + 4]);
        vst1q_u16(p + 8 * v, vreinterpretq_u16_u32(vsriq_n_u32(odd, even, 16)));
    }
}

static inline void neon_load_f16(const uint16_t *p, neon_t y[8])
{
    for (int v = 0; v < 8; v++)
        y[v] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * v)));
}

static inline void neon_store_f16(uint16_t *p, const neon_t y[8])
{
    for (int v = 0; v < 8; v++)
        vst1_u16(p + 4 * v, vreinterpret_u16_f16(vcvt_f16_f32(y[v])));
}

#undef ML_V
