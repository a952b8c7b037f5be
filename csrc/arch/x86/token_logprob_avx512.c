#include "../../kernels/numeric.h"
#include "vector_avx512.h"

#define ML_ISA avx512
#define ML_V32(op) avx512_##op
#define ML_VECTORS32 2
#include "../token_logprob_isa.h"
