// AVX-512 with bf16 and int8 dot products: Zen 4 and later, Cooper Lake, Sapphire Rapids without AMX.
#include "adapter_rows.h"
#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "rounding.h"
#include "sample.h"

const penstock::KernelTable penstock::kAvx512Bf16 = {"avx512_bf16",
                                                     0,
                                                     1 << PS_F32 | 1 << PS_BF16 | 1 << PS_I8 | 1 << PS_I4, kWideInputs, kWideBytes,
                                                     pack_rows_plain,
                                                     vector_linear,
                                                     rms_norm,
                                                     silu_mul,
                                                     rope_write,
                                                     vector_attention, sample_row, transpose_square, round_rows,
                                                     scale_values, cap_values, adapter_shrink};
