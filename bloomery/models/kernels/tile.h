/* Products in float32, tile by tile: out[r, o] = sum over i of x[r, i] * w[i, o], in the order of i.

   Each number is one chain of fused multiply-adds (of products and sums, where the processor has none that are fused), so it depends neither on the
   rows beside it, nor on their number, nor on the threads. A tile of rows and neighbouring outputs stays in registers for all of i.

   Outputs lie in panels of PANEL, side by side for each i. */

#ifdef __FMA__
#include <immintrin.h>
#endif

#include "lanes.h"

#ifndef PANEL
#error "native/bindings.py says how wide a panel is"
#endif
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* Registers of the processor, and how many of them one row of a tile, and one of its panel, may take. */
#if defined(__AVX512F__)
#define WIDE 16
#define ROWS_OF_TILE 12
typedef __m512 wide;
static inline wide fused(wide a, wide b, wide c) { return _mm512_fmadd_ps(a, b, c); }
static inline wide spread(float x) { return _mm512_set1_ps(x); }
#elif defined(__FMA__)
#define WIDE 8
#define ROWS_OF_TILE 6
typedef __m256 wide;
static inline wide fused(wide a, wide b, wide c) { return _mm256_fmadd_ps(a, b, c); }
static inline wide spread(float x) { return _mm256_set1_ps(x); }
#else
#define WIDE 8
#define ROWS_OF_TILE 4
typedef lanes wide;
static inline wide fused(wide a, wide b, wide c) { return a * b + c; }
static inline wide spread(float x) { return all(x); }
#endif

/* Inputs ahead of those that are multiplied. */
#define AHEAD 16

/* What is brought near while a tile is computed: two lines of the cache for each input, from `first` on, `step` floats further every time. */
typedef struct {
    const float *first;
    int64_t step;
} ahead;

/* Floats of a line of the cache. */
#define LINE 16

static inline float fused_one(float a, float b, float c) {
#ifdef __FMA__
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

static inline wide load(const float *x) { wide v; memcpy(&v, x, sizeof v); return v; }
static inline void store(float *x, wide v) { memcpy(x, &v, sizeof v); }

/* The number in a row and a column lies at `first + row * row's floats + column * column's floats`. */
typedef struct {
    const float *first;
    int64_t row, column;
} matrix;

/* The same from a row on. */
static inline matrix from_row(matrix x, int64_t row) { return (matrix){x.first + row * x.row, x.row, x.column}; }

/* `rows` by `groups` of WIDE outputs, both constants, beside what is in `out` where `adds`. */
static inline __attribute__((always_inline)) void tile(
    const int rows, const int groups, float *out, int64_t out_row, matrix x, const float *w, int64_t stride, int64_t inputs, int adds, ahead next) {
    wide sums[ROWS_OF_TILE][2];
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int group = 0; group < groups; group++) sums[row][group] = adds ? load(out + row * out_row + group * WIDE) : spread(0.0f);
    for (int64_t i = 0; i < inputs; i++) {
        const float *of = w + i * stride, *values = x.first + i * x.column;
        wide weights[2];
#pragma GCC unroll 4
        for (int group = 0; group < groups; group++) weights[group] = load(of + group * WIDE);
        __builtin_prefetch(next.first + i * next.step);
        __builtin_prefetch(next.first + i * next.step + LINE);
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            const wide value = spread(values[row * x.row]);
#pragma GCC unroll 4
            for (int group = 0; group < groups; group++) sums[row][group] = fused(value, weights[group], sums[row][group]);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int group = 0; group < groups; group++) store(out + row * out_row + group * WIDE, sums[row][group]);
}

#define TILE(rows, groups) tile(rows, groups, out, out_row, x, w, stride, inputs, adds, next)
#define ROWS(number) case number: if (groups == 2) TILE(number, 2); else TILE(number, 1); break;

static void tile_of(
    int64_t rows, int groups, float *out, int64_t out_row, matrix x, const float *w, int64_t stride, int64_t inputs, int adds, ahead next) {
    switch (rows) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if ROWS_OF_TILE > 4
        ROWS(5) ROWS(6)
#endif
#if ROWS_OF_TILE > 6
        ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
    }
}

