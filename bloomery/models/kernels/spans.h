/* Where sequences stand among packed rows. */

#include <stdint.h>

/* Tokens `start` to `start + count - 1` of the sequence in `slot` stand in the rows from `row` on. */
typedef struct {
    int64_t row, slot, start, count;
} span;
