// Four-bit weights: a nibble q of output column n and input k stands for (q - 8) * scale[n, k / group] + offset[n, k /
// group].
//
// A panel is [k / 32][2 halves][4 quarters][16 columns][8 nibbles]. Of a quarter's eight inputs the low nibbles of a word
// hold 0, 4, 1, 5 and the high ones 2, 6, 3, 7: masked or shifted, a word is four unsigned bytes. Inputs are rounded to
// int8, with one scale per row and group, and put in that order; sums of a group are exact integers, which are then
// scaled and added up in float, group by group in order of k. So a row's bits depend on nothing but the row.
// (Rounding inputs by group: as GGML does for its Q4_0.)
#pragma once
#include "epilogue.h"

namespace {

constexpr int64_t kGroupMax = 128;
constexpr int64_t kNibblesAhead = 4096;  // Weights come in bursts, too slow a stream for the hardware to run ahead of.

// What the kernels know of a row's group of inputs.
struct GroupInput {
  float scale, sum;  // x is about scale * q; sum of the q
};

static inline const GroupInput *group_inputs(const LinearPiece *piece, int64_t row, int64_t group) {
  const PsWeight *w = piece->job->weight;
  return (const GroupInput *)piece->a_scale + row * (w->k_padded / w->group) + group;
}

// y[rows][32] += scale * sums[rows][32] + offset * x's sum over the group.
static inline void add_group(const PsWeight *w, int64_t index, const GroupInput *x, int64_t ld_x, int64_t rows,
                             const int32_t *sums, float *y) {
  F16 s0 = load(w->scale + index * 32), s1 = load(w->scale + index * 32 + 16);
  for (int64_t r = 0; r < rows; r++, x += ld_x) {
    F16 scale = set1(x->scale);
    F16 v0 = fma(s0 * scale, load(sums + r * 32), load(y + r * 32)),
        v1 = fma(s1 * scale, load(sums + r * 32 + 16), load(y + r * 32 + 16));
    if (w->offset) {
      F16 sum = set1(x->scale * x->sum);
      v0 = fma(load(w->offset + index * 32), sum, v0);
      v1 = fma(load(w->offset + index * 32 + 16), sum, v1);
    }
    store(y + r * 32, v0);
    store(y + r * 32 + 16, v1);
  }
}

// One panel for all rows. `product(nibbles, group, row, rows, out [32][32])` gives up to 32 rows' exact sums of a group.
template <class Prepare, class Multiply>
static void int4_panel(const LinearPiece *piece, int64_t panel, Prepare prepare, Multiply product) {
  const PsLinear *job = piece->job;
  const PsWeight *w = job->weight;
  alignas(64) int32_t sums[32 * 32];
  alignas(64) float y[kRowsMax * 32];
  int64_t groups = w->k_padded / w->group;
  memset(y, 0, (size_t)(job->m * 32) * 4);
  const uint8_t *nibbles = (const uint8_t *)w->data + panel * w->k_padded * 16;
  for (int64_t g = 0; g < groups; g++, nibbles += w->group * 16) {
    for (int64_t line = 0; line < w->group / 4; line++)
      _mm_prefetch((const char *)nibbles + kNibblesAhead + line * 64, _MM_HINT_T0);
    _mm_prefetch((const char *)(w->scale + (panel * groups + g + 8) * 32), _MM_HINT_T0);
    _mm_prefetch((const char *)(w->scale + (panel * groups + g + 8) * 32 + 16), _MM_HINT_T0);
    prepare(nibbles);
    for (int64_t row = 0; row < job->m; row += 32) {
      int64_t rows = job->m - row < 32 ? job->m - row : 32;
      product(nibbles, g, row, rows, sums);
      add_group(w, panel * groups + g, group_inputs(piece, row, g), groups, rows, sums, y + row * 32);
    }
  }
  for (int64_t row = 0; row < job->m; row += 32)
    finish_block(piece, panel, row, job->m - row < 32 ? job->m - row : 32, y + row * 32);
}

#ifdef __AVX512VNNI__
// R rows by a group: nibbles count from 0, so 8 times the inputs' sum comes out again.
template <int R>
static inline void nibble_rows(const uint8_t *nibbles, int64_t group, const int8_t *a, int64_t lda, const GroupInput *x,
                               int64_t ld_x, int32_t *sums) {
  Bytes64 acc[R][2];
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = zero_ints();
  for (int64_t k = 0; k < group; k += 32, nibbles += 512)
    for (int quarter = 0; quarter < 4; quarter++) {
      fetch_thin(nibbles + quarter * 64);
      fetch_thin(nibbles + 256 + quarter * 64);
      Bytes64 w0 = load_ints(nibbles + quarter * 64), w1 = load_ints(nibbles + 256 + quarter * 64);
      Bytes64 low0 = low_nibbles(w0), low1 = low_nibbles(w1), high0 = high_nibbles(w0), high1 = high_nibbles(w1);
      for (int r = 0; r < R; r++) {
        int32_t q[2];
        memcpy(q, a + r * lda + k + quarter * 8, 8);
        acc[r][0] = dot_nibbles(dot_nibbles(acc[r][0], low0, q[0]), high0, q[1]);
        acc[r][1] = dot_nibbles(dot_nibbles(acc[r][1], low1, q[0]), high1, q[1]);
      }
    }
  for (int r = 0; r < R; r++) {
    store(sums + r * 32, acc[r][0]);
    store(sums + r * 32 + 16, acc[r][1]);
    int32_t excess = 8 * (int32_t)x[r * ld_x].sum;
    for (int c = 0; c < 32; c++) sums[r * 32 + c] -= excess;
  }
}
#else
// R rows by 32 inputs of one half of a panel. Eight products of a nibble and a byte, two by two, are below 2^15 in all
// (8 * 2 * 15 * 128 = 30,720), so they are added up in sixteen bits and widened once.
template <int R>
static inline void nibble_block(const uint8_t *nibbles, const int8_t *a, int64_t lda, int32_t *sums) {
  Bytes64 acc[R];
#pragma GCC unroll 8
  for (int eighth = 0; eighth < 8; eighth++) {
    Bytes64 words = load_ints(nibbles + eighth / 2 * 64), part = eighth % 2 ? high_nibbles(words) : low_nibbles(words);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int32_t four;
      memcpy(&four, a + r * lda + eighth * 4, 4);
      Bytes64 twos = dot_two(part, four);
      if (eighth)
        add_twos(acc[r], twos);
      else
        acc[r] = twos;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) add_fours(sums + r * 32, acc[r]);
}

// R rows by a group: nibbles count from 0, so 8 times the inputs' sum comes out again.
template <int R>
static __attribute__((noinline)) void nibble_rows(const uint8_t *nibbles, int64_t group, const int8_t *a, int64_t lda,
                                                  const GroupInput *x, int64_t ld_x, int32_t *sums) {
  for (int r = 0; r < R; r++)
    for (int c = 0; c < 32; c++) sums[r * 32 + c] = -8 * (int32_t)x[r * ld_x].sum;
  for (int64_t k = 0; k < group; k += 32, nibbles += 512) {
    for (int line = 0; line < 8; line++) fetch_thin(nibbles + line * 64);
    nibble_block<R>(nibbles, a + k, lda, sums);
    nibble_block<R>(nibbles + 256, a + k, lda, sums + 16);
  }
}
#endif

// Dynamic int8: scale = max |x| / 127, values rounded to nearest even. Inf and NaN come out as NaN scales.
template <class T>
static inline float row_scale(const T *x, int64_t k) {
  F16 top = zero();
  for (int64_t i = 0; i < k; i += 16) {
    F16 v = load_tail(x + i, k - i);
    top = keep_nan(v, vmax(vmax(v, zero() - v), top));  // The maximum of x and NaN is the second operand.
  }
  float most = max_lanes(top);
  return most < 3.0e38f ? most / 127.0f : __builtin_nanf("");
}

// `count` values from x as int8 in the order of the nibbles; those past `left` are zeros.
template <class T>
static inline GroupInput quantize_group(const T *x, int64_t left, int64_t count, int8_t *out) {
  GroupInput made = {row_scale(x, left < count ? left : count), 0};
  F16 inverse = set1(made.scale > 0 ? 1.0f / made.scale : 0.0f);
  int32_t sum = 0;
  for (int64_t i = 0; i < count; i += 16, out += 16) {
    int8_t q[16];
    store_i8(q, i < left ? load_tail(x + i, left - i) * inverse : zero());
    for (int j = 0; j < 16; j++) {
      constexpr int8_t kFrom[8] = {0, 4, 1, 5, 2, 6, 3, 7};
      out[j] = q[(j & 8) + kFrom[j & 7]];
      sum += q[j];
    }
  }
  made.sum = (float)sum;
  return made;
}

// One row's inputs as the weight's columns want them.
template <class T>
static void quantize_row_groups(const PsWeight *w, const T *x, int8_t *out, GroupInput *made) {
  alignas(64) T gathered[kGroupMax];
  for (int64_t k = 0; k < w->k_padded; k += w->group, made++) {
    const T *group = x + k;
    if (w->order) {
      for (int64_t i = 0; i < w->group; i++) gathered[i] = x[w->order[k + i]];
      group = gathered;
    }
    *made = quantize_group(group, w->k - k, w->group, out + k);
  }
}

static void quantize_groups(const PsLinear *job, int64_t r, int8_t *out, GroupInput *x) {
  if (job->x_type == PS_BF16)
    quantize_row_groups(job->weight, (const bf16 *)job->x + r * job->ldx, out, x);
  else
    quantize_row_groups(job->weight, (const float *)job->x + r * job->ldx, out, x);
}

}  // namespace
