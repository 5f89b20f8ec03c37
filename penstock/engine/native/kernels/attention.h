// Paged attention of one KV head's queries over 64-token tiles of the cache, merged in order by online softmax.
//
// A query's bits depend on its own position and the cache alone: tiles start at multiples of 64 tokens whatever the
// chunk is, each lane (query token x query head of the group) is computed by itself, and a tile that a lane may not
// see changes nothing of it (weights 0, correction exactly 1). After Dao, FlashAttention-2, arXiv 2307.08691.
//
// Keys of a tile are packed once and used by every lane: bf16 [4 groups of 16 tokens][dim / 2][16 tokens][2], float
// [4][dim][16]. Values: bf16 [2 halves of 32 tokens][dim / 16][16 token pairs][16 dims][2], float [64][dim].
#pragma once
#include "table.h"
#include "vec.h"

namespace {

using penstock::AttentionPiece;
using penstock::kAttentionLanes;
using penstock::kKvTile;
using penstock::kLanesAtOnce;

constexpr float kNoMax = -1e30f;
#ifdef __AVX512F__
constexpr int kLaneBlock = 4;
#else
constexpr int kLaneBlock = 2;
#endif

struct Shape {
  int64_t dim, padded;  // padded to 32
};

template <class T>
struct Span {  // where a piece's queries and cache lie
  const PsAttention *job;
  const T *base;
  const int32_t *table;
  int64_t context, row_stride, head_offset;

  // Token `t`, a multiple of 16, whose 15 followers lie row_stride apart in the same block; null past the context.
  const T *sixteen(int64_t t) const {
    if (t >= context) return nullptr;
    uint32_t size = (uint32_t)job->cache.block_size, block = (uint32_t)t / size, slot = (uint32_t)t % size;
    return base + table[block] * job->cache.block_stride + slot * row_stride + head_offset;
  }
};

template <class T>
struct Tile {  // 64 tokens of one head
  const T *at[kKvTile / 16];  // see Span::sixteen
  int64_t first;

