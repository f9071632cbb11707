/* Low-rank updates of products, and their gradients, in float32 (`tile.h`). Each update has rows of its own, and its numbers depend on nothing else. */

#include <omp.h>

#include "call.h"
#include "tile.h"

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
        float *low = of->low + row * of->rank;
        panels_of(rows, of->rank, low, of->rank, (matrix){x + first * x_row, x_row, 1}, of->a, of->rank, inputs, 0);
        panels_of(rows, outputs, out + first * out_row, out_row, (matrix){low, of->rank, 1}, of->b, outputs, of->rank, 1);
    }
}

/* Factors as in `update`, and their gradients in the same layouts. */
typedef struct {
    const float *a, *b;
    float *grad_a, *grad_b;
} pair;

/* What reaches `x`, beside what is there, and the factors of `count` updates of `rows` rows each, one behind the other; `grad_x` may be NULL. `low` as
   `add_updates` leaves it; `grad_low` has the same size, and `scratch` room for every pair's factors, the rank of `b` and the inputs of `a` in whole
   panels. */
void update_gradients(
    float *grad_x, int64_t grad_x_row, const float *grad, int64_t grad_row, const float *x, int64_t x_row, const float *low, const int64_t *pairs, int64_t count,
    int64_t rows, int64_t rank, int64_t outputs, int64_t inputs, float *grad_low, float *scratch, int64_t threads) {
    const pair *of = (const pair *)pairs;
    const int64_t b_panels = (rank + PANEL - 1) / PANEL, a_panels = grad_x ? (inputs + PANEL - 1) / PANEL : 0, g_panels = (outputs + PANEL - 1) / PANEL;
    const int64_t i_panels = (inputs + PANEL - 1) / PANEL, blocks = (rows + ROWS_OF_TILE - 1) / ROWS_OF_TILE;
    const int64_t room = b_panels * PANEL * outputs + i_panels * PANEL * rank;
#pragma omp parallel num_threads(threads) if (count * rows * rank * (inputs + outputs) > (int64_t)ALONE * PANEL)
    {
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < count * (b_panels + a_panels); unit++) {
            const int64_t each = unit / (b_panels + a_panels), number = unit % (b_panels + a_panels), done = PANEL * (number < b_panels ? number : number - b_panels);
            float *own = scratch + each * room;
            if (number < b_panels)
                pack_panel(own + done * outputs, of[each].b + done * outputs, outputs, MIN(PANEL, rank - done), outputs);
            else
                pack_panel(own + b_panels * PANEL * outputs + done * rank, of[each].a + done * rank, rank, MIN(PANEL, inputs - done), rank);
        }
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < count * blocks; unit++) {
            const int64_t each = unit / blocks, first = unit % blocks * ROWS_OF_TILE, row = each * rows + first, own = MIN(ROWS_OF_TILE, rows - first);
            const float *b = scratch + each * room, *a = b + b_panels * PANEL * outputs;
            float *grad_own = grad_low + row * rank;
            for (int64_t done = 0; done < rank; done += PANEL)
                panel_of(own, MIN(PANEL, rank - done), grad_own + done, rank, (matrix){grad + row * grad_row, grad_row, 1}, b + done * outputs, PANEL, outputs, 0);
            for (int64_t done = 0; done < a_panels * PANEL; done += PANEL)
                panel_of(own, MIN(PANEL, inputs - done), grad_x + row * grad_x_row + done, grad_x_row, (matrix){grad_own, rank, 1}, a + done * rank, PANEL, rank, 1);
        }
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < count * (i_panels + g_panels); unit++) {
            const int64_t each = unit / (i_panels + g_panels), number = unit % (i_panels + g_panels), row = each * rows;
            if (number < i_panels) {
                const int64_t done = number * PANEL;
                panels_of(MIN(PANEL, inputs - done), rank, of[each].grad_a + done * rank, rank, (matrix){x + row * x_row + done, 1, x_row},
                          grad_low + row * rank, rank, rows, 0);
            } else {
                const int64_t done = (number - i_panels) * PANEL;
                panel_of(rank, MIN(PANEL, outputs - done), of[each].grad_b + done, outputs, (matrix){low + row * rank, 1, rank}, grad + row * grad_row + done,
                         grad_row, rows, 0);
            }
        }
    }
}

CALL(add_updates, P(0), I(1), P(2), I(3), P(4), I(5), I(6), I(7), I(8), I(9))
