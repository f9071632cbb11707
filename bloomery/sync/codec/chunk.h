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

static inline uint8_t *NAMED(put_gap)(uint8_t *to, uint64_t gap) {
    for (; gap >= FAR; gap -= FAR) *to++ = FAR;
    *to++ = (uint8_t)gap;
    return to;
}

// Gaps have room for `changes` and a byte for each 255 elements, signs are zeros; the others have room for `changes`, and a byte for each 255 of them.
void NAMED(pack)(const uint32_t *indices, const T *by, int64_t changes, uint8_t *gaps, uint8_t *signs, uint8_t *exception_gaps, uint8_t *sizes,
                 uint8_t *wide, int64_t *result) {
    uint8_t *gap = gaps, *exception_gap = exception_gaps, *size = sizes, *far = wide;
    int64_t next = 0, exception = 0;
    for (int64_t i = 0; i < changes; i++) {
        gap = NAMED(put_gap)(gap, (uint64_t)(indices[i] - next));
        next = (int64_t)indices[i] + 1;
        int negative = (int)(by[i] >> (8 * WIDTH - 1));
        signs[i >> 3] |= (uint8_t)(negative << (i & 7));
        T by_so_much = negative ? (T)(0 - by[i]) : by[i];
        if (by_so_much == 1) continue;
        exception_gap = NAMED(put_gap)(exception_gap, (uint64_t)(i - exception));
        exception = i + 1;
#if WIDTH > 1
        if (by_so_much >= FAR + 2) {
            *size++ = FAR;
            memcpy(far, &by_so_much, WIDTH);
            far += WIDTH;
            continue;
        }
#endif
        *size++ = (uint8_t)(by_so_much - 2);
    }
    result[0] = gap - gaps;
    result[1] = exception_gap - exception_gaps;
    result[2] = size - sizes;
    result[3] = far - wide;
}

// The places of the next changes, as many; `old` is fetched from there, if it is given.
static inline int NAMED(places)(Walk *w, int64_t n, int64_t changes, uint32_t *indices, const T *old) {
    for (int64_t i = 0; i < changes;) {
        uint8_t gap = *w->gaps.from++;
        w->at += gap;
        if (gap == FAR) continue;
        if (w->at >= n) return BEHIND;
        if (old) __builtin_prefetch(old + w->at);
        indices[i++] = (uint32_t)w->at++;
    }
    return 0;
}

// By how much changes from this one to that one move.
static inline int NAMED(differences)(Walk *w, int64_t start, int64_t stop, T *by) {
    const T most = (T)((T)1 << (8 * WIDTH - 1));
    for (int64_t i = start; i < stop; i++) by[i - start] = (T)(1 - 2 * (w->signs.from[i >> 3] >> (i & 7) & 1));
    for (; w->exception < stop; w->exception++, next_exception(w)) {
        if (w->sizes.from == w->sizes.end) return LENGTH;
        T size = (T)(*w->sizes.from + 2), *moved = by + (w->exception - start);
        if (*w->sizes.from++ == FAR) {
#if WIDTH == 1
            return WIDE;
#else
            if (w->wide.end - w->wide.from < WIDTH) return LENGTH;
            memcpy(&size, w->wide.from, WIDTH);
            w->wide.from += WIDTH;
            if (size < FAR + 2) return WIDE;
#endif
        }
        int negative = *moved != 1;
        // Of a byte 254 and 2 are zero.
        if (!size || size > most || (size == most && !negative)) return SIZE;
        *moved = negative ? (T)(0 - size) : size;
    }
    return 0;
}

// Room for a change for each gap.
void NAMED(unpack)(STREAMS, int64_t n, uint32_t *indices, T *by, int64_t *result) {
    Walk w = WALK;
    int64_t error = begin(&w);
    if (!error) error = NAMED(places)(&w, n, w.changes, indices, NULL);
    if (!error) error = NAMED(differences)(&w, 0, w.changes, by);
    result[0] = error ? error : ended(&w);
}

#ifdef AVX512
typedef T NAMED(Eight) __attribute__((vector_size(8 * WIDTH)));
typedef T NAMED(AnyEight) __attribute__((vector_size(8 * WIDTH), aligned(1), may_alias));
typedef uint64_t NAMED(Widened) __attribute__((vector_size(64)));