  Tile(const Span<T> &span, int64_t first) : first(first) {
    for (int64_t g = 0; g < kKvTile / 16; g++) at[g] = span.sixteen(first + g * 16);
  }
  explicit Tile(int64_t first) : at{}, first(first) {}  // of nothing
};

// A head's part of sixteen tokens lies in pieces too far apart for the hardware to see a stream, and so regularly that
// those of a tile share few sets of the first cache: the second is as far as they are brought.
template <class T>
static inline void fetch_sixteen(const Span<T> &span, const T *at, int64_t dim) {
  for (int64_t i = 0; at && i < 16; i++, at += span.row_stride)
    for (int64_t d = 0; d < dim; d += 64 / (int64_t)sizeof(T)) _mm_prefetch((const char *)(at + d), _MM_HINT_T1);
}

template <class T>
static void fetch_first(const Span<T> &span, const Tile<T> &tile, int64_t dim) {
  for (int64_t g = 0; g < kKvTile / 16; g++) {
    fetch_sixteen(span, tile.at[g], dim);
    fetch_sixteen(span, tile.at[g] ? tile.at[g] + span.job->cache.kv_stride : nullptr, dim);
  }
}

// The first `groups` sixteens of a tile are packed, and those of the next tile asked for meanwhile.
static void pack_keys(const Span<bf16> &span, const Tile<bf16> &tile, const Tile<bf16> &next, int64_t groups,
                      Shape shape, bf16 *out) {
  for (int64_t g = 0; g < groups; g++) {
    int64_t t = tile.first + g * 16;
    const bf16 *keys = tile.at[g];
    fetch_sixteen(span, next.at[g], shape.dim);
    for (int64_t d = 0; d < shape.padded; d += 32, out += 512) {
      const uint32_t *rows[16];
      alignas(64) uint32_t edge[16][16];  // the last 16 dims of a head whose size is an odd multiple of 16
      for (int i = 0; i < 16; i++) {
        const bf16 *key = t + i < span.context ? keys + i * span.row_stride + d : nullptr;
        rows[i] = (const uint32_t *)key;
        if (!key || d + 32 <= shape.dim) continue;
        memset(edge[i], 0, 64);
        memcpy(edge[i], key, (size_t)(shape.dim - d) * 2);
        rows[i] = edge[i];
      }
      transpose_words((uint32_t *)out, 16, rows);
    }
  }
}

static void pack_keys(const Span<float> &span, const Tile<float> &tile, const Tile<float> &next, int64_t groups,
                      Shape shape, float *out) {
  for (int64_t g = 0; g < groups; g++) {
    int64_t t = tile.first + g * 16;
    const float *keys = tile.at[g];
    fetch_sixteen(span, next.at[g], shape.dim);
    for (int64_t d = 0; d < shape.padded; d += 16, out += 256) {
      const uint32_t *rows[16];
      for (int i = 0; i < 16; i++)
        rows[i] = t + i < span.context && d < shape.dim ? (const uint32_t *)(keys + i * span.row_stride + d) : nullptr;
      transpose_words((uint32_t *)out, 16, rows);
    }
  }
}

static void pack_values(const Span<bf16> &span, const Tile<bf16> &tile, const Tile<bf16> &next, int64_t groups,
                        Shape shape, bf16 *out) {
  alignas(64) static const bf16 none[512] = {};
  int64_t offset = span.job->cache.kv_stride;
  for (int64_t g = 0; g < groups; g++) {
    const bf16 *values = tile.at[g] ? tile.at[g] + offset : none;
    int64_t left = tile.at[g] ? span.context - tile.first - g * 16 : 0;
    fetch_sixteen(span, next.at[g] ? next.at[g] + offset : nullptr, shape.dim);
    for (int64_t i = 0; i < 16; i += 2) {
      bf16 *pair_row = out + g / 2 * 32 * shape.dim + (g % 2 * 16 + i) / 2 * 32;
      const bf16 *a = i < left ? values + i * span.row_stride : none;
      const bf16 *b = i + 1 < left ? values + (i + 1) * span.row_stride : none;
      for (int64_t d = 0; d < shape.dim; d += 16) interleave_bf16(pair_row + d * 32, a + d, b + d);
    }
  }
}

static void pack_values(const Span<float> &span, const Tile<float> &tile, const Tile<float> &next, int64_t groups,
                        Shape shape, float *out) {
  int64_t offset = span.job->cache.kv_stride;
  for (int64_t g = 0; g < groups; g++) {
    int64_t left = tile.at[g] ? span.context - tile.first - g * 16 : 0;
    fetch_sixteen(span, next.at[g] ? next.at[g] + offset : nullptr, shape.dim);
    for (int64_t i = 0; i < 16; i++, out += shape.dim) {
      if (i < left)
        memcpy(out, tile.at[g] + offset + i * span.row_stride, (size_t)shape.dim * 4);
      else
        memset(out, 0, (size_t)shape.dim * 4);
    }
  }
}

// Dot products on plain vectors. Lanes go together so that a key or value is widened once for several.
template <class T>
struct VectorDots {
  using P = Product<T>;
  static constexpr bool kWholeTiles = false;  // Sixteens past the context are not looked at.
  static void begin() {}
  static void end() {}

  template <int L, int G>
  static inline void score_groups(const T *q, const T *keys, Shape shape, float *out) {
    F16 acc[L][G];
    for (int l = 0; l < L; l++)
      for (int g = 0; g < G; g++) acc[l][g] = zero();
    for (int64_t d = 0; d < shape.padded; d += P::size) {
      typename P::Input x[L];
      for (int l = 0; l < L; l++) x[l] = P::input(q + l * shape.padded + d);
      for (int g = 0; g < G; g++) {
        typename P::Weights key = P::weights(keys + g * 16 * shape.padded + d * 16);
        for (int l = 0; l < L; l++) acc[l][g] = P::add(acc[l][g], key, x[l]);
      }
    }
    for (int l = 0; l < L; l++)
      for (int g = 0; g < G; g++) store(out + l * kKvTile + g * 16, acc[l][g]);
  }

