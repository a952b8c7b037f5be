/*
 * exp(-u / T) in float for one instruction set, from its vector operations ML_V(op) on ML_V(t); rate = 8 / (T ln 2),
 * and u / T in [0, ML_EXPF_LIMIT]. The rate is one float: like the rounding of T itself, that is a relative error of
 * the temperature (1.3e-8 for T = 1, at most 6e-8), which moves the entropy by that times the variance of log p. A
 * second float would cost a tenth of the whole kernel.
 *
 * -rate u = n + r with n rounded to nearest; 2^(n/8) from a table of eight, 2^(r/8) by a polynomial of degree 3.
 * Exactly 1 at 0; error in docs/numerics.md. A NaN stays a NaN.
 */
static inline ML_V(t) ML_V(exp_split)(ML_V(t) u, ML_V(t) rate, ML_V(t) * scale)
{
    const ML_V(t) magic = ML_V(set1)(ML_EXPF_MAGIC);
    const ML_V(t) shifted = ML_V(fnma)(u, rate, magic);
    const ML_V(t) r = ML_V(fnma)(u, rate, ML_V(sub)(magic, shifted));
    ML_V(t) p = ML_V(fma)(ML_V(set1)(ML_EXPF_C3), r, ML_V(set1)(ML_EXPF_C2));
    p = ML_V(fma)(p, r, ML_V(set1)(ML_EXPF_C1));
    *scale = ML_V(exp2_eighths)(shifted);
    return ML_V(fma)(p, r, ML_V(set1)(1.0f));
}

static inline ML_V(t) ML_V(exp)(ML_V(t) u, ML_V(t) rate)
{
    ML_V(t) scale;
    const ML_V(t) p = ML_V(exp_split)(u, rate, &scale);
    return ML_V(mul)(p, scale);
}
