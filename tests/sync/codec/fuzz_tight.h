// See fuzz.c: eight damaged payloads of each kind, of elements T of WIDTH bytes.

// The same streams as one payload, damaged again or not; `well`: whether they can be read.
static void NAMED(fuzz_fast)(const T *old, int64_t n, uint64_t flips, uint8_t *const parts[5], const int64_t sizes[5], int well) {
    uint8_t data[5 * 4096 + 8];
    uint32_t head[2] = {(uint32_t)sizes[0], (uint32_t)sizes[2]};
    int64_t length = sizeof head, result[1];
    memcpy(data, head, sizeof head);
    for (int part = 0; part < 5; part++) {
        memcpy(data + length, parts[part], (size_t)sizes[part]);
        length += sizes[part];
    }
    int damaged = next_random() % 4 == 0;
    if (damaged) length = (int64_t)damage(data, (size_t)length, sizeof data);
    int64_t room = n < length ? n : length;
    uint8_t *hostile = copy(data, (size_t)length);
    uint32_t *places = malloc((size_t)room * 4 + !room);
    T *values = malloc((size_t)room * WIDTH + !room);
    uint64_t sums[2], expected[2] = {0};
    NAMED(decode_fast)(hostile, length, old, n, flips, 3, 5, places, values, result, sums);
    expect(damaged || !well || result[0] >= 0, "a payload that cannot be read, and its streams can");
    for (int64_t i = 0; i < result[0]; i++) {
        expect(places[i] < (uint64_t)n && (!i || places[i] > places[i - 1]) && values[i] != old[places[i]], "distances to nowhere");
        add_expected(expected, places[i], (uint64_t)values[i] - (uint64_t)old[places[i]]);
    }
    expect(result[0] < 0 || (sums[0] == expected[0] && sums[1] == expected[1]), "another state");
    free(hostile);
    free(places);
    free(values);
}

