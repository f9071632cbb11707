// What the codecs compute over the elements of a chunk (`plain.py`, `plain_tight.py`): the same numbers, and the same bytes, in one pass over memory.
//
// Little-endian machines only. Nothing that comes from a payload is used as a place before it was held against the end of what it leads into. With
// AVX-512, 64 elements are compared at a time; everything else is C for any processor.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512BW__) && defined(__AVX512DQ__)
#define AVX512
#endif
#if defined(AVX512) || defined(__BMI2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { FAR = 255, CLASSES = 16, STEPS = 8, MOST_ONES = STEPS + 32, TILE = 512, WORDS = TILE / 64, CHUNK_BITS = 21 };

// How far ahead the old elements of changes are fetched, in changes; how many of those are settled at a time. And elements that are gone through at a
// time, and words of those.
enum { AHEAD = 64, BLOCK = 256, SPAN = 4096, SPAN_WORDS = SPAN / 64 };

// As `native.REASONS` names them.
enum { NOWHERE = -1, BEHIND = -2, LENGTH = -3, PADDING = -4, WIDE = -5, SIZE = -6, ENDS = -7, NUMBER = -8, COUNT = -9, FORM = -10, PARAMETER = -11,
       REST = -12, EMPTY = -13, LOWEST = -14, MEMORY = -15 };

// ---- what a state hash becomes more

// Both sums; the keys of the first element are of `first` and `other`. As in state_hash.c.
#ifdef AVX512
typedef struct { __m512i first, other, one, two; } Sums;

static inline Sums sums_from(uint64_t first, uint64_t other) {
    return (Sums){_mm512_set1_epi64((int64_t)first), _mm512_set1_epi64((int64_t)other), _mm512_setzero_si512(), _mm512_setzero_si512()};
}

static inline __m512i keys(__m512i x) {
    x = _mm512_add_epi64(x, _mm512_set1_epi64((int64_t)0x9E3779B97F4A7C15u));
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)), _mm512_set1_epi64((int64_t)0xBF58476D1CE4E5B9u));
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)), _mm512_set1_epi64((int64_t)0x94D049BB133111EBu));
    return _mm512_or_si512(_mm512_xor_si512(x, _mm512_srli_epi64(x, 31)), _mm512_set1_epi64(1));
}

// Of eight elements.
static inline void add_changes(Sums *s, const uint32_t *indices, __m512i by) {
    __m512i at = _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)indices));
    s->one = _mm512_add_epi64(s->one, _mm512_mullo_epi64(keys(_mm512_add_epi64(at, s->first)), by));
    s->two = _mm512_add_epi64(s->two, _mm512_mullo_epi64(keys(_mm512_add_epi64(at, s->other)), by));
}

static inline void sums_to(const Sums *s, uint64_t *sums) {
    uint64_t eight[2][8];
    _mm512_storeu_si512(eight[0], s->one);
    _mm512_storeu_si512(eight[1], s->two);
    sums[0] = sums[1] = 0;
    for (int i = 0; i < 16; i++) sums[i >> 3] += eight[i >> 3][i & 7];
}
#else
typedef struct { uint64_t first, other, one, two; } Sums;

static inline Sums sums_from(uint64_t first, uint64_t other) { return (Sums){first, other, 0, 0}; }

static inline uint64_t key(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (x ^ (x >> 31)) | 1;
}

static inline void sums_to(const Sums *s, uint64_t *sums) {
    sums[0] = s->one;
    sums[1] = s->two;
}
#endif

// ---- bits

typedef struct { uint8_t *to; uint64_t held; int width; } Writer;

static inline void put(Writer *w, uint64_t number, int width) {  // of at most 32 bits
    w->held |= number << w->width;
    w->width += width;
    if (w->width >= 32) {
        uint32_t low = (uint32_t)w->held;
        memcpy(w->to, &low, 4);
        w->to += 4;
        w->held >>= 32;
        w->width -= 32;
    }
}

static inline void put_ones(Writer *w, int ones) {
    if (ones >= 32) {
        put(w, 0xFFFFFFFFu, 32);
        ones -= 32;
    }
    put(w, ((uint64_t)1 << ones) - 1, ones + 1);
}

