/* Low-rank updates of products, and their gradients, in float32 (`tile.h`). Each update has rows of its own, and its numbers depend on nothing else.

   The factors of several targets may be joined in one update, each with ranks and outputs of its own: between those of one and of another `b` is
   zero, and nothing is computed. */

#include <omp.h>

#include "call.h"
#include "tile.h"
#include "update.h"

/* out += (x @ a) @ b, of every update's rows; behind the updates lie their targets. */
void add_updates(
    float *out, int64_t out_row, const float *x, int64_t x_row, const update *updates, int64_t count, int64_t outputs, int64_t inputs, int64_t threads,
    int64_t work) {
    const target *targets = (const target *)(updates + count);
    const int64_t blocks = blocks_of(updates, count);
#pragma omp parallel for schedule(static) num_threads(threads) if (work > (int64_t)ALONE * PANEL)
    for (int64_t unit = 0; unit < blocks; unit++) {
        int64_t row;
        const update *of = update_of(updates, unit, &row);
        const int64_t rows = MIN(ROWS_OF_TILE, of->rows - row), first = of->first + row;
        float *low = (float *)of->low + row * of->rank;
        panels_of(rows, of->rank, low, of->rank, (matrix){x + first * x_row, x_row, 1}, of->a, of->rank, inputs, 0);
        for (const target *one = targets + of->first_target, *end = one + of->targets; one < end; one++)
            panels_of(rows, one->outputs, out + first * out_row + one->first_output, out_row, (matrix){low + one->first_rank, of->rank, 1},
                      (const float *)of->b + one->first_rank * outputs + one->first_output, outputs, one->ranks, 1);
    }
}

/* Factors as in `update`, and their gradients in the same layouts; those of `b` between targets are left as they are. */
typedef struct {
    const float *a, *b;
    float *grad_a, *grad_b;
    int64_t first_target, targets;
} pair;

static inline int64_t panel_count(int64_t count) { return (count + PANEL - 1) / PANEL; }

/* What panels of the ranks of all targets before one of them take: each is as long as its target has outputs. */
static int64_t floats_before(const target *first, const target *one) {
    int64_t floats = 0;
    for (; first < one; first++) floats += panel_count(first->ranks) * PANEL * first->outputs;
    return floats;
}

/* What reaches `x`, beside what is there, and the factors of `count` updates of `rows` rows each, one behind the other; `grad_x` may be NULL. `low` as
   `add_updates` leaves it; `grad_low` has as many rows, which are a panel longer; `scratch` has `room` for the factors of each pair: the ranks of every
   target of `b`, and the inputs of `a`, in whole panels. */
void update_gradients(
    float *grad_x, int64_t grad_x_row, const float *grad, int64_t grad_row, const float *x, int64_t x_row, const float *low, const pair *pairs, int64_t count,
    int64_t rows, int64_t rank, int64_t outputs, int64_t inputs, float *grad_low, float *scratch, int64_t room, int64_t threads) {
    const target *targets = (const target *)(pairs + count);
    const int64_t i_panels = panel_count(inputs), a_panels = grad_x ? i_panels : 0, g_panels = panel_count(outputs);
    const int64_t blocks = (rows + ROWS_OF_TILE - 1) / ROWS_OF_TILE, low_row = rank + PANEL;
    int64_t most = 0;
    for (int64_t each = 0; each < count; each++) most = MAX(most, pairs[each].targets);
#pragma omp parallel num_threads(threads) if (count * rows * rank * (inputs + outputs) > (int64_t)ALONE * PANEL)
    {
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < count * (most + a_panels); unit++) {
            const pair *of = pairs + unit / (most + a_panels);
            const target *first = targets + of->first_target;
            const int64_t number = unit % (most + a_panels);
            float *own = scratch + (of - pairs) * room;
            if (number >= most) {
                const int64_t done = PANEL * (number - most);
                pack_panel(own + room - a_panels * PANEL * rank + done * rank, of->a + done * rank, rank, MIN(PANEL, inputs - done), rank);
            } else if (number < of->targets) {
                const target *one = first + number;
                for (int64_t done = 0; done < one->ranks; done += PANEL)
                    pack_panel(own + floats_before(first, one) + done * one->outputs, of->b + (one->first_rank + done) * outputs + one->first_output, outputs,
                               MIN(PANEL, one->ranks - done), one->outputs);
            }
        }
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < count * blocks; unit++) {
            const int64_t each = unit / blocks, block = unit % blocks * ROWS_OF_TILE, row = each * rows + block, own = MIN(ROWS_OF_TILE, rows - block);
            const float *b = scratch + each * room, *a = b + room - a_panels * PANEL * rank;
            const target *first = targets + pairs[each].first_target;
            float *grad_own = grad_low + row * low_row;
            for (int64_t number = 0; number < own; number++) memset(grad_own + number * low_row, 0, low_row * sizeof(float));
            /* In the order of ranks: whole groups are written, of which the next target's ranks take their own back. */
            for (const target *one = first; one < first + pairs[each].targets; one++)
                for (int64_t done = 0; done < one->ranks; done += PANEL)
                    panel_of(own, MIN(PANEL, (one->ranks - done + WIDE - 1) / WIDE * WIDE), grad_own + one->first_rank + done, low_row,
                             (matrix){grad + row * grad_row + one->first_output, grad_row, 1}, b + floats_before(first, one) + done * one->outputs, PANEL, one->outputs, 0);
            for (int64_t done = 0; done < a_panels * PANEL; done += PANEL)
                panel_of(own, MIN(PANEL, inputs - done), grad_x + row * grad_x_row + done, grad_x_row, (matrix){grad_own, low_row, 1}, a + done * rank, PANEL, rank, 1);
        }
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < count * (i_panels + g_panels); unit++) {
            const int64_t each = unit / (i_panels + g_panels), number = unit % (i_panels + g_panels), row = each * rows;
            const pair *of = pairs + each;
            if (number < i_panels) {
                const int64_t done = number * PANEL;
                panels_of(MIN(PANEL, inputs - done), rank, of->grad_a + done * rank, rank, (matrix){x + row * x_row + done, 1, x_row},
                          grad_low + row * low_row, low_row, rows, 0);
                continue;
            }
            const int64_t done = (number - i_panels) * PANEL;
            for (const target *one = targets + of->first_target, *end = one + of->targets; one < end; one++) {
                const int64_t from = MAX(done, one->first_output), to = MIN(done + PANEL, one->first_output + one->outputs);
                if (from < to)
                    panel_of(one->ranks, to - from, of->grad_b + one->first_rank * outputs + from, outputs, (matrix){low + row * rank + one->first_rank, 1, rank},
                             grad + row * grad_row + from, grad_row, rows, 0);
            }
        }
    }
}

CALL(add_updates, P(0), I(1), P(2), I(3), P(4), I(5), I(6), I(7), I(8), I(9))
