/* Attention of single queries to the keys of their own sequence, in float32.

   A query's scores are products of it with one key after the other, its weights their exponentials relative to the largest, and what it gathers the
   values times these, added up in the order of the keys: nothing of that depends on which queries are computed with it, on how many keys lie behind
   those that it sees, or on the number of threads. Queries that share keys are computed together, because each key and value is then read once.

   A query stands in a row of `q` and `out`, and has a head. Keys and values have a place for each token, and floats from place to place and from head
   to head are given for both. The places of a sequence are neighbours, or lie in blocks of PLACES that a table names in their order.
   Formula: Attention is all you need (arXiv 1706.03762), with the heads of GQA (arXiv 2305.13245). */

#include <omp.h>

#include "call.h"
#include "lanes.h"
#include "spans.h"

#if !defined(TOGETHER) || !defined(SCORES) || !defined(PLACES)
#error "native/bindings.py says how many queries are computed together, how large their scores may be, and how many places a block has"
#endif
/* Places of one head, or fewer of each of several, whose keys, or values, are in the cache at a time. */
#define NEAR 256
/* Floats of a line of the cache. */
#define LINE 16
/* Units for each thread at least, of fewer heads where there would not be as many: whoever is done first finds something to take over. */
#define FEW_UNITS 4
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

typedef struct {
    int64_t block, head, place;
} strides;

/* Keys, or values, of a sequence for one head: place 0 of it, or of the block with number 0; and the numbers of its blocks in their order, or NULL
   where all its places are neighbours. */
typedef struct {
    const float *first;
    strides by;
    const int64_t *blocks;
} sequence;

/* From where on `place` lies as many strides of a place away, as do those behind it in its block. */
static inline const float *origin(sequence of, int64_t place) {
    return of.blocks ? of.first + of.blocks[place / PLACES] * of.by.block - place / PLACES * PLACES * of.by.place : of.first;
}

/* Up to where, but not beyond `last`, those behind `place` are its neighbours in memory. */
static inline int64_t neighbours(sequence of, int64_t place, int64_t last) { return of.blocks ? MIN(last, place | (PLACES - 1)) : last; }

/* One query, scaled, and where its answer goes; the places that it sees, room for their scores, which become weights, and the sum of these. */
typedef struct {
    const float *q;
    float *out, *scores;
    int64_t first, last;
    float *log, total;
} query;

