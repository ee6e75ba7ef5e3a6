/* Calls every function of codec.c and factors.c with memory of just the right size, for the sanitizers.
 *
 *     codec_stress SEED ROUNDS
 *
 * Every instruction set, and any number of threads, must give the bytes of the baseline in one thread.
 */

#define THREAD_NUMEL 1000
#ifndef CODEC
#define CODEC "../../src/syncline/native/codec.c"
#endif
#include CODEC
#include "../../src/syncline/native/factors.c"

#include <stdio.h>

static uint64_t state;

static uint32_t draw(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

static const float SPECIAL[] = {0.0f, -0.0f, __builtin_inff(), -__builtin_inff(), __builtin_nanf(""), 1e-45f, 3e38f};

static float *floats(size_t numel, unsigned one_in) {
    float *values = malloc(numel * sizeof *values + !numel);
    for (size_t i = 0; i < numel; i++) {
        values[i] = ((float)draw() / 4294967296.0f - 0.5f) * (draw() % 3 ? 1.0f : 100.0f);
        if (one_in && draw() % one_in == 0) values[i] = SPECIAL[draw() % 7];
    }
    return values;
}

static void *copy_of(const void *memory, size_t bytes) {
    void *copy = malloc(bytes + !bytes);
    memcpy(copy, memory, bytes);
    return copy;
}

static void expect(bool is_right, const char *what, int isa, int num_threads) {
    if (is_right) return;
    printf("%s differs: instruction set %d, %d threads\n", what, isa, num_threads);
    exit(1);
}

/* Compare floats by their bits; all NaN count as equal. */
static bool are_equal(const float *a, const float *b, size_t numel) {
    for (size_t i = 0; i < numel; i++)
        if (memcmp(&a[i], &b[i], sizeof *a) && (a[i] == a[i] || b[i] == b[i])) return false;
    return true;
}

struct results {
    uint8_t *rows;
    float *lost, *mean;
    uint16_t *narrow;
    int32_t *places;
    float *chosen;
};

static void free_results(struct results r) {
    free(r.rows), free(r.lost), free(r.mean), free(r.narrow), free(r.places), free(r.chosen);
}

struct drawn {
    int bits, feedback; /* feedback: 0 none, 1 in place, 2 in other memory */
    size_t block_numel, numel, num_blocks, number;
    float *values, *residual;
};

static struct results run(const struct drawn *d, int isa, int num_threads) {
    size_t bytes = d->numel * sizeof(float), row_bytes = d->num_blocks * (2 + d->block_numel * (size_t)d->bits / 8);
    struct results r = {.rows = malloc(2 * row_bytes + 1), .mean = malloc(bytes + 1)};
    float *residual = d->feedback ? copy_of(d->residual, bytes) : NULL;
    r.lost = d->feedback == 1 ? residual : malloc(bytes + 1);
    for (int row = 0; row < 2; row++) /* the second row adds to what the first one has lost */
        expect(syncline_quantize(isa, d->bits, d->block_numel, d->num_blocks, d->numel, d->values, row ? r.lost : residual,
                                 r.lost, 1.0f, r.rows + (size_t)row * row_bytes, num_threads) == 0,
               "a result of quantize", isa, num_threads);
    syncline_mean_of_codes(isa, d->bits, d->block_numel, d->num_blocks, d->numel, r.rows, 2, row_bytes, d->feedback - 1,
                           d->values, 3, r.mean, num_threads);
    r.narrow = malloc(d->numel * 2 + 1);
    syncline_narrow(isa, d->values, d->numel, 3, d->bits == 8, r.narrow, num_threads);
    r.places = malloc(d->number * sizeof *r.places + 1), r.chosen = malloc(d->number * sizeof *r.chosen + 1);
    float *total = malloc(bytes + 1);
    if (d->number)
        expect(syncline_select(isa, d->values, residual, total, d->numel, d->number, r.places, r.chosen, num_threads) >= 0,
               "a result of select", isa, num_threads);
    free(total);
    if (d->feedback == 2) free(residual);
    return r;
}

static void check(const struct drawn *d) {
    size_t row_bytes = d->num_blocks * (2 + d->block_numel * (size_t)d->bits / 8);
    struct results expected = run(d, 0, 1);
    for (int isa = 0; isa < count_instruction_sets(); isa++)
        for (int num_threads = 1; num_threads <= 5; num_threads += 2) {
            struct results found = run(d, isa, num_threads);
            expect(!memcmp(found.rows, expected.rows, 2 * row_bytes), "codes", isa, num_threads);
            expect(are_equal(found.lost, expected.lost, d->numel), "the error", isa, num_threads);
            expect(are_equal(found.mean, expected.mean, d->numel), "the mean", isa, num_threads);
            expect(!memcmp(found.narrow, expected.narrow, d->numel * 2), "16 bits", isa, num_threads);
            expect(!memcmp(found.places, expected.places, d->number * 4), "places", isa, num_threads);
            expect(are_equal(found.chosen, expected.chosen, d->number), "chosen values", isa, num_threads);
            free_results(found);
        }
    free_results(expected);
}

/* ------------------------------------------------------------------ thin factors */

struct tensors {
    int rank, feedback;
    size_t num, numel, left_numel, right_numel, rest_numel;
    int64_t shapes[8];
    float *values, *residual, *starts, *means, *rights;
};

struct factor_results {
    float *message, *total, *lefts, *rights, *out, *starts;
};

static struct factor_results run_all_factors(const struct tensors *t, int isa, int num_threads) {
    size_t bytes = t->numel * sizeof(float), first = t->left_numel + t->rest_numel;
    struct factor_results r = {.message = malloc(first * sizeof(float) + 1), .rights = malloc(t->right_numel * sizeof(float) + 1)};
    r.starts = copy_of(t->starts, t->right_numel * sizeof(float)), r.lefts = copy_of(t->means, first * sizeof(float));
    r.total = t->feedback ? copy_of(t->residual, bytes) : copy_of(t->values, bytes);
    r.out = t->feedback ? malloc(bytes + 1) : copy_of(t->values, bytes);
    float *residual = t->feedback ? r.total : NULL;
    syncline_left_factors(isa, t->rank, t->shapes, t->num, t->numel, t->values, residual, residual, r.starts, r.message,
                          r.message + t->left_numel, num_threads);
    syncline_right_factors(isa, t->rank, t->shapes, t->num, t->numel, r.total, r.out, r.lefts, r.lefts + t->left_numel,
                           r.rights, num_threads);
    syncline_lost_of_factors(isa, t->rank, t->shapes, t->num, t->numel, r.total, r.lefts, t->rights, num_threads);
    syncline_mean_of_factors(isa, t->rank, t->shapes, t->num, t->numel, r.out, r.lefts, t->rights, r.starts, num_threads);
    return r;
}

static void free_factor_results(struct factor_results r) {
    free(r.message), free(r.total), free(r.lefts), free(r.rights), free(r.out), free(r.starts);
}

static void check_factors(const struct tensors *t) {
    struct factor_results expected = run_all_factors(t, 0, 1);
    for (int isa = 0; isa < count_instruction_sets(); isa++)
        for (int num_threads = 1; num_threads <= 5; num_threads += 2) {
            struct factor_results found = run_all_factors(t, isa, num_threads);
            expect(are_equal(found.message, expected.message, t->left_numel + t->rest_numel), "left", isa, num_threads);
            expect(are_equal(found.lefts, expected.lefts, t->left_numel), "orthonormal rows", isa, num_threads);
            expect(are_equal(found.rights, expected.rights, t->right_numel), "right", isa, num_threads);
            expect(are_equal(found.total, expected.total, t->numel), "the error of factors", isa, num_threads);
            expect(are_equal(found.out, expected.out, t->numel), "the mean of factors", isa, num_threads);
            expect(are_equal(found.starts, expected.starts, t->right_numel), "the starts", isa, num_threads);
            free_factor_results(found);
        }
    free_factor_results(expected);
}

static void draw_factors(int round) {
    struct tensors t = {.rank = 1 + (int)(draw() % 5), .feedback = (int)(draw() % 2), .num = 1 + draw() % 4};
    for (size_t i = 0; i < t.num; i++) {
        size_t n = draw() % 4 ? draw() % 60 : 0, m = 1 + draw() % (round % 8 ? 90 : 2100), rank = (size_t)t.rank;
        t.shapes[2 * i] = (int64_t)n, t.shapes[2 * i + 1] = (int64_t)m;
        t.numel += n ? n * m : m, t.left_numel += rank * n, t.right_numel += n ? rank * m : 0, t.rest_numel += n ? 0 : m;
    }
    unsigned one_in = draw() % 2 ? 0 : 1 + draw() % 1000;
    t.values = floats(t.numel, one_in), t.residual = floats(t.numel, one_in), t.starts = floats(t.right_numel, 0);
    t.means = floats(t.left_numel + t.rest_numel, one_in), t.rights = floats(t.right_numel, one_in);
    check_factors(&t);
    free(t.values), free(t.residual), free(t.starts), free(t.means), free(t.rights);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    state = strtoull(argv[1], NULL, 10);
    for (int round = 0; round < atoi(argv[2]); round++) {
        struct drawn d = {.bits = 2 << (draw() % 3), .feedback = (int)(draw() % 3)};
        d.block_numel = 4 * (1 + draw() % (round % 4 ? 40 : 256));
        d.numel = draw() % (round % 8 ? 3000 : 300000);
        d.num_blocks = (d.numel + d.block_numel - 1) / d.block_numel + draw() % 3;
        d.number = d.numel ? 1 + draw() % (draw() % 2 ? d.numel : d.numel / 50 + 1) : 0;
        unsigned one_in = draw() % 2 ? 0 : 1 + draw() % 1000;
        d.values = floats(d.numel, one_in), d.residual = floats(d.numel, one_in);
        check(&d);
        free(d.values), free(d.residual);
        draw_factors(round);
    }
    expect(syncline_narrow(9, NULL, 0, 1, 1, NULL, 1) == -1, "an unknown instruction set", 9, 1);
    puts("all right");
    return 0;
}
