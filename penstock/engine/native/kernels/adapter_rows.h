// The two products of an adapter on vectors: inner = scale * x A^T, rounded, then inner B^T onto the sums of the linear,
// where these are complete and still in the first-level cache. The order of every sum is fixed, whatever else the call
// computes, so a token's bits never depend on the tokens beside it.
#pragma once
#include "table.h"
#include "vec.h"

namespace {

using penstock::AdapterPiece;
using penstock::AddedHalf;
using penstock::kAdapterRanks;
using penstock::LinearAdded;
using penstock::LinearPiece;

constexpr int kTokenBlock = 4;  // tokens that share what is read of a matrix
constexpr int kChains = 4;      // parts of k that are summed apart: a lone token would wait for each of its products
#ifdef __AVX512F__
constexpr int kAddRows = 8;  // rows of one adapter whose sums are held in registers at once
constexpr bool kBothHalves = true;
#else
constexpr int kAddRows = 4;
constexpr bool kBothHalves = false;
#endif

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

// R rows' sums by H halves of a panel: the products of `inner` and B^T go on where those of the weights ended.
template <class T, int R, int H>
static inline void add_halves(const LinearAdded &all, const AddedHalf *half, int64_t place, float *sums) {
  using Step = Product<T>;
  const T *inner = (const T *)all.inner + place * kAdapterRanks + half->from;
  F16 acc[R][H];
  for (int r = 0; r < R; r++)
    for (int h = 0; h < H; h++) acc[r][h] = load(sums + r * 32 + h * 16);
  for (int64_t j = 0; j < half->rank; j += Step::size) {
    typename Step::Weights w[H];
    for (int h = 0; h < H; h++) w[h] = Step::weights((const T *)half[h].b + j * 16);
    for (int r = 0; r < R; r++) {
      typename Step::Input v = Step::input(inner + r * kAdapterRanks + j);
      for (int h = 0; h < H; h++) acc[r][h] = Step::add(acc[r][h], w[h], v);
    }
  }
  for (int r = 0; r < R; r++)
    for (int h = 0; h < H; h++) store(sums + r * 32 + h * 16, acc[r][h]);
}

template <class T>
struct Add {
  const LinearAdded *all;
  const AddedHalf *halves;
  int64_t place;
  float *sums;
  template <int R>
  void run() const {
    if (kBothHalves && halves[0].rank == halves[1].rank && halves[0].from == halves[1].from)
      return add_halves<T, R, 2>(*all, halves, place, sums);
    for (int h = 0; h < 2; h++) add_halves<T, R, 1>(*all, halves + h, place, sums + h * 16);
  }
};

// What the adapters of rows [row, row + rows) add to their sums [rows][32] of a panel. Others' sums stay as they are.
static __attribute__((noinline)) void add_adapters(const LinearPiece *piece, int64_t panel, int64_t row, int64_t rows, float *sums) {
  const LinearAdded &all = piece->added;
  const int32_t *adapters = all.adapters + row;
  for (int64_t r = 0, run; r < rows; r += run) {
    for (run = 1; run < kAddRows && r + run < rows && adapters[r + run] == adapters[r];) run++;
    if (adapters[r] < 0) continue;
    const AddedHalf *halves = all.halves + (adapters[r] * all.most + panel - all.panel) * 2;
    int64_t place = all.places[row + r];
    if (piece->job->x_type == PS_BF16)
      tokens_left<kAddRows>(run, Add<bf16>{&all, halves, place, sums + r * 32});
    else
      tokens_left<kAddRows>(run, Add<float>{&all, halves, place, sums + r * 32});
  }
}

static void adapter_shrink(const AdapterPiece *piece, int64_t first, int64_t last) {
  for (int64_t token = 0; token < piece->count; token += kTokenBlock) {
    if (piece->type == PS_BF16)
      tokens_left<kTokenBlock>(piece->count - token, Shrink<bf16>{piece, token, first, last});
    else
      tokens_left<kTokenBlock>(piece->count - token, Shrink<float>{piece, token, first, last});
  }
}

}  // namespace
