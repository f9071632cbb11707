/* Products of float32 in the tiles of a processor that multiplies bfloat16 (AMX): out[r, c] = sum over s of a[r, s] * b[s, c].

   A float32 is the sum of three numbers of bfloat16: so a product of two is nine products, of which the three smallest are beyond the digits of a
   float32, and six are computed, the largest last. Each is exact, and their sums are float32's. So errors are those of a float32 product, but near the
   ends of what a float32 can be: parts below its smallest normal number count as zero, so numbers and products below 2^-100 lose digits, and what is
   not finite, or rounds to what is not, becomes no number.

   A number depends on its own row and column alone: sums are made of DEPTH steps at a time, in the order of s. */

#include <stdint.h>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#include "bfloat16_tiles.h"
#include "tile.h"

/* Into how many numbers of bfloat16 a float32 is split. */
#define PARTS 3
#define BLOCK_NUMBERS (2 * PARTS * TILE_NUMBERS)
/* Steps that are added up before their sum is. */
#define DEPTH 512
#define LINES_NUMBERS (DEPTH / STEP * BLOCK_NUMBERS)
/* Blocks of rows, and of columns, whose parts stay in the cache meanwhile. */
#define NEAR_ROWS 4
#define NEAR_COLUMNS 32

/* Of Linux: how a process asks for the registers of the tiles. */
#ifndef ARCH_REQ_XCOMP_PERM
#define ARCH_REQ_XCOMP_PERM 0x1023
#endif
#define XFEATURE_XTILEDATA 18

/* The numbers of an operand: from line to line of the result, and from step to step of its sums; one of both is 1. */
typedef struct {
    const float *first;
    int64_t line, step;
} operand;

static inline operand from(operand x, int64_t line, int64_t step) { return (operand){x.first + line * x.line + step * x.step, x.line, x.step}; }

static inline __m512 widened(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

/* The parts of thirty-two numbers, the largest first. */
static inline void split(__m512 low, __m512 high, __m512i parts[PARTS]) {
    for (int part = 0; part < PARTS; part++) {
        const __m512i own = parts[part] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        low = _mm512_sub_ps(low, widened(_mm512_castsi512_si256(own)));
        high = _mm512_sub_ps(high, widened(_mm512_extracti64x4_epi64(own, 1)));
    }
}

/* The parts of sixteen lines and STEP steps, as tiles: rows are lines where `by_line`, else pairs of steps. Zeros stand for what there is not. */
static inline __attribute__((always_inline)) void pack_tile(half *to, operand x, int64_t lines, int64_t steps, const int by_line) {
    __m512i own[PARTS];
    const int along_steps = x.step == 1;
    if (along_steps) {
        const __mmask16 low = first_of(steps), high = first_of(steps - SIDE);
        for (int line = 0; line < SIDE; line++) {
            const float *numbers = x.first + line * x.line;
            const __mmask16 there = line < lines ? 0xffff : 0;
            split(_mm512_maskz_loadu_ps(low & there, numbers), _mm512_maskz_loadu_ps(high & there, numbers + SIDE), own);
            for (int part = 0; part < PARTS; part++) _mm512_storeu_si512(to + part * TILE_NUMBERS + line * STEP, own[part]);
        }
    } else {
        const __mmask16 there = first_of(lines);
        const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        for (int pair = 0; pair < SIDE; pair++) {
            const float *numbers = x.first + 2 * pair * x.step;
            split(_mm512_maskz_loadu_ps(2 * pair < steps ? there : 0, numbers), _mm512_maskz_loadu_ps(2 * pair + 1 < steps ? there : 0, numbers + x.step), own);
            for (int part = 0; part < PARTS; part++) _mm512_storeu_si512(to + part * TILE_NUMBERS + pair * STEP, _mm512_permutexvar_epi16(pairs, own[part]));
        }
    }
    for (int part = 0; part < PARTS && along_steps != by_line; part++) transpose_pairs(to + part * TILE_NUMBERS);
}

/* Two tiles of each part for every STEP steps. */
static void pack_block(half *to, operand x, int64_t lines, int64_t steps, int by_line) {
    for (int64_t step = 0; step < steps; step += STEP)
        for (int side = 0; side < 2 && side * SIDE < lines; side++)
            pack_tile(to + step / STEP * BLOCK_NUMBERS + side * PARTS * TILE_NUMBERS, from(x, side * SIDE, step), lines - side * SIDE, steps - step, by_line);
}

#define LOAD_ROWS(part) { _tile_loadd(4, a + part * TILE_NUMBERS, ROW_BYTES); if (tall) _tile_loadd(5, a + (PARTS + part) * TILE_NUMBERS, ROW_BYTES); }
#define LOAD_COLUMNS(part) { _tile_loadd(6, b + part * TILE_NUMBERS, ROW_BYTES); if (broad) _tile_loadd(7, b + (PARTS + part) * TILE_NUMBERS, ROW_BYTES); }
#define MULTIPLY { _tile_dpbf16ps(0, 4, 6); if (broad) _tile_dpbf16ps(1, 4, 7); if (tall) { _tile_dpbf16ps(2, 5, 6); if (broad) _tile_dpbf16ps(3, 5, 7); } }

static inline __attribute__((always_inline)) void multiply(float sums[4][SIDE * SIDE], const half *a, const half *b, int64_t blocks, const int tall, const int broad) {
    STORED;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t block = 0; block < blocks; block++, a += BLOCK_NUMBERS, b += BLOCK_NUMBERS) {
        LOAD_ROWS(2) LOAD_COLUMNS(0) MULTIPLY
        LOAD_ROWS(1) MULTIPLY
        LOAD_COLUMNS(1) MULTIPLY
        LOAD_ROWS(0) MULTIPLY
        LOAD_COLUMNS(2) MULTIPLY
        LOAD_COLUMNS(0) MULTIPLY
    }
    _tile_stored(0, sums[0], ROW_BYTES); _tile_stored(1, sums[1], ROW_BYTES); _tile_stored(2, sums[2], ROW_BYTES); _tile_stored(3, sums[3], ROW_BYTES);
}

