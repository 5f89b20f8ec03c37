// AVX-512 with int8 dot products but none of bf16: Cascade Lake and Ice Lake.
#include "adapter_rows.h"
#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "rounding.h"
#include "sample.h"

const penstock::KernelTable penstock::kAvx512Vnni = {"avx512_vnni",
                                                     0,
                                                     1 << PS_F32 | 1 << PS_BF16 | 1 << PS_I8 | 1 << PS_I4, kWideInputs, kWideBytes,
                                                     pack_rows_plain,
                                                     vector_linear,
                                                     rms_norm,
                                                     silu_mul,
                                                     rope_write,
                                                     vector_attention, sample_row, transpose_square, round_rows,
                                                     scale_values, cap_values, adapter_shrink};
