// The two products of an adapter on vectors: inner = scale * x A^T, rounded, then delta = inner B^T. The order of every
// sum is fixed, whatever else the call computes, so a token's bits never depend on the tokens beside it.
#pragma once
#include "table.h"
#include "vec.h"

namespace {

using penstock::AdapterPiece;
using penstock::kAdapterRanks;

constexpr int kTokenBlock = 4;  // tokens that share what is read of a matrix
constexpr int kChains = 4;      // parts of k that are summed apart: a lone token would wait for each of its products

// R tokens by P panels of ranks, C chains at a time.
template <class T, int R, int P, int C>
static inline void shrink_block(const AdapterPiece *piece, const T *const *x, int64_t token, int64_t panel) {
  using Step = Product<T>;
  constexpr int64_t size = Step::size, width = 16 * size;
  const PsAdapterLinear *linear = piece->linear;
  int64_t whole = linear->k / size, rest = linear->k % size, units = whole + (rest ? 1 : 0), chain = whole / kChains;
  const T *a = (const T *)linear->a + panel * units * width;
  F16 sums[R][P];
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) sums[r][p] = zero();
  for (int from = 0; from < kChains; from += C) {
    F16 acc[C][R][P];
    for (int c = 0; c < C; c++)
      for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) acc[c][r][p] = zero();
    auto add = [&](int c, int64_t unit, const T *const *inputs, int64_t at) {
      typename Step::Weights w[P];
      for (int p = 0; p < P; p++) w[p] = Step::weights(a + (p * units + unit) * width);
      for (int r = 0; r < R; r++) {
        typename Step::Input v = Step::input(inputs[r] + at);
        for (int p = 0; p < P; p++) acc[c][r][p] = Step::add(acc[c][r][p], w[p], v);
      }
    };
    for (int64_t i = 0; i < chain; i++)
      for (int c = 0; c < C; c++) add(c, (from + c) * chain + i, x, ((from + c) * chain + i) * size);
    if (from + C == kChains) {
      for (int64_t i = kChains * chain; i < whole; i++) add(C - 1, i, x, i * size);
      if (rest) {
        T last[R][size];
        const T *inputs[R];
        for (int r = 0; r < R; r++) last[r][0] = x[r][whole * size], last[r][size - 1] = 0, inputs[r] = last[r];
        add(C - 1, whole, inputs, 0);
      }
    }
    for (int c = 0; c < C; c++)
      for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) sums[r][p] = sums[r][p] + acc[c][r][p];
  }
  for (int p = 0; p < P; p++) {
    F16 scale = load(linear->scale + (panel + p) * 16);
    for (int r = 0; r < R; r++)
      store_from_float((T *)piece->inner + (token + r) * kAdapterRanks + (panel + p) * 16, sums[r][p] * scale);
  }
}

template <class T, int R>
static inline void shrink_tokens(const AdapterPiece *piece, int64_t token, int64_t first, int64_t last) {
  constexpr int C = R <= 2 ? 4 : 2;
  const T *x[R];
  for (int r = 0; r < R; r++) x[r] = (const T *)(piece->x + piece->tokens[token + r] * piece->row_bytes);
  int64_t panel = first;
  for (; panel + 3 <= last; panel += 3) shrink_block<T, R, 3, C>(piece, x, token, panel);
  if (panel + 2 == last) shrink_block<T, R, 2, C>(piece, x, token, panel);
  if (panel + 1 == last) shrink_block<T, R, 1, C>(piece, x, token, panel);
}

// R tokens by G groups of 16 outputs.
template <class T, int R, int G>
static inline void expand_block(const AdapterPiece *piece, const PsAdapterPart *part, int64_t token, int64_t group) {
  using Step = Product<T>;
  constexpr int64_t size = Step::size, width = 16 * size;
  int64_t units = part->rank / size;
  const T *b = (const T *)part->b + group * units * width;
  const T *inner = (const T *)piece->inner + token * kAdapterRanks + part->from;
  F16 acc[R][G];
  for (int r = 0; r < R; r++)
    for (int g = 0; g < G; g++) acc[r][g] = zero();
  for (int64_t j = 0; j < units; j++) {
    typename Step::Weights w[G];
    for (int g = 0; g < G; g++) w[g] = Step::weights(b + (g * units + j) * width);
    for (int r = 0; r < R; r++) {
      typename Step::Input v = Step::input(inner + r * kAdapterRanks + j * size);
      for (int g = 0; g < G; g++) acc[r][g] = Step::add(acc[r][g], w[g], v);
    }
  }
  for (int g = 0; g < G; g++) {
    int64_t place = part->first + (group + g) * part->stride;
    float *out = piece->delta + ((place / 2 - piece->panel) * piece->all + token) * 32 + place % 2 * 16;
    for (int r = 0; r < R; r++) store(out + r * 32, acc[r][g]);
  }
}

template <class T, int R>
static inline void expand_tokens(const AdapterPiece *piece, const PsAdapterPart *part, int64_t token, int64_t first,
                                 int64_t last) {
  int64_t group = first;
  for (; group + 4 <= last; group += 4) expand_block<T, R, 4>(piece, part, token, group);
  for (; group + 2 <= last; group += 2) expand_block<T, R, 2>(piece, part, token, group);
  for (; group < last; group++) expand_block<T, R, 1>(piece, part, token, group);
}

// Work(R) on as many tokens as are left, R at most.
template <int R, class Work>
static inline void tokens_left(int64_t count, const Work &work) {
  if (count >= R) return work.template run<R>();
  if constexpr (R > 1) tokens_left<R - 1>(count, work);
}

template <class T>
struct Shrink {
  const AdapterPiece *piece;
  int64_t token, first, last;
  template <int R>
  void run() const {
    shrink_tokens<T, R>(piece, token, first, last);
  }
};

template <class T>
struct Expand {
  const AdapterPiece *piece;
  const PsAdapterPart *part;
  int64_t token, first, last;
  template <int R>
  void run() const {
    expand_tokens<T, R>(piece, part, token, first, last);
  }
};

static void adapter_shrink(const AdapterPiece *piece, int64_t first, int64_t last) {
  for (int64_t token = 0; token < piece->count; token += kTokenBlock) {
    if (piece->type == PS_BF16)
      tokens_left<kTokenBlock>(piece->count - token, Shrink<bf16>{piece, token, first, last});
    else
      tokens_left<kTokenBlock>(piece->count - token, Shrink<float>{piece, token, first, last});
  }
}

static void adapter_expand(const AdapterPiece *piece, const PsAdapterPart *part, int64_t first, int64_t last) {
  for (int64_t token = 0; token < piece->count; token += kTokenBlock) {
    if (piece->type == PS_BF16)
      tokens_left<kTokenBlock>(piece->count - token, Expand<bf16>{piece, part, token, first, last});
    else
      tokens_left<kTokenBlock>(piece->count - token, Expand<float>{piece, part, token, first, last});
  }
}

}  // namespace