/* `outputs` of one panel, for as many rows as there are. Of several tiles each brings a share of the panel `later` near, unless that is 0; a single one
   is done before that could arrive, and runs ahead in its own. Those behind the last whole group of a panel are computed apart, for no number outside
   of `out` may be written, and none outside of the matrix read. */
static void panel_before(
    int64_t rows, int64_t outputs, float *out, int64_t out_row, matrix x, const float *w, int64_t stride, int64_t inputs, int adds, const float *later) {
    const int64_t tiles = (rows + ROWS_OF_TILE - 1) / ROWS_OF_TILE, most = (rows + tiles - 1) / tiles, passes = tiles * (PANEL / (2 * WIDE));
    const int64_t share = (PANEL + passes - 1) / passes;
    if (tiles == 1) later = 0;
    for (int64_t row = 0; row < rows; row += most) {
        const int64_t own = MIN(most, rows - row);
        int64_t done = 0;
        for (; done + WIDE <= outputs;) {
            const int groups = outputs - done >= 2 * WIDE ? 2 : 1;
            ahead next = {w + done + AHEAD * stride, stride};
            if (later) next = (ahead){later, share}, later += share * inputs;
            tile_of(own, groups, out + row * out_row + done, out_row, from_row(x, row), w + done, stride, inputs, adds, next);
            done += groups * WIDE;
        }
        for (; done < outputs; done++)
            for (int64_t each = row; each < row + own; each++) {
                float sum = adds ? out[each * out_row + done] : 0.0f;
                for (int64_t i = 0; i < inputs; i++) sum = fused_one(x.first[each * x.row + i * x.column], w[i * stride + done], sum);
                out[each * out_row + done] = sum;
            }
    }
}

static inline void panel_of(int64_t rows, int64_t outputs, float *out, int64_t out_row, matrix x, const float *w, int64_t stride, int64_t inputs, int adds) {
    panel_before(rows, outputs, out, out_row, x, w, stride, inputs, adds, 0);
}

/* `outputs` of a matrix whose columns they are, panel after panel. */
static inline void panels_of(int64_t rows, int64_t outputs, float *out, int64_t out_row, matrix x, const float *w, int64_t stride, int64_t inputs, int adds) {
    for (int64_t done = 0; done < outputs; done += PANEL)
        panel_of(rows, MIN(PANEL, outputs - done), out + done, out_row, x, w + done, stride, inputs, adds);
}

/* Eight rows of eight numbers become columns. */
static inline void transpose(lanes v[LANES]) {
    for (int i = 0; i < 4; i++) {
        const lanes a = v[i], b = v[i + 4];
        v[i] = PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11), v[i + 4] = PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i = 0; i < 6; i += i == 1 ? 3 : 1) {
        const lanes a = v[i], b = v[i + 2];
        v[i] = PICK(a, b, 0, 1, 8, 9, 4, 5, 12, 13), v[i + 2] = PICK(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int i = 0; i < LANES; i += 2) {
        const lanes a = v[i], b = v[i + 1];
        v[i] = PICK(a, b, 0, 8, 2, 10, 4, 12, 6, 14), v[i + 1] = PICK(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    }
}

/* Up to PANEL outputs of a matrix whose rows they are, as a panel in one piece, with zeros behind the last. Brings those of the next panel near
   meanwhile: of short rows each is over before the processor has found out that it is read in order. */
static void pack_panel(float *to, const float *from, int64_t row, int64_t outputs, int64_t inputs) {
    const int64_t whole = outputs / LANES * LANES, pieces = inputs / LANES * LANES;
    if (outputs < PANEL) memset(to, 0, PANEL * inputs * sizeof(float));
    for (int64_t output = 0; output < whole; output += LANES)
        for (int64_t i = 0; i < pieces; i += LANES) {
            lanes block[LANES];
            const float *first = from + output * row + i;
            if (i % LINE == 0)
                for (int each = 0; each < LANES; each++) __builtin_prefetch(first + (PANEL + each) * row, 0, 2);
            for (int each = 0; each < LANES; each++) block[each] = at(first + each * row);
            transpose(block);
            for (int column = 0; column < LANES; column++) put(to + (i + column) * PANEL + output, block[column]);
        }
    for (int64_t output = 0; output < outputs; output++)
        for (int64_t i = output < whole ? pieces : 0; i < inputs; i++) to[i * PANEL + output] = from[output * row + i];
}