static inline void put_grown(Writer *w, uint32_t number, int k) {
    uint32_t steps = number >> k;
    if (steps < STEPS) {
        put_ones(w, (int)steps);
        put(w, number & (((uint64_t)1 << k) - 1), k);
    } else {
        int j = 31 - __builtin_clz(steps - (STEPS - 1));
        put_ones(w, STEPS + j);
        put(w, number - ((STEPS - 1 + ((uint64_t)1 << j)) << k), k + j);
    }
}

static void put_count(Writer *w, uint32_t number) {
    int below = 31 - __builtin_clz(number);
    put(w, (uint64_t)below, 5);
    put(w, number - ((uint32_t)1 << below), below);
}

static void finish(Writer *w) {
    for (; w->width > 0; w->width -= 8, w->held >>= 8) *w->to++ = (uint8_t)w->held;
}

// `from` has zeros for 16 bytes behind its end, so that whatever begins before it is read in one piece. An error stays.
typedef struct { const uint8_t *from; uint64_t at, end; int error; } Reader;

static inline uint64_t ahead(const Reader *r) {
    uint64_t found;
    memcpy(&found, r->from + (r->at >> 3), 8);
    return found >> (r->at & 7);
}

static inline uint32_t get(Reader *r, int width) {  // of at most 32 bits
    uint64_t found = ahead(r) & (((uint64_t)1 << width) - 1);
    if (r->at + (uint64_t)width > r->end) {
        r->error = ENDS;
        r->at = r->end;
        return 0;
    }
    r->at += (uint64_t)width;
    return (uint32_t)found;
}

static inline uint32_t get_grown(Reader *r, int k, uint64_t most) {
    uint64_t rest = ~ahead(r);
    int ones = rest ? __builtin_ctzll(rest) : 64;
    if (ones >= MOST_ONES) {
        r->error = NUMBER;
        return 0;
    }
    int j = ones < STEPS ? 0 : ones - STEPS;
    uint64_t begin = ones < STEPS ? (uint64_t)ones : STEPS - 1 + ((uint64_t)1 << j);
    if (r->at + (uint64_t)ones + 1 > r->end) {
        r->error = ENDS;
        return 0;
    }
    if (k + j > 32) {
        r->error = NUMBER;
        return 0;
    }
    r->at += (uint64_t)ones + 1;
    uint64_t found = (begin << k) + get(r, k + j);
    if (found > most) {
        r->error = NUMBER;
        return 0;
    }
    return (uint32_t)found;
}

// As many numbers as are told in less than 57 bits together, in one reading; none where that is not sure.
enum { AT_ONCE = 3 };

static inline int get_few(Reader *r, int k, uint32_t *numbers) {
    if (AT_ONCE * (STEPS + k) > 56 || r->at + 64 > r->end) return 0;
    uint64_t bits = ahead(r), below = ((uint64_t)1 << k) - 1;
    for (int i = 0; i < AT_ONCE; i++) {
        int ones = __builtin_ctzll(~bits | 1u << STEPS);
        if (ones >= STEPS) return i;
        numbers[i] = (uint32_t)(((uint64_t)ones << k) + (bits >> (ones + 1) & below));
        bits >>= ones + 1 + k;
        r->at += (uint64_t)(ones + 1 + k);
    }
    return AT_ONCE;
}

static uint32_t get_count(Reader *r) {
    int below = (int)get(r, 5);
    if (below >= CHUNK_BITS) {
        r->error = COUNT;
        return 1;
    }
    return ((uint32_t)1 << below) + get(r, below);
}

static int parameter(uint64_t total, uint64_t numbers) {
    uint64_t mean = total / numbers;
    return mean ? 63 - __builtin_clzll(mean) : 0;
}

// ---- classes

// Which of 64 classes are this one.
static inline uint64_t equal(const uint8_t *classes, uint8_t which) {
#ifdef AVX512
    return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(classes), _mm512_set1_epi8((char)which));
