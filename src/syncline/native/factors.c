/* Encoding and decoding of matrices as two thin factors, for the compression PowerSGD.
 *
 * A call handles all tensors of a flat tensor: matrices that are compressed, and tensors that are sent whole. Each
 * function makes one pass over the values, in strips that stay in the cache. It divides rows or columns among up to
 * `num_threads` threads. The result does not depend on their number, nor on the instruction set. `isa` is as in codec.c.
 */

#define _GNU_SOURCE
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "isa.h"
#include "parts.h"

enum { FACTOR_STRIP = 1024, NUM_LANES = 16, NUM_SLICES = 64 };
static const double ZERO_LENGTH = 1e-24; /* the squared length up to which the rest of a row counts as zero */

/* The tensors of a flat tensor, and the addresses of their parts. */
struct factors {
    int rank;
    size_t num_tensors;
    const int64_t *shapes; /* n and m of each tensor; n is 0 for m values that are sent whole */
    const float *values, *residual;
    float *total, *out;     /* like the values */
    float *starts, *rights; /* a matrix of shape (rank, m) for each matrix */
    const float *right_means;
    float *lefts; /* a matrix of shape (rank, n) for each matrix */
    float *rest;  /* the values that are sent whole */
};

struct factor_kernels {
    void (*left)(const struct factors *f, size_t from, size_t to);
    void (*right)(const struct factors *f, size_t from, size_t to);
    void (*lost)(const struct factors *f, size_t from, size_t to);
    void (*mean)(const struct factors *f, size_t from, size_t to);
};

/* Return the beginning of a slice of `size` items. */
static inline size_t slice_at(size_t size, size_t slice) { return size * slice / NUM_SLICES; }

/* The place of one tensor in a walk over all tensors. */
struct place {
    size_t n, m, value, left, right, rest;
};

/* Move to the tensor with this index; `place` must be that of the tensor before. */
static inline void move_to(struct place *place, const struct factors *f, size_t index) {
    size_t rank = (size_t)f->rank;
    if (index) {
        place->value += place->n ? place->n * place->m : place->m;
        place->left += rank * place->n;
        place->right += place->n ? rank * place->m : 0;
        place->rest += place->n ? 0 : place->m;
    }
    place->n = (size_t)f->shapes[2 * index], place->m = (size_t)f->shapes[2 * index + 1];
}

#define KERNELS "factors.h"
#include "each_isa.h"

static const struct factor_kernels *factor_kernels_of(int isa) {
    static const struct factor_kernels *const kernels[] = {
        &factor_kernels_baseline,
#if defined(__x86_64__)
        &factor_kernels_avx2,
        &factor_kernels_avx512,
#endif
    };
    int num_supported = count_instruction_sets();
    return isa >= num_supported ? NULL : kernels[isa < 0 ? num_supported - 1 : isa];
}

#define RUN(name)                                                                                                  \
    static void run_##name(struct part *p) {                                                                       \
        const struct factor_kernels *kernels = p->kernels;                                                         \
        kernels->name(p->work, p->from, p->to);                                                                    \
    }
RUN(left)
RUN(right)
RUN(lost)
RUN(mean)

static int run_factors(int isa, void (*run)(struct part *), struct factors *f, size_t numel, int num_threads) {
    struct part whole = {.run = run, .kernels = factor_kernels_of(isa), .work = f};
    if (!whole.kernels) return -1;
    run_all(whole, NUM_SLICES, numel, num_threads);
    return 0;
}

/* Compute the left factors `start @ (residual + values).T`. The residual may be NULL.
 *
 * Into `total` the sums are written, and zeros for the tensors that are sent whole; it may be NULL if there is no
 * residual. `message` gets the factors, and behind them, from `rest`, the sums of the other tensors. */
EXPORT int syncline_left_factors(int isa, int rank, const int64_t *shapes, size_t num_tensors, size_t numel,
                                 const float *values, const float *residual, float *total, float *starts, float *lefts,
                                 float *rest, int num_threads) {
    struct factors f = {.rank = rank, .shapes = shapes, .num_tensors = num_tensors, .values = values};
    f.residual = residual, f.total = total, f.starts = starts, f.lefts = lefts, f.rest = rest;
    return run_factors(isa, run_left, &f, numel, num_threads);
}

/* ------------------------------------------------------------------ orthonormal rows */

/* Add up `width` terms by halves, as `pairwise_sums` in base.py does. The width is a power of two; the terms change. */
static double sum_by_halves(double *terms, size_t width) {
    while (width > 1) {
        width /= 2;
        for (size_t i = 0; i < width; i++) terms[i] += terms[i + width];
    }
    return terms[0];
}

static double product_of(const double *a, const double *b, double *terms, size_t width) {
    for (size_t i = 0; i < width; i++) terms[i] = a[i] * b[i];
    return sum_by_halves(terms, width);
}

