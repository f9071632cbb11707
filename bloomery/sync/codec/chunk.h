// What changed, and the streams of `fast`, for elements T of WIDTH bytes. See kernel.c.

static inline T NAMED(ordered)(T bits, T flips) { return bits ^ ((T)(0 - (bits >> (8 * WIDTH - 1))) & flips); }

// Which of 64 elements differ.
static inline uint64_t NAMED(differing)(const T *one, const T *other) {
#ifdef AVX512
    uint64_t found = 0;
    for (int part = 0; part < WIDTH; part++) {
        __m512i a = _mm512_loadu_si512(one + 64 / WIDTH * part), b = _mm512_loadu_si512(other + 64 / WIDTH * part);
#if WIDTH == 1
        found |= _mm512_cmpneq_epi8_mask(a, b);
#elif WIDTH == 2
        found |= (uint64_t)_mm512_cmpneq_epi16_mask(a, b) << (32 * part);
#elif WIDTH == 4
        found |= (uint64_t)_mm512_cmpneq_epi32_mask(a, b) << (16 * part);
#else
        found |= (uint64_t)_mm512_cmpneq_epi64_mask(a, b) << (8 * part);
#endif
    }
    return found;
#else
    T any = 0;
    for (int place = 0; place < 64; place++) any |= one[place] ^ other[place];
    if (!any) return 0;
    uint64_t found = 0;
    for (int place = 0; place < 64; place++) found |= (uint64_t)(one[place] != other[place]) << place;
    return found;
#endif
}

// Room for all n.
void NAMED(find)(const T *old, const T *new, int64_t n, uint64_t flips, uint32_t *indices, T *by, int64_t *result) {
    int64_t found = 0, start = 0;
    for (; start + 64 <= n; start += 64)
        for (uint64_t bits = NAMED(differing)(old + start, new + start); bits; bits &= bits - 1) {
            int64_t at = start + __builtin_ctzll(bits);
            indices[found] = (uint32_t)at;
            by[found++] = NAMED(ordered)(new[at], (T)flips) - NAMED(ordered)(old[at], (T)flips);
        }
    for (; start < n; start++)
        if (old[start] != new[start]) {
            indices[found] = (uint32_t)start;
            by[found++] = NAMED(ordered)(new[start], (T)flips) - NAMED(ordered)(old[start], (T)flips);
        }
    result[0] = found;
}

// Gaps have room for `changes` and a byte for each 255 elements; the others have room for `changes`, and a byte for each 255 of them. What is rare is
// branched for, and other bytes are written whether they count or not: a processor would guess wrong as often as it guesses.
void NAMED(pack)(const uint32_t *indices, const T *by, int64_t changes, uint8_t *gaps, uint8_t *signs, uint8_t *exception_gaps, uint8_t *sizes,
                 uint8_t *wide, int64_t *result) {
    uint8_t *gap = gaps, *exception_gap = exception_gaps, *size = sizes, *far = wide;
    int64_t next = 0, exception = 0;
    for (int64_t i = 0; i < changes; i += 8) {
        unsigned negative = 0;
        for (int64_t each = i; each < i + 8 && each < changes; each++) negative |= (unsigned)(by[each] >> (8 * WIDTH - 1)) << (each - i);
        signs[i >> 3] = (uint8_t)negative;
    }
    for (int64_t i = 0; i < changes; i++) {
        gap = put_gap(gap, indices[i] - next);
        next = (int64_t)indices[i] + 1;
        T by_so_much = by[i] >> (8 * WIDTH - 1) ? (T)(0 - by[i]) : by[i];
        int differs = by_so_much != 1;
        if (i - exception >= FAR && differs) {
            exception_gap = put_gap(exception_gap, i - exception) - 1;
        } else {
            *exception_gap = (uint8_t)(i - exception);
        }
        *size = (uint8_t)(by_so_much - 2);
#if WIDTH > 1
        if (by_so_much >= FAR + 2) {
            *size = FAR;
            memcpy(far, &by_so_much, WIDTH);
            far += WIDTH;
        }
#endif
        exception = differs ? i + 1 : exception;
        exception_gap += differs;
        size += differs;
    }
    result[0] = gap - gaps;
    result[1] = exception_gap - exception_gaps;
    result[2] = size - sizes;
    result[3] = far - wide;
}

