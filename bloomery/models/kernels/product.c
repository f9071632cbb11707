/* Products of rows with matrices, in float32 (`tile.h`).

   Of a matrix that was packed a panel lies in one piece, with zeros behind the last output; of one whose rows are the inputs a panel is some columns. So
   a matrix is told by the floats from panel to panel and from i to i. */

#include <omp.h>

#include "call.h"
#include "tile.h"

/* Rows whose inputs stay in the cache while panel after panel is read. */
#define NEAR_ROWS (8 * ROWS_OF_TILE)
/* Inputs of so many rows that do. */
#define NEAR_INPUTS 1024
/* Inputs of panels of which two fit into the cache that a processor has for itself. */
#define LATER_INPUTS 4096
/* Rows of which the nearest cache has all lines, however far from each other they lie: of those that are 4 KB apart it keeps no more than it has ways. */
#define WAYS 8

/* Where rows lie as far apart as the nearest cache keeps them all: an odd number of lines. */
static _Thread_local float near[NEAR_ROWS * (NEAR_INPUTS + LINE)] __attribute__((aligned(4 * LINE)));

/* `inputs` of rows, copied to `near`. */
static matrix nearer(matrix x, int64_t rows, int64_t inputs) {
    const int64_t row = ((inputs + LINE - 1) / LINE | 1) * LINE;
    for (int64_t each = 0; each < rows; each++) memcpy(near + each * row, x.first + each * x.row, inputs * sizeof(float));
    return (matrix){near, row, 1};
}

/* out = x @ w. */
void product(
    float *out, int64_t out_row, const float *x, int64_t x_row, const float *w, int64_t panel, int64_t input, int64_t rows, int64_t outputs, int64_t inputs,
    int64_t threads) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    const int64_t most = rows > WAYS ? (NEAR_ROWS / MIN(rows, NEAR_ROWS) * (NEAR_INPUTS / LINE + 1) - 1) * LINE : MAX(inputs, 1);
    for (int64_t first = 0; first == 0 || first < inputs; first += most) {
        const int64_t own = MIN(most, inputs - first), follows = input == PANEL && own <= LATER_INPUTS;
#pragma omp parallel num_threads(threads) if (rows * outputs * inputs > (int64_t)ALONE * PANEL)
        {
            int64_t copied = -1;
            matrix of = {0};
#pragma omp for collapse(2) schedule(static)
            for (int64_t row = 0; row < rows; row += NEAR_ROWS)
                for (int64_t number = 0; number < panels; number++) {
                    if (row != copied) {
                        of = (matrix){x + row * x_row + first, x_row, 1}, copied = row;
                        if (rows > WAYS) of = nearer(of, MIN(NEAR_ROWS, rows - row), own);
                    }
                    panel_before(MIN(NEAR_ROWS, rows - row), MIN(PANEL, outputs - number * PANEL), out + row * out_row + number * PANEL, out_row, of,
                                 w + number * panel + first * input, input, own, first > 0,
                                 follows && number + 1 < panels ? w + (number + 1) * panel + first * input : 0);
                }
        }
    }
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
        panel_of(rows, own, out + number * PANEL, out_row, (matrix){x, x_row, 1}, panel, PANEL, inputs, 0);
    }
}

CALL(product, P(0), I(1), P(2), I(3), P(4), I(5), I(6), I(7), I(8), I(9), I(10))
CALL(product_unpacked, P(0), I(1), P(2), I(3), P(4), I(5), I(6), I(7), I(8), P(9), I(10))
