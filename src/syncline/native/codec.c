/* Encoding and decoding of values that are averaged over ranks, and copies of gradients that are not encoded.
 *
 * Each function makes one pass over its values, in blocks that stay in the cache. It divides the blocks among up to
 * `num_threads` threads. The result does not depend on their number. Tensors are aligned to their items; codes need not
 * be. `isa` is an instruction set, or -1 for the best one of this processor. The functions return -1 for an instruction
 * set that this processor does not have. They are independent of each other and of the collectives.
 */

#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "isa.h"
#include "parts.h"

enum { MAX_BLOCK_NUMEL = 1024, STRIP_NUMEL = 32, NUM_SAMPLES = 1 << 14 };
enum { NAN_SCALE = 0x7fc0 };                            /* the only scale of a block that is not finite */
static const uint32_t INFINITE = 0x7f800000;            /* the bits of infinity; those of NaN are larger */
static const float SMALLEST_SCALE = 0x1p-126f;          /* a smaller scale has no reciprocal in float32 */
static const float INNER = 0.4528f, BORDER = 0.9816f, OUTER = 1.5104f; /* the levels of 2 bits */

struct quantize {
    int bits;
    size_t block_numel, numel;
    const float *values, *residual; /* of shape (numel,); the residual may be NULL */
    float *lost;                    /* of shape (numel,), or NULL */
    float factor;
    uint8_t *scales, *codes;
};

struct mean_of_codes {
    int bits, num_rows, own_row;
    size_t block_numel, num_blocks, numel, row_bytes, divisor;
    const uint8_t *rows; /* of shape (num_rows, row_bytes) */
    const float *own;    /* of shape (numel,) */
    float *out;          /* of shape (numel,) */
};

struct narrow {
    const float *values;
    size_t divisor;
    bool is_bf16;
    uint16_t *out;
};

struct scale {
    const float *values;
    float factor;
    float *out; /* may be `values` */
    atomic_bool *any_infinite;
};

struct select {
    const float *values, *residual;
    float *total;
};

/* Values that may be among the largest, as one thread has found them, in ascending order of their places. */
struct found {
    uint32_t limit; /* the magnitude from which a value is listed */
    int32_t *places;
    float *values;
    size_t capacity, count;
    bool is_full, any_infinite; /* whether values are not listed; whether a value of the range is not finite */
};

struct codec {
    void (*quantize)(const struct quantize *q, size_t from, size_t to);
    void (*mean_of_codes)(const struct mean_of_codes *m, size_t from, size_t to);
    void (*narrow)(const struct narrow *w, size_t from, size_t to);
    bool (*scale)(const struct scale *s, size_t from, size_t to);
    void (*find)(const struct select *s, size_t from, size_t to, struct found *f);
};

#define KERNELS "encode.h"
#include "each_isa.h"

static const struct codec *codec_of(int isa) {
    static const struct codec *const codecs[] = {
        &codec_baseline,
#if defined(__x86_64__)
        &codec_avx2,
        &codec_avx512,
#endif
    };
    int num_supported = count_instruction_sets();
    return isa >= num_supported ? NULL : codecs[isa < 0 ? num_supported - 1 : isa];
}

/* ------------------------------------------------------------------ codes of 8, 4 or 2 bits */

static void run_quantize(struct part *p) {
    const struct codec *codec = p->kernels;
    codec->quantize(p->work, p->from, p->to);
}

/* Encode values as scales, one for each of `num_blocks` blocks, and the codes of the blocks behind them.
 *
 * The encoded values are residual + values, or only the values. Values from `numel` on count as zero. The error of
 * each value, times `factor`, is written to `lost`; where it is not finite, zero. */
EXPORT int syncline_quantize(int isa, int bits, size_t block_numel, size_t num_blocks, size_t numel, const float *values,
                             const float *residual, float *lost, float factor, uint8_t *row, int num_threads) {
    struct quantize q = {.bits = bits, .block_numel = block_numel, .numel = numel, .values = values};
    q.residual = residual, q.lost = lost, q.factor = factor, q.scales = row, q.codes = row + 2 * num_blocks;
    struct part whole = {.run = run_quantize, .kernels = codec_of(isa), .work = &q};
    if (!whole.kernels || block_numel > MAX_BLOCK_NUMEL) return -1;
    run_all(whole, num_blocks, num_blocks * block_numel, num_threads);
    return 0;
}

