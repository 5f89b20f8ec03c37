// Advanced Matrix Extensions: Sapphire Rapids and later. Matrix products in tiles of 16 x 16, for every m: a lone row
// streams the weights as fast as memory gives them, and the same instruction in the same order of k gives the same
// bits as in a full tile.
#include "adapter_rows.h"
#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "rounding.h"
#include "sample.h"
#ifdef PENSTOCK_EMULATE_TILES
#include "tiles_emulated.h"
#endif

namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0-3 hold sums, 4 and 5 inputs (`rows` rows each), 6 and 7 weights.
static void configure(int rows) {
  TileConfig config;
  for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = (uint8_t)(i < 6 ? rows : 16);
  _tile_loadconfig(&config);
}

// What will be wanted soon, fetched a little at each step: the next panel's weights into L2 while there are rows to
// compute on, and ownership of the output lines that this block is going to write.
struct Ahead {
  const char *weights;
  int weight_lines;
  char *out;
  int64_t out_stride, out_rows, rows_per_step;

  inline void step() {
    for (int i = 0; i < weight_lines; i++) _mm_prefetch(weights + i * 64, _MM_HINT_T1);
    weights += weight_lines * 64;
    for (int64_t i = 0; i < rows_per_step && out_rows > 0; i++, out_rows--, out += out_stride)
      __builtin_prefetch(out, 1, 3);
  }
};

struct Bf16Tiles {
  static inline void mul_0(void) { _tile_dpbf16ps(0, 4, 6); }
  static inline void mul_1(void) { _tile_dpbf16ps(1, 4, 7); }
  static inline void mul_2(void) { _tile_dpbf16ps(2, 5, 6); }
  static inline void mul_3(void) { _tile_dpbf16ps(3, 5, 7); }
};
struct Int8Tiles {
  static inline void mul_0(void) { _tile_dpbssd(0, 4, 6); }
  static inline void mul_1(void) { _tile_dpbssd(1, 4, 7); }
  static inline void mul_2(void) { _tile_dpbssd(2, 5, 6); }
  static inline void mul_3(void) { _tile_dpbssd(3, 5, 7); }
};

// The compiler's tile loads do not say that they read memory: nothing may move across this.
static inline void memory_fence() { __asm__ volatile("" ::: "memory"); }

// One or two tiles of rows by one panel. Rows of `a` lie a_row bytes apart, it steps by a_step bytes and its second tile
// lies a_tile bytes on.
template <class Tiles, bool Two>
static void tile_block(const char *a, int64_t a_row, int64_t a_step, int64_t a_tile, const char *w, int64_t steps, char *sums,
                       bool fresh, Ahead ahead) {
  memory_fence();
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    if (Two) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, sums, 128);
    _tile_loadd(1, sums + 64, 128);
    if (Two) {
      _tile_loadd(2, sums + 2048, 128);
      _tile_loadd(3, sums + 2048 + 64, 128);
    }
  }
  for (int64_t s = 0; s < steps; s++, a += a_step, w += 2048) {
    _tile_stream_loadd(4, a, a_row);
    _tile_loadd(6, w, 64);
    Tiles::mul_0();
    _tile_loadd(7, w + 1024, 64);
    Tiles::mul_1();
    if (Two) {
      _tile_stream_loadd(5, a + a_tile, a_row);
      Tiles::mul_2();
      Tiles::mul_3();
    }
    ahead.step();
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 64, 128);
  if (Two) {
    _tile_stored(2, sums + 2048, 128);
    _tile_stored(3, sums + 2048 + 64, 128);
  }
  memory_fence();
}

// k is done in slices whose weights stay in L1 while every row passes by; a row's sums wait in between, unrounded.
constexpr int64_t kSliceSteps = 16;

