/* Products of rows with matrices, in bfloat16, in the tiles of a processor that has them: out[r, o] = sum over i of x[r, i] * w[o, i].

   Products are summed in float32, in pairs in the order of i, and each sum is rounded once, at its end: so a number depends neither on the rows beside
   it, nor on their number, nor on the threads. What is smaller than the smallest normal number counts as zero.

   Outputs lie in panels of BLOCK_SIDE; of a panel, STEP inputs lie in one piece, as two tiles. There are whole STEPs of inputs. */

#include <omp.h>
#include <stdint.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include "bfloat16_tiles.h"

/* Rows whose inputs, of so many bytes, stay in the cache while panel after panel is read, and how many there are at most. */
#define NEAR_BYTES (1 << 20)
#define NEAR_ROWS 512
/* Inputs of a panel that stay in the nearest cache while all of those rows are multiplied with them: the sums wait in memory for the next inputs. */
#define NEAR_INPUTS 256
/* Panels that are packed before they are multiplied with all rows. */
#define NEAR_PANELS 16

/* Of a block of a result, a tile after the other. */
typedef float block_sums[4][SIDE * SIDE];
/* Of as many rows as are near, with a panel. */
typedef block_sums panel_sums[NEAR_ROWS / BLOCK_SIDE];

static inline int64_t near_rows(int64_t inputs) {
    return MIN(NEAR_ROWS, MAX(1, NEAR_BYTES / (inputs * (int64_t)sizeof(half)) / BLOCK_SIDE) * BLOCK_SIDE);
}

static inline int64_t panel_numbers(int64_t inputs) { return inputs * BLOCK_SIDE; }

static void pack_panel(half *to, const half *w, int64_t w_row, int64_t outputs, int64_t inputs) {
    for (int64_t i = 0; i < inputs; i += STEP)
        for (int side = 0; side < 2; side++, to += TILE_NUMBERS) {
            for (int line = 0; line < SIDE; line++) {
                const int64_t output = side * SIDE + line;
                _mm512_storeu_si512(to + line * STEP, output < outputs ? _mm512_loadu_si512(w + output * w_row + i) : _mm512_setzero_si512());
            }
            transpose_pairs(to);
        }
}

static inline __attribute__((always_inline)) void multiply(
    block_sums sums, const half *x, int64_t x_row, const half *w, int64_t inputs, const int tall, const int broad, int goes_on) {
    const int64_t row_bytes = x_row * (int64_t)sizeof(half);
    STORED;
    if (goes_on) {
        _tile_loadd(0, sums[0], ROW_BYTES);
        if (broad) _tile_loadd(1, sums[1], ROW_BYTES);
        if (tall) _tile_loadd(2, sums[2], ROW_BYTES);
        if (tall && broad) _tile_loadd(3, sums[3], ROW_BYTES);
    } else {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    }
    for (int64_t i = 0; i < inputs; i += STEP, w += 2 * TILE_NUMBERS) {
        _tile_loadd(6, w, ROW_BYTES);
        if (broad) _tile_loadd(7, w + TILE_NUMBERS, ROW_BYTES);
        _tile_loadd(4, x + i, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (broad) _tile_dpbf16ps(1, 4, 7);
        if (tall) {
            _tile_loadd(5, x + SIDE * x_row + i, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            if (broad) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], ROW_BYTES);
    if (broad) _tile_stored(1, sums[1], ROW_BYTES);
    if (tall) _tile_stored(2, sums[2], ROW_BYTES);
    if (tall && broad) _tile_stored(3, sums[3], ROW_BYTES);
}

static inline void round_block(half *out, int64_t out_row, block_sums sums, int64_t rows, int64_t outputs) {
    const __mmask16 left = first_of(outputs), right = first_of(outputs - SIDE);
    STORED;
    for (int64_t row = 0; row < rows; row++) {
        const float *first = sums[row / SIDE * 2] + row % SIDE * SIDE, *second = sums[row / SIDE * 2 + 1] + row % SIDE * SIDE;
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_maskz_load_ps(right, second), _mm512_load_ps(first));
        _mm512_mask_storeu_epi16(out + row * out_row, (__mmask32)right << SIDE | left, (__m512i)both);
    }
}

/* `goes_on`: there are sums of the inputs before. `ends`: there are no inputs behind. `configured`: for how many rows this thread's tiles are laid out. */
static void multiply_inputs(
    half *out, int64_t out_row, block_sums *sums, int64_t next_sums, const half *x, int64_t x_row, const half *w, int64_t rows, int64_t outputs,
    int64_t inputs, int goes_on, int ends, int64_t *configured) {
    for (int64_t row = 0; row < rows; row += BLOCK_SIDE, x += BLOCK_SIDE * x_row, out += BLOCK_SIDE * out_row, sums += next_sums) {
        const int64_t own = MIN(BLOCK_SIDE, rows - row);
        const int tall = own > SIDE, broad = outputs > SIDE;
        if (*configured != own) configure_tiles(*configured = own);
        if (tall && broad) multiply(*sums, x, x_row, w, inputs, 1, 1, goes_on);
        else if (tall) multiply(*sums, x, x_row, w, inputs, 1, 0, goes_on);
        else if (broad) multiply(*sums, x, x_row, w, inputs, 0, 1, goes_on);
        else multiply(*sums, x, x_row, w, inputs, 0, 0, goes_on);
        if (ends) round_block(out, out_row, *sums, own, outputs);
    }
}

static void multiply_panel(
    half *out, int64_t out_row, panel_sums sums, const half *x, int64_t x_row, const half *w, int64_t rows, int64_t outputs, int64_t inputs,
    int64_t *configured) {
    for (int64_t i = 0; i < inputs; i += NEAR_INPUTS)
        multiply_inputs(out, out_row, sums, inputs > NEAR_INPUTS, x + i, x_row, w + i * BLOCK_SIDE, rows, outputs, MIN(NEAR_INPUTS, inputs - i),
                        i > 0, i + NEAR_INPUTS >= inputs, configured);
}

/* Of a matrix that `half_pack` packed. */
void half_product(
    half *out, int64_t out_row, const half *x, int64_t x_row, const half *w, int64_t rows, int64_t outputs, int64_t inputs, int64_t threads) {
    const int64_t near = near_rows(inputs), chunks = (rows + near - 1) / near, panels = (outputs + BLOCK_SIDE - 1) / BLOCK_SIDE;
#pragma omp parallel num_threads(threads)
    {
        panel_sums sums __attribute__((aligned(64)));
        int64_t configured = 0;
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t chunk = 0; chunk < chunks; chunk++)
            for (int64_t panel = 0; panel < panels; panel++)
                multiply_panel(out + chunk * near * out_row + panel * BLOCK_SIDE, out_row, sums, x + chunk * near * x_row, x_row,
                               w + panel * panel_numbers(inputs), MIN(near, rows - chunk * near), MIN(BLOCK_SIDE, outputs - panel * BLOCK_SIDE),
                               inputs, &configured);
        if (configured) _tile_release();
    }
}