static inline NAMED(Eight) NAMED(ordered_eight)(NAMED(Eight) bits, T flips) { return bits ^ ((0 - (bits >> (8 * WIDTH - 1))) & flips); }

// Of eight changes, put together in registers: what is stored one by one can be read as eight only when the last of it has left the processor.
static inline void NAMED(settle_eight)(const T *old, const uint32_t *at, const T *by, T flips, T *values, Sums *s) {
    NAMED(Eight) before = {old[at[0]], old[at[1]], old[at[2]], old[at[3]], old[at[4]], old[at[5]], old[at[6]], old[at[7]]};
    NAMED(Eight) after = NAMED(ordered_eight)(NAMED(ordered_eight)(before, flips) + *(const NAMED(AnyEight) *)by, flips);
    *(NAMED(AnyEight) *)values = after;
#ifdef UNPROVED
    // What proving takes is measured against this.
    (void)s;
#else
    NAMED(Widened) moved = __builtin_convertvector(after, NAMED(Widened)) - __builtin_convertvector(before, NAMED(Widened));
    add_changes(s, at, (__m512i)moved);
#endif
}
#endif

// What elements become that are moved, and what that adds to the sums: each old one is read once.
static inline void NAMED(settle)(const T *old, const uint32_t *indices, const T *by, int changes, T flips, T *values, Sums *s) {
#ifdef AVX512
    int whole = 0;
    for (; whole + 8 <= changes; whole += 8) NAMED(settle_eight)(old, indices + whole, by + whole, flips, values + whole, s);
    if (whole < changes) {
        // Eight with the last one again, which does not move then.
        uint32_t at[8];
        T moved[8] = {0}, after[8];
        for (int i = 0; i < 8; i++) at[i] = indices[whole + i < changes ? whole + i : changes - 1];
        memcpy(moved, by + whole, (size_t)(changes - whole) * WIDTH);
        NAMED(settle_eight)(old, at, moved, flips, after, s);
        memcpy(values + whole, after, (size_t)(changes - whole) * WIDTH);
    }
#else
    for (int i = 0; i < changes; i++) {
        T before = old[indices[i]], after = NAMED(ordered)((T)(NAMED(ordered)(before, flips) + by[i]), flips);
        values[i] = after;
#ifndef UNPROVED
        uint64_t moved = (uint64_t)after - (uint64_t)before;
        s->one += key(s->first + indices[i]) * moved;
        s->two += key(s->other + indices[i]) * moved;
#endif
    }
#endif
}

// Room for a change for each gap. Places are looked for, and their elements fetched, a block of changes before they are settled.
void NAMED(decode)(STREAMS, const T *old, int64_t n, uint64_t flips, uint64_t first, uint64_t other, uint32_t *indices, T *values, int64_t *result,
                   uint64_t *sums) {
    Walk w = WALK;
    Sums s = sums_from(first, other);
    int64_t error = begin(&w), stop = 0, ahead = 0;
    for (int64_t start = 0; !error && start < w.changes; start = stop) {
        T by[FEW];
        stop = start + FEW < w.changes ? start + FEW : w.changes;
        int64_t next = stop + BLOCK < w.changes ? stop + BLOCK : w.changes;
        error = NAMED(places)(&w, n, next - ahead, indices + ahead, old);
        ahead = next;
        if (!error) error = NAMED(differences)(&w, start, stop, by);
        if (!error) NAMED(settle)(old, indices + start, by, (int)(stop - start), (T)flips, values + start, &s);
    }
    result[0] = error ? error : ended(&w);
    sums_to(&s, sums);
}

// Elements at `indices`, counted from `first`, become `values`; none if one of them lies outside.
void NAMED(put)(T *to, int64_t n, int64_t first, const uint32_t *indices, const T *values, int64_t changes, int64_t *result) {
    result[0] = BEHIND;
    for (int64_t i = 0; i < changes; i++)
        if ((uint64_t)(first + indices[i]) >= (uint64_t)n) return;
    for (int64_t i = 0; i < changes; i++) {
        if (i + BLOCK / 4 < changes) __builtin_prefetch(to + first + indices[i + BLOCK / 4], 1);
        to[first + indices[i]] = values[i];
    }
    result[0] = changes;
}
