/*
 * Vector operations on an array of 32 numbers, for any machine; the compiler vectorises what it can.
 * Included with ML_REAL (float or double) and ML_V(op); ML_V(t) is the array.
 */
typedef struct {
    ML_REAL lane[32];
} ML_V(t);

#define ML_EACH for (int i = 0; i < 32; i++)

static inline ML_V(t) ML_V(set1)(ML_REAL a)
{
    ML_V(t) r;
    ML_EACH r.lane[i] = a;
    return r;
}

static inline ML_V(t) ML_V(add)(ML_V(t) a, ML_V(t) b)
{
    ML_EACH a.lane[i] += b.lane[i];
    return a;
}

static inline ML_V(t) ML_V(sub)(ML_V(t) a, ML_V(t) b)
{
    ML_EACH a.lane[i] -= b.lane[i];
    return a;
}

static inline ML_V(t) ML_V(mul)(ML_V(t) a, ML_V(t) b)
{
    ML_EACH a.lane[i] *= b.lane[i];
    return a;
}

/* b where either is NaN, like the x86 instruction. */
static inline ML_V(t) ML_V(max)(ML_V(t) a, ML_V(t) b)
{
    ML_EACH b.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return b;
}

static inline ML_V(t) ML_V(min)(ML_V(t) a, ML_V(t) b)
{
    ML_EACH b.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
    return b;
}

/* Not in [0, limit], or NaN. */
static inline int ML_V(any_outside)(const ML_V(t) u[1], ML_V(t) limit)
{
    int any = 0;
    ML_EACH any |= !(u->lane[i] >= 0 && u->lane[i] <= limit.lane[i]);
    return any;
}

/* Not in (0, limit], or NaN. */
static inline int ML_V(any_zero_or_outside)(const ML_V(t) u[1], ML_V(t) limit)
{
    int any = 0;
    ML_EACH any |= !(u->lane[i] > 0 && u->lane[i] <= limit.lane[i]);
    return any;
}

static inline int ML_V(any_negative)(const ML_V(t) u[1])
{
    int any = 0;
    ML_EACH any |= u->lane[i] < 0;
    return any;
}

static inline ML_V(t) ML_V(zero_above)(ML_V(t) e, ML_V(t) u, ML_V(t) limit)
{
    ML_EACH e.lane[i] = u.lane[i] > limit.lane[i] ? 0 : e.lane[i];
    return e;
}

/* e, with 0 where u is 0; adds their number to *count. */
static inline ML_V(t) ML_V(drop_zero)(ML_V(t) e, ML_V(t) u, int64_t *count)
{
    ML_EACH
    {
        *count += u.lane[i] == 0;
        e.lane[i] = u.lane[i] == 0 ? 0 : e.lane[i];
    }
    return e;
}

static inline ML_REAL ML_V(largest)(const ML_V(t) y[1])
{
    ML_REAL r = y->lane[0];
    ML_EACH r = y->lane[i] > r ? y->lane[i] : r;
    return r;
}

/* Lanes 8 apart first, then halves: the order of every instruction set. */
static inline double ML_V(sum)(const ML_V(t) y[1])
{
    double d[8];
    for (int i = 0; i < 8; i++)
        d[i] = ((double)y->lane[i] + (double)y->lane[i + 8]) + ((double)y->lane[i + 16] + (double)y->lane[i + 24]);
    for (int i = 0; i < 4; i++)
        d[i] += d[i + 4];
    return (d[0] + d[2]) + (d[1] + d[3]);
}
