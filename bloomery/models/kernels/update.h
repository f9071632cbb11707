/* Low-rank updates of the rows of a product, and which rows are computed together. */

#pragma once

typedef struct {
    int64_t first_rank, ranks, first_output, outputs;
} target;

/* Neighbouring rows and the factors of a low-rank update of them: `a` [inputs, rank] and `b` [rank, outputs]. `low` [rows, rank] gets x @ a. Of all targets
   those are its own that begin with `first_target`, in the order of their ranks. */
typedef struct {
    int64_t first, rows, rank;
    const void *a, *b;
    void *low;
    int64_t first_target, targets;
} update;

static inline int64_t tiles_of(const update *of) { return (of->rows + ROWS_OF_TILE - 1) / ROWS_OF_TILE; }

/* Rows that are computed together, of all updates. */
static inline int64_t blocks_of(const update *updates, int64_t count) {
    int64_t blocks = 0;
    for (int64_t each = 0; each < count; each++) blocks += tiles_of(updates + each);
    return blocks;
}

/* Whose a block is, and its first row there. */
static inline const update *update_of(const update *updates, int64_t block, int64_t *row) {
    int64_t own;
    for (; block >= (own = tiles_of(updates)); updates++) block -= own;
    *row = block * ROWS_OF_TILE;
    return updates;
}
