/* Tiles of a processor that multiplies bfloat16 (AMX): eight registers of sixteen rows, each of sixteen pairs of bfloat16 or numbers of float32. */

#pragma once

#include <immintrin.h>
#include <stdint.h>

/* Rows of a tile of the processor, and its columns, which are pairs of numbers. */
#define SIDE 16
#define STEP (2 * SIDE)
#define TILE_NUMBERS (SIDE * STEP)
#define ROW_BYTES (STEP * (int)sizeof(half))
/* Lines of two tiles: so many rows are multiplied with as many columns at a time. */
#define BLOCK_SIDE (2 * SIDE)

/* What a compiler does not know: that tiles are read from memory, so what is stored there must be there. */
#define STORED __asm__ volatile("" ::: "memory")

typedef uint16_t half;

static inline __mmask16 first_of(int64_t count) { return count >= SIDE ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

/* Sixteen rows of sixteen pairs become columns. */
static inline void transpose_pairs(half *tile) {
    __m512i v[SIDE], w[SIDE];
    for (int i = 0; i < SIDE; i++) v[i] = _mm512_loadu_si512(tile + i * STEP);
    for (int i = 0; i < SIDE; i += 2) w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]), w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    for (int i = 0; i < SIDE; i += 4) {
        v[i] = _mm512_unpacklo_epi64(w[i], w[i + 2]), v[i + 1] = _mm512_unpackhi_epi64(w[i], w[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(w[i + 1], w[i + 3]), v[i + 3] = _mm512_unpackhi_epi64(w[i + 1], w[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        w[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88), w[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
        w[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88), w[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        v[i] = _mm512_shuffle_i32x4(w[i], w[i + 8], 0x88), v[i + 8] = _mm512_shuffle_i32x4(w[i], w[i + 8], 0xdd);
        v[i + 4] = _mm512_shuffle_i32x4(w[i + 4], w[i + 12], 0x88), v[i + 12] = _mm512_shuffle_i32x4(w[i + 4], w[i + 12], 0xdd);
    }
    for (int i = 0; i < SIDE; i++) _mm512_storeu_si512(tile + i * STEP, v[i]);
}

/* Sums in tiles 0 to 3, rows in 4 and 5, columns in 6 and 7, for so many rows of a result of two tiles by two. */
static inline void configure_tiles(int64_t rows) {
    struct __attribute__((packed)) {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } own = {.palette = 1};
    const uint8_t upper = rows < SIDE ? rows : SIDE, lower = rows > SIDE ? rows - SIDE : SIDE;
    const uint8_t of[8] = {upper, upper, lower, lower, upper, lower, SIDE, SIDE};
    for (int i = 0; i < 8; i++) own.row_bytes[i] = ROW_BYTES, own.rows[i] = of[i];
    STORED;
    _tile_loadconfig(&own);
}
