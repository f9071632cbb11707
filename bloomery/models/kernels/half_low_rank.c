/* Low-rank updates of products in bfloat16, as `low_rank.c` has them in float32.

   Both sums run in float32, each number one chain in the order of its inputs, and are rounded once: x @ a before it is multiplied with b, and what is
   added to `out` with what was there. So a row's numbers depend neither on the rows beside it, nor on their number, nor on the threads. */

#include <omp.h>

#include "tile.h"
#include "update.h"

#if ROWS_OF_TILE > MOST_ROWS
#error "native/bindings.py has room for no more rows that are computed together: raise its ROWS"
#endif

typedef uint16_t half;
typedef uint16_t halves __attribute__((vector_size(2 * WIDE)));
typedef uint32_t words __attribute__((vector_size(4 * WIDE)));

#define HIGH 0xffff0000u

/* Inputs and outputs ahead of those that are multiplied: factors are small and lie apart, so a processor that looks ahead by itself comes too late. */
#define AHEAD_INPUTS 64
#define AHEAD_OUTPUTS (4 * PANEL)

static inline wide widened(const half *x) {
    halves v;
    memcpy(&v, x, sizeof v);
    return (wide)(__builtin_convertvector(v, words) << 16);
}

/* To the nearest, of two as near to the even one; what is no number stays none. */
static inline words rounded(words bits) {
    const words number = (words)((bits & 0x7fffffffu) <= 0x7f800000u);
    return ((bits + 0x7fffu + ((bits >> 16) & 1u)) & number) | ((bits | 0x400000u) & ~number);
}

static inline void narrow(half *to, wide v) {
    const halves kept = __builtin_convertvector(rounded((words)v) >> 16, halves);
    memcpy(to, &kept, sizeof kept);
}

/* `rows` by `groups` of WIDE ranks, both constants: low = x @ a, rounded, for the next product and for whoever asked. */
static inline __attribute__((always_inline)) void low_tile(
    const int rows, const int groups, float *near, half *low, int64_t rank, const half *x, int64_t x_row, const half *a, int64_t inputs) {
    wide sums[ROWS_OF_TILE][2];
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int group = 0; group < groups; group++) sums[row][group] = spread(0.0f);
    int64_t i = 0;
    for (; i + 2 <= inputs; i += 2) {
        wide even[2], odd[2];
#pragma GCC unroll 2
        for (int group = 0; group < groups; group++) even[group] = widened(a + i * rank + group * WIDE), odd[group] = widened(a + (i + 1) * rank + group * WIDE);
        __builtin_prefetch(a + (i + AHEAD_INPUTS) * rank);
        __builtin_prefetch(a + (i + AHEAD_INPUTS + 1) * rank);
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            uint32_t both;
            memcpy(&both, x + row * x_row + i, sizeof both);
            const words pair = (words){} + both;
            const wide first = (wide)(pair << 16), second = (wide)(pair & HIGH);
#pragma GCC unroll 2
            for (int group = 0; group < groups; group++) sums[row][group] = fused(second, odd[group], fused(first, even[group], sums[row][group]));
        }
    }
    for (; i < inputs; i++)
        for (int row = 0; row < rows; row++) {
            const wide value = (wide)(((words){} + x[row * x_row + i]) << 16);
            for (int group = 0; group < groups; group++) sums[row][group] = fused(value, widened(a + i * rank + group * WIDE), sums[row][group]);
        }
    for (int row = 0; row < rows; row++)
        for (int group = 0; group < groups; group++) {
            narrow(low + row * rank + group * WIDE, sums[row][group]);
            store(near + row * rank + group * WIDE, widened(low + row * rank + group * WIDE));
        }
}

/* `rows` by `groups` of WIDE outputs, both constants: out += low @ b. */
static inline __attribute__((always_inline)) void out_tile(
    const int rows, const int groups, half *out, int64_t out_row, const float *near, int64_t rank, const half *b, int64_t b_row, int64_t ranks) {
    wide sums[ROWS_OF_TILE][2];
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int group = 0; group < groups; group++) sums[row][group] = widened(out + row * out_row + group * WIDE);
    for (int64_t i = 0; i < ranks; i++) {
        wide weights[2];
#pragma GCC unroll 2
        for (int group = 0; group < groups; group++) weights[group] = widened(b + i * b_row + group * WIDE);
        __builtin_prefetch(b + i * b_row + AHEAD_OUTPUTS);
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            const wide value = spread(near[row * rank + i]);
#pragma GCC unroll 2
            for (int group = 0; group < groups; group++) sums[row][group] = fused(value, weights[group], sums[row][group]);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int group = 0; group < groups; group++) narrow(out + row * out_row + group * WIDE, sums[row][group]);
}

