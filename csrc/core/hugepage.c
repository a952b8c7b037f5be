#if defined(__linux__)
#define _DEFAULT_SOURCE /* madvise */
#endif

#include "../memlean.h"

#if defined(__linux__)

#include <sys/mman.h>

/* First touches of 4 KiB pages cost more than all the arithmetic of a backward pass. */
void memlean_advise_hugepages(void *data, size_t bytes)
{
    const uintptr_t huge = (uintptr_t)2 << 20;
    const uintptr_t begin = ((uintptr_t)data + huge - 1) / huge * huge, end = ((uintptr_t)data + bytes) / huge * huge;
    if (begin < end)
        (void)madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* advice: a refusal changes nothing */
}

#else

void memlean_advise_hugepages(void *data, size_t bytes)
{
    (void)data;
    (void)bytes;
}

#endif