void half_pack(half *to, const half *w, int64_t w_row, int64_t outputs, int64_t inputs, int64_t threads) {
    const int64_t panels = (outputs + BLOCK_SIDE - 1) / BLOCK_SIDE;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t panel = 0; panel < panels; panel++)
        pack_panel(to + panel * panel_numbers(inputs), w + panel * BLOCK_SIDE * w_row, w_row, MIN(BLOCK_SIDE, outputs - panel * BLOCK_SIDE), inputs);
}

/* Panels that a thread packs at a time. */
static inline int64_t panels_at_a_time(int64_t outputs, int64_t threads) {
    const int64_t panels = (outputs + BLOCK_SIDE - 1) / BLOCK_SIDE;
    return MIN(NEAR_PANELS, (panels + threads - 1) / threads);
}

void half_product_room(int64_t *bytes, int64_t outputs, int64_t inputs, int64_t threads) {
    *bytes = threads * panels_at_a_time(outputs, threads) * panel_numbers(inputs) * (int64_t)sizeof(half);
}

/* Of a plain matrix; `scratch` has `half_product_room`. */
void half_product_unpacked(
    half *out, int64_t out_row, const half *x, int64_t x_row, const half *w, int64_t w_row, int64_t rows, int64_t outputs, int64_t inputs, half *scratch,
    int64_t threads) {
    const int64_t near = near_rows(inputs), most = panels_at_a_time(outputs, threads), width = most * BLOCK_SIDE;
#pragma omp parallel num_threads(threads)
    {
        half *packed = scratch + omp_get_thread_num() * most * panel_numbers(inputs);
        panel_sums sums __attribute__((aligned(64)));
        int64_t configured = 0;
#pragma omp for schedule(static) nowait
        for (int64_t first = 0; first < outputs; first += width) {
            const int64_t end = MIN(outputs, first + width);
            for (int64_t output = first; output < end; output += BLOCK_SIDE)
                pack_panel(packed + (output - first) * inputs, w + output * w_row, w_row, MIN(BLOCK_SIDE, end - output), inputs);
            for (int64_t row = 0; row < rows; row += near)
                for (int64_t output = first; output < end; output += BLOCK_SIDE)
                    multiply_panel(out + row * out_row + output, out_row, sums, x + row * x_row, x_row, packed + (output - first) * inputs,
                                   MIN(near, rows - row), MIN(BLOCK_SIDE, end - output), inputs, &configured);
        }
        if (configured) _tile_release();
    }
}

#else

/* No tiles are granted here (`split_product.c`), so these are never asked for. */
void half_product(
    void *out, int64_t out_row, const void *x, int64_t x_row, const void *w, int64_t rows, int64_t outputs, int64_t inputs, int64_t threads) {
    (void)out, (void)out_row, (void)x, (void)x_row, (void)w, (void)rows, (void)outputs, (void)inputs, (void)threads;
}
void half_pack(void *to, const void *w, int64_t w_row, int64_t outputs, int64_t inputs, int64_t threads) {
    (void)to, (void)w, (void)w_row, (void)outputs, (void)inputs, (void)threads;
}
void half_product_room(int64_t *bytes, int64_t outputs, int64_t inputs, int64_t threads) { (void)outputs, (void)inputs, (void)threads, *bytes = 0; }
void half_product_unpacked(
    void *out, int64_t out_row, const void *x, int64_t x_row, const void *w, int64_t w_row, int64_t rows, int64_t outputs, int64_t inputs, void *scratch,
    int64_t threads) {
    (void)out, (void)out_row, (void)x, (void)x_row, (void)w, (void)w_row, (void)rows, (void)outputs, (void)inputs, (void)scratch, (void)threads;
}
#endif
