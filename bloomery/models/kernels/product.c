/* Products of rows with matrices, in float32: out[r, o] = sum over i of x[r, i] * w[i, o], in the order of i.

   Each number is one chain of fused multiply-adds (of products and sums, where the processor has none that are fused), so it depends neither on the
   rows beside it, nor on their number, nor on the threads. A tile of rows and neighbouring outputs stays in registers for all of i.

   Outputs lie in panels of PANEL, side by side for each i. Of a matrix that was packed a panel lies in one piece, with zeros behind the last output;
   of one whose rows are the inputs a panel is some columns. So a matrix is told by the floats from panel to panel and from i to i. */

#include <omp.h>
#ifdef __FMA__
#include <immintrin.h>
#endif

#include "call.h"
#include "lanes.h"

#ifndef PANEL
#error "native.py says how wide a panel is"
#endif
#define MIN(a, b) ((a) < (b) ? (a) : (b))

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

/* Rows whose inputs stay in the cache while panel after panel is read. */
#define NEAR_ROWS (8 * ROWS_OF_TILE)
/* Inputs ahead of those that are multiplied. */
#define AHEAD 16

static inline wide load(const float *x) { wide v; memcpy(&v, x, sizeof v); return v; }
static inline void store(float *x, wide v) { memcpy(x, &v, sizeof v); }

/* `rows` by `groups` of WIDE outputs, both constants, beside what is in `out` where `adds`. */
static inline __attribute__((always_inline)) void tile(
    const int rows, const int groups, float *out, int64_t out_row, const float *x, int64_t x_row, const float *w, int64_t stride, int64_t inputs, int adds) {
    wide sums[ROWS_OF_TILE][2];
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int group = 0; group < groups; group++) sums[row][group] = adds ? load(out + row * out_row + group * WIDE) : spread(0.0f);
    for (int64_t i = 0; i < inputs; i++) {
        const float *of = w + i * stride;
        wide weights[2];
#pragma GCC unroll 4
        for (int group = 0; group < groups; group++) {
            weights[group] = load(of + group * WIDE);
            __builtin_prefetch(of + AHEAD * stride + group * WIDE);
        }
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            const wide value = spread(x[row * x_row + i]);
#pragma GCC unroll 4
            for (int group = 0; group < groups; group++) sums[row][group] = fused(value, weights[group], sums[row][group]);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int group = 0; group < groups; group++) store(out + row * out_row + group * WIDE, sums[row][group]);
}

#define TILE(rows, groups) tile(rows, groups, out, out_row, x, x_row, w, stride, inputs, adds)
#define ROWS(number) case number: if (groups == 2) TILE(number, 2); else TILE(number, 1); break;

static void tile_of(
    int64_t rows, int groups, float *out, int64_t out_row, const float *x, int64_t x_row, const float *w, int64_t stride, int64_t inputs, int adds) {
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

/* `outputs` of one panel, for as many rows as there are. Those behind the last whole group of a panel are computed apart, for no number outside of
   `out` may be written, and none outside of the matrix read. */
static void panel_of(
    int64_t rows, int64_t outputs, float *out, int64_t out_row, const float *x, int64_t x_row, const float *w, int64_t stride, int64_t inputs, int adds) {
    const int64_t tiles = (rows + ROWS_OF_TILE - 1) / ROWS_OF_TILE, most = (rows + tiles - 1) / tiles;
    for (int64_t row = 0; row < rows; row += most) {
        const int64_t own = MIN(most, rows - row);
        int64_t done = 0;
        for (; done + WIDE <= outputs;) {
            const int groups = outputs - done >= 2 * WIDE ? 2 : 1;
            tile_of(own, groups, out + row * out_row + done, out_row, x + row * x_row, x_row, w + done, stride, inputs, adds);
            done += groups * WIDE;
        }
        for (; done < outputs; done++)
            for (int64_t each = row; each < row + own; each++) {
                float sum = adds ? out[each * out_row + done] : 0.0f;
                for (int64_t i = 0; i < inputs; i++)
#ifdef __FMA__
                    sum = __builtin_fmaf(x[each * x_row + i], w[i * stride + done], sum);
#else
                    sum = x[each * x_row + i] * w[i * stride + done] + sum;
#endif
                out[each * out_row + done] = sum;
            }
    }
}

/* out = x @ w. */
void product(
    float *out, int64_t out_row, const float *x, int64_t x_row, const float *w, int64_t panel, int64_t input, int64_t rows, int64_t outputs, int64_t inputs,
    int64_t threads) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (rows * outputs * inputs > (int64_t)ALONE * PANEL)
    for (int64_t row = 0; row < rows; row += NEAR_ROWS)
        for (int64_t number = 0; number < panels; number++)
            panel_of(MIN(NEAR_ROWS, rows - row), MIN(PANEL, outputs - number * PANEL), out + row * out_row + number * PANEL, out_row, x + row * x_row, x_row,
                     w + number * panel, input, inputs, 0);
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

/* Up to PANEL outputs of a matrix whose rows they are, as a panel in one piece, with zeros behind the last. */
static void pack_panel(float *to, const float *from, int64_t row, int64_t outputs, int64_t inputs) {
    const int64_t whole = outputs / LANES * LANES, pieces = inputs / LANES * LANES;
    if (outputs < PANEL) memset(to, 0, PANEL * inputs * sizeof(float));
    for (int64_t output = 0; output < whole; output += LANES)
        for (int64_t i = 0; i < pieces; i += LANES) {
            lanes block[LANES];
            for (int each = 0; each < LANES; each++) block[each] = at(from + (output + each) * row + i);
            transpose(block);
            for (int column = 0; column < LANES; column++) put(to + (i + column) * PANEL + output, block[column]);
        }
    for (int64_t output = 0; output < outputs; output++)
        for (int64_t i = output < whole ? pieces : 0; i < inputs; i++) to[i * PANEL + output] = from[output * row + i];
}

/* All panels of such a matrix. */
void pack(float *to, const float *w, int64_t w_row, int64_t outputs, int64_t inputs, int64_t threads) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads) if (outputs * inputs > ALONE)
    for (int64_t number = 0; number < panels; number++)
        pack_panel(to + number * PANEL * inputs, w + number * PANEL * w_row, w_row, MIN(PANEL, outputs - number * PANEL), inputs);
}

