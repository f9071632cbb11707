/* Groups of float32 that are computed together.

   A row's numbers depend on nothing but the row: sums have LANES partial sums in a fixed order, and nothing is contracted or reordered
   (-ffp-contract=off, no -ffast-math), so a row has the same bits with every processor and number of threads. */

#include <stdint.h>
#include <string.h>

#define LANES 8
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* Less work than this does not pay for waking threads. */
#define ALONE (1 << 15)

static inline lanes at(const float *x) { lanes v; memcpy(&v, x, sizeof v); return v; }
static inline void put(float *x, lanes v) { memcpy(x, &v, sizeof v); }
static inline lanes all(float x) { return (lanes){} + x; }
static inline lanes some(const float *x, int64_t count) { lanes v = {}; memcpy(&v, x, count * sizeof(float)); return v; }
static inline lanes chosen(ints where, lanes yes, lanes no) { return (lanes)((where & (ints)yes) | (~where & (ints)no)); }

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

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
