/*
 * exp in float for one instruction set, from its vector operations ML_V(op) on ML_V(t); t in [ML_EXPF_LOWEST, 0] or NaN.
 *
 * t = n ln 2 + r with n rounded to nearest, then a polynomial of degree 5 in r times 2^n. At most 2 ulp on [-10, 0],
 * exactly 1 at 0, exactly 0 below about -87.68.
 */
static inline ML_V(t) ML_V(exp_split)(ML_V(t) t, ML_V(t) *scale)
{
    const ML_V(t) magic = ML_V(set1)(ML_EXPF_MAGIC), one = ML_V(set1)(1.0f);
    const ML_V(t) shifted = ML_V(fma)(t, ML_V(set1)(ML_EXPF_LOG2E), magic);
    const ML_V(t) n = ML_V(sub)(shifted, magic);
    ML_V(t) r = ML_V(fnma)(n, ML_V(set1)(ML_EXPF_LN2_HI), t);
    r = ML_V(fnma)(n, ML_V(set1)(ML_EXPF_LN2_LO), r);
    ML_V(t) p = ML_V(fma)(ML_V(set1)(ML_EXPF_C5), r, ML_V(set1)(ML_EXPF_C4));
    p = ML_V(fma)(p, r, ML_V(set1)(ML_EXPF_C3));
    p = ML_V(fma)(p, r, ML_V(set1)(ML_EXPF_C2));
    p = ML_V(fma)(p, r, one);
    *scale = ML_V(low_bits_to_exponent)(shifted);
    return ML_V(fma)(p, r, one);
}

static inline ML_V(t) ML_V(exp)(ML_V(t) t)
{
    ML_V(t) scale;
    const ML_V(t) p = ML_V(exp_split)(t, &scale);
    return ML_V(mul)(p, scale);
}

/* exp(t) + sum. The scaling is exact, so fusing it with the addition changes no bit. */
static inline ML_V(t) ML_V(exp_add)(ML_V(t) t, ML_V(t) sum)
{
    ML_V(t) scale;
    const ML_V(t) p = ML_V(exp_split)(t, &scale);
    return ML_V(fma)(p, scale, sum);
}
