// The bits of `tight`, for elements T of WIDTH bytes. See kernel.c.

// Of at most so many elements as there is room for; those behind the end are in none.
static inline void NAMED(classify)(const T *old, int64_t n, int64_t room, int shift, uint32_t mask, int lowest, uint8_t *classes) {
    if (n > room) n = room;
    int64_t place = 0;
#if defined(AVX512) && WIDTH == 2
    const __m512i field = _mm512_set1_epi16((short)mask), from = _mm512_set1_epi8((char)lowest), last = _mm512_set1_epi8(CLASSES - 1);
    for (; place + 64 <= n; place += 64) {
        __m512i low = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(old + place), _mm_cvtsi32_si128(shift)), field);
        __m512i high = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(old + place + 32), _mm_cvtsi32_si128(shift)), field);
        __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(low)), _mm512_cvtepi16_epi8(high), 1);
        _mm512_storeu_si512(classes + place, _mm512_min_epu8(_mm512_subs_epu8(both, from), last));
    }
#endif
    for (; place < n; place++) {
        int above = (int)((uint32_t)(old[place] >> shift) & mask) - lowest;
        classes[place] = (uint8_t)(above < 0 ? 0 : above >= CLASSES ? CLASSES - 1 : above);
    }
    if (n < room) memset(classes + n, CLASSES, (size_t)(room - n));
}

// Have a sixteenth of the next elements on its way while one class is counted: all at once they would be waited for.
static inline void NAMED(fetch)(const T *from, int64_t count, int which) {
    const char *share = (const char *)from + count * WIDTH / CLASSES * which;
    for (int64_t at = 0; at < count * WIDTH / CLASSES; at += 64) __builtin_prefetch(share + at);
}

// Gaps of changes, in ascending order, to `gaps` of their classes; `next` is where each class begins there.
static void NAMED(count_gaps)(const T *old, int64_t n, int shift, uint32_t mask, int lowest, const uint32_t *indices, int64_t changes,
                              const Class *class, uint32_t *gaps) {
    uint8_t classes[TILE];
    uint32_t seen[CLASSES] = {0}, last[CLASSES] = {0}, told[CLASSES] = {0};
    int64_t change = 0;
    for (int64_t start = 0; change < changes; start += TILE) {
        NAMED(classify)(old + start, n - start, TILE, shift, mask, lowest, classes);
        for (; change < changes && indices[change] < start + TILE; change++) {
            int place = (int)(indices[change] - start), word = place / 64;
            uint8_t which = classes[place];
            uint32_t rank = seen[which] + (uint32_t)__builtin_popcountll(equal(classes + 64 * word, which) & (((uint64_t)1 << (place & 63)) - 1));
            for (int before = 0; before < word; before++) rank += (uint32_t)__builtin_popcountll(equal(classes + 64 * before, which));
            gaps[class[which].first + told[which]++] = rank - last[which];
            last[which] = rank + 1;
        }
        for (int which = 0; which < CLASSES; which++) {
            NAMED(fetch)(old + start + 2 * TILE, TILE, which);
            if (told[which] < class[which].changes)
                for (int word = 0; word < WORDS; word++) seen[which] += (uint32_t)__builtin_popcountll(equal(classes + 64 * word, (uint8_t)which));
        }
    }
}

static void NAMED(choose)(Class *class, const uint32_t *gaps, const uint32_t *sizes) {
    uint64_t between = 0, all = 0, larger = 0;
    for (uint32_t i = 0; i < class->changes; i++) {
        between += gaps[class->first + i];
        uint32_t size = sizes[class->first + i];
        all += size - 1;
        class->exceptions += size > 1;
        larger += size > 1 ? size - 2 : 0;
    }
    class->gap_parameter = parameter(between, class->changes);
    class->form = !class->exceptions ? 0 : 2 * (uint64_t)class->exceptions > class->changes ? 1 : 2;
    if (class->form) class->size_parameter = class->form == 1 ? parameter(all, class->changes) : parameter(larger, class->exceptions);
}

