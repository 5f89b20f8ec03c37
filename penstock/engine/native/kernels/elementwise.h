// RMSNorm, SiLU * up, scales and soft caps, and the step between projections and attention: q/k norm, RoPE, KV write.
#pragma once
#include "table.h"
#include "vec.h"

namespace {

// Sum of squares of n values in a fixed order; `add` is joined in first when not null, and kept in `joined`.
template <class T>
static inline float square_sum(const T *x, int64_t n) {
  F16 acc = zero();
  for (int64_t i = 0; i < n; i += 16) {
    F16 v = load_tail(x + i, n - i);
    acc = fma(v, v, acc);
  }
  return sum_lanes(acc);
}

static inline float root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

template <class T>
static inline void norm_row(const T *x, const float *weight, T *y, int64_t n, float eps, bool add) {
  F16 scale = set1(1.0f / root(square_sum(x, n) / (float)n + eps));
  for (int64_t i = 0; i < n; i += 16) {
    F16 v = load_tail(x + i, n - i) * scale * load_tail(weight + i, n - i);
    store_tail(y + i, add ? load_tail(y + i, n - i) + v : v, n - i);
  }
}

template <class T>
static void norm_rows(const PsNorm *job, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; r++) {
    const T *x = (const T *)job->x + r * job->ldx;
    if (job->residual) {
      T *sum = (T *)job->residual + r * job->ldr;
      for (int64_t i = 0; i < job->n; i += 16)
        store_tail(sum + i, load_tail(x + i, job->n - i) + load_tail(sum + i, job->n - i), job->n - i);
      x = sum;
    }
    norm_row(x, job->weight, (T *)job->y + r * job->ldy, job->n, job->eps, job->add != 0);
  }
}

static void rms_norm(const PsNorm *job, int64_t first, int64_t last) {
  if (job->type == PS_BF16)
    norm_rows<bf16>(job, first, last);
  else
    norm_rows<float>(job, first, last);
}

template <class T>
static void silu_mul_rows(const PsSiluMul *job, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; r++) {
    const T *gate = (const T *)job->x + r * job->ldx, *up = gate + job->n;
    T *y = (T *)job->y + r * job->ldy;
    for (int64_t i = 0; i < job->n; i += 16)
      store_tail(y + i, silu(load_tail(gate + i, job->n - i)) * load_tail(up + i, job->n - i), job->n - i);
  }
}

static void silu_mul(const PsSiluMul *job, int64_t first, int64_t last) {
  if (job->type == PS_BF16)
    silu_mul_rows<bf16>(job, first, last);
  else
    silu_mul_rows<float>(job, first, last);
}

template <class T>
static void scale_typed(T *x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += 16) store_tail(x + i, load_tail(x + i, n - i) * set1(factor), n - i);
}

static void scale_values(void *x, int32_t type, int64_t n, float factor) {
  if (type == PS_BF16)
    scale_typed((bf16 *)x, n, factor);
  else
    scale_typed((float *)x, n, factor);
}

static void cap_values(float *x, int64_t n, float cap) {
  for (int64_t i = 0; i < n; i += 16) store_tail(x + i, soft_cap(load_tail(x + i, n - i), cap), n - i);
}

// One head through norm (if any) and rotation: dimension i is paired with i + rotary_dim / 2 (the Hugging Face order).
template <class T>
static inline void rope_head(const PsRopeWrite *job, const T *x, const float *norm, int64_t position, T *y) {
  int64_t dim = job->cache.head_dim, half = job->rotary_dim / 2;
  const float *cos = job->cos + position * half, *sin = job->sin + position * half;
  float v[512];
  F16 scale = norm ? set1(1.0f / root(square_sum(x, dim) / (float)dim + job->eps)) : set1(1.0f);
  for (int64_t i = 0; i < dim; i += 16) {
    F16 value = load_tail(x + i, dim - i);
    store(v + i, norm ? value * scale * load(norm + i) : value);
  }
  float turned[512];
  for (int64_t i = 0; i < half; i += 16) {
    int64_t left = half - i;
    F16 a = load_tail(v + i, left), b = load_tail(v + half + i, left), c = load_tail(cos + i, left),
        s = load_tail(sin + i, left);
    store_tail(turned + i, a * c - b * s, left);
    store_tail(turned + half + i, fma(b, c, a * s), left);
  }
  for (int64_t i = job->rotary_dim; i < dim; i++) turned[i] = v[i];
  for (int64_t i = 0; i < dim; i += 16) store_tail(y + i, load_tail(turned + i, dim - i), dim - i);
}

// A head of a rounded cache: the largest value becomes 127 or -127, and the step between two of them stands behind.
template <class T>
static inline void store_rounded(const T *x, int64_t dim, int8_t *to) {
  F16 top = zero();
  for (int64_t i = 0; i < dim; i += 16) {
    F16 v = load_as_float(x + i);
    top = vmax(top, vmax(v, zero() - v));
  }
  float largest = max_lanes(top), step = largest / 127.0f;
  F16 inverse = set1(largest > 1e-30f ? 127.0f / largest : 0.0f);
  for (int64_t i = 0; i < dim; i += 16) store_i8(to + i, load_as_float(x + i) * inverse);
  memcpy(to + dim, &step, 4);
}

// What one token adds to a rounded cache.
template <class T>
static inline void write_rounded(const PsRopeWrite *job, const T *key, int64_t position, int64_t slot) {
  const PsKvCache *cache = &job->cache;
  int64_t dim = cache->head_dim, kv_heads = cache->num_kv_heads, stride = dim + 4;
  int8_t *where = (int8_t *)cache->base + slot / cache->block_size * cache->block_stride +
                  slot % cache->block_size * kv_heads * stride;
  T turned[256];
  for (int64_t h = 0; h < kv_heads; h++) {
    rope_head(job, key + h * dim, job->k_norm, position, turned);
    store_rounded(turned, dim, where + h * stride);
    store_rounded(key + (kv_heads + h) * dim, dim, where + cache->kv_stride + h * stride);
  }
}

template <class T>
static void rope_write_rows(const PsRopeWrite *job, int64_t first, int64_t last) {
  const PsKvCache *cache = &job->cache;
  int64_t dim = cache->head_dim, heads = job->num_q_heads, kv_heads = cache->num_kv_heads;
  for (int64_t t = first; t < last; t++) {
    const T *x = (const T *)job->qkv + t * job->ld_qkv;
    T *q = (T *)job->q + t * job->ld_q;
    int64_t position = job->positions[t], slot = job->slots[t];
    for (int64_t h = 0; h < heads; h++) rope_head(job, x + h * dim, job->q_norm, position, q + h * dim);
    if (slot < 0) continue;
    const T *key = x + heads * dim, *value = key + kv_heads * dim;
    if (cache->rounded) {
      write_rounded(job, key, position, slot);
      continue;
    }
    T *where =
        (T *)cache->base + slot / cache->block_size * cache->block_stride + slot % cache->block_size * kv_heads * dim;
    for (int64_t h = 0; h < kv_heads; h++) rope_head(job, key + h * dim, job->k_norm, position, where + h * dim);
    memcpy(where + cache->kv_stride, value, (size_t)(kv_heads * dim) * sizeof(T));
  }
}

static void rope_write(const PsRopeWrite *job, int64_t first, int64_t last) {
  if (job->cache.type == PS_BF16)
    rope_write_rows<bf16>(job, first, last);
  else
    rope_write_rows<float>(job, first, last);
}

}  // namespace