template <class Tiles>
static void tile_panel(const LinearPiece *piece, int64_t panel, bool last_panel) {
  const PsLinear *job = piece->job;
  const PsWeight *w = job->weight;
  bool ints = w->type == PS_I8, done = piece->k_last == w->k_padded;
  int64_t per_step = ints ? 64 : 32, m = job->m, first = piece->k_first / per_step,
          steps = piece->k_last / per_step - first;
  int64_t a_step = m <= 16 ? m * 64 : 1024, a_tile = w->k_padded / per_step * 1024, blocks = (m + 31) / 32;
  int64_t slices = blocks > 2 ? (steps + kSliceSteps - 1) / kSliceSteps : 1,
          slice_steps = (steps + slices - 1) / slices;
  int64_t out_width = w->epilogue == PS_PLAIN ? 32 : 16, out_size = job->y_type == PS_BF16 ? 2 : 4;
  const char *weights = (const char *)w->data + (panel * (w->k_padded / per_step) + first) * 2048;
  const char *next = last_panel ? weights : weights + w->k_padded / per_step * 2048;
  int lines = blocks > 1 && !last_panel ? (int)((32 + blocks - 1) / blocks) : 0;
  alignas(64) float here[kRowsMax * 32];
  float *waiting = piece->partial ? piece->partial + (panel - piece->partial_panel) * piece->m_padded * 32 : here;
  for (int64_t step = 0; step < steps; step += slice_steps) {
    int64_t some = steps - step < slice_steps ? steps - step : slice_steps;
    bool finish = done && step + some == steps, fresh = piece->k_first == 0 && step == 0;
    for (int64_t row = 0; row < m; row += 32) {
      int64_t rows = m - row < 32 ? m - row : 32;
      const char *a = (const char *)piece->a + row / 16 * a_tile + (first + step) * a_step;
      float *sums = fresh && finish ? here : waiting + row * 32;
      char *y = (char *)job->y + (row * job->ldy + panel * out_width) * out_size;
      Ahead ahead = {next + (step * blocks + row / 32 * some) * lines * 64,
                     lines,
                     y,
                     job->ldy * out_size,
                     finish ? rows : 0,
                     (rows + some - 1) / some};
      if (rows > 16)
        tile_block<Tiles, true>(a, 64, a_step, a_tile, weights + step * 2048, some, (char *)sums, fresh, ahead);
      else
        tile_block<Tiles, false>(a, 64, a_step, a_tile, weights + step * 2048, some, (char *)sums, fresh, ahead);
      if (!finish) continue;
      if (ints)
        finish_block(piece, panel, row, rows, (const int32_t *)sums);
      else
        finish_block(piece, panel, row, rows, sums);
    }
  }
}

// A group's nibbles as signed bytes in the order of int8 weights: [group / 64][2 halves][16 quads][16 columns][4].
static void expand_nibbles(const uint8_t *nibbles, int64_t group, int8_t *out) {
  __m512i eight = _mm512_set1_epi8(8);
  for (int64_t block = 0; block < group / 32; block++)
    for (int64_t half = 0; half < 2; half++)
      for (int64_t quarter = 0; quarter < 4; quarter++, nibbles += 64) {
        int8_t *to = out + block / 2 * 2048 + half * 1024 + (block % 2 * 8 + quarter * 2) * 64;
        Bytes64 words = load_ints(nibbles);
        _mm512_store_si512(to, _mm512_sub_epi8(low_nibbles(words).v, eight));
        _mm512_store_si512(to + 64, _mm512_sub_epi8(high_nibbles(words).v, eight));
      }
}

// Integer sums are exact, so few rows may go through vectors and many through tiles. Tiles take 64 inputs at once.
constexpr int64_t kVectorRows = 4;

static void tile_int4(const LinearPiece *piece, int64_t panel) {
  int64_t group = piece->job->weight->group, lda = piece->lda;
  alignas(64) int8_t weights[128 * 32];
  Ahead nothing = {nullptr, 0, nullptr, 0, 0, 0};
  int4_panel(
      piece, panel, [&weights, group](const uint8_t *nibbles) { expand_nibbles(nibbles, group, weights); },
      [&](const uint8_t *, int64_t g, int64_t row, int64_t rows, int32_t *sums) {
        const char *a = (const char *)piece->a + row * lda + g * group, *w = (const char *)weights;
        if (rows > 16)
          tile_block<Int8Tiles, true>(a, lda, 64, 16 * lda, w, group / 64, (char *)sums, true, nothing);
        else
          tile_block<Int8Tiles, false>(a, lda, 64, 16 * lda, w, group / 64, (char *)sums, true, nothing);
      });
}