#define EACH(number, tile, ...) case number: if (groups == 2) tile(number, 2, __VA_ARGS__); else tile(number, 1, __VA_ARGS__); break;
#if ROWS_OF_TILE > 6
#define MORE(tile, ...) EACH(5, tile, __VA_ARGS__) EACH(6, tile, __VA_ARGS__) EACH(7, tile, __VA_ARGS__) EACH(8, tile, __VA_ARGS__) \
    EACH(9, tile, __VA_ARGS__) EACH(10, tile, __VA_ARGS__) EACH(11, tile, __VA_ARGS__) EACH(12, tile, __VA_ARGS__)
#elif ROWS_OF_TILE > 4
#define MORE(tile, ...) EACH(5, tile, __VA_ARGS__) EACH(6, tile, __VA_ARGS__)
#else
#define MORE(tile, ...)
#endif
#define OF_ROWS(tile, ...) \
    switch (rows) { EACH(1, tile, __VA_ARGS__) EACH(2, tile, __VA_ARGS__) EACH(3, tile, __VA_ARGS__) EACH(4, tile, __VA_ARGS__) MORE(tile, __VA_ARGS__) }

static inline float widened_one(half x) {
    const uint32_t bits = (uint32_t)x << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline half narrowed_one(float x) {
    half all[WIDE];
    narrow(all, spread(x));
    return all[0];
}

/* Ranks behind the last whole group are computed one by one, as outputs are. */
static void low_of(int64_t rows, float *near, half *low, int64_t rank, const half *x, int64_t x_row, const half *a, int64_t inputs) {
    int64_t done = 0;
    while (done + WIDE <= rank) {
        const int groups = rank - done >= 2 * WIDE ? 2 : 1;
        OF_ROWS(low_tile, near + done, low + done, rank, x, x_row, a + done, inputs)
        done += groups * WIDE;
    }
    for (; done < rank; done++)
        for (int64_t row = 0; row < rows; row++) {
            float sum = 0.0f;
            for (int64_t i = 0; i < inputs; i++) sum = fused_one(widened_one(x[row * x_row + i]), widened_one(a[i * rank + done]), sum);
            low[row * rank + done] = narrowed_one(sum);
            near[row * rank + done] = widened_one(low[row * rank + done]);
        }
}

static void out_of(int64_t rows, half *out, int64_t out_row, const float *near, int64_t rank, const half *b, int64_t b_row, int64_t outputs, int64_t ranks) {
    int64_t done = 0;
    while (done + WIDE <= outputs) {
        const int groups = outputs - done >= 2 * WIDE ? 2 : 1;
        OF_ROWS(out_tile, out + done, out_row, near, rank, b + done, b_row, ranks)
        done += groups * WIDE;
    }
    for (; done < outputs; done++)
        for (int64_t row = 0; row < rows; row++) {
            float sum = widened_one(out[row * out_row + done]);
            for (int64_t i = 0; i < ranks; i++) sum = fused_one(near[row * rank + i], widened_one(b[i * b_row + done]), sum);
            out[row * out_row + done] = narrowed_one(sum);
        }
}

/* The outputs of a target that no tile looks ahead to. */
static inline void bring_near(const half *b, int64_t b_row, const target *of) {
    for (int64_t i = 0; i < of->ranks; i++)
        for (int64_t done = 0; done < MIN(AHEAD_OUTPUTS, of->outputs); done += PANEL) __builtin_prefetch(b + i * b_row + done);
}

/* As `add_updates`; `near` has room for the ranks of ROWS_OF_TILE rows for each of the threads. */
void add_half_updates(
    half *out, int64_t out_row, const half *x, int64_t x_row, const update *updates, int64_t count, int64_t outputs, int64_t inputs, int64_t threads,
    int64_t work, float *near, int64_t near_floats) {
    const target *targets = (const target *)(updates + count);
    const int64_t blocks = blocks_of(updates, count);
#pragma omp parallel for schedule(static) num_threads(threads) if (work > (int64_t)ALONE * PANEL)
    for (int64_t unit = 0; unit < blocks; unit++) {
        int64_t row;
        const update *of = update_of(updates, unit, &row);
        const int64_t rows = MIN(ROWS_OF_TILE, of->rows - row), first = of->first + row;
        float *own = near + omp_get_thread_num() * near_floats;
        for (const target *one = targets + of->first_target, *end = one + of->targets; one < end; one++)
            bring_near((const half *)of->b + one->first_rank * outputs + one->first_output, outputs, one);
        low_of(rows, own, (half *)of->low + row * of->rank, of->rank, x + first * x_row, x_row, (const half *)of->a, inputs);
        for (const target *one = targets + of->first_target, *end = one + of->targets; one < end; one++)
            out_of(rows, out + first * out_row + one->first_output, out_row, own + one->first_rank, of->rank,
                   (const half *)of->b + one->first_rank * outputs + one->first_output, outputs, one->outputs, one->ranks);
    }
}