static void NAMED(put_sizes)(Writer *w, const Class *class, const uint32_t *sizes, const uint8_t *signs) {
    const uint32_t *size = sizes + class->first;
    for (uint32_t i = 0; i < class->changes; i++) put(w, signs[class->first + i], 1);
    if (class->form == 1)
        for (uint32_t i = 0; i < class->changes; i++) put_grown(w, size[i] - 1, class->size_parameter);
    if (class->form != 2) return;
    int k = parameter(class->changes - class->exceptions, class->exceptions);
    uint32_t next = 0;
    for (uint32_t i = 0; i < class->changes; i++)
        if (size[i] > 1) {
            put_grown(w, i - next, k);
            next = i + 1;
        }
    for (uint32_t i = 0; i < class->changes; i++)
        if (size[i] > 1) put_grown(w, size[i] - 2, class->size_parameter);
}

// Room for 24 bytes for each change, and 256.
void NAMED(pack_tight)(const T *old, int64_t n, int64_t shift, int64_t exponent_bits, const uint32_t *indices, const T *by, int64_t changes,
                       uint8_t *payload, int64_t *result) {
    uint32_t *gaps = malloc((size_t)changes * 9), *sizes = gaps + changes;
    uint8_t *signs = (uint8_t *)(sizes + changes);
    result[0] = MEMORY;
    if (!gaps) return;
    uint32_t exponents[256 + CLASSES] = {0}, mask = ((uint32_t)1 << exponent_bits) - 1, told[CLASSES] = {0}, first = 0, set = 0;
    for (int64_t i = 0; i < changes; i++) exponents[(uint32_t)(old[indices[i]] >> shift) & mask]++;
    int lowest = lowest_of(exponents, exponent_bits > 4 ? (1 << exponent_bits) - CLASSES + 1 : 1);
    Class class[CLASSES] = {{0}};
    for (int exponent = 0; exponent < 256; exponent++) {
        int above = exponent - lowest;
        class[above < 0 ? 0 : above >= CLASSES ? CLASSES - 1 : above].changes += exponents[exponent];
    }
    for (int which = 0; which < CLASSES; which++) {
        class[which].first = first;
        first += class[which].changes;
        set |= (uint32_t)(class[which].changes > 0) << which;
    }
    for (int64_t i = 0; i < changes; i++) {
        int above = (int)((uint32_t)(old[indices[i]] >> shift) & mask) - lowest, which = above < 0 ? 0 : above >= CLASSES ? CLASSES - 1 : above;
        uint32_t to = class[which].first + told[which]++;
        signs[to] = (uint8_t)(by[i] >> (8 * WIDTH - 1));
        sizes[to] = (uint32_t)(signs[to] ? (T)(0 - by[i]) : by[i]);
    }
    NAMED(count_gaps)(old, n, (int)shift, mask, lowest, indices, changes, class, gaps);
    Writer w = {payload, 0, 0};
    put(&w, (uint64_t)lowest, 8);
    put(&w, set, 16);
    for (int which = 0; which < CLASSES; which++) {
        Class *each = class + which;
        if (!each->changes) continue;
        NAMED(choose)(each, gaps, sizes);
        put_count(&w, each->changes);
        put(&w, (uint64_t)each->gap_parameter, 5);
        put(&w, (uint64_t)each->form, 2);
        if (each->form) put(&w, (uint64_t)each->size_parameter, 5);
        if (each->form == 2) put_count(&w, each->exceptions);
    }
    for (int which = 0; which < CLASSES; which++)
        for (uint32_t i = 0; i < class[which].changes; i++) put_grown(&w, gaps[class[which].first + i], class[which].gap_parameter);
    for (int which = 0; which < CLASSES; which++) NAMED(put_sizes)(&w, class + which, sizes, signs);
    finish(&w);
    result[0] = w.to - payload;
    free(gaps);
}

// Gaps become places among the elements of the class.
static int NAMED(get_places)(Reader *r, const Class *class, uint64_t most, uint32_t *places) {
    uint64_t next = 0;
    for (uint32_t i = 0; i < class->changes;) {
        uint32_t gaps[AT_ONCE];
        int few = i + AT_ONCE <= class->changes ? get_few(r, class->gap_parameter, gaps) : 0;
        if (!few) {
            gaps[0] = get_grown(r, class->gap_parameter, most);
            if (r->error) return r->error;
            few = 1;
        }
        for (int each = 0; each < few; each++, i++) {
            next += gaps[each];
            places[class->first + i] = (uint32_t)next++;
        }
        if (next > most) return BEHIND;
    }
    return parameter(next - class->changes, class->changes) == class->gap_parameter ? 0 : PARAMETER;
}