/* Make the rows of a matrix of shape (rank, n) orthonormal, with the bits of `orthonormal_rows` in power_sgd.py.
 *
 * The memory holds rank + 1 rows of `width` numbers. */
static void orthonormalize(float *matrix, size_t rank, size_t n, double *memory, size_t width) {
    double *terms = memory + rank * width;
    for (size_t r = 0; r < rank; r++) {
        double *row = memory + r * width, largest = 0;
        for (size_t i = 0; i < width; i++) {
            row[i] = i < n ? matrix[r * n + i] : 0;
            double magnitude = fabs(row[i]);
            largest = magnitude > largest || magnitude != magnitude ? magnitude : largest;
        }
        if (largest != 0)
            for (size_t i = 0; i < width; i++) row[i] /= largest;
    }
    for (int time = 0; time < 2; time++)
        for (size_t k = 0; k + 1 < rank; k++) {
            double *row = memory + k * width, squared = product_of(row, row, terms, width);
            for (size_t later = k + 1; later < rank; later++) {
                double *rest = memory + later * width, product = product_of(rest, row, terms, width);
                double factor = squared <= ZERO_LENGTH ? 0 : product / squared;
                for (size_t i = 0; i < width; i++) rest[i] -= factor * row[i];
            }
        }
    for (size_t r = 0; r < rank; r++) {
        double *row = memory + r * width, squared = product_of(row, row, terms, width), length = sqrt(squared);
        for (size_t i = 0; i < n; i++) matrix[r * n + i] = squared <= ZERO_LENGTH ? 0 : (float)(row[i] / length);
    }
}

/* Make the rows of all left factors orthonormal. Return whether there was memory. */
static bool orthonormalize_all(const struct factors *f) {
    size_t largest = 1;
    for (size_t i = 0; i < f->num_tensors; i++)
        while (largest < (size_t)f->shapes[2 * i]) largest *= 2;
    double *memory = malloc(((size_t)f->rank + 1) * largest * sizeof *memory);
    if (!memory) return false;
    struct place place = {0};
    for (size_t i = 0; i < f->num_tensors; i++) {
        move_to(&place, f, i);
        size_t width = 1;
        while (width < place.n) width *= 2;
        if (place.n) orthonormalize(f->lefts + place.left, (size_t)f->rank, place.n, memory, width);
    }
    free(memory);
    return true;
}

/* Make the rows of the left factors orthonormal, and compute the right factors `left @ total`.
 *
 * `rest` is written into the places of the tensors that are sent whole, in `out`. Return -2 if there is no memory. */
EXPORT int syncline_right_factors(int isa, int rank, const int64_t *shapes, size_t num_tensors, size_t numel,
                                  float *total, float *out, float *lefts, float *rest, float *rights, int num_threads) {
    struct factors f = {.rank = rank, .shapes = shapes, .num_tensors = num_tensors, .total = total, .out = out};
    f.lefts = lefts, f.rest = rest, f.rights = rights;
    if (!orthonormalize_all(&f)) return -2;
    return run_factors(isa, run_right, &f, numel, num_threads);
}

/* Subtract `left.T @ right` from `total`. Differences that are not finite become zero. */
EXPORT int syncline_lost_of_factors(int isa, int rank, const int64_t *shapes, size_t num_tensors, size_t numel,
                                    float *total, float *lefts, float *rights, int num_threads) {
    struct factors f = {.rank = rank, .shapes = shapes, .num_tensors = num_tensors, .total = total};
    f.lefts = lefts, f.rights = rights;
    return run_factors(isa, run_lost, &f, numel, num_threads);
}

/* Write the products `left.T @ right` into `out`, and scaled right factors into `starts`.
 *
 * The largest number of each row of a start is 1. A row that is zero or not finite does not replace the old one. */
EXPORT int syncline_mean_of_factors(int isa, int rank, const int64_t *shapes, size_t num_tensors, size_t numel,
                                    float *out, float *lefts, const float *right_means, float *starts, int num_threads) {
    struct factors f = {.rank = rank, .shapes = shapes, .num_tensors = num_tensors, .out = out};
    f.lefts = lefts, f.right_means = right_means, f.starts = starts;
    int result = run_factors(isa, run_mean, &f, numel, num_threads);
    struct place place = {0};
    for (size_t t = 0; t < num_tensors; t++) {
        move_to(&place, &f, t);
        for (size_t r = 0; place.n && r < (size_t)rank; r++) {
            const float *row = right_means + place.right + r * place.m;
            float *start = starts + place.right + r * place.m, largest = 0;
            for (size_t i = 0; i < place.m; i++) {
                float magnitude = fabsf(row[i]);
                largest = magnitude > largest || magnitude != magnitude ? magnitude : largest;
            }
            if (largest > 0 && largest < INFINITY)
                for (size_t i = 0; i < place.m; i++) start[i] = row[i] / largest;
        }
    }
    return result;
}
