/* The gradients of attention (`attention.c`), in float32.

   A sequence's keys are taken block after block, and to each come the queries that see it, block after block and head after head. So every number is
   added up in an order that its own sequence decides: the rows beside it and the threads change nothing. Weights come back from the logarithms that
   the forward left. Formulas: FlashAttention (arXiv 2205.14135), appendix B. */

#include <omp.h>

#include "spans.h"
#include "tile.h"

#ifndef QUERIES
#error "native/bindings.py says how many queries are computed together"
#endif
/* Keys whose products with them are in the cache at a time. */
#define KEYS (2 * PANEL)

/* What one thread needs, beside a number for every query of a sequence and group of heads. */
typedef struct {
    float *keys, *values, *weights, *grads;
} block;

/* Scores and the gradients of weights become weights and the gradients of scores. `ahead`: how many places the first query is behind the first key. */
static void weigh(
    block of, int64_t queries, int64_t keys, int64_t ahead, int64_t window, float scale, const float *logs, int64_t log_row, const float *means,
    int64_t mean_row) {
    ints places;
    for (int lane = 0; lane < LANES; lane++) places[lane] = lane;
    for (int64_t query = 0; query < queries; query++) {
        const int32_t last = MIN(query + ahead, keys - 1), first = window ? MAX(0, query + ahead - window + 1) : 0;
        const lanes log = all(logs[query * log_row]), mean = all(means[query * mean_row]);
        for (int64_t key = 0; key < keys; key += LANES) {
            float *weight = of.weights + query * KEYS + key, *grad = of.grads + query * KEYS + key;
            const ints place = places + (int32_t)key, seen = (place <= last) & (place >= first);
            const lanes share = chosen(seen, exponential(at(weight) * scale - log), (lanes){});
            put(weight, share);
            put(grad, chosen(seen, share * (at(grad) - mean) * scale, (lanes){}));
        }
    }
}

static void clear(float *x, int64_t row, int64_t rows, int64_t dim) {
    for (int64_t each = 0; each < rows; each++) memset(x + each * row, 0, dim * sizeof(float));
}

/* What reaches q [rows, heads, dim], k and v [rows, kv_heads, dim], each in one piece, from what reaches `out`; `logs` [rows, heads] as `attend` leaves
   them, and spans are whole sequences. `scratch` has `room` floats for each of the threads: `4 * PANEL * dim + 2 * QUERIES * KEYS`, and `heads / kv_heads`
   for each token of the longest span. */
void attend_backward(
    float *grad_q, float *grad_k, float *grad_v, const float *grad, const float *q, int64_t q_row, int64_t q_head, const float *k, int64_t k_row,
    int64_t k_head, const float *v, int64_t v_row, int64_t v_head, const float *out, const float *logs, const int64_t *spans, int64_t count, int64_t heads,
    int64_t kv_heads, int64_t dim, int64_t window, float *scratch, int64_t room, int64_t threads) {
    const float scale = 1.0f / __builtin_sqrtf((float)dim);
    const int64_t group = heads / kv_heads, q_width = heads * dim, k_width = kv_heads * dim;
    int64_t pairs = 0;
    for (int64_t each = 0; each < count; each++) pairs += ((const span *)spans)[each].count * ((const span *)spans)[each].count;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (pairs * heads * dim > ALONE)
    for (int64_t unit = 0; unit < count * kv_heads; unit++) {
        const span of = ((const span *)spans)[unit / kv_heads];
        const int64_t kv_head = unit % kv_heads, first_head = kv_head * group;
        float *own = scratch + omp_get_thread_num() * room;
        const block near = {own, own + KEYS * dim, own + 2 * KEYS * dim, own + 2 * KEYS * dim + QUERIES * KEYS};
        float *means = near.grads + QUERIES * KEYS;
        const float *key_rows = k + of.row * k_row + kv_head * k_head, *value_rows = v + of.row * v_row + kv_head * v_head;
        for (int64_t token = 0; token < of.count; token++)
            for (int64_t member = 0; member < group; member++) {
                const int64_t place = (of.row + token) * q_width + (first_head + member) * dim;
                lanes total = {};
                for (int64_t i = 0; i < dim; i += LANES) total += at(grad + place + i) * at(out + place + i);
                means[token * group + member] = sum(total);
            }
        clear(grad_q + of.row * q_width + first_head * dim, q_width, of.count, group * dim);
        for (int64_t key = 0; key < of.count; key += KEYS) {
            const int64_t keys = MIN(KEYS, of.count - key);
            for (int64_t done = 0; done < keys; done += PANEL) {
                pack_panel(near.keys + done * dim, key_rows + (key + done) * k_row, k_row, MIN(PANEL, keys - done), dim);
                pack_panel(near.values + done * dim, value_rows + (key + done) * v_row, v_row, MIN(PANEL, keys - done), dim);
            }
            float *grad_keys = grad_k + (of.row + key) * k_width + kv_head * dim, *grad_values = grad_v + (of.row + key) * k_width + kv_head * dim;
            clear(grad_keys, k_width, keys, dim);
            clear(grad_values, k_width, keys, dim);
            /* The last query that sees the last key of the block, where there is a window. */
            const int64_t stop = window ? MIN(of.count, key + keys - 1 + window) : of.count;
            for (int64_t head = first_head; head < first_head + group; head++)
                for (int64_t query = key; query < stop; query += QUERIES) {
                    const int64_t queries = MIN(QUERIES, stop - query), row = of.row + query, seen = MIN(keys, query + queries - key);
                    const matrix q_rows = {q + row * q_row + head * q_head, q_row, 1};
                    const float *grad_rows = grad + row * q_width + head * dim;
                    for (int64_t done = 0; done < seen; done += PANEL) {
                        panel_of(queries, PANEL, near.weights + done, KEYS, q_rows, near.keys + done * dim, PANEL, dim, 0);
                        panel_of(queries, PANEL, near.grads + done, KEYS, (matrix){grad_rows, q_width, 1}, near.values + done * dim, PANEL, dim, 0);
                    }
                    weigh(near, queries, seen, query - key, window, scale, logs + row * heads + head, heads, means + query * group + head - first_head, group);
                    panels_of(queries, dim, grad_q + row * q_width + head * dim, q_width, (matrix){near.grads, KEYS, 1}, key_rows + key * k_row, k_row, seen, 1);
                    panels_of(seen, dim, grad_values, k_width, (matrix){near.weights, 1, KEYS}, grad_rows, q_width, queries, 1);
                    panels_of(seen, dim, grad_keys, k_width, (matrix){near.grads, 1, KEYS}, q_rows.first, q_row, queries, 1);
                }
        }
    }
}