static int NAMED(get_sizes)(Reader *r, const Class *class, T *by) {
    const uint64_t most = (uint64_t)1 << (8 * WIDTH - 1);
    T *to = by + class->first;
    uint64_t total = 0, larger = 0;
    if (r->at + class->changes > r->end) return ENDS;
    for (uint32_t i = 0; i < class->changes; i += 32) {
        int few = class->changes - i < 32 ? (int)(class->changes - i) : 32;
        uint32_t signs = get(r, few);
        for (int each = 0; each < few; each++) to[i + (uint32_t)each] = (T)(1 - 2 * (int)(signs >> each & 1));
    }
    if (class->form == 1) {
        for (uint32_t i = 0; i < class->changes; i++) {
            uint64_t size = 1 + (uint64_t)get_grown(r, class->size_parameter, most - 1);
            if (r->error) return r->error;
            if (size == most && to[i] == 1) return SIZE;
            total += size - 1;
            larger += size > 1;
            to[i] = to[i] == 1 ? (T)size : (T)(0 - size);
        }
        if (2 * larger <= class->changes) return FORM;
        return parameter(total, class->changes) == class->size_parameter ? 0 : PARAMETER;
    }
    if (class->form != 2) return 0;
    if (2 * (uint64_t)class->exceptions > class->changes) return FORM;
    // Their places are read twice: sizes stand behind all of them.
    Reader places = *r;
    int k = parameter(class->changes - class->exceptions, class->exceptions);
    for (uint32_t i = 0; i < class->exceptions; i++) {
        get_grown(r, k, class->changes);
        if (r->error) return r->error;
    }
    uint64_t at = 0;
    for (uint32_t i = 0; i < class->exceptions; i++) {
        at += get_grown(&places, k, class->changes);
        if (at >= class->changes) return BEHIND;
        uint64_t size = 2 + (uint64_t)get_grown(r, class->size_parameter, most - 2);
        if (r->error) return r->error;
        if (size == most && to[at] == 1) return SIZE;
        total += size - 2;
        to[at] = to[at] == 1 ? (T)size : (T)(0 - size);
        at++;
    }
    return parameter(total, class->exceptions) == class->size_parameter ? 0 : PARAMETER;
}

// Where the changes of a class are in a span: a bit in `hit` for each, and by how much it moves in `moved`; how many there are is told in `entry`. What is
// returned is how many elements of the class there are.
static inline uint32_t NAMED(look)(const uint8_t *classes, int which, const uint32_t *places, const T *by, uint32_t seen, uint32_t end, uint32_t *entry,
                                   uint64_t *hit, T *moved) {
    uint16_t before[SPAN_WORDS];
    uint32_t total = 0, at = *entry;
#pragma GCC unroll 8
    for (int word = 0; word < SPAN_WORDS; word++) {
        before[word] = (uint16_t)total;
        total += (uint32_t)__builtin_popcountll(equal(classes + 64 * word, (uint8_t)which));
    }
    for (; at < end && places[at] - seen < total; at++) {
        uint32_t rank = places[at] - seen;
        int word = word_of(before, rank), bit = select_bit(equal(classes + 64 * word, (uint8_t)which), rank - before[word]);
        hit[word] |= (uint64_t)1 << bit;
        moved[64 * word + bit] = by[at];
    }
    *entry = at;
    return total;
}