/* out = x @ w.T of such a matrix, a panel after the other. `scratch` has room for one for each of the threads. */
void product_unpacked(
    float *out, int64_t out_row, const float *x, int64_t x_row, const float *w, int64_t w_row, int64_t rows, int64_t outputs, int64_t inputs, float *scratch,
    int64_t threads) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * outputs * inputs > (int64_t)ALONE * PANEL)
    for (int64_t number = 0; number < panels; number++) {
        const int64_t own = MIN(PANEL, outputs - number * PANEL);
        float *panel = scratch + omp_get_thread_num() * PANEL * inputs;
        pack_panel(panel, w + number * PANEL * w_row, w_row, own, inputs);
        panel_of(rows, own, out + number * PANEL, out_row, x, x_row, panel, PANEL, inputs, 0);
    }
}

/* Neighbouring rows and the factors of a low-rank update of them: `a` [inputs, rank] and `b` [rank, outputs]. `low` [rows, rank] gets x @ a. */
typedef struct {
    int64_t first, rows, rank;
    const float *a, *b;
    float *low;
} update;

/* out += (x @ a) @ b, of every update's rows. */
void add_updates(
    float *out, int64_t out_row, const float *x, int64_t x_row, const update *updates, int64_t count, int64_t outputs, int64_t inputs, int64_t threads,
    int64_t work) {
    int64_t blocks = 0;
    for (int64_t each = 0; each < count; each++) blocks += (updates[each].rows + ROWS_OF_TILE - 1) / ROWS_OF_TILE;
#pragma omp parallel for schedule(static) num_threads(threads) if (work > (int64_t)ALONE * PANEL)
    for (int64_t unit = 0; unit < blocks; unit++) {
        int64_t block = unit, each = 0, own;
        for (; block >= (own = (updates[each].rows + ROWS_OF_TILE - 1) / ROWS_OF_TILE); each++) block -= own;
        const update *of = updates + each;
        const int64_t row = block * ROWS_OF_TILE, rows = MIN(ROWS_OF_TILE, of->rows - row), first = of->first + row;
        for (int64_t done = 0; done < of->rank; done += PANEL)
            panel_of(rows, MIN(PANEL, of->rank - done), of->low + row * of->rank + done, of->rank, x + first * x_row, x_row, of->a + done, of->rank, inputs, 0);
        for (int64_t done = 0; done < outputs; done += PANEL)
            panel_of(rows, MIN(PANEL, outputs - done), out + first * out_row + done, out_row, of->low + row * of->rank, of->rank, of->b + done, outputs,
                     of->rank, 1);
    }
}

CALL(product, P(0), I(1), P(2), I(3), P(4), I(5), I(6), I(7), I(8), I(9), I(10))
CALL(add_updates, P(0), I(1), P(2), I(3), P(4), I(5), I(6), I(7), I(8), I(9))
