#include "../../kernels/numeric.h"
#include "vector_neon.h"

#define ML_ISA neon
#define ML_V32(op) neon_##op
#define ML_VECTORS32 8
#include "../token_logprob_isa.h"
