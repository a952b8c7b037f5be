/* Float vectors for AVX-512 (F, BW, DQ, VL): a chunk of 32 lanes is 2 vectors of 16. */
#include <immintrin.h>

#define ML_V(op) avx512_##op

typedef __m512 avx512_t;

static inline avx512_t avx512_set1(float a)
{
    return _mm512_set1_ps(a);
}

static inline avx512_t avx512_add(avx512_t a, avx512_t b)
{
    return _mm512_add_ps(a, b);
}

static inline avx512_t avx512_sub(avx512_t a, avx512_t b)
{
    return _mm512_sub_ps(a, b);
}

static inline avx512_t avx512_mul(avx512_t a, avx512_t b)
{
    return _mm512_mul_ps(a, b);
}

static inline avx512_t avx512_fma(avx512_t a, avx512_t b, avx512_t c)
{
    return _mm512_fmadd_ps(a, b, c);
}

static inline avx512_t avx512_fnma(avx512_t a, avx512_t b, avx512_t c)
{
    return _mm512_fnmadd_ps(a, b, c);
}

static inline avx512_t avx512_max(avx512_t a, avx512_t b)
{
    return _mm512_max_ps(a, b);
}

static inline avx512_t avx512_min(avx512_t a, avx512_t b)
{
    return _mm512_min_ps(a, b);
}

/* 2^(n/8), n in the low bits; the permutation looks at the lowest four, hence the table twice. */
static inline avx512_t avx512_exp2_eighths(avx512_t shifted)
{
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi32(ML_EXPF_TABLE)), n = _mm512_castps_si512(shifted);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_permutexvar_epi32(n, table), _mm512_slli_epi32(n, 20)));
}

#include "../../kernels/exp_tpl.h"

/* As unsigned integers, negative numbers and NaN are above every number in [0, limit]; less 1, zero is too. */
static inline int avx512_any_above(const avx512_t u[2], avx512_t limit, __m512i less)
{
    const __m512i highest = _mm512_max_epu32(_mm512_sub_epi32(_mm512_castps_si512(u[0]), less),
                                             _mm512_sub_epi32(_mm512_castps_si512(u[1]), less));
    return _mm512_cmpgt_epu32_mask(highest, _mm512_sub_epi32(_mm512_castps_si512(limit), less)) != 0;
}

static inline int avx512_any_outside(const avx512_t u[2], avx512_t limit)
{
    return avx512_any_above(u, limit, _mm512_setzero_si512());
}

static inline int avx512_any_zero_or_outside(const avx512_t u[2], avx512_t limit)
{
    return avx512_any_above(u, limit, _mm512_set1_epi32(1));
}

static inline int avx512_any_negative(const avx512_t u[2])
{
    const avx512_t zero = _mm512_setzero_ps();
    return (_mm512_cmp_ps_mask(u[0], zero, _CMP_LT_OQ) | _mm512_cmp_ps_mask(u[1], zero, _CMP_LT_OQ)) != 0;
}

static inline avx512_t avx512_zero_above(avx512_t e, avx512_t u, avx512_t limit)
{
    return _mm512_maskz_mov_ps((__mmask16)~_mm512_cmp_ps_mask(u, limit, _CMP_GT_OQ), e);
}

static inline avx512_t avx512_drop_zero(avx512_t e, avx512_t u, int64_t *count)
{
    const __mmask16 mask = _mm512_cmp_ps_mask(u, _mm512_setzero_ps(), _CMP_EQ_OQ);
    *count += __builtin_popcount(mask);
    return _mm512_maskz_mov_ps((__mmask16)~mask, e);
}

static inline float avx512_largest(const avx512_t y[2])
{
    return _mm512_reduce_max_ps(_mm512_max_ps(y[0], y[1]));
}

static inline double avx512_sum(const avx512_t y[2])
{
    __m512d d[4];
    for (int v = 0; v < 2; v++) {
        d[2 * v] = _mm512_cvtps_pd(_mm512_castps512_ps256(y[v]));
        d[2 * v + 1] = _mm512_cvtps_pd(_mm512_extractf32x8_ps(y[v], 1));
    }
    const __m512d eight = _mm512_add_pd(_mm512_add_pd(d[0], d[1]), _mm512_add_pd(d[2], d[3]));
    const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
    const __m128d pair = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(pair) + _mm_cvtsd_f64(_mm_unpackhi_pd(pair, pair));
}

static inline void avx512_load_f32(const float *p, avx512_t y[2])
{
    y[0] = _mm512_loadu_ps(p);
    y[1] = _mm512_loadu_ps(p + 16);
}

static inline void avx512_store_f32(float *p, const avx512_t y[2])
{
    _mm512_storeu_ps(p, y[0]);
    _mm512_storeu_ps(p + 16, y[1]);
}

/* Even columns in y[0], odd ones in y[1]. */
static inline void avx512_load_bf16(const uint16_t *p, avx512_t y[2])
{
    const __m512i pairs = _mm512_loadu_si512(p);
    y[0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    y[1] = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u)));
}

/*
 * A bf16 in the high half of each 32-bit lane, rounded to nearest even; the low half is not cleared. The only NaN that
 * can come is the processor's default one (core fills rows that are NaN as a whole), which rounding leaves a NaN.
 */
static inline __m512i avx512_round_bf16(avx512_t y)
{
    const __m512i bits = _mm512_castps_si512(y);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
}

static inline void avx512_store_bf16(uint16_t *p, const avx512_t y[2])
{
    const __m512i even = _mm512_srli_epi32(avx512_round_bf16(y[0]), 16);
    _mm512_storeu_si512(p, _mm512_mask_mov_epi16(even, 0xaaaaaaaau, avx512_round_bf16(y[1])));
}

static inline void avx512_load_f16(const uint16_t *p, avx512_t y[2])
{
    for (int v = 0; v < 2; v++)
        y[v] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p + 16 * v)));
}

static inline void avx512_store_f16(uint16_t *p, const avx512_t y[2])
{
    for (int v = 0; v < 2; v++)
        _mm256_storeu_si256((__m256i *)(p + 16 * v),
                            _mm512_cvtps_ph(y[v], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#undef ML_V