// By how much changes move.
static int NAMED(differences)(const Streams *s, T *by) {
    const T most = (T)((T)1 << (8 * WIDTH - 1));
    const uint8_t *sign = s->signs.from, *size = s->sizes.from, *far = s->wide.from;
    int64_t whole = s->changes / 8 * 8, exception = 0;
    for (int64_t i = 0; i < whole; i += 8, sign++)
        for (int bit = 0; bit < 8; bit++) by[i + bit] = (T)(1 - 2 * (*sign >> bit & 1));
    for (int64_t i = whole; i < s->changes; i++) by[i] = (T)(1 - 2 * (*sign >> (i & 7) & 1));
    for (const uint8_t *gap = s->exception_gaps.from; gap < s->exception_gaps.end; gap++) {
        exception += *gap;
        if (*gap == FAR) continue;
        if (exception >= s->changes) return BEHIND;
        T by_so_much = (T)(*size + 2), *moved = by + exception++;
        if (*size++ == FAR) {
#if WIDTH == 1
            return WIDE;
#else
            if (s->wide.end - far < WIDTH) return LENGTH;
            memcpy(&by_so_much, far, WIDTH);
            far += WIDTH;
            if (by_so_much < FAR + 2) return WIDE;
#endif
        }
        int negative = *moved != 1;
        // Of a byte 254 and 2 are zero.
        if (!by_so_much || by_so_much > most || (by_so_much == most && !negative)) return SIZE;
        *moved = negative ? (T)(0 - by_so_much) : by_so_much;
    }
    return far == s->wide.end ? 0 : LENGTH;
}

// How many changes there are, or why there can be none.
static int64_t NAMED(unpacked)(const Streams *s, int64_t n, uint32_t *indices, T *by) {
    int error = check(s, n);
    if (!error) error = places(s->gaps, n, indices);
    if (!error) error = NAMED(differences)(s, by);
    return error ? error : s->changes;
}

// Room for a change for each gap.
void NAMED(unpack)(STREAMS, int64_t n, uint32_t *indices, T *by, int64_t *result) {
    Streams s = GIVEN;
    result[0] = NAMED(unpacked)(&s, n, indices, by);
}

#ifdef AVX512
typedef T NAMED(Eight) __attribute__((vector_size(8 * WIDTH)));
typedef T NAMED(AnyEight) __attribute__((vector_size(8 * WIDTH), aligned(1), may_alias));
typedef uint64_t NAMED(Widened) __attribute__((vector_size(64)));

static inline NAMED(Eight) NAMED(ordered_eight)(NAMED(Eight) bits, T flips) { return bits ^ ((0 - (bits >> (8 * WIDTH - 1))) & flips); }

static inline void NAMED(settle_eight)(const T *before, const uint32_t *indices, T flips, T *values, Sums *s) {
    NAMED(Eight) was = *(const NAMED(AnyEight) *)before;
    NAMED(Eight) is = NAMED(ordered_eight)(NAMED(ordered_eight)(was, flips) + *(NAMED(AnyEight) *)values, flips);
    *(NAMED(AnyEight) *)values = is;
#ifdef UNPROVED
    // What proving takes is measured against this.
    (void)s;
    (void)indices;
#else
    NAMED(Widened) moved = __builtin_convertvector(is, NAMED(Widened)) - __builtin_convertvector(was, NAMED(Widened));
    add_changes(s, indices, (__m512i)moved);
#endif
}
#endif

