/* What this CPU, and the operating system on it, can run. */
#ifndef MEMLEAN_CPU_H
#define MEMLEAN_CPU_H

int ml_cpu_has_avx2(void);   /* AVX2, FMA, F16C, and saved ymm registers */
int ml_cpu_has_avx512(void); /* the above, AVX-512 F, BW, DQ, VL, and saved zmm registers */

#endif
