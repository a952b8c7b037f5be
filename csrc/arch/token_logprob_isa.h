/* The four dtypes of one instruction set. Included with ML_ISA, ML_V32(op) for its float vectors, and ML_VECTORS32. */
#include <stdint.h>

#include "generic/vector_array_f64.h"
#include "kernels.h"

#define ML_JOIN_(pass, dtype, isa) ml_token_logprob_##pass##_##dtype##__##isa
#define ML_JOIN(pass, dtype, isa) ML_JOIN_(pass, dtype, isa)

#define ML_NAME(pass) ML_JOIN(pass, f32, ML_ISA)
#define ML_REAL float
#define ML_STORAGE float
#define ML_MINUS_INF (-INFINITY)
#define ML_LOAD ML_V32(load_f32)
#define ML_STORE ML_V32(store_f32)
#define ML_V ML_V32
#define ML_VECTORS ML_VECTORS32
#include "../kernels/token_logprob_tpl.h"

#define ML_NAME(pass) ML_JOIN(pass, bf16, ML_ISA)
#define ML_REAL float
#define ML_STORAGE uint16_t
#define ML_MINUS_INF 0xff80
#define ML_LOAD ML_V32(load_bf16)
#define ML_STORE ML_V32(store_bf16)
#define ML_V ML_V32
#define ML_VECTORS ML_VECTORS32
#include "../kernels/token_logprob_tpl.h"

#define ML_NAME(pass) ML_JOIN(pass, f16, ML_ISA)
#define ML_REAL float
#define ML_STORAGE uint16_t
#define ML_MINUS_INF 0xfc00
#define ML_LOAD ML_V32(load_f16)
#define ML_STORE ML_V32(store_f16)
#define ML_V ML_V32
#define ML_VECTORS ML_VECTORS32
#include "../kernels/token_logprob_tpl.h"

#define ML_NAME(pass) ML_JOIN(pass, f64, ML_ISA)
#define ML_REAL double
#define ML_STORAGE double
#define ML_MINUS_INF (-INFINITY)
#define ML_LOAD array64_load
#define ML_STORE array64_store
#define ML_V(op) array64_##op
#define ML_VECTORS 1
#include "../kernels/token_logprob_tpl.h"