static void run_mean_of_codes(struct part *p) {
    const struct codec *codec = p->kernels;
    codec->mean_of_codes(p->work, p->from, p->to);
}

/* Decode rows that syncline_quantize has written, add them up in their order, and divide the sum by `divisor`.
 *
 * The row `own_row`, if it is not negative, is not decoded: its values are `own`. */
EXPORT int syncline_mean_of_codes(int isa, int bits, size_t block_numel, size_t num_blocks, size_t numel,
                                  const uint8_t *rows, int num_rows, size_t row_bytes, int own_row, const float *own,
                                  size_t divisor, float *out, int num_threads) {
    struct mean_of_codes m = {.bits = bits, .block_numel = block_numel, .num_blocks = num_blocks, .numel = numel};
    m.rows = rows, m.num_rows = num_rows, m.row_bytes = row_bytes, m.own_row = own_row, m.own = own;
    m.divisor = divisor, m.out = out;
    struct part whole = {.run = run_mean_of_codes, .kernels = codec_of(isa), .work = &m};
    if (!whole.kernels || block_numel > MAX_BLOCK_NUMEL) return -1;
    run_all(whole, (numel + block_numel - 1) / block_numel, numel * (size_t)num_rows, num_threads);
    return 0;
}

/* ------------------------------------------------------------------ 16-bit types */

static void run_narrow(struct part *p) {
    const struct codec *codec = p->kernels;
    codec->narrow(p->work, p->from, p->to);
}

/* Divide values, and round them to bfloat16 or float16. */
EXPORT int syncline_narrow(int isa, const float *values, size_t numel, size_t divisor, int is_bf16, uint16_t *out,
                           int num_threads) {
    struct narrow w = {.values = values, .divisor = divisor, .is_bf16 = is_bf16 != 0, .out = out};
    struct part whole = {.run = run_narrow, .kernels = codec_of(isa), .work = &w};
    if (!whole.kernels) return -1;
    run_all(whole, numel, numel, num_threads);
    return 0;
}

/* ------------------------------------------------------------------ copies of gradients */

static void run_scale(struct part *p) {
    const struct codec *codec = p->kernels;
    const struct scale *s = p->work;
    if (!codec->scale(s, p->from, p->to)) atomic_store(s->any_infinite, true);
}

/* Write values, times `factor`, to `out`. Return 1 if some products are not finite, 0 if all are finite. */
EXPORT int syncline_scale(int isa, const float *values, size_t numel, float factor, float *out, int num_threads) {
    atomic_bool any_infinite = false;
    struct scale s = {.values = values, .factor = factor, .out = out, .any_infinite = &any_infinite};
    struct part whole = {.run = run_scale, .kernels = codec_of(isa), .work = &s};
    if (!whole.kernels) return -1;
    run_all(whole, numel, numel, num_threads);
    return any_infinite;
}

/* ------------------------------------------------------------------ the largest magnitudes */

static void run_find(struct part *p) {
    const struct codec *codec = p->kernels;
    codec->find(p->work, p->from, p->to, p->found);
}

static uint32_t magnitude_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}

/* Return the magnitude that is the `number`-th largest of `count` values, and how many values of just this magnitude are
 * among the `number` largest.
 *
 * One group of bits after the other is found by counting, which takes the same time for any values. */
static uint32_t nth_magnitude(const float *values, size_t count, size_t number, size_t *num_equal) {
    static const int shifts[] = {20, 10, 0}, num_bins[] = {2048, 1024, 1024};
    uint32_t found = 0, known = 0; /* the bits that are known, and which these are */
    for (int step = 0; step < 3; step++) {
        size_t bins[2048] = {0};
        for (size_t i = 0; i < count; i++) {
            uint32_t magnitude = magnitude_of(values[i]);
            if ((magnitude & known) == found) bins[magnitude >> shifts[step] & (uint32_t)(num_bins[step] - 1)]++;
        }
        int bin = num_bins[step] - 1;
        while (bins[bin] < number) number -= bins[bin--];
        found |= (uint32_t)bin << shifts[step];
        known |= (uint32_t)(num_bins[step] - 1) << shifts[step];
    }
    *num_equal = number;
    return found;
}