static void amx_linear(const LinearPiece *piece, int64_t panel_first, int64_t panel_last) {
  int32_t type = piece->job->weight->type;
  bool few = piece->job->m <= kVectorRows || piece->job->weight->group % 64;
  if (type == PS_F32 || (type == PS_I4 && few)) return vector_linear(piece, panel_first, panel_last);
  configure(piece->job->m < 16 ? (int)piece->job->m : 16);
  for (int64_t panel = panel_first; panel < panel_last; panel++) {
    if (type == PS_BF16)
      tile_panel<Bf16Tiles>(piece, panel, panel + 1 == panel_last);
    else if (type == PS_I4)
      tile_int4(piece, panel);
    else
      tile_panel<Int8Tiles>(piece, panel, panel + 1 == panel_last);
  }
  _tile_release();
}

// Inputs in tile order, [row tile][k step][16 rows][64 bytes]; up to 16 rows make one tile of just those rows.
static void amx_pack_rows(const PsLinear *job, int64_t first, int64_t last, void *out, float *a_scale) {
  const PsWeight *w = job->weight;
  if (w->type == PS_F32 || w->type == PS_I4) return pack_rows_plain(job, first, last, out, a_scale);
  bool ints = w->type == PS_I8;
  int64_t m = job->m, steps = w->k_padded * (ints ? 1 : 2) / 64, whole = w->k * 2 / 64, rest = w->k * 2 % 64;
  int64_t step_bytes = (m < 16 ? m : 16) * 64;
  for (int64_t r = first; r < last; r++) {
    char *to = (char *)out + r / 16 * steps * 1024 + r % 16 * 64;
    const char *from = (const char *)job->x + r * job->ldx * 2;
    if (r >= m) {  // the last tile's spare rows
      for (int64_t s = 0; s < steps; s++) memset(to + s * step_bytes, 0, 64);
    } else if (ints) {
      quantize_row(job, r, (int8_t *)to, step_bytes, a_scale + r);
    } else {
      for (int64_t s = 0; s < whole; s++) memcpy(to + s * step_bytes, from + s * 64, 64);
      for (int64_t s = whole; s < steps; s++) memset(to + s * step_bytes, 0, 64);
      memcpy(to + whole * step_bytes, from + whole * 64, (size_t)rest);
    }
  }
}

// bf16 attention products in tiles; lanes beyond `lanes` are zero queries.
struct TileDots {
  static constexpr bool kWholeTiles = true;
  static void begin() { configure(16); }
  static void end() { _tile_release(); }

  static void scores(const bf16 *q, const bf16 *keys, Shape shape, int64_t, int64_t, float *out) {
    int64_t group = 16 * shape.padded;
    memory_fence();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < shape.padded; d += 32, keys += 512) {
      _tile_loadd(4, q + d, shape.padded * 2);
      _tile_loadd(6, keys, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, keys + group, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, keys + 2 * group, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, keys + 3 * group, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, out, kKvTile * 4);
    _tile_stored(1, out + 16, kKvTile * 4);
    _tile_stored(2, out + 32, kKvTile * 4);
    _tile_stored(3, out + 48, kKvTile * 4);
    memory_fence();
  }

  static void values(const bf16 *weights, const bf16 *v, Shape shape, int64_t, int64_t, float *out) {
    const bf16 *late = v + 32 * shape.dim;  // tokens 32 to 63
    memory_fence();
    _tile_loadd(4, weights, kKvTile * 2);
    _tile_loadd(5, weights + 32, kKvTile * 2);
    int64_t d = 0;
    for (; d + 32 <= shape.dim; d += 32, v += 1024, late += 1024, out += 32) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_loadd(6, v, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, v + 512, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, late, 64);
      _tile_dpbf16ps(0, 5, 6);
      _tile_loadd(7, late + 512, 64);
      _tile_dpbf16ps(1, 5, 7);
      _tile_stored(0, out, shape.padded * 4);
      _tile_stored(1, out + 16, shape.padded * 4);
    }
    if (d < shape.dim) {
      _tile_zero(2);
      _tile_loadd(6, v, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, late, 64);
      _tile_dpbf16ps(2, 5, 7);
      _tile_stored(2, out, shape.padded * 4);
    }
    memory_fence();
  }
};

static void amx_attention(const AttentionPiece *piece) {
  attend_any<TileDots>(piece);
}

}  // namespace

const penstock::KernelTable penstock::kAmx = {
    "amx",         16,         1 << PS_F32 | 1 << PS_BF16 | 1 << PS_I8 | 1 << PS_I4, kWideInputs, kWideBytes,
    amx_pack_rows, amx_linear, rms_norm,
    silu_mul,      rope_write, amx_attention, sample_row, transpose_square, round_rows,
    scale_values,  cap_values, adapter_shrink};
