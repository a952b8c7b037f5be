#include "dispatch.h"

#include <stdatomic.h>
#include <string.h>

#include "cpu.h"

static int always(void)
{
    return 1;
}

enum { level_generic, level_avx2, level_avx512, level_neon, level_count }; /* lowest first */

static const ml_kernel_table levels[level_count] = {
    [level_generic].isa = "generic", [level_generic].runs_here = always,
    [level_avx2].isa = "avx2",       [level_avx2].runs_here = ml_cpu_has_avx2,
    [level_avx512].isa = "avx512",   [level_avx512].runs_here = ml_cpu_has_avx512,
    [level_neon].isa = "neon",       [level_neon].runs_here = always, /* every AArch64 has it */
#define ML_KERNEL(op, pass, dtype, dtype_enum, isa) \
    [level_##isa].op##_##pass[dtype_enum] = ml_##op##_##pass##_##dtype##__##isa,
#include "../arch/kernels.def"
#undef ML_KERNEL
};

static _Atomic(const ml_kernel_table *) active;

/* The levels that are compiled in and run here. */
static const ml_kernel_table *available(int position)
{
    for (int level = 0; level < level_count; level++)
        if (levels[level].token_logprob_fwd[MEMLEAN_F32] && levels[level].runs_here() && position-- == 0)
            return &levels[level];
    return NULL;
}

const char *memlean_isa_available(int position)
{
    const ml_kernel_table *level = position < 0 ? NULL : available(position);
    return level ? level->isa : NULL;
}

memlean_status memlean_isa_select(const char *name)
{
    const ml_kernel_table *chosen = NULL, *level;
    for (int position = 0; (level = available(position)); position++)
        if (!name || strcmp(name, level->isa) == 0)
            chosen = level;
    if (!chosen)
        return MEMLEAN_EISA;
    atomic_store_explicit(&active, chosen, memory_order_release);
    return MEMLEAN_OK;
}

const ml_kernel_table *ml_kernels(void)
{
    const ml_kernel_table *table = atomic_load_explicit(&active, memory_order_acquire);
    if (!table) {
        /* Two threads here at once choose the same level. */
        memlean_isa_select(NULL);
        table = atomic_load_explicit(&active, memory_order_acquire);
    }
    return table;
}

const char *memlean_isa_active(void)
{
    return ml_kernels()->isa;
}

const char *memlean_kernel_name(int position)
{
    static const char *const names[] = {
#define ML_KERNEL(op, pass, dtype, dtype_enum, isa) "ml_" #op "_" #pass "_" #dtype "__" #isa,
#include "../arch/kernels.def"
#undef ML_KERNEL
    };
    return position >= 0 && position < (int)(sizeof names / sizeof *names) ? names[position] : NULL;
}