static void add_block(float *out, int64_t out_row, const half *a, const half *b, int64_t rows, int64_t columns, int64_t blocks, int adds) {
    float sums[4][SIDE * SIDE];
    const int tall = rows > SIDE, broad = columns > SIDE;
    if (tall && broad) multiply(sums, a, b, blocks, 1, 1);
    else if (tall) multiply(sums, a, b, blocks, 1, 0);
    else if (broad) multiply(sums, a, b, blocks, 0, 1);
    else multiply(sums, a, b, blocks, 0, 0);
    for (int64_t row = 0; row < rows; row++)
        for (int side = 0; side < 2 && side * SIDE < columns; side++) {
            const __mmask16 there = first_of(columns - side * SIDE);
            float *to = out + row * out_row + side * SIDE;
            const __m512 sum = _mm512_loadu_ps(sums[row / SIDE * 2 + side] + row % SIDE * SIDE);
            _mm512_mask_storeu_ps(to, there, adds ? _mm512_add_ps(_mm512_maskz_loadu_ps(there, to), sum) : sum);
        }
}

/* Whether this process may use the tiles, after asking for them. */
void split_product_granted(int64_t *granted) { *granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0; }

/* How a result is divided among threads: so that none waits for what another packs, each packs the rows and columns of its own part. */
typedef struct {
    int64_t across, height, width;
} division;

static inline int64_t blocks_of(int64_t count) { return (count + BLOCK_SIDE - 1) / BLOCK_SIDE; }

static division divided(int64_t rows, int64_t columns, int64_t threads) {
    division best = {};
    for (int64_t down = 1; down <= threads; down++) {
        if (threads % down) continue;
        const int64_t across = threads / down;
        const division own = {across, (blocks_of(rows) + down - 1) / down * BLOCK_SIDE, (blocks_of(columns) + across - 1) / across * BLOCK_SIDE};
        if (down == 1 || own.height + own.width < best.height + best.width) best = own;
    }
    return best;
}

