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
constexpr int kMixedRows = 4;  // and rows of different ones
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

// R rows' sums by H halves of a panel: the products of `inner` and B^T go on where those of the weights ended. Rows of one
// adapter share what is loaded of B; those of different ones only their time, so that none waits for each of its products.
template <class T, int R, int H, bool Shared>
static inline void add_halves(const LinearAdded &all, const AddedHalf *const *halves, const int32_t *places,
                              float *sums) {
  using Step = Product<T>;
  F16 acc[R][H];
  const T *inner[R];
  for (int r = 0; r < R; r++) {
    inner[r] = (const T *)all.inner + places[r] * kAdapterRanks + halves[r]->from;
    for (int h = 0; h < H; h++) acc[r][h] = load(sums + r * 32 + h * 16);
  }
  for (int64_t j = 0; j < halves[0]->rank; j += Step::size) {
    typename Step::Weights w[H];
    for (int r = 0; r < R; r++) {
      if (r == 0 || !Shared)
        for (int h = 0; h < H; h++) w[h] = Step::weights((const T *)halves[r][h].b + j * 16);
      typename Step::Input v = Step::input(inner[r] + j);
      for (int h = 0; h < H; h++) acc[r][h] = Step::add(acc[r][h], w[h], v);
    }
  }
  for (int r = 0; r < R; r++)
    for (int h = 0; h < H; h++) store(sums + r * 32 + h * 16, acc[r][h]);
}

// Both halves' of rows that are alike.
template <class T, bool Shared>
struct Add {
  const LinearAdded *all;
  const AddedHalf *const *halves;
  const int32_t *places;
  float *sums;
  template <int R>
  void run() const {
    const AddedHalf *first = halves[0];
    if (kBothHalves && first[0].rank == first[1].rank && first[0].from == first[1].from)
      return add_halves<T, R, 2, Shared>(*all, halves, places, sums);
    const AddedHalf *seconds[R];
    for (int r = 0; r < R; r++) seconds[r] = halves[r] + 1;
    add_halves<T, R, 1, Shared>(*all, halves, places, sums);
    add_halves<T, R, 1, Shared>(*all, seconds, places, sums + 16);
  }
};

// What one adapter adds to rows that all have it, to sums that are still in registers.
struct AddedHere {
  const bf16 *inner[2], *b[2];  // of each half; `inner` of the first row, which the others' follow
  int64_t rank;
};

// Whether rows [row, row + rows) have one adapter, with one rank in both halves of the panel.
static inline bool find_added(const LinearPiece *piece, int64_t panel, int64_t row, int64_t rows, AddedHere *out) {
  const LinearAdded &all = piece->added;
  if (!all.adapters || piece->job->x_type != PS_BF16) return false;
  const int32_t *adapters = all.adapters + row;
  if (adapters[0] < 0) return false;
  for (int64_t r = 1; r < rows; r++)
    if (adapters[r] != adapters[0]) return false;
  const AddedHalf *halves = all.halves + (adapters[0] * all.most + panel - all.panel) * 2;
  if (halves[0].rank != halves[1].rank) return false;
  const bf16 *inner = (const bf16 *)all.inner + all.places[row] * kAdapterRanks;
  *out = {{inner + halves[0].from, inner + halves[1].from},
          {(const bf16 *)halves[0].b, (const bf16 *)halves[1].b},
          halves[0].rank};
  return true;
}

static inline bool alike(const AddedHalf *a, const AddedHalf *b) {
  return a[0].rank == b[0].rank && a[0].from == b[0].from && a[1].rank == b[1].rank && a[1].from == b[1].from;
}

// What the adapters of rows [row, row + rows) add to their sums [rows][32] of a panel. Others' sums stay as they are.
template <class T>
static void add_typed(const LinearPiece *piece, int64_t panel, int64_t row, int64_t rows, float *sums) {
  const LinearAdded &all = piece->added;
  const int32_t *adapters = all.adapters + row, *places = all.places + row;
  auto of = [&](int64_t r) { return all.halves + (adapters[r] * all.most + panel - all.panel) * 2; };
  for (int64_t r = 0, run; r < rows; r += run) {
    run = 1;
    if (adapters[r] < 0) continue;
    const AddedHalf *halves[kAddRows] = {of(r)};
    while (run < kAddRows && r + run < rows && adapters[r + run] == adapters[r]) halves[run++] = halves[0];
    if (run > 1) {
      tokens_left<kAddRows>(run, Add<T, true>{&all, halves, places + r, sums + r * 32});
      continue;
    }
    while (run < kMixedRows && r + run < rows && adapters[r + run] >= 0 && alike(of(r + run), halves[0]))
      halves[run] = of(r + run), run++;
    tokens_left<kMixedRows>(run, Add<T, false>{&all, halves, places + r, sums + r * 32});
  }
}

static __attribute__((noinline)) void add_adapters(const LinearPiece *piece, int64_t panel, int64_t row, int64_t rows,
                                                   float *sums) {
  if (piece->job->x_type == PS_BF16)
    add_typed<bf16>(piece, panel, row, rows, sums);
  else
    add_typed<float>(piece, panel, row, rows, sums);
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
