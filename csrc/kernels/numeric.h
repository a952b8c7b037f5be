/*
 * Scalar arithmetic shared by kernels and row splitting: dtype conversions, and exp, log1p and expm1 in double.
 *
 * The double functions use plain additions and multiplications in a fixed order, so that they give the same bits on
 * every machine; libm makes no such promise.
 */
#ifndef MEMLEAN_NUMERIC_H
#define MEMLEAN_NUMERIC_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../memlean.h"

/* For bodies with constant arguments: one copy per constant, with its branches gone. Under the address sanitizer that
 * would be minutes of compilation. */
#if defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__)
#define ML_ALWAYS_INLINE static inline __attribute__((always_inline))
#else
#define ML_ALWAYS_INLINE static inline
#endif

#if defined(__GNUC__)
#define ML_UNLIKELY(condition) __builtin_expect(condition, 0)
#define ML_PREFETCH(address) __builtin_prefetch((const void *)(address))
#else
#define ML_UNLIKELY(condition) (condition)
#define ML_PREFETCH(address) (void)(address)
#endif

/* ---- exp(-u) in float: constants of exp_tpl.h -------------------------------------------------------------------- */

/* Largest u / T: exp is 0 beyond, which also keeps -inf and masking constants (-1e30) harmless, and no result is
 * denormal. */
#define ML_EXPF_LIMIT 87.25f
#define ML_EXPF_EIGHTHS 0x1.71547652b82fep+3 /* 8 / ln 2 */
/* 1.5 * 2^23: adding it rounds to an integer n and leaves n in the low bits. */
#define ML_EXPF_MAGIC 12582912.0f
/* 2^(r/8) on |r| <= 1/2 with c0 = 1, relative minimax 2.5e-8. */
#define ML_EXPF_C1 0x1.62e432p-4f
#define ML_EXPF_C2 0x1.ec0c32p-9f
#define ML_EXPF_C3 0x1.c6a004p-14f
/* 2^(i/8) as bits, less i << 20, so that adding n << 20 puts floor(n / 8) into the exponent. */
#define ML_EXPF_TABLE 0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7, 0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7

/* ---- exp in double ----------------------------------------------------------------------------------------------- */

#define ML_EXP_LOG2E 0x1.71547652b82fep+0
#define ML_EXP_LN2_HI 0x1.62e42feep-1 /* 32 bits, so that n * LN2_HI is exact */
#define ML_EXP_LN2_LO 0x1.a39ef35793c76p-33
#define ML_EXP_LOWEST -0x1.628b76e3a7b61p+9 /* -1023 ln 2: the exponent field is 0 there */
#define ML_EXP_MAGIC 6755399441056767.0     /* 1.5 * 2^52 + 1023 */
#define ML_EXP_LIMIT 708.0                  /* largest u of exp(-u), as ML_EXPF_LIMIT */

/* e^r by Taylor's series to r^13 / 13!; |r| <= 0.35 leaves 4e-18. */
static inline double ml_exp_poly(double r)
{
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    return p * r + 1.0;
}

/* e^t for t <= 0; 0 from about -708.8 on; NaN for NaN. */
static inline double ml_exp(double t)
{
    t = ML_EXP_LOWEST > t ? ML_EXP_LOWEST : t;
    const double shifted = t * ML_EXP_LOG2E + ML_EXP_MAGIC;
    const double n = shifted - ML_EXP_MAGIC;
    const double p = ml_exp_poly((t - n * ML_EXP_LN2_HI) - n * ML_EXP_LN2_LO);
    uint64_t bits;
    double scale;
    memcpy(&bits, &shifted, sizeof bits);
    bits <<= 52;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

/* The same partial result beside a maximum that is higher, or as high, and in none of its columns. */
static inline void ml_row_state_raise(memlean_row_state *state, double max, double inverse_temperature)
{
    const double step = state->max - max, factor = ml_exp(step * inverse_temperature), sum = 1 + state->excess;
    state->shifted = factor == 0.0 ? 0.0 * state->shifted : factor * (state->shifted + step * sum);
    state->excess = factor * sum;
    state->squares *= factor * factor;
    state->max = max;
}

/* e^t - 1 for t <= 0. */
static inline double ml_expm1(double t)
{
    if (!(t > -0.25))
        return ml_exp(t) - 1.0;
    double p = 1.0;
    for (int k = 14; k >= 2; k--)
        p = 1.0 + p * t / k;
    return p * t;
}

/* log(1 + d) for d >= 0, by 2 atanh(d / (2 + d)) near 0 and a split of 1 + d into 2^k f otherwise. */
static inline double ml_log1p(double d)
{
    if (!(d < INFINITY))
        return d;
    double s, k = 0.0, lost = 0.0;
    if (d < 0.4) {
        s = d / (2.0 + d);
    } else {
        const double u = 1.0 + d;
        int exponent;
        double f = frexp(u, &exponent);
        if (f < 0x1.6a09e667f3bcdp-1) {
            f *= 2.0;
            exponent--;
        }
        k = exponent;
        s = (f - 1.0) / (f + 1.0);
        lost = (d >= 1.0 ? 1.0 - (u - d) : d - (u - 1.0)) / u;
    }
    const double q = s * s;
    double series = 0.0;
    for (int n = 25; n >= 3; n -= 2)
        series = q * (1.0 / n + series);
    return k * ML_EXP_LN2_HI + (2.0 * s + (2.0 * s * series + (k * ML_EXP_LN2_LO + lost)));
}

/* ---- dtypes ------------------------------------------------------------------------------------------------------ */

static inline float ml_bits_to_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t ml_float_to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float ml_bf16_to_float(uint16_t x)
{
    return ml_bits_to_float((uint32_t)x << 16);
}

/* Round to nearest even; a NaN stays a NaN instead of carrying into infinity. */
static inline uint16_t ml_float_to_bf16(float value)
{
    const uint32_t bits = ml_float_to_bits(value);
    if (value != value)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float ml_f16_to_float(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
    if (rest >= 0x7c00) /* infinity, NaN */
        return ml_bits_to_float(sign | 0x7f800000u | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000u : 0));
    if (rest < 0x400) /* denormal; no float on the way is, as torch.set_flush_denormal would make that 0 */
        return ml_bits_to_float(sign | ml_float_to_bits((float)rest * 0x1p-24f));
    return ml_bits_to_float(sign | ((rest << 13) + 0x38000000u)); /* the exponent's bias from 15 to 127 */
}

static inline uint16_t ml_float_to_f16(float value)
{
    const uint32_t bits = ml_float_to_bits(value);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    const uint32_t rest = bits & 0x7fffffff;
    if (rest > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000u) /* 65520, the first that rounds to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000u) /* below 2^-14: adding 0.5 leaves the bits of a denormal half, correctly rounded */
        return (uint16_t)(sign | (ml_float_to_bits(ml_bits_to_float(rest) + 0.5f) & 0x7fff));
    return (uint16_t)(sign | ((rest - 0x38000000u + 0xfff + (rest >> 13 & 1)) >> 13));
}

#endif
