/* The pointwise parts of a block, the reduction of the head and the draw of tokens, each in one pass over its rows.

   Rows of `x` are `row_stride` floats apart, their heads `head_stride`, and a head is `dim` floats in a row; what is written is contiguous.
   Formulas: RMSNorm (arXiv 1910.07467), RoFormer (arXiv 2104.09864), SwiGLU (arXiv 2002.05202). */

#include "call.h"
#include "lanes.h"

#define ROWS _Pragma("omp parallel for schedule(static) if (rows > 1 && rows * width > ALONE)") for (int64_t row = 0; row < rows; row++)

static inline lanes sigmoid(lanes x) { return 1.0f / (1.0f + exponential(-x)); }

/* Groups of lanes; the last has `count` that are of use, and others that are 0 where it is read and are not written. */
#define ALONG(width) for (int64_t i = 0, count; (count = (width) - i < LANES ? (width) - i : LANES) > 0; i += LANES)
#define GET(x) (count == LANES ? at((x) + i) : some((x) + i, count))
#define SET(x, v) set((x) + i, v, count)

/* Of a weight, that one thread adds up gradients of. */
#define COLUMNS 64

static inline void set(float *x, lanes v, int64_t count) {
    if (count == LANES) put(x, v);
    else memcpy(x, &v, count * sizeof(float));
}

/* out = x * scale * weight, scale = 1 / sqrt(mean(x^2) + eps); `scale` [rows, heads] may be NULL. */
void rms_norm(
    float *out, float *scale, const float *x, int64_t row_stride, int64_t head_stride, const float *weight, int64_t rows, int64_t heads, int64_t dim,
    float eps) {
    const int64_t width = heads * dim;
    ROWS for (int64_t head = 0; head < heads; head++) {
        const float *own = x + row * row_stride + head * head_stride;
        float *to = out + row * width + head * dim;
        lanes squares = {};
        ALONG(dim) squares += GET(own) * GET(own);
        const float factor = 1.0f / __builtin_sqrtf(sum(squares) / (float)dim + eps);
        ALONG(dim) SET(to, (GET(own) * factor) * GET(weight));
        if (scale) scale[row * heads + head] = factor;
    }
}

/* out = x + y; rows of `y` are `y_row` floats apart, which may be none. */
void add(float *out, const float *x, const float *y, int64_t y_row, int64_t rows, int64_t width) {
    ROWS ALONG(width) SET(out + row * width, GET(x + row * width) + GET(y + row * y_row));
}

/* grad_x = scale * g - x * scale^3 * mean(g * x), g = grad * weight. */
void rms_norm_backward(
    float *grad_x, const float *grad, const float *x, int64_t row_stride, int64_t head_stride, const float *weight, const float *scale, int64_t rows,
    int64_t heads, int64_t dim) {
    const int64_t width = heads * dim;
    ROWS for (int64_t head = 0; head < heads; head++) {
        const float *own = x + row * row_stride + head * head_stride, *from = grad + row * width + head * dim;
        float *to = grad_x + row * width + head * dim;
        const float factor = scale[row * heads + head];
        lanes along = {};
        ALONG(dim) along += (GET(from) * GET(weight)) * GET(own);
        const float back = sum(along) / (float)dim * (factor * factor * factor);
        ALONG(dim) SET(to, (GET(from) * GET(weight)) * factor - GET(own) * back);
    }
}

/* What reaches the weight: the sum of grad * x * scale over all rows and heads, some of them after the other. Threads have columns of their own. */
void rms_norm_weight_gradient(
    float *grad_weight, const float *grad, const float *x, int64_t row_stride, int64_t head_stride, const float *scale, int64_t rows, int64_t heads,
    int64_t dim) {
#pragma omp parallel for schedule(static) if (rows * heads * dim > ALONE)
    for (int64_t first = 0; first < dim; first += COLUMNS) {
        lanes totals[COLUMNS / LANES] = {};
        for (int64_t begin = 0; begin < rows; begin += BLOCK) {
            lanes sums[COLUMNS / LANES] = {};
            for (int64_t row = begin; row < rows && row < begin + BLOCK; row++)
                for (int64_t head = 0; head < heads; head++) {
                    const float *own = x + row * row_stride + head * head_stride + first, *from = grad + (row * heads + head) * dim + first;
                    const float factor = scale[row * heads + head];
                    ALONG(dim - first < COLUMNS ? dim - first : COLUMNS) sums[i / LANES] += GET(from) * (GET(own) * factor);
                }
            for (int64_t i = 0; i < COLUMNS / LANES; i++) totals[i] += sums[i];
        }
        ALONG(dim - first < COLUMNS ? dim - first : COLUMNS) SET(grad_weight + first, totals[i / LANES]);
    }
}

