/* Float vectors for AVX2 with FMA and F16C: a chunk of 32 lanes is 4 vectors of 8. */
#include <immintrin.h>

#define ML_V(op) avx2_##op

typedef __m256 avx2_t;

static inline avx2_t avx2_set1(float a)
{
    return _mm256_set1_ps(a);
}

static inline avx2_t avx2_add(avx2_t a, avx2_t b)
{
    return _mm256_add_ps(a, b);
}

static inline avx2_t avx2_sub(avx2_t a, avx2_t b)
{
    return _mm256_sub_ps(a, b);
}

static inline avx2_t avx2_mul(avx2_t a, avx2_t b)
{
    return _mm256_mul_ps(a, b);
}

static inline avx2_t avx2_fma(avx2_t a, avx2_t b, avx2_t c)
{
    return _mm256_fmadd_ps(a, b, c);
}

static inline avx2_t avx2_fnma(avx2_t a, avx2_t b, avx2_t c)
{
    return _mm256_fnmadd_ps(a, b, c);
}

static inline avx2_t avx2_max(avx2_t a, avx2_t b)
{
    return _mm256_max_ps(a, b);
}

static inline avx2_t avx2_min(avx2_t a, avx2_t b)
{
    return _mm256_min_ps(a, b);
}

/* 2^(n/8), n in the low bits; the permutation looks at the lowest three. */
static inline avx2_t avx2_exp2_eighths(avx2_t shifted)
{
    const __m256i table = _mm256_setr_epi32(ML_EXPF_TABLE), n = _mm256_castps_si256(shifted);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_permutevar8x32_epi32(table, n), _mm256_slli_epi32(n, 20)));
}

#include "../../kernels/exp_tpl.h"

/* As unsigned integers, negative numbers and NaN are above every number in [0, limit]; less 1, zero is too. */
static inline int avx2_any_above(const avx2_t u[4], avx2_t limit, __m256i less)
{
    __m256i highest = _mm256_sub_epi32(_mm256_castps_si256(u[0]), less);
    for (int v = 1; v < 4; v++)
        highest = _mm256_max_epu32(highest, _mm256_sub_epi32(_mm256_castps_si256(u[v]), less));
    const __m256i bound = _mm256_sub_epi32(_mm256_castps_si256(limit), less);
    return _mm256_movemask_epi8(_mm256_cmpeq_epi32(_mm256_max_epu32(highest, bound), bound)) != -1;
}

static inline int avx2_any_outside(const avx2_t u[4], avx2_t limit)
{
    return avx2_any_above(u, limit, _mm256_setzero_si256());
}

static inline int avx2_any_zero_or_outside(const avx2_t u[4], avx2_t limit)
{
    return avx2_any_above(u, limit, _mm256_set1_epi32(1));
}

static inline int avx2_any_negative(const avx2_t u[4])
{
    const avx2_t lowest = _mm256_setzero_ps();
    const avx2_t a = _mm256_or_ps(_mm256_cmp_ps(u[0], lowest, _CMP_LT_OQ), _mm256_cmp_ps(u[1], lowest, _CMP_LT_OQ));
    const avx2_t b = _mm256_or_ps(_mm256_cmp_ps(u[2], lowest, _CMP_LT_OQ), _mm256_cmp_ps(u[3], lowest, _CMP_LT_OQ));
    return _mm256_movemask_ps(_mm256_or_ps(a, b));
}

static inline avx2_t avx2_zero_above(avx2_t e, avx2_t u, avx2_t limit)
{
    return _mm256_andnot_ps(_mm256_cmp_ps(u, limit, _CMP_GT_OQ), e);
}

static inline avx2_t avx2_drop_zero(avx2_t e, avx2_t u, int64_t *count)
{
    const avx2_t mask = _mm256_cmp_ps(u, _mm256_setzero_ps(), _CMP_EQ_OQ);
    *count += __builtin_popcount((unsigned)_mm256_movemask_ps(mask));
    return _mm256_andnot_ps(mask, e);
}

static inline float avx2_largest(const avx2_t y[4])
{
    const avx2_t eight = _mm256_max_ps(_mm256_max_ps(y[0], y[1]), _mm256_max_ps(y[2], y[3]));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

static inline double avx2_sum(const avx2_t y[4])
{
    __m256d half[2];
    for (int h = 0; h < 2; h++) {
        __m256d d[4];
        for (int v = 0; v < 4; v++)
            d[v] = _mm256_cvtps_pd(h ? _mm256_extractf128_ps(y[v], 1) : _mm256_castps256_ps128(y[v]));
        half[h] = _mm256_add_pd(_mm256_add_pd(d[0], d[1]), _mm256_add_pd(d[2], d[3]));
    }
    const __m256d d = _mm256_add_pd(half[0], half[1]);
    const __m128d pair = _mm_add_pd(_mm256_castpd256_pd128(d), _mm256_extractf128_pd(d, 1));
    return _mm_cvtsd_f64(pair) + _mm_cvtsd_f64(_mm_unpackhi_pd(pair, pair));
}

static inline void avx2_load_f32(const float *p, avx2_t y[4])
{
    for (int v = 0; v < 4; v++)
        y[v] = _mm256_loadu_ps(p + 8 * v);
}

static inline void avx2_store_f32(float *p, const avx2_t y[4])
{
    for (int v = 0; v < 4; v++)
        _mm256_storeu_ps(p + 8 * v, y[v]);
}

/* Even columns in y[0], y[1] (lanes 0 to 15), odd ones in y[2], y[3]. */
static inline void avx2_load_bf16(const uint16_t *p, avx2_t y[4])
{
    const __m256i high = _mm256_set1_epi32((int)0xffff0000u);
    for (int v = 0; v < 2; v++) {
        const __m256i pairs = _mm256_loadu_si256((const __m256i *)(p + 16 * v));
        y[v] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
        y[v + 2] = _mm256_castsi256_ps(_mm256_and_si256(pairs, high));
    }
}

/*
 * A bf16 in the high half of each 32-bit lane, rounded to nearest even; the low half is not cleared. The only NaN that
 * can come is the processor's default one (core fills rows that are NaN as a whole), which rounding leaves a NaN.
 */
static inline __m256i avx2_round_bf16(avx2_t y)
{
    const __m256i bits = _mm256_castps_si256(y);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}

static inline void avx2_store_bf16(uint16_t *p, const avx2_t y[4])
{
    for (int v = 0; v < 2; v++) {
        const __m256i even = _mm256_srli_epi32(avx2_round_bf16(y[v]), 16);
        const __m256i odd = avx2_round_bf16(y[v + 2]);
        _mm256_storeu_si256((__m256i *)(p + 16 * v), _mm256_blend_epi16(even, odd, 0xaa));
    }
}

static inline void avx2_load_f16(const uint16_t *p, avx2_t y[4])
{
    for (int v = 0; v < 4; v++)
        y[v] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8 * v)));
}

static inline void avx2_store_f16(uint16_t *p, const avx2_t y[4])
{
    for (int v = 0; v < 4; v++)
        _mm_storeu_si128((__m128i *)(p + 8 * v), _mm256_cvtps_ph(y[v], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#undef ML_V
