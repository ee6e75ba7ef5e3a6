/* Kernels of compressions, for one range of blocks or values. Included by `each_isa.h`.
 *
 * Their results have the bits of the same operations in PyTorch, in float32: each operation is rounded once, in the
 * order in which it is written. They read a block into a local array first, so `lost` may be any of the inputs.
 */

#include "half.h"

static inline ISA_TARGET uint32_t FN(magnitude)(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}

/* Return the nearest integer, of two the even one. The magnitude of x is below 2^22. The sign of zero is kept. */
static inline ISA_TARGET float FN(nearest)(float x) {
    return __builtin_copysignf((x + 0x1.8p23f) - 0x1.8p23f, x);
}

/* ------------------------------------------------------------------ codes of 8, 4 or 2 bits */

/* Return the scale of a block, as the bits of a bfloat16: NAN_SCALE if it is not finite. */
static inline ISA_TARGET uint16_t FN(scale_of)(const float *total, int bits, size_t block_numel, uint32_t *largest) {
    float scale;
    if (bits == 2) {
        float squares[MAX_BLOCK_NUMEL];
        size_t half = 1;
        while (half < block_numel) half *= 2;
        for (size_t i = 0; i < block_numel; i++) squares[i] = total[i] * total[i];
        for (size_t i = block_numel; i < half; i++) squares[i] = 0;
        while (half > 1) {
            half /= 2;
            for (size_t i = 0; i < half; i++) squares[i] = squares[i] + squares[i + half];
        }
        scale = __builtin_sqrtf(squares[0] / (float)block_numel);
    } else {
        uint32_t found = 0;
        for (size_t i = 0; i < block_numel; i++) {
            uint32_t magnitude = FN(magnitude)(total[i]);
            found = magnitude > found ? magnitude : found;
        }
        *largest = found;
        memcpy(&scale, &found, sizeof scale);
        scale /= bits == 8 ? 127.0f : 7.0f;
    }
    uint16_t rounded = FN(to_bf16)(scale);
    return (rounded & 0x7f80) == 0x7f80 ? NAN_SCALE : rounded;
}

/* Write the levels of a block as bytes. The values that share a byte are a half or a quarter of a block apart. */
static inline ISA_TARGET void FN(pack)(const float *levels, int bits, size_t block_numel, uint8_t *codes) {
    if (bits == 8) {
        for (size_t i = 0; i < block_numel; i++) codes[i] = (uint8_t)(int32_t)levels[i];
    } else if (bits == 4) {
        const float *high = levels + block_numel / 2;
        for (size_t i = 0; i < block_numel / 2; i++)
            codes[i] = (uint8_t)((int32_t)levels[i] + 16 * (int32_t)high[i] + 0x88);
    } else {
        size_t quarter = block_numel / 4;
        uint8_t each[MAX_BLOCK_NUMEL];
        for (size_t i = 0; i < block_numel; i++)
            each[i] = (uint8_t)((levels[i] > -1.0f) + (levels[i] > 0.0f) + (levels[i] > 1.0f));
        for (size_t i = 0; i < quarter; i++)
            codes[i] = (uint8_t)(each[i] + 4 * each[i + quarter] + 16 * each[i + 2 * quarter] + 64 * each[i + 3 * quarter]);
    }
}

