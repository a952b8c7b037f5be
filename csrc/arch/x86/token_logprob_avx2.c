#include "../../kernels/numeric.h"
#include "vector_avx2.h"

#define ML_ISA avx2
#define ML_V32(op) avx2_##op
#define ML_VECTORS32 4
#include "../token_logprob_isa.h"