/* Numbers of bfloat16 that each thread needs room for. */
#define ROOM ((NEAR_ROWS + NEAR_COLUMNS) * LINES_NUMBERS)

void split_product_room(int64_t *bytes, int64_t threads) { *bytes = threads * ROOM * (int64_t)sizeof(half); }

/* At most NEAR_COLUMNS blocks of columns. */
static void multiply_columns(float *out, int64_t out_row, operand a, operand b, int64_t rows, int64_t columns, int64_t steps, int adds, half *scratch) {
    half *near_rows = scratch, *near_columns = scratch + NEAR_ROWS * LINES_NUMBERS;
    for (int64_t step = 0; step < steps; step += DEPTH) {
        const int64_t depth = MIN(DEPTH, steps - step), blocks = (depth + STEP - 1) / STEP;
        for (int64_t column = 0; column < columns; column += BLOCK_SIDE)
            pack_block(near_columns + column / BLOCK_SIDE * LINES_NUMBERS, from(b, column, step), columns - column, depth, 0);
        for (int64_t top = 0; top < rows; top += NEAR_ROWS * BLOCK_SIDE) {
            const int64_t height = MIN(NEAR_ROWS * BLOCK_SIDE, rows - top);
            for (int64_t row = 0; row < height; row += BLOCK_SIDE)
                pack_block(near_rows + row / BLOCK_SIDE * LINES_NUMBERS, from(a, top + row, step), height - row, depth, 1);
            for (int64_t column = 0; column < columns; column += BLOCK_SIDE)
                for (int64_t row = 0; row < height; row += BLOCK_SIDE)
                    add_block(out + (top + row) * out_row + column, out_row, near_rows + row / BLOCK_SIDE * LINES_NUMBERS,
                              near_columns + column / BLOCK_SIDE * LINES_NUMBERS, MIN(BLOCK_SIDE, height - row), MIN(BLOCK_SIDE, columns - column), blocks,
                              adds || step > 0);
        }
    }
}

/* out = a @ b, beside what is in `out` where `adds`. A line of `a` is a row of the result, one of `b` a column; `scratch` has `split_product_room`. */
void split_product(
    float *out, int64_t out_row, const float *a, int64_t a_line, int64_t a_step, const float *b, int64_t b_line, int64_t b_step, int64_t rows, int64_t columns,
    int64_t steps, int64_t adds, half *scratch, int64_t threads) {
    const operand left = {a, a_line, a_step}, right = {b, b_line, b_step};
    const division of = divided(rows, columns, threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t part = 0; part < threads; part++) {
        const int64_t row = part / of.across * of.height, first = part % of.across * of.width, end = MIN(columns, first + of.width);
        if (row >= rows || first >= end) continue;
        configure_tiles(BLOCK_SIDE);
        for (int64_t column = first; column < end; column += NEAR_COLUMNS * BLOCK_SIDE)
            multiply_columns(out + row * out_row + column, out_row, from(left, row, 0), from(right, column, 0), MIN(of.height, rows - row),
                             MIN(NEAR_COLUMNS * BLOCK_SIDE, end - column), steps, adds, scratch + part * ROOM);
        _tile_release();
    }
}

#else

/* Nothing is granted, so the product is never asked for. */
void split_product_granted(int64_t *granted) { *granted = 0; }
void split_product_room(int64_t *bytes, int64_t threads) { (void)threads, *bytes = 0; }
void split_product(
    float *out, int64_t out_row, const float *a, int64_t a_line, int64_t a_step, const float *b, int64_t b_line, int64_t b_step, int64_t rows, int64_t columns,
    int64_t steps, int64_t adds, void *scratch, int64_t threads) {
    (void)out, (void)out_row, (void)a, (void)a_line, (void)a_step, (void)b, (void)b_line, (void)b_step, (void)rows, (void)columns, (void)steps, (void)adds;
    (void)scratch, (void)threads;
}
#endif
