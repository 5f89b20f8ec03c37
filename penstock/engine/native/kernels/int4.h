// Four-bit weights: a nibble q of output column n and input k stands for (q - 8) * scale[n, k / group] + offset[n, k /
// group].
//
// A panel is [k / 32][2 halves][4 quarters][16 columns][8 nibbles]: a quarter has eight inputs, the even ones in the
// low half of each column's word. A group's nibbles become small integers in bf16, in the order of bf16 weights, and
// every row is multiplied with them; sums of a group are then scaled and added up in float, group by group in order of
// k. Products of bf16 and small integers are exact, so a row's bits depend on nothing but the row.
#pragma once
#include "epilogue.h"

namespace {

constexpr int64_t kGroupMax = 128;
constexpr int64_t kNibblesAhead = 4096;  // Weights come in bursts, too slow a stream for the hardware to run ahead of.

// y[rows][32] += scale * sums[rows][32] + offset * x's sum over the group.
static inline void add_group(const PsWeight *w, int64_t index, const float *x_sums, int64_t ld_sums, int64_t rows,
                             const float *sums, float *y) {
  F16 s0 = load(w->scale + index * 32), s1 = load(w->scale + index * 32 + 16);
  for (int64_t r = 0; r < rows; r++) {
    F16 v0 = fma(s0, load(sums + r * 32), load(y + r * 32)),
        v1 = fma(s1, load(sums + r * 32 + 16), load(y + r * 32 + 16));
    if (w->offset) {
      F16 x = set1(x_sums[r * ld_sums]);
      v0 = fma(load(w->offset + index * 32), x, v0);
      v1 = fma(load(w->offset + index * 32 + 16), x, v1);
    }
    store(y + r * 32, v0);
    store(y + r * 32 + 16, v1);
  }
}

// One panel for all rows. `product(weights, first k, row, rows, out [32][32])` multiplies up to 32 rows with a group.
template <class Product>
static void int4_panel(const LinearPiece *piece, int64_t panel, Product product) {
  const PsLinear *job = piece->job;
  const PsWeight *w = job->weight;
  alignas(64) bf16 weights[kGroupMax * 32];
  alignas(64) float sums[32 * 32], y[kRowsMax * 32];
  int64_t groups = w->k_padded / w->group;
  memset(y, 0, (size_t)(job->m * 32) * 4);
  const uint8_t *nibbles = (const uint8_t *)w->data + panel * w->k_padded * 16;
  for (int64_t g = 0; g < groups; g++) {
    for (int64_t block = 0; block < w->group / 4; block++, nibbles += 64) {
      _mm_prefetch((const char *)nibbles + kNibblesAhead, _MM_HINT_T0);
      expand_nibbles(nibbles, weights + block * 128);
    }
    _mm_prefetch((const char *)(w->scale + (panel * groups + g + 8) * 32), _MM_HINT_T0);
    _mm_prefetch((const char *)(w->scale + (panel * groups + g + 8) * 32 + 16), _MM_HINT_T0);
    for (int64_t row = 0; row < job->m; row += 32) {
      int64_t rows = job->m - row < 32 ? job->m - row : 32;
      product(weights, g * w->group, row, rows, sums);
      add_group(w, panel * groups + g, piece->a_scale + row * groups + g, groups, rows, sums, y + row * 32);
    }
  }
  for (int64_t row = 0; row < job->m; row += 32)
    finish_block(piece, panel, row, job->m - row < 32 ? job->m - row : 32, y + row * 32);
}

// Sums of a row of x over every group, in a fixed order.
static void group_sums(const PsLinear *job, int64_t r, float *out) {
  const PsWeight *w = job->weight;
  const bf16 *x = (const bf16 *)job->x + r * job->ldx;
  for (int64_t k = 0; k < w->k_padded; k += w->group, out++) {
    F16 acc = zero();
    for (int64_t i = k; i < k + w->group && i < w->k; i += 16) acc = acc + load_tail(x + i, w->k - i);
    *out = sum_lanes(acc);
  }
}

}  // namespace