  template <int L>
  static inline void score_lanes(const T *q, const T *keys, Shape shape, int64_t groups, float *out) {
    if (groups == 1) return score_groups<L, 1>(q, keys, shape, out);
    if (groups == 2) return score_groups<L, 2>(q, keys, shape, out);
    if (groups == 3) return score_groups<L, 3>(q, keys, shape, out);
    score_groups<L, 4>(q, keys, shape, out);
  }

  static inline const float *value_row(const float *v, Shape shape, int64_t t, int64_t d) {
    return v + t * shape.dim + d;
  }
  static inline const bf16 *value_row(const bf16 *v, Shape shape, int64_t t, int64_t d) {
    return v + t / 32 * 32 * shape.dim + d * 32 + t % 32 / 2 * 32;
  }

  template <int L, int D>  // D times 16 dims
  static inline void weigh_values(const T *weights, const T *v, Shape shape, int64_t tokens, int64_t d, float *out) {
    F16 acc[L][D];
    for (int l = 0; l < L; l++)
      for (int i = 0; i < D; i++) acc[l][i] = zero();
    for (int64_t t = 0; t < tokens; t += P::size) {
      typename P::Input x[L];
      for (int l = 0; l < L; l++) x[l] = P::input(weights + l * kKvTile + t);
      for (int i = 0; i < D; i++) {
        typename P::Weights value = P::weights(value_row(v, shape, t, d + i * 16));
        for (int l = 0; l < L; l++) acc[l][i] = P::add(acc[l][i], value, x[l]);
      }
    }
    for (int l = 0; l < L; l++)
      for (int i = 0; i < D; i++) store(out + l * shape.padded + d + i * 16, acc[l][i]);
  }

  template <int L>
  static inline void value_lanes(const T *weights, const T *v, Shape shape, int64_t groups, float *out) {
    int64_t d = 0;
    for (; d + 64 <= shape.dim; d += 64) weigh_values<L, 4>(weights, v, shape, groups * 16, d, out);
    for (; d < shape.dim; d += 16) weigh_values<L, 1>(weights, v, shape, groups * 16, d, out);
  }

  // Blocks of L lanes, then what is left in smaller ones.
  template <int L, class Block>
  static inline void in_blocks(int64_t first, int64_t lanes, const Block &block) {
    for (; first + L <= lanes; first += L) block.template lanes<L>(first);
    if constexpr (L > 1)
      if (first < lanes) in_blocks<L - 1>(first, lanes, block);
  }

  struct Score {
    const T *q, *keys;
    Shape shape;
    int64_t groups;
    float *out;
    template <int L>
    void lanes(int64_t l) const {
      score_lanes<L>(q + l * shape.padded, keys, shape, groups, out + l * kKvTile);
    }
  };
  struct Value {
    const T *weights, *v;
    Shape shape;
    int64_t groups;
    float *out;
    template <int L>
    void lanes(int64_t l) const {
      value_lanes<L>(weights + l * kKvTile, v, shape, groups, out + l * shape.padded);
    }
  };

  // scores[lane][token] of `lanes` queries against the tile's first keys.
  static void scores(const T *q, const T *keys, Shape shape, int64_t lanes, int64_t groups, float *out) {
    in_blocks<kLaneBlock>(0, lanes, Score{q, keys, shape, groups, out});
  }

