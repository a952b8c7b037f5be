/*
 * exp(-u) in float for one instruction set, from its vector operations ML_V(op) on ML_V(t); u in [0, ML_EXPF_LIMIT].
 *
 * -u = (n + r) ln(2) / 8 with n rounded to nearest; 2^(n/8) from a table of eight, 2^(r/8) by a polynomial of degree 3.
 * Exactly 1 at 0; error in docs/numerics.md. A NaN stays a NaN.
 */
static inline ML_V(t) ML_V(exp_split)(ML_V(t) u, ML_V(t) *scale)
{
    const ML_V(t) eighths = ML_V(set1)(ML_EXPF_EIGHTHS), magic = ML_V(set1)(ML_EXPF_MAGIC);
    const ML_V(t) shifted = ML_V(fnma)(u, eighths, magic);
    const ML_V(t) r = ML_V(fnms)(u, eighths, ML_V(sub)(shifted, magic));
    ML_V(t) p = ML_V(fma)(ML_V(set1)(ML_EXPF_C3), r, ML_V(set1)(ML_EXPF_C2));
    p = ML_V(fma)(p, r, ML_V(set1)(ML_EXPF_C1));
    *scale = ML_V(exp2_eighths)(shifted);
    return ML_V(fma)(p, r, ML_V(set1)(1.0f));
}

static inline ML_V(t) ML_V(exp)(ML_V(t) u)
{
    ML_V(t) scale;
    const ML_V(t) p = ML_V(exp_split)(u, &scale);
    return ML_V(mul)(p, scale);
}