// Of a block; what elements were lies in a row.
static inline void NAMED(settle_block)(const T *before, const uint32_t *indices, int changes, T flips, T *values, Sums *s) {
#ifdef AVX512
    int whole = changes & ~7, rest = changes & 7;
    for (int i = 0; i < whole; i += 8) NAMED(settle_eight)(before + i, indices + i, flips, values + i, s);
    if (rest) {
        // Those behind the last are zero and do not move.
        uint32_t at[8] = {0};
        T was[8] = {0}, is[8] = {0};
        memcpy(at, indices + whole, (size_t)rest * sizeof *at);
        memcpy(was, before + whole, (size_t)rest * WIDTH);
        memcpy(is, values + whole, (size_t)rest * WIDTH);
        NAMED(settle_eight)(was, at, flips, is, s);
        memcpy(values + whole, is, (size_t)rest * WIDTH);
    }
#else
    for (int i = 0; i < changes; i++) {
        T after = NAMED(ordered)((T)(NAMED(ordered)(before[i], flips) + values[i]), flips);
        values[i] = after;
#ifndef UNPROVED
        uint64_t moved = (uint64_t)after - (uint64_t)before[i];
        s->one += key(s->first + indices[i]) * moved;
        s->two += key(s->other + indices[i]) * moved;
#endif
    }
#endif
}

// By how much elements move, in `values`, becomes what they are then, and is added to the sums: each old one is read once. A block of them is read before
// anything is computed, so that as many as possible are on their way from memory at a time.
static void NAMED(settle)(const T *old, const uint32_t *indices, int64_t changes, T flips, T *values, Sums *s) {
    T before[BLOCK];
    for (int64_t start = 0; start < changes; start += BLOCK) {
        int few = (int)(changes - start < BLOCK ? changes - start : BLOCK);
        for (int64_t i = start; i < start + few; i++) {
            __builtin_prefetch(old + indices[i + AHEAD < changes ? i + AHEAD : changes - 1]);
            before[i - start] = old[indices[i]];
        }
        NAMED(settle_block)(before, indices + start, few, flips, values + start, s);
    }
}

static int64_t NAMED(decoded)(const Streams *s, const T *old, int64_t n, T flips, uint32_t *indices, T *values, Sums *sums) {
    int64_t changes = NAMED(unpacked)(s, n, indices, values);
    if (changes > 0) NAMED(settle)(old, indices, changes, flips, values, sums);
    return changes;
}

// Room for a change for each gap.
void NAMED(decode)(STREAMS, const T *old, int64_t n, uint64_t flips, uint64_t first, uint64_t other, uint32_t *indices, T *values, int64_t *result,
                   uint64_t *sums) {
    Streams s = GIVEN;
    Sums found = sums_from(first, other);
    result[0] = NAMED(decoded)(&s, old, n, (T)flips, indices, values, &found);
    sums_to(&found, sums);
}

// The same of a payload of `fast`, and not of its streams: room for as many changes as there are elements, or bytes of it.
void NAMED(decode_fast)(const uint8_t *payload, int64_t size, const T *old, int64_t n, uint64_t flips, uint64_t first, uint64_t other, uint32_t *indices,
                        T *values, int64_t *result, uint64_t *sums) {
    Streams s;
    Sums found = sums_from(first, other);
    int error = split(payload, size, &s);
    result[0] = error ? error : NAMED(decoded)(&s, old, n, (T)flips, indices, values, &found);
    sums_to(&found, sums);
}

// Elements at `indices`, counted from `first`, become `values`; none if one of them lies outside.
void NAMED(put)(T *to, int64_t n, int64_t first, const uint32_t *indices, const T *values, int64_t changes, int64_t *result) {
    uint64_t outside = 0;
    for (int64_t i = 0; i < changes; i++) outside |= (uint64_t)((uint64_t)(first + indices[i]) >= (uint64_t)n);
    result[0] = BEHIND;
    if (outside) return;
    for (int64_t i = 0; i < changes; i++) {
        if (i + AHEAD / 4 < changes) __builtin_prefetch(to + first + indices[i + AHEAD / 4], 1);
        to[first + indices[i]] = values[i];
    }
    result[0] = changes;
}
