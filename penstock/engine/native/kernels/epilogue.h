// From a block of finished sums to outputs: scales, adapters, bias, gate * up, residual, rounding.
#pragma once
#include "adapter_rows.h"

namespace {

using penstock::kRowsMax;
using penstock::LinearAhead;

// Sums [rows][32] of a panel, float or exact int32; int32 get one scale per row and one per column.
template <class S>
struct Sums {
  const S *at;
  F16 low, high;           // column scales
  const float *row_scale;  // [rows]

  F16 column_half(int64_t r, int half) const {
    F16 v = load(at + r * 32 + half * 16);
    return row_scale ? v * set1(row_scale[r]) * (half ? high : low) : v;
  }
};

template <class T, class S>
static inline void finish_rows(const LinearPiece *piece, int64_t panel, int64_t row, int64_t rows,
                               const Sums<S> &sums) {
  const PsLinear *job = piece->job;
  const PsWeight *w = job->weight;
  bool gated = w->epilogue != PS_PLAIN;
  int64_t width = gated ? 16 : 32, column = panel * width, left = w->n - column;
  T *y = (T *)job->y + row * job->ldy + column;
  if (!gated && !w->bias && !job->residual && left >= 32) {
    for (int64_t r = 0; r < rows; r++, y += job->ldy) store_32(y, sums.column_half(r, 0), sums.column_half(r, 1));
    return;
  }
  F16 bias0 = w->bias ? load(w->bias + panel * 32) : zero(), bias1 = w->bias ? load(w->bias + panel * 32 + 16) : zero();
  const T *res = job->residual ? (const T *)job->residual + row * job->ldr + column : nullptr;
  for (int64_t r = 0; r < rows; r++, y += job->ldy, res += res ? job->ldr : 0) {
    F16 v0 = sums.column_half(r, 0) + bias0, v1 = sums.column_half(r, 1) + bias1;
    if (gated) v0 = (w->epilogue == PS_SILU_MUL ? silu(v0) : gelu_tanh(v0)) * v1;
    if (res) v0 = v0 + load_tail(res, left);
    store_tail(y, v0, left);
    if (gated || left <= 16) continue;
    if (res) v1 = v1 + load_tail(res + 16, left - 16);
    store_tail(y + 16, v1, left - 16);
  }
}

template <class S>
static inline void finish_typed(const LinearPiece *piece, int64_t panel, int64_t row, int64_t rows,
                                const Sums<S> &sums) {
  if (piece->job->y_type == PS_BF16)
    finish_rows<bf16>(piece, panel, row, rows, sums);
  else
    finish_rows<float>(piece, panel, row, rows, sums);
}

static inline void finish_sums(const LinearPiece *piece, int64_t panel, int64_t row, int64_t rows, float *sums) {
  finish_typed<float>(piece, panel, row, rows, {sums, zero(), zero(), nullptr});
}

static inline void finish_block(const LinearPiece *piece, int64_t panel, int64_t row, int64_t rows, float *sums) {
  if (piece->added.adapters) add_adapters(piece, panel, row, rows, sums);
  finish_sums(piece, panel, row, rows, sums);
}

// At most 32 rows.
static inline void finish_block(const LinearPiece *piece, int64_t panel, int64_t row, int64_t rows,
                                const int32_t *sums) {
  const float *scale = piece->job->weight->scale + panel * 32;
  Sums<int32_t> exact = {sums, load(scale), load(scale + 16), piece->a_scale + row};
  if (!piece->added.adapters) return finish_typed<int32_t>(piece, panel, row, rows, exact);
  alignas(64) float scaled[32 * 32];
  for (int64_t r = 0; r < rows; r++)
    for (int half = 0; half < 2; half++) store(scaled + r * 32 + half * 16, exact.column_half(r, half));
  finish_block(piece, panel, row, rows, scaled);
}

}  // namespace