/* `sum` of eight, of each in its own lane. */
static inline lanes sums(const lanes v[LANES]) {
    lanes a[4], b[2];
    for (int i = 0; i < 4; i++)
        a[i] = PICK(v[i], v[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) + PICK(v[i], v[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 2; i++)
        b[i] = PICK(a[i], a[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) + PICK(a[i], a[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    return PICK(b[0], b[1], 0, 8, 2, 10, 4, 12, 6, 14) + PICK(b[0], b[1], 1, 9, 3, 11, 5, 13, 7, 15);
}

/* Scores of `queries` with `count` neighbours from `place` on; both are constants, and their product is LANES at most. */
static inline __attribute__((always_inline)) void score(
    const int queries, const int count, const query *of, const float *keys, int64_t stride, int64_t place, int64_t dim) {
    lanes products[LANES] = {};
    for (int64_t i = 0; i < dim; i += LANES) {
        lanes q[LANES];
#pragma GCC unroll 8
        for (int each = 0; each < queries; each++) q[each] = at(of[each].q + i);
#pragma GCC unroll 8
        for (int key = 0; key < count; key++) {
            const lanes k = at(keys + (place + key) * stride + i);
#pragma GCC unroll 8
            for (int each = 0; each < queries; each++) products[each * count + key] += q[each] * k;
        }
    }
    const lanes found = sums(products);
#pragma GCC unroll 8
    for (int each = 0; each < queries; each++)
        memcpy(of[each].scores + place - of[each].first, (const float *)&found + each * count, count * sizeof(float));
}

/* The weights of all places that a query sees, and their sum. */
static inline void weigh(query *of) {
    const int64_t seen = of->last - of->first + 1;
    float *scores = of->scores;
    int64_t whole = seen;
    /* What fills the last group has no weight. */
    for (; whole % LANES; whole++) scores[whole] = -__builtin_inff();
    lanes most = at(scores), total = {};
    for (int64_t i = LANES; i < whole; i += LANES) most = chosen(at(scores + i) > most, at(scores + i), most);
    const float top = largest(most);
    for (int64_t i = 0; i < whole; i += LANES) {
        const lanes share = exponential(at(scores + i) - top);
        put(scores + i, share);
        total += share;
    }
    of->total = sum(total);
    if (of->log) *of->log = top + (float)__builtin_log((double)of->total);
}

/* Neighbouring places, none where the last is before the first. */
typedef struct {
    int64_t first, last;
} places;

/* Of `among`, those that a query sees. */
static inline places seen(const query *of, places among) { return (places){MAX(of->first, among.first), MIN(of->last, among.last)}; }

/* Of `among`, those that all queries of a tile see; those before and behind them are seen by some. */
static inline places seen_by_all(int queries, const query *of, places among) {
    for (int each = 0; each < queries; each++) among = seen(of + each, among);
    return among;
}

/* Keys, or values, that are read after those that are read now. */
typedef struct {
    sequence of;
    places left;
} ahead;

/* Brings the next `count` of them into the cache that a processor has for itself. They lie in pages of their own, whose first lines memory takes longer
   to find than a few queries take to read all of them. */
static inline void bring(ahead *next, int64_t count, int64_t dim) {
    for (; count > 0 && next->left.first <= next->left.last; count--, next->left.first++) {
        const float *near = origin(next->of, next->left.first) + next->left.first * next->of.by.place;
        for (int64_t i = 0; i < dim; i += LINE) __builtin_prefetch(near + i, 0, 2);
    }
}

/* Of places that are read `step` at a time, those from `first` on, up to where whole steps end. */
static inline places piece(places all, int64_t first, int64_t step) { return (places){first, MIN(first / step * step + step - 1, all.last)}; }

/* Scores of a tile of queries, a constant number: what all of them see they read together, and the rest by themselves. */
static inline __attribute__((always_inline)) void score_tile(
    const int queries, const query *of, places among, sequence keys, int64_t dim, ahead *next) {
    const int count = LANES / queries;
    const places common = seen_by_all(queries, of, among);
    for (int64_t place = common.first; place <= common.last;) {
        const int64_t last = neighbours(keys, place, common.last);
        const float *near = origin(keys, place);
        for (; place + count - 1 <= last; place += count) {
            bring(next, count, dim);
            score(queries, count, of, near, keys.by.place, place, dim);
        }
        for (; place <= last; place++) score(queries, 1, of, near, keys.by.place, place, dim);
    }
    for (int each = 0; each < queries; each++) {
        const places own = seen(of + each, among);
        int64_t place = own.first;
        for (; place <= MIN(common.first - 1, own.last); place++) score(1, 1, of + each, origin(keys, place), keys.by.place, place, dim);
        place = MAX(common.last + 1, MAX(common.first, own.first));
        for (; place <= own.last; place++) score(1, 1, of + each, origin(keys, place), keys.by.place, place, dim);
    }
}

/* Adds to `gathered` the values of neighbouring places times the weights of `queries`; that and `groups` of lanes are constants. Brings `next` of
   `dim` floats near, which may be none. */
static inline __attribute__((always_inline)) void gather(
    const int queries, const int groups, const query *of, lanes *gathered, sequence values, int64_t i, int64_t first, int64_t last, ahead *next,
    int64_t dim) {
    for (int64_t place = first; place <= last;) {
        const int64_t end = neighbours(values, place, last);
        const float *near = origin(values, place) + i;
        for (; place <= end; place++) {
            bring(next, 1, dim);
            for (int group = 0; group < groups; group++) {
                const lanes value = at(near + place * values.by.place + group * LANES);
                for (int each = 0; each < queries; each++) gathered[each * groups + group] += of[each].scores[place - of[each].first] * value;
            }
        }
    }
}

/* What a tile of queries gathers of `groups` of lanes, beside what it has gathered before; in the order of the places for each. */
static inline __attribute__((always_inline)) void gather_tile(
    const int queries, const int groups, const query *of, places among, sequence values, int64_t i, ahead *next, int64_t dim) {
    lanes gathered[LANES];
    ahead nothing = {{0}, {0, -1}};
    const places common = seen_by_all(queries, of, among);
    for (int each = 0; each < queries; each++) {
        const places own = seen(of + each, among);
        for (int group = 0; group < groups; group++) gathered[each * groups + group] = at(of[each].out + i + group * LANES);
        gather(1, groups, of + each, gathered + each * groups, values, i, own.first, MIN(common.first - 1, own.last), &nothing, dim);
    }
    gather(queries, groups, of, gathered, values, i, common.first, common.last, next, dim);
    for (int each = 0; each < queries; each++) {
        const places own = seen(of + each, among);
        gather(1, groups, of + each, gathered + each * groups, values, i, MAX(common.last + 1, MAX(common.first, own.first)), own.last, &nothing, dim);
        for (int group = 0; group < groups; group++) put(of[each].out + i + group * LANES, gathered[each * groups + group]);
    }
}

static inline __attribute__((always_inline)) void gather_all(const int queries, const query *of, places among, sequence values, int64_t dim, ahead *next) {
    const int groups = LANES / queries;
    int64_t i = 0;
    for (; i + groups * LANES <= dim; i += groups * LANES) gather_tile(queries, groups, of, among, values, i, next, dim);
    for (; i < dim; i += LANES) gather_tile(queries, 1, of, among, values, i, next, dim);
}

#define TILES(call)                                                              \
    for (int64_t done = 0; done < queries;) {                                    \
        query *own = of + done;                                                  \
        if (queries - done >= 4) { call(4, own); done += 4; }                    \
        else if (queries - done >= 2) { call(2, own); done += 2; }               \
        else { call(1, own); done++; }                                           \
    }
#define SCORE(number, own) score_tile(number, own, among, keys, dim, &next)
#define GATHER(number, own) gather_all(number, own, among, values, dim, &next)

/* All queries of a head. */
static void score_head(query *of, int64_t queries, places among, sequence keys, int64_t dim, ahead next) { TILES(SCORE) }
static void gather_head(query *of, int64_t queries, places among, sequence values, int64_t dim, ahead next) { TILES(GATHER) }

/* Keys, or values, of the head that is so many further. */
static inline sequence further(sequence of, int64_t heads) { of.first += heads * of.by.head; return of; }

/* What is read after some places of a head, where all heads of these are read before those behind them: `follows` after the last. */
static inline ahead behind(sequence of, int64_t head, int64_t heads, places among, places all, int64_t step, ahead follows) {
    if (head + 1 < heads) return (ahead){further(of, head + 1), among};
    return among.last < all.last ? (ahead){of, piece(all, among.last + 1, step)} : follows;
}

/* Queries of some heads of keys and values, as many of each. Of some places all heads are read, then of those behind them, in the order in which
   they lie in memory, and stay in the cache until all queries have read them. `follows` is read after the last values. */
static void attend_together(query *of, int64_t heads, int64_t queries, sequence keys, sequence values, int64_t dim, ahead follows) {
    const int64_t step = MAX(NEAR / heads / PLACES, 1) * PLACES;
    places all = {of[0].first, of[0].last};
    for (int64_t each = 1; each < queries; each++) all = (places){MIN(all.first, of[each].first), MAX(all.last, of[each].last)};
    for (places among = piece(all, all.first, step); among.first <= all.last; among = piece(all, among.last + 1, step))
        for (int64_t head = 0; head < heads; head++) {
            const ahead next = behind(keys, head, heads, among, all, step, (ahead){values, piece(all, all.first, step)});
            score_head(of + head * queries, queries, among, further(keys, head), dim, next);
        }
    for (int64_t each = 0; each < heads * queries; each++) {
        weigh(of + each);
        memset(of[each].out, 0, dim * sizeof(float));
    }
    for (places among = piece(all, all.first, step); among.first <= all.last; among = piece(all, among.last + 1, step))
        for (int64_t head = 0; head < heads; head++) {
            const ahead next = behind(values, head, heads, among, all, step, follows);
            gather_head(of + head * queries, queries, among, further(values, head), dim, next);
        }
    for (int64_t each = 0; each < heads * queries; each++)
        for (int64_t i = 0; i < dim; i += LANES) put(of[each].out + i, at(of[each].out + i) / of[each].total);
}

/* Of a span's sequence: in the blocks of its slot, or from the place on that its slot is. */
static inline sequence of_slot(const float *storage, strides by, int64_t head, const int64_t *tables, int64_t table, int64_t slot) {
    storage += head * by.head;
    return tables ? (sequence){storage, by, tables + slot * table} : (sequence){storage + slot * by.place, by, 0};
}

/* Some tokens of a span, up to `stop`, and some heads of keys and values that they see. */
typedef struct {
    span of;
    int64_t first, stop, head, heads;
} unit;

/* Of so many things, as many at a time. */
static inline int64_t shares(int64_t things, int64_t together) { return (things + together - 1) / together; }

static inline int64_t units_of(span of, int64_t tokens) { return shares(of.count, tokens); }

/* The unit with this number of all, with so many tokens and heads at most; of some tokens one for some heads after the other. */
static inline unit unit_at(const span *spans, int64_t number, int64_t tokens, int64_t kv_heads, int64_t heads) {
    const int64_t parts = shares(kv_heads, heads), head = number % parts * heads;
    int64_t block = number / parts;
    for (; block >= units_of(*spans, tokens); spans++) block -= units_of(*spans, tokens);
    return (unit){*spans, block * tokens, MIN(spans->count, (block + 1) * tokens), head, MIN(heads, kv_heads - head)};
}

/* The first place that a token at `place` sees. */
static inline int64_t first_seen(int64_t place, int64_t window) { return window ? MAX(0, place - window + 1) : 0; }

/* Every token of the spans attends to its sequence up to itself, or to the last `window` places of it; `logs` [rows, heads] gets the logarithms of
   the sums of exponentials, and may be NULL. Those of all `rows` in which none of them stands are 0. `tables` has `table` numbers of blocks for
   each slot; where it is NULL a slot is a first place. `scratch` has `room` floats for each of the threads: for TOGETHER queries, or those of one group
   where they are more, each with scores of the longest sequence in whole groups of lanes, and `dim` floats. As many heads are computed together as have
   room there, but in SCORES floats at most, and as leave units to all threads. */
void attend(
    float *out, float *logs, const float *q, int64_t q_row, int64_t q_head, const float *keys, const int64_t *key_strides, const float *values,
    const int64_t *value_strides, const int64_t *spans, int64_t count, const int64_t *tables, int64_t table, int64_t heads, int64_t kv_heads,
    int64_t dim, int64_t window, int64_t rows, float *scratch, int64_t room, int64_t threads) {
    const float scale = 1.0f / __builtin_sqrtf((float)dim);
    const span *of = (const span *)spans;
    const strides k = *(const strides *)key_strides, v = *(const strides *)value_strides;
    const int64_t group = heads / kv_heads, tokens = group >= TOGETHER ? 1 : TOGETHER / group;
    int64_t blocks = 0, longest = 0, most = 1, pairs = 0, covered = 0;
    for (int64_t each = 0; each < count; each++) {
        const int64_t stop = of[each].start + of[each].count;
        blocks += units_of(of[each], tokens);
        longest = MAX(longest, stop);
        most = MAX(most, MIN(of[each].count, tokens) * group);
        pairs += stop * of[each].count;
        covered += of[each].count;
    }
    if (covered < rows) memset(out, 0, rows * heads * dim * sizeof(float));
    if (covered < rows && logs) memset(logs, 0, rows * heads * sizeof(float));
    const int64_t scores = (longest + LANES - 1) / LANES * LANES;
    const int64_t used = pairs * heads * dim > ALONE ? threads : 1, near = MAX(1, MIN(room, SCORES) / (most * (scores + dim)));
    int64_t parts = shares(kv_heads, near);
    if (used > 1) parts = MIN(kv_heads, MAX(parts, shares(FEW_UNITS * used, MAX(1, blocks))));
    const int64_t together = shares(kv_heads, parts), units = blocks * shares(kv_heads, together);
#pragma omp parallel num_threads(used)
    {
        float *own = scratch + omp_get_thread_num() * room, *scaled = own + together * most * scores;
        query queries[together * most];
#pragma omp for schedule(dynamic)
        for (int64_t number = 0; number < units; number++) {
            const unit now = unit_at(of, number, tokens, kv_heads, together);
            int64_t found = 0;
            for (int64_t head = now.head * group; head < (now.head + now.heads) * group; head += group)
                for (int64_t token = now.first; token < now.stop; token++)
                    for (int64_t member = head; member < head + group; member++, found++) {
                        const int64_t row = now.of.row + token, place = now.of.start + token;
                        for (int64_t i = 0; i < dim; i += LANES) put(scaled + found * dim + i, at(q + row * q_row + member * q_head + i) * scale);
                        queries[found] = (query){scaled + found * dim, out + (row * heads + member) * dim, own + found * scores,
                                                 first_seen(place, window), place, logs ? logs + row * heads + member : 0, 0};
                    }
            ahead follows = {{0}, {0, -1}};
            if (number + 1 < units) {
                const unit next = unit_at(of, number + 1, tokens, kv_heads, together);
                const places its = {first_seen(next.of.start + next.first, window), next.of.start + next.stop - 1};
                follows = (ahead){of_slot(keys, k, next.head, tables, table, next.of.slot), piece(its, its.first, PLACES)};
            }
            attend_together(queries, now.heads, found / now.heads, of_slot(keys, k, now.head, tables, table, now.of.slot),
                            of_slot(values, v, now.head, tables, table, now.of.slot), dim, follows);
        }
    }
}

/* Puts the rows of the spans where their keys or values belong. */
void keep(
    float *to, const int64_t *to_strides, const float *x, int64_t x_row, int64_t x_head, const int64_t *spans, int64_t count,
    const int64_t *tables, int64_t table, int64_t heads, int64_t dim) {
    const strides by = *(const strides *)to_strides;
    for (int64_t each = 0; each < count; each++) {
        const span own = ((const span *)spans)[each];
        for (int64_t head = 0; head < heads; head++) {
            const sequence kept = of_slot(to, by, head, tables, table, own.slot);
            for (int64_t token = 0; token < own.count; token++)
                memcpy((float *)origin(kept, own.start + token) + (own.start + token) * by.place, x + (own.row + token) * x_row + head * x_head,
                       dim * sizeof(float));
        }
    }
}

CALL(attend, P(0), P(1), P(2), I(3), I(4), P(5), P(6), P(7), P(8), P(9), I(10), P(11), I(12), I(13), I(14), I(15), I(16), I(17), P(18), I(19), I(20))
CALL(keep, P(0), P(1), P(2), I(3), I(4), P(5), I(6), P(7), I(8), I(9), I(10))
