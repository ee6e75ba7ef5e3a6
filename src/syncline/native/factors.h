/* Kernels of factors.c, for some of the slices of each tensor. Included by `each_isa.h`.
 *
 * Each operation is rounded once, in the order in which it is written. `mean` has the bits of `sum_of_outer_products`
 * in power_sgd.py.
 */

/* Add up the products of two rows, in lanes. */
static inline ISA_TARGET void FN(add_products)(float *lanes, const float *a, const float *b, size_t n) {
    size_t i = 0;
    for (; i + NUM_LANES <= n; i += NUM_LANES)
        for (size_t lane = 0; lane < NUM_LANES; lane++) lanes[lane] += a[i + lane] * b[i + lane];
    for (size_t lane = 0; i < n; i++, lane++) lanes[lane] += a[i] * b[i];
}

static inline ISA_TARGET float FN(sum_of_lanes)(float *lanes) {
    for (size_t half = NUM_LANES / 2; half; half /= 2)
        for (size_t lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

static inline ISA_TARGET void FN(left_of_row)(const struct factors *f, const struct place *p, size_t row) {
    float lanes[NUM_LANES], strip[FACTOR_STRIP];
    size_t m = p->m, at = p->value + row * m, rank = (size_t)f->rank;
    const float *starts = f->starts + p->right;
    float *lefts = f->lefts + p->left + row;
    for (size_t from = 0; from < m; from += FACTOR_STRIP) {
        size_t n = m - from < FACTOR_STRIP ? m - from : FACTOR_STRIP;
        const float *values = f->values + at + from, *total = values;
        if (f->residual) {
            const float *residual = f->residual + at + from;
            for (size_t i = 0; i < n; i++) strip[i] = residual[i] + values[i];
            total = strip;
        }
        if (f->total) memcpy(f->total + at + from, total, n * sizeof *total);
        for (size_t r = 0; r < rank; r++) {
            memset(lanes, 0, sizeof lanes);
            FN(add_products)(lanes, total, starts + r * m + from, n);
            float sum = FN(sum_of_lanes)(lanes);
            lefts[r * p->n] = from ? lefts[r * p->n] + sum : sum;
        }
    }
}

static ISA_TARGET void FN(left)(const struct factors *f, size_t from, size_t to) {
    struct place p = {0};
    for (size_t t = 0; t < f->num_tensors; t++) {
        move_to(&p, f, t);
        if (p.n) {
            for (size_t row = slice_at(p.n, from); row < slice_at(p.n, to); row++) FN(left_of_row)(f, &p, row);
            continue;
        }
        const float *values = f->values + p.value, *residual = f->residual ? f->residual + p.value : NULL;
        float *rest = f->rest + p.rest;
        size_t begin = slice_at(p.m, from), end = slice_at(p.m, to);
        for (size_t i = begin; i < end; i++) rest[i] = residual ? residual[i] + values[i] : values[i];
        if (f->total) memset(f->total + p.value + begin, 0, (end - begin) * sizeof *rest);
    }
}

/* Compute some columns of the right factor of a matrix. The rows that are read stay in the cache for the next factor. */
static inline ISA_TARGET void FN(right_of_columns)(const struct factors *f, const struct place *p, size_t column,
                                                   size_t count) {
    const float *total = f->total + p->value + column;
    size_t m = p->m, rank = (size_t)f->rank, row = 0;
    for (size_t r = 0; r < rank; r++) memset(f->rights + p->right + r * m + column, 0, count * sizeof(float));
    for (; row + 4 <= p->n; row += 4) {
        const float *a = total + row * m, *b = a + m, *c = b + m, *d = c + m;
        for (size_t r = 0; r < rank; r++) {
            const float *left = f->lefts + p->left + r * p->n + row;
            float la = left[0], lb = left[1], lc = left[2], ld = left[3];
            float *sums = f->rights + p->right + r * m + column;
            IVDEP for (size_t i = 0; i < count; i++) {
                float sum = sums[i] + la * a[i];
                sum = sum + lb * b[i];
                sum = sum + lc * c[i];
                sums[i] = sum + ld * d[i];
            }
        }
    }
    for (; row < p->n; row++)
        for (size_t r = 0; r < rank; r++) {
            float left = f->lefts[p->left + r * p->n + row], *sums = f->rights + p->right + r * m + column;
            IVDEP for (size_t i = 0; i < count; i++) sums[i] = sums[i] + left * total[row * m + i];
        }
}

static ISA_TARGET void FN(right)(const struct factors *f, size_t from, size_t to) {
    struct place p = {0};
    for (size_t t = 0; t < f->num_tensors; t++) {
        move_to(&p, f, t);
        size_t begin = slice_at(p.m, from), end = slice_at(p.m, to);
        if (!p.n) memcpy(f->out + p.value + begin, f->rest + p.rest + begin, (end - begin) * sizeof(float));
        for (size_t column = begin; p.n && column < end; column += FACTOR_STRIP)
            FN(right_of_columns)(f, &p, column, end - column < FACTOR_STRIP ? end - column : FACTOR_STRIP);
    }
}

static ISA_TARGET void FN(lost)(const struct factors *f, size_t from, size_t to) {
    float strip[FACTOR_STRIP];
    struct place p = {0};
    for (size_t t = 0; t < f->num_tensors; t++) {
        move_to(&p, f, t);
        for (size_t row = slice_at(p.n, from); row < slice_at(p.n, to); row++)
            for (size_t column = 0; column < p.m; column += FACTOR_STRIP) {
                size_t n = p.m - column < FACTOR_STRIP ? p.m - column : FACTOR_STRIP;
                float *total = f->total + p.value + row * p.m + column;
                memcpy(strip, total, n * sizeof *strip);
                for (size_t r = 0; r < (size_t)f->rank; r++) {
                    const float *right = f->rights + p.right + r * p.m + column;
                    float left = f->lefts[p.left + r * p.n + row];
                    for (size_t i = 0; i < n; i++) strip[i] = strip[i] - left * right[i];
                }
                for (size_t i = 0; i < n; i++) total[i] = __builtin_fabsf(strip[i]) < INFINITY ? strip[i] : 0.0f;
            }
    }
}

static ISA_TARGET void FN(mean)(const struct factors *f, size_t from, size_t to) {
    float strip[FACTOR_STRIP];
    struct place p = {0};
    for (size_t t = 0; t < f->num_tensors; t++) {
        move_to(&p, f, t);
        for (size_t row = slice_at(p.n, from); row < slice_at(p.n, to); row++)
            for (size_t column = 0; column < p.m; column += FACTOR_STRIP) {
                size_t n = p.m - column < FACTOR_STRIP ? p.m - column : FACTOR_STRIP;
                for (size_t r = 0; r < (size_t)f->rank; r++) {
                    const float *right = f->right_means + p.right + r * p.m + column;
                    float left = f->lefts[p.left + r * p.n + row];
                    if (r)
                        for (size_t i = 0; i < n; i++) strip[i] = strip[i] + left * right[i];
                    else
                        for (size_t i = 0; i < n; i++) strip[i] = left * right[i];
                }
                memcpy(f->out + p.value + row * p.m + column, strip, n * sizeof *strip);
            }
    }
}

static const struct factor_kernels FN(factor_kernels) = {
    .left = FN(left), .right = FN(right), .lost = FN(lost), .mean = FN(mean)};