/* The two halves of every head, turned; `sign` -1 turns back. */
void rotate(
    float *out, const float *x, int64_t row_stride, int64_t head_stride, const float *cosine, const float *sine, float sign, int64_t rows,
    int64_t heads, int64_t dim) {
    const int64_t width = heads * dim, half = dim / 2;
    ROWS for (int64_t head = 0; head < heads; head++) {
        const float *first = x + row * row_stride + head * head_stride, *second = first + half, *c = cosine + row * half, *s = sine + row * half;
        float *to = out + row * width + head * dim;
        ALONG(half) {
            const lanes a = GET(first), b = GET(second), cos = GET(c), sin = GET(s) * sign;
            SET(to, a * cos - b * sin);
            SET(to + half, b * cos + a * sin);
        }
    }
}

/* out = silu(gate) * up; a row of `gate_up` holds both, one behind the other. */
void swiglu(float *out, const float *gate_up, int64_t rows, int64_t inner) {
    const int64_t width = inner;
    ROWS {
        const float *gate = gate_up + row * 2 * inner, *up = gate + inner;
        float *to = out + row * inner;
        ALONG(inner) SET(to, (GET(gate) * sigmoid(GET(gate))) * GET(up));
    }
}

void swiglu_backward(float *grad_gate_up, const float *grad, const float *gate_up, int64_t rows, int64_t inner) {
    const int64_t width = inner;
    ROWS {
        const float *gate = gate_up + row * 2 * inner, *up = gate + inner, *from = grad + row * inner;
        float *to = grad_gate_up + row * 2 * inner;
        ALONG(inner) {
            const lanes v = GET(gate), share = sigmoid(v), wanted = GET(from);
            SET(to, (wanted * GET(up)) * (share * (1.0f + v * (1.0f - share))));
            SET(to + inner, wanted * (v * share));
        }
    }
}

/* This many values at a time are added up in float32, and their sums in float64. */
#ifndef BLOCK
#error "native/bindings.py says how large a block is"
#endif

static inline float greatest(const float *x, int64_t width) {
    lanes most = all(x[0]);
    int64_t rest = 0;
    for (; rest + LANES <= width; rest += LANES) most = chosen(at(x + rest) > most, at(x + rest), most);
    float top = largest(most);
    for (; rest < width; rest++) top = x[rest] > top ? x[rest] : top;
    return top;
}

/* The sum of exp(x - top) over a row; where `shares` is given it gets what is added up. */
static inline double mass_of(float *shares, const float *x, float top, int64_t width) {
    double whole = 0;
    for (int64_t start = 0; start < width; start += BLOCK) {
        const float *block = x + start;
        lanes total = {};
        ALONG(width - start < BLOCK ? width - start : BLOCK) {
            const lanes share = exponential(GET(block) - top);
            if (shares) SET(shares + start, share);
            total += count == LANES ? share : some((const float *)&share, count);
        }
        whole += sum(total);
    }
    return whole;
}

/* log(sum(exp(x))) of every row. */
void logsumexp(float *out, const float *x, int64_t rows, int64_t width) {
    ROWS {
        const float top = greatest(x + row * width, width);
        out[row] = top + (float)__builtin_log(mass_of(0, x + row * width, top, width));
    }
}

/* out = -softmax(x) * mass: what the logarithm takes back from every logit, where the log-probabilities' gradients add up to `mass`. */
void softmax_gradient(float *out, const float *x, const float *mass, int64_t rows, int64_t width) {
    ROWS {
        const float *own = x + row * width;
        float *to = out + row * width;
        const float factor = (float)(-mass[row] / mass_of(to, own, greatest(own, width), width));
        ALONG(width) SET(to, GET(to) * factor);
    }
}

/* What tokens are drawn from: exp(x - top), laid end to end in the order of the columns and added up in float64. */
typedef struct {
    const float *x;
    float top;
    int64_t width;
} line;

