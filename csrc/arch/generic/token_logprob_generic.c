#include "../../kernels/numeric.h"
#include "vector_array_f32.h"

#define ML_ISA generic
#define ML_V32(op) array32_##op
#define ML_VECTORS32 1
#include "../token_logprob_isa.h"