static ISA_TARGET void FN(quantize)(const struct quantize *q, size_t from, size_t to) {
    float total[MAX_BLOCK_NUMEL], levels[MAX_BLOCK_NUMEL], lost[MAX_BLOCK_NUMEL];
    float without_overflow = 0x1p126f / (q->factor > 1 ? q->factor : 1); /* below it, no error of a finite block overflows */
    uint32_t large;
    memcpy(&large, &without_overflow, sizeof large);
    size_t size = q->block_numel;
    for (size_t block = from; block < to; block++) {
        size_t start = block * size, n = start >= q->numel ? 0 : q->numel - start < size ? q->numel - start : size;
        if (n && q->residual) {
            const float *values = q->values + start, *residual = q->residual + start;
            for (size_t i = 0; i < n; i++) total[i] = residual[i] + values[i];
        } else if (n) {
            memcpy(total, q->values + start, n * sizeof *total);
        }
        for (size_t i = n; i < size; i++) total[i] = 0;

        uint32_t largest = 0;
        uint16_t rounded = FN(scale_of)(total, q->bits, size, &largest);
        memcpy(q->scales + 2 * block, &rounded, sizeof rounded);
        float scale = FN(from_bf16)(rounded);
        bool is_finite = rounded != NAN_SCALE;
        float inverse = is_finite && scale >= SMALLEST_SCALE ? 1.0f / scale : 0.0f;
        for (size_t i = 0; i < size; i++) levels[i] = total[i] * inverse;
        if (!is_finite)
            for (size_t i = 0; i < size; i++) levels[i] = levels[i] == levels[i] ? levels[i] : 0.0f;
        if (q->bits == 2)
            for (size_t i = 0; i < size; i++)
                levels[i] = __builtin_copysignf(__builtin_fabsf(levels[i]) > BORDER ? OUTER : INNER, levels[i]);
        else
            for (size_t i = 0; i < size; i++) levels[i] = FN(nearest)(levels[i]);
        FN(pack)(levels, q->bits, size, q->codes + block * (size * (size_t)q->bits / 8));
        if (!q->lost || !n) continue;

        float *target = n == size ? q->lost + start : lost;
        for (size_t i = 0; i < size; i++) target[i] = (total[i] - levels[i] * scale) * q->factor;
        if (!is_finite || largest >= large)
            for (size_t i = 0; i < size; i++) target[i] = FN(magnitude)(target[i]) < INFINITE ? target[i] : 0.0f;
        if (n < size) memcpy(q->lost + start, lost, n * sizeof *lost);
    }
}

/* Write the values that the codes of a block stand for. */
static inline ISA_TARGET void FN(unpack)(const uint8_t *codes, int bits, size_t block_numel, float scale, float *to) {
    if (bits == 8) {
        for (size_t i = 0; i < block_numel; i++) to[i] = (float)(int8_t)codes[i] * scale;
    } else if (bits == 4) {
        float *high = to + block_numel / 2;
        for (size_t i = 0; i < block_numel / 2; i++) to[i] = (float)((int32_t)(codes[i] & 15) - 8) * scale;
        for (size_t i = 0; i < block_numel / 2; i++) high[i] = (float)((int32_t)(codes[i] >> 4) - 8) * scale;
    } else {
        size_t quarter = block_numel / 4;
        float inner = INNER * scale, outer = OUTER * scale;
        float levels[4] = {-outer, -inner, inner, outer};
        if (scale != scale) levels[0] = levels[1] = scale; /* a NaN keeps its sign */
        for (unsigned place = 0; place < 4; place++)
            for (size_t i = 0; i < quarter; i++) {
                unsigned code = codes[i] >> (2 * place) & 3;
                float low = code & 1 ? levels[1] : levels[0], high = code & 1 ? levels[3] : levels[2];
                to[place * quarter + i] = code & 2 ? high : low;
            }
    }
}

static ISA_TARGET void FN(mean_of_codes)(const struct mean_of_codes *m, size_t from, size_t to) {
    float sum[MAX_BLOCK_NUMEL], row[MAX_BLOCK_NUMEL];
    size_t size = m->block_numel, block_bytes = size * (size_t)m->bits / 8;
    float count = (float)m->divisor, reciprocal = 1.0f / count;
    bool is_exact = (m->divisor & (m->divisor - 1)) == 0; /* the product has the bits of the quotient */
    for (size_t block = from; block < to; block++) {
        size_t start = block * size, n = m->numel - start < size ? m->numel - start : size;
        for (int r = 0; r < m->num_rows; r++) {
            float *target = r ? row : sum;
            if (r == m->own_row) {
                memcpy(target, m->own + start, n * sizeof *target);
                for (size_t i = n; i < size; i++) target[i] = 0;
            } else {
                const uint8_t *scales = m->rows + (size_t)r * m->row_bytes, *codes = scales + 2 * m->num_blocks;
                uint16_t scale;
                memcpy(&scale, scales + 2 * block, sizeof scale);
                FN(unpack)(codes + block * block_bytes, m->bits, size, FN(from_bf16)(scale), target);
            }
            if (r)
                for (size_t i = 0; i < size; i++) sum[i] = sum[i] + row[i];
        }
        float *out = m->out + start;
        if (is_exact)
            for (size_t i = 0; i < n; i++) out[i] = sum[i] * reciprocal;
        else
            for (size_t i = 0; i < n; i++) out[i] = sum[i] / count;
    }
}