/* The weights of a block of columns; returns `before` with all of them added, one after the other. `mass` grows as `mass_of` adds them up. */
static inline double weigh(float *weights, const line *of, int64_t block, double before, double *mass) {
    const float *x = of->x + block * BLOCK;
    const int64_t width = of->width - block * BLOCK < BLOCK ? of->width - block * BLOCK : BLOCK;
    lanes total = {};
    ALONG(width) {
        const lanes share = exponential(GET(x) - of->top);
        SET(weights, share);
        total += count == LANES ? share : some((const float *)&share, count);
    }
    *mass += sum(total);
    for (int64_t place = 0; place < width; place++) before += weights[place];
    return before;
}

/* The mass up to the end of each block goes to `sums`; returns the whole. */
static double mass_by_block(double *sums, const line *of, double *mass) {
    float weights[BLOCK];
    double whole = 0;
    for (int64_t block = 0; block * BLOCK < of->width; block++) sums[block] = whole = weigh(weights, of, block, whole, mass);
    return whole;
}

/* The column in whose share of the whole a number from 0 to 1 falls. What has no weight is found by none. */
static int64_t found_at(double number, const double *sums, double whole, const line *of) {
    const double target = number * whole;
    const int64_t blocks = (of->width + BLOCK - 1) / BLOCK;
    float weights[BLOCK];
    int64_t block = 0;
    while (block < blocks - 1 && !(sums[block] > target)) block++;
    /* Rounded up to the whole: the last that has weight. */
    while (block && !(sums[block] > sums[block - 1])) block--;
    const int64_t size = of->width - block * BLOCK < BLOCK ? of->width - block * BLOCK : BLOCK;
    double before = block ? sums[block - 1] : 0, mass = 0;
    weigh(weights, of, block, 0, &mass);
    int64_t found = 0;
    while (found < size && !((before += weights[found]) > target)) found++;
    if (found == size)
        for (found = size - 1; found && !(weights[found] > 0);) found--;
    return block * BLOCK + found;
}

/* Where the numbers of every row fall in exp(x). `sums` has room for a number per block of every row. */
void invert(int64_t *out, const float *x, const double *numbers, double *sums, int64_t rows, int64_t width, int64_t draws) {
    const int64_t blocks = (width + BLOCK - 1) / BLOCK;
    ROWS {
        const line own = {x + row * width, 0, width};
        double mass = 0;
        const double whole = mass_by_block(sums + row * blocks, &own, &mass);
        for (int64_t draw = 0; draw < draws; draw++) out[row * draws + draw] = found_at(numbers[row * draws + draw], sums + row * blocks, whole, &own);
    }
}

/* A number between 0 and 1 with 52 bits: Philox4x32-10 (Salmon et al. 2011) of the counter (0, position, sample, 0). */
static double uniform(uint64_t seed, uint64_t position, uint64_t sample) {
    uint32_t counter[4] = {0, position, sample, 0}, key[2] = {seed, seed >> 32};
    for (int round = 0; round < 10; round++) {
        const uint64_t even = counter[0] * (uint64_t)0xD2511F53, odd = counter[2] * (uint64_t)0xCD9E8D57;
        const uint32_t next[4] = {odd >> 32 ^ counter[1] ^ key[0], odd, even >> 32 ^ counter[3] ^ key[1], even};
        memcpy(counter, next, sizeof counter);
        key[0] += 0x9E3779B9;
        key[1] += 0xBB67AE85;
    }
    return ((double)((uint64_t)counter[0] << 20 | counter[1] >> 12) + 0.5) * 0x1p-52;
}

/* A token from every row of logits x, each with its own seed, position and sample; `logs` gets the `logsumexp` of the row, from the same weights. */
void draw(
    int64_t *out, float *logs, const float *x, const uint64_t *seeds, const uint64_t *positions, const uint64_t *samples, double *sums, int64_t rows,
    int64_t width) {
    const int64_t blocks = (width + BLOCK - 1) / BLOCK;
    ROWS {
        const line own = {x + row * width, greatest(x + row * width, width), width};
        double mass = 0;
        const double whole = mass_by_block(sums + row * blocks, &own, &mass);
        logs[row] = own.top + (float)__builtin_log(mass);
        out[row] = found_at(uniform(seeds[row], positions[row], samples[row]), sums + row * blocks, whole, &own);
    }
}

CALL(rms_norm, P(0), P(1), P(2), I(3), I(4), P(5), I(6), I(7), I(8), F(9))
CALL(add, P(0), P(1), P(2), I(3), I(4), I(5))
CALL(rotate, P(0), P(1), I(2), I(3), P(4), P(5), F(6), I(7), I(8), I(9))
CALL(swiglu, P(0), P(1), I(2), I(3))
