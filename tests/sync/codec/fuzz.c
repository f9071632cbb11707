// Hostile payloads for every decoder in C, with a compiler that notices each read and write outside of what was allocated: `fuzz TIMES SEED`.
//
// Payloads of changes that it makes itself are damaged, and decoded into rooms of exactly the size that the callers give. What is read must be ascending
// places among the elements, and be encoded as the same bytes again.

#include <stdio.h>

#include "kernel.c"

static uint64_t state;

static uint64_t next_random(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static size_t damage(uint8_t *data, size_t size, size_t room) {
    for (int times = 1 + (int)(next_random() % 3); times; times--) {
        size_t place = size ? next_random() % size : 0, more = 1 + next_random() % 8;
        switch (next_random() % 6) {
        case 0:
            if (size) data[place] ^= (uint8_t)(1 << next_random() % 8);
            break;
        case 1:
            if (size) data[place] = (uint8_t)next_random();
            break;
        case 2:
            more = more > size - place ? size - place : more;
            memmove(data + place, data + place + more, size - place - more);
            size -= more;
            break;
        case 3:
            if (size + more > room) break;
            memmove(data + place + more, data + place, size - place);
            for (size_t i = 0; i < more; i++) data[place + i] = (uint8_t)next_random();
            size += more;
            break;
        case 4:
            size = place;
            break;
        default:
            for (size_t i = 0; i < 4 && i < size; i++) data[i] = (uint8_t)(next_random() >> 60 ? 0xFF : next_random());
        }
    }
    return size;
}

static void expect(int is_so, const char *what) {
    if (!is_so) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

static void *copy(const void *data, size_t size) {
    void *found = malloc(size ? size : 1);
    memcpy(found, data, size);
    return found;
}

// Element by element, of keys that begin at 3 and 5.
static void add_expected(uint64_t *sums, uint64_t place, uint64_t by) {
    for (int seed = 0; seed < 2; seed++) {
        uint64_t x = (seed ? 5 : 3) + place + 0x9E3779B97F4A7C15u;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
        sums[seed] += ((x ^ (x >> 31)) | 1) * by;
    }
}

#define WIDTH 1
#define T uint8_t
#include "fuzz_tight.h"
#undef WIDTH
#undef T
#define WIDTH 2
#define T uint16_t
#include "fuzz_tight.h"
#undef WIDTH
#undef T
#define WIDTH 4
#define T uint32_t
#include "fuzz_tight.h"

int main(int count, char **arguments) {
    if (count != 3) return 2;
    int64_t read[2] = {0}, times = atoll(arguments[1]);
    state = strtoull(arguments[2], NULL, 10) * 0x9E3779B97F4A7C15u + 1;
    for (int64_t i = 0; i < times; i += 64) {
        fuzz_1(3, 4, read);
        fuzz_2(7, 8, read);
        fuzz_2(10, 5, read);
        fuzz_4(23, 8, read);
    }
    printf("%lld %lld\n", (long long)read[0], (long long)read[1]);
    return 0;
}