// Elements of classes become places among all, in their order, and what they become.
static int64_t NAMED(scan)(const T *old, int64_t n, int shift, uint32_t mask, int lowest, const Class *class, const uint32_t *places, const T *by,
                           int64_t changes, T flips, uint32_t *indices, T *values, Sums *sums) {
    uint32_t entry[CLASSES], seen[CLASSES] = {0}, exponents[256 + CLASSES] = {0};
    uint8_t classes[SPAN];
    T moved[SPAN];
    int64_t out = 0, settled = 0;
    for (int which = 0; which < CLASSES; which++) entry[which] = class[which].first;
    for (int64_t start = 0; start < n && out < changes; start += SPAN) {
        uint64_t hit[SPAN_WORDS] = {0};
        NAMED(classify)(old + start, n - start, SPAN, shift, mask, lowest, classes);
        for (int which = 0; which < CLASSES; which++) {
            uint32_t end = class[which].first + class[which].changes;
            NAMED(fetch)(old + start + SPAN, SPAN, which);
            if (entry[which] < end) seen[which] += NAMED(look)(classes, which, places, by, seen[which], end, entry + which, hit, moved);
        }
        uint64_t words = 0;
        for (int word = 0; word < SPAN_WORDS; word++) words |= (uint64_t)(hit[word] != 0) << word;
        for (; words; words &= words - 1) {
            int word = __builtin_ctzll(words);
            uint64_t left = hit[word];
            do {
                int place = 64 * word + __builtin_ctzll(left);
                indices[out] = (uint32_t)(start + place);
                values[out++] = moved[place];
                exponents[(uint32_t)(old[start + place] >> shift) & mask]++;
            } while (left &= left - 1);
        }
        // Not the last ones: what was just stored one by one is not yet to be read as a whole.
        for (; out - settled >= 2 * BLOCK; settled += BLOCK) NAMED(settle)(old, indices + settled, BLOCK, flips, values + settled, sums);
    }
    NAMED(settle)(old, indices + settled, out - settled, flips, values + settled, sums);
    if (out < changes) return BEHIND;
    return lowest_of(exponents, mask >= CLASSES ? (int)mask + 1 - CLASSES + 1 : 1) == lowest ? out : LOWEST;
}

static int64_t NAMED(decoded_tight)(Reader *r, const T *old, int64_t n, int shift, uint32_t mask, T flips, uint32_t **places, T **by,
                                    uint32_t *indices, T *values, int64_t room, Sums *sums) {
    int lowest = (int)get(r, 8);
    uint32_t set = get(r, 16);
    if (r->error) return r->error;
    if (!set) return EMPTY;
    Class class[CLASSES] = {{0}};
    int64_t changes = 0;
    for (int which = 0; which < CLASSES; which++) {
        if (!(set >> which & 1)) continue;
        Class *each = class + which;
        each->first = (uint32_t)changes;
        each->changes = get_count(r);
        each->gap_parameter = (int)get(r, 5);
        each->form = (int)get(r, 2);
        if (each->form > 2) return FORM;
        if (each->form) each->size_parameter = (int)get(r, 5);
        if (each->form == 2) each->exceptions = get_count(r);
        if (r->error) return r->error;
        changes += each->changes;
    }
    if (changes > n || changes > room) return COUNT;
    *places = malloc((size_t)changes * sizeof **places);
    *by = malloc((size_t)changes * sizeof **by);
    if (!*places || !*by) return MEMORY;
    for (int which = 0; which < CLASSES; which++) {
        int error = class[which].changes ? NAMED(get_places)(r, class + which, (uint64_t)n, *places) : 0;
        if (error) return error;
    }
    for (int which = 0; which < CLASSES; which++) {
        int error = class[which].changes ? NAMED(get_sizes)(r, class + which, *by) : 0;
        if (error || r->error) return error ? error : r->error;
    }
    if (r->end - r->at >= 8 || get(r, (int)(r->end - r->at))) return REST;
    return NAMED(scan)(old, n, shift, mask, lowest, class, *places, *by, changes, flips, indices, values, sums);
}

// Room for as many changes as there are elements, or bits in the payload.
void NAMED(decode_tight)(const uint8_t *payload, int64_t size, const T *old, int64_t n, int64_t shift, int64_t exponent_bits, uint64_t flips,
                         uint64_t first, uint64_t other, uint32_t *indices, T *values, int64_t room, int64_t *result, uint64_t *sums) {
    uint8_t *padded = malloc((size_t)size + 16);
    uint32_t *places = NULL;
    T *by = NULL;
    result[0] = MEMORY;
    if (!padded) return;
    memcpy(padded, payload, (size_t)size);
    memset(padded + size, 0, 16);
    Reader r = {padded, 0, 8 * (uint64_t)size, 0};
    Sums s = sums_from(first, other);
    uint32_t mask = ((uint32_t)1 << exponent_bits) - 1;
    result[0] = NAMED(decoded_tight)(&r, old, n, (int)shift, mask, (T)flips, &places, &by, indices, values, room, &s);
    sums_to(&s, sums);
    free(places);
    free(by);
    free(padded);
}