static void NAMED(fuzz)(int shift, int exponent_bits, int64_t *read) {
    int64_t n = 1 + (int64_t)(next_random() % 1200), result[4];
    uint64_t flips = (1ull << (8 * WIDTH - 1)) - 1, share = 1 + next_random() % 100;
    T *old = malloc((size_t)n * WIDTH), *new = malloc((size_t)n * WIDTH), *by = malloc((size_t)n * WIDTH);
    uint32_t *indices = malloc((size_t)n * 4);
    for (int64_t i = 0; i < n; i++) {
        old[i] = (T)next_random();
        T step = (T)(next_random() % 4 ? 1 : next_random() >> (next_random() % 64));
        new[i] = next_random() % 100 < share ? NAMED(ordered)((T)(NAMED(ordered)(old[i], (T)flips) + step), (T)flips) : old[i];
    }
    NAMED(find)(old, new, n, flips, indices, by, result);
    int64_t changes = result[0];
    uint8_t *gaps = malloc((size_t)(changes + n / FAR + 1)), *signs = calloc((size_t)(changes + 7) / 8 + 1, 1),
            *exception_gaps = malloc((size_t)(changes + changes / FAR + 1)), *sizes = malloc((size_t)changes + 1),
            *wide = malloc((size_t)changes * WIDTH + 1), *payload = malloc((size_t)changes * 24 + 256), *again = malloc((size_t)n * 24 + 256);
    NAMED(pack)(indices, by, changes, gaps, signs, exception_gaps, sizes, wide, result);
    uint8_t *streams[5] = {gaps, signs, exception_gaps, sizes, wide};
    int64_t lengths[5] = {result[0], (changes + 7) / 8, result[1], result[2], result[3]}, size = 0;
    if (changes) {
        NAMED(pack_tight)(old, n, shift, exponent_bits, indices, by, changes, payload, result);
        size = result[0];
        expect(size > 0 && size <= changes * 24 + 256, "a payload larger than its room");
    }
    for (int time = 0; time < 8; time++) {
        uint8_t data[4096], *parts[5];
        int64_t sizes_of[5];
        for (int part = 0; part < 5; part++) {
            int64_t length = lengths[part] > 4000 ? 4000 : lengths[part];
            memcpy(data, streams[part], (size_t)length);
            sizes_of[part] = next_random() % 4 ? length : (int64_t)damage(data, (size_t)length, sizeof data);
            parts[part] = copy(data, (size_t)sizes_of[part]);
        }
        uint32_t *places = malloc((size_t)sizes_of[0] * 4 + !sizes_of[0]), *again_places = malloc((size_t)sizes_of[0] * 4 + !sizes_of[0]);
        T *found = malloc((size_t)sizes_of[0] * WIDTH + !sizes_of[0]), *values = malloc((size_t)sizes_of[0] * WIDTH + !sizes_of[0]);
        NAMED(unpack)(parts[0], sizes_of[0], parts[1], sizes_of[1], parts[2], sizes_of[2], parts[3], sizes_of[3], parts[4], sizes_of[4], n, places,
                      found, result);
        read[0] += result[0] >= 0;
        for (int64_t i = 0; i < result[0]; i++) expect(places[i] < (uint64_t)n && (!i || places[i] > places[i - 1]) && found[i], "distances to nowhere");
        int64_t decoded[1];
        uint64_t sums[2], expected[2] = {0};
        NAMED(decode)(parts[0], sizes_of[0], parts[1], sizes_of[1], parts[2], sizes_of[2], parts[3], sizes_of[3], parts[4], sizes_of[4], old, n, flips,
                      3, 5, again_places, values, decoded, sums);
        expect(decoded[0] == result[0] || (decoded[0] < 0 && result[0] < 0), "two answers to the same distances");
        for (int64_t i = 0; i < result[0]; i++) {
            T moved = (T)(NAMED(ordered)(values[i], (T)flips) - NAMED(ordered)(old[places[i]], (T)flips));
            expect(again_places[i] == places[i] && moved == found[i], "elements that do not move as they should");
            add_expected(expected, places[i], (uint64_t)values[i] - (uint64_t)old[places[i]]);
        }
        expect(result[0] < 0 || (sums[0] == expected[0] && sums[1] == expected[1]), "another state");
        free(again_places);
        free(values);
        NAMED(fuzz_fast)(old, n, flips, parts, sizes_of, result[0] >= 0);
        for (int part = 0; part < 5; part++) free(parts[part]);
        free(places);
        free(found);
        if (!changes || size > 4000) continue;
        memcpy(data, payload, (size_t)size);
        int64_t length = (int64_t)damage(data, (size_t)size, sizeof data), room = n < 8 * length ? n : 8 * length;
        uint8_t *hostile = copy(data, (size_t)length);
        places = malloc((size_t)room * 4 + !room);
        found = malloc((size_t)room * WIDTH + !room);
        NAMED(decode_tight)(hostile, length, old, n, shift, exponent_bits, flips, 3, 5, places, found, room, result, sums);
        read[1] += result[0] >= 0;
        expected[0] = expected[1] = 0;
        for (int64_t i = 0; i < result[0]; i++) {
            expect(places[i] < (uint64_t)n && (!i || places[i] > places[i - 1]), "bits that lead nowhere");
            add_expected(expected, places[i], (uint64_t)found[i] - (uint64_t)old[places[i]]);
            found[i] = (T)(NAMED(ordered)(found[i], (T)flips) - NAMED(ordered)(old[places[i]], (T)flips));
            expect(found[i], "an element that stays");
        }
        expect(result[0] < 0 || (sums[0] == expected[0] && sums[1] == expected[1]), "another state");
        if (result[0] > 0) {
            int64_t told[1];
            NAMED(pack_tight)(old, n, shift, exponent_bits, places, found, result[0], again, told);
            expect(told[0] == length && !memcmp(again, hostile, (size_t)length), "two encodings of the same changes");
        }
        free(hostile);
        free(places);
        free(found);
    }
    void *all[] = {old, new, by, indices, gaps, signs, exception_gaps, sizes, wide, payload, again};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}