#elif defined(__SSE2__)
    uint64_t found = 0;
    for (int part = 0; part < 4; part++) {
        __m128i same = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)(classes + 16 * part)), _mm_set1_epi8((char)which));
        found |= (uint64_t)(uint32_t)_mm_movemask_epi8(same) << (16 * part);
    }
    return found;
#else
    uint64_t found = 0;
    for (int place = 0; place < 64; place++) found |= (uint64_t)(classes[place] == which) << place;
    return found;
#endif
}

// The place of the bit that has so many set ones below it.
static inline int select_bit(uint64_t bits, uint32_t below) {
#ifdef __BMI2__
    return __builtin_ctzll(_pdep_u64((uint64_t)1 << below, bits));
#else
    while (below--) bits &= bits - 1;
    return __builtin_ctzll(bits);
#endif
}

// The word of a span that has an element of this rank, of the words that have `before` so many in front of them.
static inline int word_of(const uint16_t *before, uint32_t rank) {
#ifdef AVX512
    __m512i wanted = _mm512_set1_epi16((short)rank);
    uint32_t low = _mm512_cmple_epu16_mask(_mm512_loadu_si512(before), wanted), high = _mm512_cmple_epu16_mask(_mm512_loadu_si512(before + 32), wanted);
    return __builtin_popcount(low) + __builtin_popcount(high) - 1;
#else
    int word = 0;
    for (int half = SPAN_WORDS / 2; half; half /= 2)
        if (before[word + half] <= rank) word += half;
    return word;
#endif
}

// From which on sixteen exponents are those of the most.
static int lowest_of(const uint32_t *exponents, int windows) {
    uint64_t sum = 0, most = 0;
    int found = 0;
    for (int place = 0; place < CLASSES; place++) sum += exponents[place];
    most = sum;
    for (int first = 1; first < windows; first++) {
        sum += exponents[first + CLASSES - 1];
        sum -= exponents[first - 1];
        if (sum > most) {
            most = sum;
            found = first;
        }
    }
    return found;
}

typedef struct { uint32_t changes, exceptions, first; int gap_parameter, form, size_parameter; } Class;

// ---- distances

typedef struct { const uint8_t *from, *end; } Stream;

// The streams of `fast`, and how many places its gaps lead to.
typedef struct { Stream gaps, signs, exception_gaps, sizes, wide; int64_t changes, exceptions; } Streams;

#define STREAMS                                                                                                                    \
    const uint8_t *gaps, int64_t gap_bytes, const uint8_t *signs, int64_t sign_bytes, const uint8_t *exception_gaps,               \
        int64_t exception_gap_bytes, const uint8_t *sizes, int64_t size_bytes, const uint8_t *wide, int64_t wide_bytes
#define GIVEN                                                                                                                      \
    {                                                                                                                              \
        {gaps, gaps + gap_bytes}, {signs, signs + sign_bytes}, {exception_gaps, exception_gaps + exception_gap_bytes},             \
            {sizes, sizes + size_bytes}, {wide, wide + wide_bytes}, led_to(gaps, gap_bytes), led_to(exception_gaps, exception_gap_bytes) \
    }

static inline uint8_t *put_gap(uint8_t *to, int64_t gap) {
    for (; gap >= 2 * FAR; gap -= FAR) *to++ = FAR;
    *to = FAR;
    to += gap >= FAR;
    *to++ = (uint8_t)(gap >= FAR ? gap - FAR : gap);
    return to;
}

static int64_t led_to(const uint8_t *gaps, int64_t bytes) {
    int64_t found = 0;
    for (int64_t i = 0; i < bytes; i++) found += gaps[i] != FAR;
    return found;
}

static int take(Stream *stream, const uint8_t **from, const uint8_t *end, int64_t bytes) {
    if (bytes > end - *from) return LENGTH;
    *stream = (Stream){*from, *from + bytes};
    *from += bytes;
    return 0;
}

