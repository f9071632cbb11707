/* The pointwise parts of a block, the reduction of the head and the draw of tokens, in float32, each in one pass over its rows.

   A row's numbers depend on nothing but the row: sums have LANES partial sums in a fixed order, and nothing is contracted or reordered
   (-ffp-contract=off, no -ffast-math), so a row has the same bits with every processor and number of threads.

   Rows of `x` are `row_stride` floats apart, their heads `head_stride`, and a head is `dim` floats in a row; what is written is contiguous.
   Formulas: RMSNorm (arXiv 1910.07467), RoFormer (arXiv 2104.09864), SwiGLU (arXiv 2002.05202). */

#include <stdint.h>
#include <string.h>

#define LANES 8
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* Less work than this does not pay for waking threads. */
#define ALONE (1 << 15)
#define ROWS _Pragma("omp parallel for schedule(static) if (rows > 1 && rows * width > ALONE)") for (int64_t row = 0; row < rows; row++)

static inline lanes at(const float *x) { lanes v; memcpy(&v, x, sizeof v); return v; }
static inline void put(float *x, lanes v) { memcpy(x, &v, sizeof v); }
static inline lanes all(float x) { return (lanes){} + x; }
static inline lanes some(const float *x, int64_t count) { lanes v = {}; memcpy(&v, x, count * sizeof(float)); return v; }
static inline lanes chosen(ints where, lanes yes, lanes no) { return (lanes)((where & (ints)yes) | (~where & (ints)no)); }

static inline float sum(lanes v) {
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) v[lane] += v[lane + half];
    return v[0];
}

static inline float largest(lanes v) {
    float most = v[0];
    for (int lane = 1; lane < LANES; lane++) most = v[lane] > most ? v[lane] : most;
    return most;
}

/* exp(x), within 2 units in the last place: x = n ln 2 + r, and a polynomial of r (Cephes, expf). 0 below the smallest normal number, infinity
   from exp(88.38) on. */
static inline lanes exponential(lanes x) {
    const lanes magic = all(12582912.0f), most = all(88.3762626f), least = all(-87.3365448f);
    ints below = x < least, above = x > most;
    x = chosen(above, most, x);
    x = chosen(below, least, x);
    lanes n = (x * 1.44269504088896341f + magic) - magic;
    lanes r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    lanes p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r) * r + r + 1.0f;
    ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return chosen(above, all(__builtin_inff()), chosen(below, (lanes){}, p * (lanes)power));
}

static inline lanes sigmoid(lanes x) { return 1.0f / (1.0f + exponential(-x)); }

/* Groups of lanes; the last has `count` that are of use, and others that are 0 where it is read and are not written. */
#define ALONG(width) for (int64_t i = 0, count; (count = (width) - i < LANES ? (width) - i : LANES) > 0; i += LANES)
#define GET(x) (count == LANES ? at((x) + i) : some((x) + i, count))
#define SET(x, v) set((x) + i, v, count)

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
#error "native.py says how large a block is"
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

/* The weights exp(x) of a block; returns `before` with all of them added, one after the other. */
static double weigh(float *weights, const float *x, int64_t width, double before) {
    ALONG(width) SET(weights, exponential(GET(x)));
    for (int64_t place = 0; place < width; place++) before += weights[place];
    return before;
}

/* Where in exp(x), laid end to end in the order of the columns and added up in float64, the numbers from 0 to 1 of every row fall. What has no
   weight is found by none. `sums` has room for a number per block of every row. */
void invert(int64_t *out, const float *x, const double *numbers, double *sums, int64_t rows, int64_t width, int64_t draws) {
    const int64_t blocks = (width + BLOCK - 1) / BLOCK;
    ROWS {
        const float *own = x + row * width;
        double *mass = sums + row * blocks, whole = 0;
        float weights[BLOCK];
        for (int64_t block = 0; block < blocks; block++)
            mass[block] = whole = weigh(weights, own + block * BLOCK, width - block * BLOCK < BLOCK ? width - block * BLOCK : BLOCK, whole);
        for (int64_t draw = 0; draw < draws; draw++) {
            const double target = numbers[row * draws + draw] * whole;
            int64_t block = 0;
            while (block < blocks - 1 && !(mass[block] > target)) block++;
            /* Rounded up to the whole: the last that has weight. */
            while (block && !(mass[block] > mass[block - 1])) block--;
            const int64_t size = width - block * BLOCK < BLOCK ? width - block * BLOCK : BLOCK;
            double before = block ? mass[block - 1] : 0;
            weigh(weights, own + block * BLOCK, size, 0);
            int64_t found = 0;
            while (found < size && !((before += weights[found]) > target)) found++;
            if (found == size)
                for (found = size - 1; found && !(weights[found] > 0);) found--;
            out[row * draws + draw] = block * BLOCK + found;
        }
    }
}
