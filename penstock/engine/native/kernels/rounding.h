// What is done to weights while a model is loaded: rounding to int8 and four bits, and squares of words for pack.cpp.
#pragma once
#include "linear.h"

namespace {

using penstock::RoundJob;

// int8: the row's largest magnitude becomes 127. One scale.
template <class T>
static inline void round_row_i8(const T *x, int64_t k, int8_t *out, float *scale) {
  *scale = row_scale(x, k);
  F16 inverse = set1(*scale > 0 ? 1.0f / *scale : 0.0f);
  for (int64_t i = 0; i < k; i += 16) {
    int8_t q[16];
    store_i8(q, load_tail(x + i, k - i) * inverse);
    memcpy(out + i, q, (size_t)(k - i < 16 ? k - i : 16));
  }
}

// Four bits as 0 to 15: a group's value of largest magnitude becomes -8, which is stored as 0. One scale per group.
template <class T>
static inline void round_row_i4(const T *x, int64_t k, int64_t group, uint8_t *out, float *scale) {
  for (int64_t g = 0; g < k; g += group, scale++) {
    int64_t end = g + group < k ? g + group : k;
    F16 high = zero(), low = zero();  // What is missing of the last group counts as zeros.
    if (end - g == group) high = low = load_tail(x + g, k - g);
    for (int64_t i = g; i < end; i += 16) {
      F16 v = load_tail(x + i, end - i);
      high = vmax(v, high), low = vmin(v, low);
    }
    float top = max_lanes(high), bottom = -max_lanes(zero() - low);
    *scale = (top > -bottom ? top : bottom) / -8.0f;
    F16 inverse = set1(*scale != 0 ? 1.0f / *scale : 0.0f);
    for (int64_t i = g; i < end; i += 16) {
      int8_t q[16];
      store_i8(q, vmin(set1(7.0f), vmax(set1(-8.0f), load_tail(x + i, end - i) * inverse)));
      for (int64_t j = 0; j < 16 && i + j < end; j++) out[i + j] = (uint8_t)(q[j] + 8);
    }
  }
}

template <class T>
static inline void round_rows_of(const RoundJob *job, int64_t first, int64_t last) {
  int64_t k = job->k, groups = job->type == PS_I4 ? (k + job->group - 1) / job->group : 1;
  for (int64_t r = first; r < last; r++) {
    const T *x = (const T *)job->x + r * job->ldx;
    if (job->type == PS_I4)
      round_row_i4(x, k, job->group, (uint8_t *)job->values + r * k, job->scale + r * groups);
    else
      round_row_i8(x, k, (int8_t *)job->values + r * k, job->scale + r);
  }
}

static void transpose_square(uint32_t *out, const uint32_t *const rows[16]) { transpose_words(out, 16, rows); }

static void round_rows(const RoundJob *job, int64_t first, int64_t last) {
  if (job->x_type == PS_BF16)
    round_rows_of<bf16>(job, first, last);
  else
    round_rows_of<float>(job, first, last);
}

}  // namespace
