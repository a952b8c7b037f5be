#include "cpu.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <stdint.h>

typedef struct {
    uint32_t eax, ebx, ecx, edx;
} registers;

static registers cpuid(uint32_t leaf)
{
    registers r = {0, 0, 0, 0};
    __get_cpuid_count(leaf, 0, &r.eax, &r.ebx, &r.ecx, &r.edx); /* leaves zeros where the leaf does not exist */
    return r;
}

/* Registers that the operating system saves and restores; asking is allowed only where OSXSAVE is set. */
static uint32_t saved_state(void)
{
    const uint32_t osxsave = 1u << 27;
    if (!(cpuid(1).ecx & osxsave))
        return 0;
    uint32_t eax, edx;
    __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    return eax;
}

int ml_cpu_has_avx2(void)
{
    const uint32_t ymm = 0x6, fma = 1u << 12, f16c = 1u << 29, avx = 1u << 28, avx2 = 1u << 5;
    const uint32_t basic = fma | f16c | avx;
    return (saved_state() & ymm) == ymm && (cpuid(1).ecx & basic) == basic && (cpuid(7).ebx & avx2);
}

int ml_cpu_has_avx512(void)
{
    const uint32_t zmm = 0xe6, f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31;
    const uint32_t all = f | dq | bw | vl;
    return ml_cpu_has_avx2() && (saved_state() & zmm) == zmm && (cpuid(7).ebx & all) == all;
}

#else

int ml_cpu_has_avx2(void)
{
    return 0;
}

int ml_cpu_has_avx512(void)
{
    return 0;
}

#endif