// The streams of a payload, as long as those before them say; what remains is the last.
static int split(const uint8_t *payload, int64_t bytes, Streams *s) {
    const uint8_t *from = payload, *end = payload + bytes;
    Stream head;
    uint32_t gap_bytes[2];
    if (take(&head, &from, end, sizeof gap_bytes)) return LENGTH;
    memcpy(gap_bytes, head.from, sizeof gap_bytes);
    if (take(&s->gaps, &from, end, gap_bytes[0])) return LENGTH;
    s->changes = led_to(s->gaps.from, gap_bytes[0]);
    if (take(&s->signs, &from, end, (s->changes + 7) / 8) || take(&s->exception_gaps, &from, end, gap_bytes[1])) return LENGTH;
    s->exceptions = led_to(s->exception_gaps.from, gap_bytes[1]);
    if (take(&s->sizes, &from, end, s->exceptions)) return LENGTH;
    s->wide = (Stream){from, end};
    return 0;
}

static int ends_nowhere(Stream gaps) { return gaps.from < gaps.end && gaps.end[-1] == FAR; }

// What can be said of streams before they are read.
static int check(const Streams *s, int64_t n) {
    if (ends_nowhere(s->gaps) || ends_nowhere(s->exception_gaps)) return NOWHERE;
    // Each byte leads on by one element at least.
    if (s->gaps.end - s->gaps.from > n) return BEHIND;
    if (s->signs.end - s->signs.from != (s->changes + 7) / 8 || s->sizes.end - s->sizes.from != s->exceptions) return LENGTH;
    return s->changes & 7 && s->signs.end[-1] >> (s->changes & 7) ? PADDING : 0;
}

// Where gaps lead among n elements; `check` has seen that the last leads somewhere, and that there are no more than n.
static int places(Stream gaps, int64_t n, uint32_t *indices) {
    const uint8_t *gap = gaps.from;
    int64_t at = 0;
#ifdef AVX512
    // Sixteen at a time: each place is what lies before it, added up.
    const __m512i none = _mm512_setzero_si512(), one = _mm512_set1_epi32(1), last = _mm512_set1_epi32(15);
    __m512i before = _mm512_set1_epi32(-1);
    for (; gap + 16 <= gaps.end; gap += 16) {
        __m512i steps = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)gap));
        __mmask16 leads = _mm512_cmpneq_epi32_mask(steps, _mm512_set1_epi32(FAR));
        steps = _mm512_mask_add_epi32(steps, leads, steps, one);
        steps = _mm512_add_epi32(steps, _mm512_alignr_epi32(steps, none, 15));
        steps = _mm512_add_epi32(steps, _mm512_alignr_epi32(steps, none, 14));
        steps = _mm512_add_epi32(steps, _mm512_alignr_epi32(steps, none, 12));
        steps = _mm512_add_epi32(steps, _mm512_alignr_epi32(steps, none, 8));
        __m512i found = _mm512_add_epi32(steps, before);
        int few = __builtin_popcount(leads);
        _mm512_mask_storeu_epi32(indices, (__mmask16)((1u << few) - 1), _mm512_maskz_compress_epi32(leads, found));
        indices += few;
        before = _mm512_permutexvar_epi32(last, found);
        at = (int64_t)_mm_cvtsi128_si32(_mm512_castsi512_si128(before)) + 1;
        if (at > n) return BEHIND;
    }
#endif
    for (; gap < gaps.end; gap++) {
        // No branch: a processor would guess wrong each time that a gap is far. What is written for such a one is written over, as the last leads on.
        int leads = *gap != FAR;
        at += *gap;
        *indices = (uint32_t)at;
        indices += leads;
        at += leads;
    }
    return at > n ? BEHIND : 0;
}

#define GLUE_(NAME, WIDTH) NAME##_##WIDTH
#define GLUE(NAME, WIDTH) GLUE_(NAME, WIDTH)
#define NAMED(NAME) GLUE(NAME, WIDTH)

#define WIDTH 1
#define T uint8_t
#include "chunk.h"
#include "tight.h"
#undef WIDTH
#undef T
#define WIDTH 2
#define T uint16_t
#include "chunk.h"
#include "tight.h"
#undef WIDTH
#undef T
#define WIDTH 4
#define T uint32_t
#include "chunk.h"
#include "tight.h"
#undef WIDTH
#undef T
#define WIDTH 8
#define T uint64_t
#include "chunk.h"
#undef WIDTH
#undef T
