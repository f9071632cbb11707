// What changed, and the streams of `fast`, for elements T of WIDTH bytes. See kernel.c.

static inline T NAMED(ordered)(T bits, T flips) { return bits ^ ((T)(0 - (bits >> (8 * WIDTH - 1))) & flips); }

// Which of 64 elements differ.
static inline uint64_t NAMED(differing)(const T *one, const T *other) {
#ifdef __AVX512BW__
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

void NAMED(moved)(const T *old, int64_t n, const uint32_t *indices, const T *by, int64_t changes, uint64_t flips, T *values, int64_t *result) {
    result[0] = changes;
    for (int64_t i = 0; i < changes; i++) {
        if (indices[i] >= (uint64_t)n) {
            result[0] = BEHIND;
            return;
        }
        values[i] = NAMED(ordered)((T)(NAMED(ordered)(old[indices[i]], (T)flips) + by[i]), (T)flips);
    }
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

// Room for a change for each gap.
static int64_t NAMED(unpacked)(const uint8_t *gaps, int64_t gap_bytes, const uint8_t *signs, int64_t sign_bytes, const uint8_t *exception_gaps,
                               int64_t exception_gap_bytes, const uint8_t *sizes, int64_t size_bytes, const uint8_t *wide, int64_t wide_bytes,
                               int64_t count, uint32_t *indices, T *by) {
    if ((gap_bytes && gaps[gap_bytes - 1] == FAR) || (exception_gap_bytes && exception_gaps[exception_gap_bytes - 1] == FAR)) return NOWHERE;
    int64_t at = 0, changes = 0, exceptions = 0, far = 0;
    for (int64_t i = 0; i < gap_bytes; i++) {
        at += gaps[i];
        if (gaps[i] == FAR) continue;
        if (at >= count) return BEHIND;
        indices[changes++] = (uint32_t)at++;
    }
    if (sign_bytes != (changes + 7) / 8) return LENGTH;
    if ((changes & 7) && signs[sign_bytes - 1] >> (changes & 7)) return PADDING;
    for (int64_t i = 0; i < changes; i++) by[i] = signs[i >> 3] >> (i & 7) & 1 ? (T)-1 : (T)1;
    at = 0;
    const T most = (T)((T)1 << (8 * WIDTH - 1));
    for (int64_t i = 0; i < exception_gap_bytes; i++) {
        at += exception_gaps[i];
        if (exception_gaps[i] == FAR) continue;
        if (at >= changes) return BEHIND;
        if (exceptions >= size_bytes) return LENGTH;
        T size = (T)(sizes[exceptions] + 2);
        if (sizes[exceptions++] == FAR) {
#if WIDTH == 1
            return WIDE;
#else
            if (far + WIDTH > wide_bytes) return LENGTH;
            memcpy(&size, wide + far, WIDTH);
            far += WIDTH;
            if (size < FAR + 2) return WIDE;
#endif
        }
        int negative = by[at] != 1;
        // Of a byte 254 and 2 are zero.
        if (!size || size > most || (size == most && !negative)) return SIZE;
        by[at++] = negative ? (T)(0 - size) : size;
    }
    (void)wide;
    return exceptions == size_bytes && far == wide_bytes ? changes : LENGTH;
}

void NAMED(unpack)(const uint8_t *gaps, int64_t gap_bytes, const uint8_t *signs, int64_t sign_bytes, const uint8_t *exception_gaps,
                   int64_t exception_gap_bytes, const uint8_t *sizes, int64_t size_bytes, const uint8_t *wide, int64_t wide_bytes, int64_t count,
                   uint32_t *indices, T *by, int64_t *result) {
    result[0] = NAMED(unpacked)(gaps, gap_bytes, signs, sign_bytes, exception_gaps, exception_gap_bytes, sizes, size_bytes, wide, wide_bytes, count,
                                indices, by);
}
