// The sums of `state_hash.py` in one pass over the elements: both seeds at once, nothing written but the two sums of each part.
// Parts lie one after the other and end where `stops` says; the keys of the first element of all are of `first` and `other`.

#include <stdint.h>

static inline uint64_t key(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (x ^ (x >> 31)) | 1;
}

// gcc takes vectors of half the width by itself, with which these sums take 1.5 to 2.2 times as long on an Intel Xeon.
#if defined(__AVX512DQ__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST __attribute__((target("prefer-vector-width=512")))
#else
#define WIDEST
#endif

#define SUM(NAME, TYPE)                                                                                        \
    WIDEST void NAME(const TYPE *values, const int64_t *stops, int64_t parts, uint64_t first, uint64_t other, uint64_t *sums) { \
        int64_t start = 0;                                                                                     \
        for (int64_t part = 0; part < parts; part++) {                                                         \
            int64_t stop = stops[part];                                                                        \
            uint64_t one = 0, two = 0;                                                                         \
            for (int64_t i = start; i < stop; i++) {                                                           \
                uint64_t value = values[i];                                                                    \
                one += key(first + (uint64_t)i) * value;                                                       \
                two += key(other + (uint64_t)i) * value;                                                       \
            }                                                                                                  \
            sums[2 * part] = one;                                                                              \
            sums[2 * part + 1] = two;                                                                          \
            start = stop;                                                                                      \
        }                                                                                                      \
    }

SUM(sum_1, uint8_t)
SUM(sum_2, uint16_t)
SUM(sum_4, uint32_t)
SUM(sum_8, uint64_t)

// What the sums of all become more when the elements at `indices` do; differences wrap around like the sums that they go into.
#define CHANGE(NAME, TYPE)                                                                                     \
    void NAME(const uint64_t *indices, const TYPE *old, const TYPE *values, int64_t n, uint64_t first, uint64_t other, uint64_t *sums) { \
        uint64_t one = 0, two = 0;                                                                             \
        for (int64_t i = 0; i < n; i++) {                                                                      \
            uint64_t by = (uint64_t)values[i] - (uint64_t)old[i];                                              \
            one += key(first + indices[i]) * by;                                                               \
            two += key(other + indices[i]) * by;                                                               \
        }                                                                                                      \
        sums[0] = one;                                                                                         \
        sums[1] = two;                                                                                         \
    }

CHANGE(change_1, uint8_t)
CHANGE(change_2, uint16_t)
CHANGE(change_4, uint32_t)
CHANGE(change_8, uint64_t)