/* ------------------------------------------------------------------ 16-bit types */

static ISA_TARGET void FN(narrow)(const struct narrow *w, size_t from, size_t to) {
    const float *values = w->values;
    uint16_t *out = w->out;
    float count = (float)w->divisor, reciprocal = 1.0f / count;
    if ((w->divisor & (w->divisor - 1)) == 0) {
        if (w->is_bf16)
            IVDEP for (size_t i = from; i < to; i++) out[i] = FN(to_bf16)(values[i] * reciprocal);
        else
            IVDEP for (size_t i = from; i < to; i++) out[i] = FN(to_f16)(values[i] * reciprocal);
    } else {
        if (w->is_bf16)
            IVDEP for (size_t i = from; i < to; i++) out[i] = FN(to_bf16)(values[i] / count);
        else
            IVDEP for (size_t i = from; i < to; i++) out[i] = FN(to_f16)(values[i] / count);
    }
}

/* ------------------------------------------------------------------ copies of gradients */

/* Return whether all products are finite. */
static ISA_TARGET bool FN(scale)(const struct scale *s, size_t from, size_t to) {
    const float *values = s->values;
    float *out = s->out, factor = s->factor;
    uint32_t largest = 0;
    IVDEP for (size_t i = from; i < to; i++) {
        float product = values[i] * factor;
        uint32_t magnitude = FN(magnitude)(product);
        largest = magnitude > largest ? magnitude : largest;
        out[i] = product;
    }
    return largest < INFINITE;
}

/* ------------------------------------------------------------------ the largest magnitudes */

/* Add the residual, and list the values whose magnitude is at least `limit`, as far as they fit into `f`. */
static ISA_TARGET void FN(find)(const struct select *s, size_t from, size_t to, struct found *f) {
    uint32_t limit = f->limit, largest_of_all = 0;
    size_t count = 0;
    int32_t *places = f->places;
    float *found = f->values;
    for (size_t start = from; start < to; start += STRIP_NUMEL) {
        size_t n = to - start < STRIP_NUMEL ? to - start : STRIP_NUMEL;
        float strip[STRIP_NUMEL] = {0};
        const float *values = s->values + start;
        if (s->residual) {
            const float *residual = s->residual + start;
            for (size_t i = 0; i < n; i++) strip[i] = residual[i] + values[i];
        } else {
            memcpy(strip, values, n * sizeof *strip);
        }
        memcpy(s->total + start, strip, n * sizeof *strip);
        uint32_t largest = 0;
        for (size_t i = 0; i < STRIP_NUMEL; i++) {
            uint32_t magnitude = FN(magnitude)(strip[i]);
            largest = magnitude > largest ? magnitude : largest;
        }
        largest_of_all = largest > largest_of_all ? largest : largest_of_all;
        if (largest < limit) continue;
        if (count + STRIP_NUMEL > f->capacity) {
            f->is_full = true;
            continue;
        }
        uint8_t is_found[STRIP_NUMEL];
        for (size_t i = 0; i < STRIP_NUMEL; i++) is_found[i] = FN(magnitude)(strip[i]) >= limit;
        memset(is_found + n, 0, STRIP_NUMEL - n);
        for (size_t word = 0; word < n; word += 8) { /* most words have no value to list */
            uint64_t any;
            memcpy(&any, is_found + word, sizeof any);
            if (!any) continue;
            for (size_t i = word; i < word + 8; i++) {
                places[count] = (int32_t)(start + i);
                found[count] = strip[i];
                count += is_found[i];
            }
        }
    }
    f->count = count;
    f->any_infinite = largest_of_all >= INFINITE;
}

static const struct codec FN(codec) = {
    .quantize = FN(quantize), .mean_of_codes = FN(mean_of_codes), .narrow = FN(narrow),
    .scale = FN(scale), .find = FN(find)};
