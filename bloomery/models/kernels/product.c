/* Products of rows with matrices, in float32 (`tile.h`).

   Of a matrix that was packed a panel lies in one piece, with zeros behind the last output; of one whose rows are the inputs a panel is some columns. So
   a matrix is told by the floats from panel to panel and from i to i. */

#include <omp.h>

#include "call.h"
#include "tile.h"

/* out = x @ w. */
void product(
    float *out, int64_t out_row, const float *x, int64_t x_row, const float *w, int64_t panel, int64_t input, int64_t rows, int64_t outputs, int64_t inputs,
    int64_t threads) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (rows * outputs * inputs > (int64_t)ALONE * PANEL)
    for (int64_t row = 0; row < rows; row += NEAR_ROWS)
        for (int64_t number = 0; number < panels; number++)
            panel_of(MIN(NEAR_ROWS, rows - row), MIN(PANEL, outputs - number * PANEL), out + row * out_row + number * PANEL, out_row,
                     (matrix){x + row * x_row, x_row, 1}, w + number * panel, input, inputs, 0);
}

/* All panels of such a matrix. */
void pack(float *to, const float *w, int64_t w_row, int64_t outputs, int64_t inputs, int64_t threads) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads) if (outputs * inputs > ALONE)
    for (int64_t number = 0; number < panels; number++)
        pack_panel(to + number * PANEL * inputs, w + number * PANEL * w_row, w_row, MIN(PANEL, outputs - number * PANEL), inputs);
}

/* out = x @ w.T of such a matrix, or x @ w of one whose rows are the inputs, `group` panels after the others: packed by a thread that multiplies the
   rows with them while they are in its cache. `scratch` has room for a group for each of the threads. */
static void by_groups(
    float *out, int64_t out_row, const float *x, int64_t x_row, const float *w, int64_t w_row, int64_t rows, int64_t outputs, int64_t inputs, float *scratch,
    int64_t group, int64_t threads, int rows_are_inputs) {
    const int64_t wide = group * PANEL;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * outputs * inputs > (int64_t)ALONE * PANEL)
    for (int64_t first = 0; first < outputs; first += wide) {
        const int64_t stop = MIN(outputs, first + wide);
        float *panels = scratch + omp_get_thread_num() * wide * inputs;
        for (int64_t output = first; output < stop; output += PANEL) {
            float *panel = panels + (output - first) * inputs;
            const int64_t own = MIN(PANEL, stop - output);
            if (!rows_are_inputs) pack_panel(panel, w + output * w_row, w_row, own, inputs);
            else
                for (int64_t i = 0; i < inputs; i++) memcpy(panel + i * PANEL, w + i * w_row + output, own * sizeof(float));
        }
        for (int64_t row = 0; row < rows; row += NEAR_ROWS)
            for (int64_t output = first; output < stop; output += PANEL)
                panel_of(MIN(NEAR_ROWS, rows - row), MIN(PANEL, stop - output), out + row * out_row + output, out_row, (matrix){x + row * x_row, x_row, 1},
                         panels + (output - first) * inputs, PANEL, inputs, 0);
    }
}

void product_unpacked(
    float *out, int64_t out_row, const float *x, int64_t x_row, const float *w, int64_t w_row, int64_t rows, int64_t outputs, int64_t inputs, float *scratch,
    int64_t group, int64_t threads) {
    by_groups(out, out_row, x, x_row, w, w_row, rows, outputs, inputs, scratch, group, threads, 0);
}

void product_of_rows(
    float *out, int64_t out_row, const float *x, int64_t x_row, const float *w, int64_t w_row, int64_t rows, int64_t outputs, int64_t inputs, float *scratch,
    int64_t group, int64_t threads) {
    by_groups(out, out_row, x, x_row, w, w_row, rows, outputs, inputs, scratch, group, threads, 1);
}

CALL(product, P(0), I(1), P(2), I(3), P(4), I(5), I(6), I(7), I(8), I(9), I(10))
