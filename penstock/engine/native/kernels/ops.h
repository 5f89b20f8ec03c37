// The operations on the whole pool, for callers inside the library that already hold its lock.
#pragma once
#include "table.h"

namespace penstock {
// What is computed beside a linear by the same threads, without a fork and join of its own where the linear has one.
struct LinearSide {
  const void *ctx;
  int64_t num_chunks;                                                     // of `inputs`
  void (*inputs)(const void *ctx, int64_t chunk);                         // before any panel
  // Before these panels end: says in `piece` what is added to them, and what is read soon.
  void (*panels)(const void *ctx, int64_t panel_first, int64_t panel_last, int worker, LinearPiece *piece);
};

// `side`: of at most kRowsMax rows; or null.
int32_t linear(const PsLinear *job, const LinearSide *side = nullptr);
int64_t chunk_panels_most(const PsWeight *weight);  // that a side's `panels` is called for at once
bool reserve_linear(const PsWeight *weight, int64_t m);  // the scratch memory that `m` rows take
int32_t rms_norm(const PsNorm *job);
int32_t silu_mul(const PsSiluMul *job);
int32_t rope_write(const PsRopeWrite *job);
int32_t attention(const PsAttention *job);
int32_t sample(const PsSample *job);
void scale_values(void *x, int32_t type, int64_t n, float factor);  // x *= factor
void cap_values(float *x, int64_t n, float cap);                    // x = cap * tanh(x / cap)
void lookup(const PsLookup *job);
int32_t step(const PsDecoder *decoder, const PsStep *step);
int32_t draft(const PsDecoder *decoder, const PsDraft *job);

// Memory that lives as long as the process and only grows; calls use it one at a time, under the pool's lock.
struct Arena {
  char *at = nullptr;
  int64_t size = 0;
  bool reserve(int64_t bytes);
};
}  // namespace penstock