  // out[lane][dim] = weights[lane][token] x values, of the tile's first tokens.
  static void values(const T *weights, const T *v, Shape shape, int64_t lanes, int64_t groups, float *out) {
    in_blocks<kLaneBlock>(0, lanes, Value{weights, v, shape, groups, out});
  }
};

// One lane's scores to weights: scale, cap, mask, then powers of two under the new maximum (scores and maxima count in
// powers of two, so that no factor is left inside the exponential). Returns that maximum.
//
// Keys and values of a rounded cache are integers: what each token's are multiplied by goes to its scores and weights.
template <class T, bool Rounded>
static inline float weigh(const PsAttention *job, int64_t position, int64_t first, int64_t groups, const float *scores,
                          float old_max, T *weights, float *total, const float *scales) {
  F16 s[kKvTile / 16], top = set1(old_max), sum = zero();
  int64_t seen_from = job->window > 0 ? position - job->window + 1 : 0;
  bool whole = first + kKvTile - 1 <= position && first >= seen_from;
  float factor = job->softcap > 0 ? kLog2E : job->scale * kLog2E;
  for (int64_t i = 0; i < groups; i++) {
    s[i] = load(scores + i * 16);
    if (Rounded) s[i] = s[i] * load(scales + i * 16);
    if (job->softcap > 0) s[i] = soft_cap(s[i] * set1(job->scale), job->softcap);
    s[i] = s[i] * set1(factor);
    if (!whole) s[i] = keep_lanes(s[i], seen_from - first - i * 16, position + 1 - first - i * 16);
    top = vmax(s[i], top);
  }
  float new_max = max_lanes(top);
  for (int64_t i = 0; i < groups; i++) {
    F16 p = vexp2(s[i] - set1(new_max));
    sum = sum + p;
    store_from_float(weights + i * 16, Rounded ? p * load(scales + kKvTile + i * 16) : p);
  }
  *total = sum_lanes(sum);
  return new_max;
}

template <class T>
struct Lanes {  // running softmax state and scratch of a piece
  T *keys, *values, *queries, *weights;
  T *widened;     // of a rounded cache: keys, then values [64][dim]
  float *scales;  // and what they are multiplied by, [2][64]
  float *sums, *scores, *tile, *maxima, *totals;