/* Return a magnitude that about 1.25 * number values reach, by a sample. */
static uint32_t sampled_limit(const struct select *s, size_t numel, size_t number) {
    float samples[NUM_SAMPLES];
    size_t stride = numel / NUM_SAMPLES, num_equal;
    for (size_t i = 0; i < NUM_SAMPLES; i++)
        samples[i] = s->residual ? s->residual[i * stride] + s->values[i * stride] : s->values[i * stride];
    size_t num_above = (size_t)(1.25 * (double)number / (double)numel * NUM_SAMPLES) + 8;
    return nth_magnitude(samples, NUM_SAMPLES, num_above < NUM_SAMPLES ? num_above : NUM_SAMPLES, &num_equal);
}

/* Write the `number` largest of `count` values, and their places, in ascending order of the places.
 *
 * `from` has the places of the values, in ascending order; NULL if value i is at place i. */
static void pick(const float *values, const int32_t *from, size_t count, size_t number, int32_t *places,
                 float *chosen) {
    size_t num_equal, num_picked = 0;
    uint32_t smallest = nth_magnitude(values, count, number, &num_equal);
    for (size_t i = 0; num_picked < number; i++) {
        uint32_t magnitude = magnitude_of(values[i]);
        if (magnitude < smallest || (magnitude == smallest && !num_equal)) continue;
        if (magnitude == smallest) num_equal--;
        places[num_picked] = from ? from[i] : (int32_t)i;
        chosen[num_picked++] = values[i];
    }
}

/* Find the values that reach the limit, by all parts. Return their number; 0 if they are not all listed.
 *
 * They are moved together, to the beginning of the lists of the first part. */
static size_t find_candidates(struct part *parts, struct found *found, int num_parts, bool *any_infinite) {
    size_t count = 0;
    bool is_full = false;
    run_parts(parts, num_parts);
    *any_infinite = false;
    for (int i = 0; i < num_parts; i++) {
        is_full |= found[i].is_full;
        *any_infinite |= found[i].any_infinite;
        memmove(found[0].places + count, found[i].places, found[i].count * sizeof *found[i].places);
        memmove(found[0].values + count, found[i].values, found[i].count * sizeof *found[i].values);
        count += found[i].count;
    }
    return is_full ? 0 : count;
}

/* Find the `number` values of largest magnitude; of equal magnitudes those with the lowest index. NaN is the largest.
 *
 * The values are residual + values, or only the values, and are written to `total`. Their number is below 2^31. If a
 * sample gives a limit that only a few values reach, these values contain the largest of all.
 *
 * Returns 1 if some values are not finite, 0 if all are finite, and -2 if there is no memory. */
EXPORT int syncline_select(int isa, const float *values, const float *residual, float *total, size_t numel,
                           size_t number, int32_t *places, float *chosen, int num_threads) {
    struct select s = {.values = values, .residual = residual, .total = total};
    struct part parts[MAX_THREADS], whole = {.run = run_find, .kernels = codec_of(isa), .work = &s};
    struct found found[MAX_THREADS];
    if (!whole.kernels) return -1;
    int num_parts = divide(parts, whole, numel, numel, num_threads);
    bool are_few = numel >= 4 * NUM_SAMPLES && 5 * number <= 2 * numel;
    size_t capacity = are_few ? 3 * number + 4096 : 1;
    int32_t *memory = malloc((size_t)num_parts * capacity * (sizeof(int32_t) + sizeof(float)));
    if (!memory) return -2;
    uint32_t limit = are_few ? sampled_limit(&s, numel, number) : UINT32_MAX;
    for (int i = 0; i < num_parts; i++) {
        found[i] = (struct found){.limit = limit, .places = memory + (size_t)i * capacity, .capacity = capacity};
        found[i].values = (float *)(memory + (size_t)(num_parts + i) * capacity);
        parts[i].found = &found[i];
    }
    bool any_infinite;
    size_t count = find_candidates(parts, found, num_parts, &any_infinite);
    if (count >= number)
        pick(found[0].values, found[0].places, count, number, places, chosen);
    else
        pick(total, NULL, numel, number, places, chosen);
    free(memory);
    return any_infinite;
}