  Lanes(void *scratch, Shape shape) {
    char *at = (char *)scratch;
    auto take = [&at](int64_t bytes) {
      char *p = at;
      at += (bytes + 63) / 64 * 64;
      return p;
    };
    keys = (T *)take(kKvTile * shape.padded * (int64_t)sizeof(T));
    values = (T *)take(kKvTile * shape.padded * (int64_t)sizeof(T));
    queries = (T *)take(kAttentionLanes * shape.padded * (int64_t)sizeof(T));
    weights = (T *)take(kLanesAtOnce * kKvTile * (int64_t)sizeof(T));
    sums = (float *)take(kAttentionLanes * shape.padded * 4);
    scores = (float *)take(kLanesAtOnce * kKvTile * 4);
    tile = (float *)take(kLanesAtOnce * shape.padded * 4);
    maxima = (float *)take(kAttentionLanes * 4);
    totals = (float *)take(kAttentionLanes * 4);
    widened = (T *)take(2 * kKvTile * shape.padded * (int64_t)sizeof(T));
    scales = (float *)take(2 * kKvTile * 4);
  }
};

// A tile as the products want it.
template <class T>
static inline void pack_tile(const Span<T> &span, const Tile<T> &tile, const Tile<T> &next, int64_t groups, Shape shape,
                             const Lanes<T> &lanes) {
  pack_keys(span, tile, next, groups, shape, lanes.keys);
  pack_values(span, tile, next, groups, shape, lanes.values);
}

// Sixteen tokens of a rounded cache as T, which holds such integers exactly, and their scales; zeros past the context.
template <class T>
static inline void widen_sixteen(const int8_t *at, int64_t row_stride, int64_t dim, int64_t left, T *to, float *scales) {
  for (int64_t i = 0; i < 16; i++, at += row_stride, to += dim) {
    scales[i] = 0;
    if (i < left) memcpy(scales + i, at + dim, 4);
    for (int64_t d = 0; d < dim; d += 16) store_from_float(to + d, load_i8(at + d));
  }
}

template <class T>
static inline void pack_tile(const Span<int8_t> &span, const Tile<int8_t> &tile, const Tile<int8_t> &next,
                             int64_t groups, Shape shape, const Lanes<T> &lanes) {
  int64_t dim = shape.dim, offset = span.job->cache.kv_stride;
  PsAttention job = {};
  job.cache.kv_stride = kKvTile * dim;
  Span<T> wide = {&job, nullptr, nullptr, span.context, dim, 0};
  Tile<T> packed(tile.first);
  memset(lanes.scales, 0, 2 * kKvTile * 4);
  for (int64_t g = 0; g < groups; g++) {
    fetch_sixteen(span, next.at[g], dim + 4);
    fetch_sixteen(span, next.at[g] ? next.at[g] + offset : nullptr, dim + 4);
    if (!tile.at[g]) continue;
    T *to = lanes.widened + g * 16 * dim;
    int64_t left = span.context - tile.first - g * 16;
    widen_sixteen(tile.at[g], span.row_stride, dim, left, to, lanes.scales + g * 16);
    widen_sixteen(tile.at[g] + offset, span.row_stride, dim, left, to + kKvTile * dim, lanes.scales + kKvTile + g * 16);
    packed.at[g] = to;
  }
  pack_tile(wide, packed, Tile<T>(0), groups, shape, lanes);
}

// `count` lanes from `lane0` against one packed tile, phase by phase, so that products of one sixteen overlap with the
// arithmetic of another.
template <class T, class Dots, bool Rounded>
static void attend_tile(const AttentionPiece *piece, const Lanes<T> &lanes, Shape shape, int64_t lane0, int64_t count,
                        int64_t first, int64_t groups, int64_t position0, int64_t group) {
  alignas(64) float fade[kLanesAtOnce] = {}, added[kLanesAtOnce];
  const T *queries = lanes.queries + lane0 * shape.padded;
  float *maxima = lanes.maxima + lane0, *totals = lanes.totals + lane0;
  for (int64_t i = 0; i < count; i += 16)
    Dots::scores(queries + i * shape.padded, lanes.keys, shape, count - i < 16 ? count - i : 16, groups,
                 lanes.scores + i * kKvTile);
  for (int64_t i = 0; i < count; i++) {
    int64_t position = position0 + (uint32_t)(piece->lane_first + lane0 + i) / (uint32_t)group;
    float before = maxima[i];
    maxima[i] = weigh<T, Rounded>(piece->job, position, first, groups, lanes.scores + i * kKvTile, before,
                                  lanes.weights + i * kKvTile, added + i, lanes.scales);
    fade[i] = before - maxima[i];
  }
  for (int64_t i = 0; i < count; i += 16) {
    store(fade + i, vexp2(load(fade + i)));
    Dots::values(lanes.weights + i * kKvTile, lanes.values, shape, count - i < 16 ? count - i : 16, groups,
                 lanes.tile + i * shape.padded);
  }
  for (int64_t i = 0; i < count; i++) {
    float *sum = lanes.sums + (lane0 + i) * shape.padded, *add = lanes.tile + i * shape.padded;
    totals[i] = totals[i] * fade[i] + added[i];
    for (int64_t d = 0; d < shape.dim; d += 16) store(sum + d, fma(load(sum + d), set1(fade[i]), load(add + d)));
  }
}

// T: of queries and products. S: of the cache, T or int8_t.
template <class T, class Dots, class S>
static void attend(const AttentionPiece *piece) {
  constexpr bool kRounded = sizeof(S) == 1;
  const PsAttention *job = piece->job;
  const PsKvCache *cache = &job->cache;
  int64_t group = job->num_q_heads / cache->num_kv_heads, dim = cache->head_dim, count = piece->lane_count;
  Shape shape = {dim, (dim + 31) / 32 * 32};
  int64_t token0 = job->query_starts[piece->row], chunk = job->query_starts[piece->row + 1] - token0,
          context = job->context_lens[piece->row];
  int64_t stride = kRounded ? dim + 4 : dim;  // from head to head
  Span<S> span = {job,     (const S *)cache->base,       job->block_tables + piece->row * job->ld_tables,
                  context, cache->num_kv_heads * stride, piece->kv_head * stride};
  Lanes<T> lanes(piece->scratch, shape);

  int64_t padded_count = (count + 15) / 16 * 16;  // Spare lanes of a tile are zeros.
  memset(lanes.queries, 0, (size_t)(padded_count * shape.padded) * sizeof(T));
  memset(lanes.weights, 0, (size_t)((padded_count < kLanesAtOnce ? padded_count : kLanesAtOnce) * kKvTile) * sizeof(T));
  memset(lanes.sums, 0, (size_t)(count * shape.padded) * 4);
  for (int64_t i = 0; i < count; i++) {
    int64_t lane = piece->lane_first + i;
    const T *q =
        (const T *)job->q + (token0 + lane / group) * job->ld_q + (piece->kv_head * group + lane % group) * dim;
    memcpy(lanes.queries + i * shape.padded, q, (size_t)dim * sizeof(T));
    lanes.maxima[i] = kNoMax, lanes.totals[i] = 0;
  }
  int64_t position0 = context - chunk;  // of lane 0 of the row
  int64_t lowest = position0 + piece->lane_first / group, highest = position0 + (piece->lane_first + count - 1) / group;
  int64_t from = job->window > 0 && lowest >= job->window ? lowest - job->window + 1 : 0;
  int64_t first = from / kKvTile * kKvTile;
  Span<S> other = span;  // the head that comes next, if there is one: its first tile follows our last
  other.head_offset += stride;
  Tile<S> tile(span, first);
  if (!piece->fetched) fetch_first(span, tile, stride);
  Dots::begin();
  for (; first <= highest; first = tile.first) {
    bool last = first + kKvTile > highest;
    if (last && !piece->another) other.context = 0;
    Tile<S> next(last ? other : span, last ? from / kKvTile * kKvTile : first + kKvTile);
    int64_t groups = Dots::kWholeTiles || context - first >= kKvTile ? kKvTile / 16 : (context - first + 15) / 16;
    pack_tile(span, tile, next, groups, shape, lanes);
    // Lanes are in order of position: those from some sixteen on see this tile.
    int64_t seeing = (first - position0) * group - piece->lane_first, skipped = seeing > 0 ? seeing / 16 * 16 : 0;
    for (int64_t lane = skipped; lane < count; lane += kLanesAtOnce)
      attend_tile<T, Dots, kRounded>(piece, lanes, shape, lane, count - lane < kLanesAtOnce ? count - lane : kLanesAtOnce, first,
                           groups, position0, group);
    if (last) break;
    tile = next;
  }
  Dots::end();
  for (int64_t i = 0; i < count; i++) {
    int64_t lane = piece->lane_first + i;
    T *out = (T *)job->out + (token0 + lane / group) * job->ld_out + (piece->kv_head * group + lane % group) * dim;
    for (int64_t d = 0; d < dim; d += 16)
      store_from_float(out + d, load(lanes.sums + i * shape.padded + d) / set1(lanes.totals[i]));
  }
}

template <class Bf16Dots>
static void attend_any(const AttentionPiece *piece) {
  const PsKvCache *cache = &piece->job->cache;
  if (cache->type == PS_BF16)
    cache->rounded ? attend<bf16, Bf16Dots, int8_t>(piece) : attend<bf16, Bf16Dots, bf16>(piece);
  else
    cache->rounded ? attend<float, VectorDots<float>, int8_t>(piece) : attend<float, VectorDots<float>, float>(piece);
}

static void vector_attention(const AttentionPiece *piece) { attend_any<VectorDots<bf16>>(piece); }

}  // namespace
