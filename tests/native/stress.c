/* Ranks as threads that do everything the native core can do, all at once, and check every result.
 *
 * Compiled with STRESS_RANK defined, once or more, it is the core of a rank, with static variables of its own, as in a
 * process of its own; without, it is the driver. They are linked into one program: so a thread sanitizer sees both
 * sides of every exchange.
 *
 *     stress RANKS ROUNDS SEED
 *
 * CORE may name another core.c.
 *
 * Each rank has three threads: one talks on two lanes of one group and one of another, and waits in an order of its
 * own; one talks on a lane of its own; one waits for what the first has started. Then the ranks of one group call
 * different things, and the other group is aborted while its ranks are at work.
 */

#ifdef STRESS_RANK

#define NAME__(name, rank) name##_of_##rank
#define NAME_(name, rank) NAME__(name, rank)
#define NAME(name) NAME_(name, STRESS_RANK)
#define syncline_abi NAME(abi)
#define syncline_isa NAME(isa)
#define syncline_reduce NAME(reduce_)
#define syncline_group_bytes NAME(group_bytes)
#define syncline_group_open NAME(group_open)
#define syncline_group_close NAME(group_close)
#define syncline_lane_bytes NAME(lane_bytes_)
#define syncline_lane_close NAME(lane_close)
#define syncline_lane_open NAME(lane_open)
#define syncline_start NAME(start_)
#define syncline_start_in_place NAME(start_in_place)
#define syncline_start_part NAME(start_part)
#define syncline_poll NAME(poll)
#define syncline_wait NAME(wait)
#define syncline_abort NAME(abort)
#define syncline_abort_text NAME(abort_text)
#define syncline_called NAME(called)
#ifndef CORE
#define CORE "../../src/syncline/native/core.c"
#endif
#include CORE

#include "stress_core.h"
extern const struct core NAME(core);
const struct core NAME(core) = {
    .group_bytes = syncline_group_bytes,
    .group_open = syncline_group_open,
    .group_close = syncline_group_close,
    .lane_bytes = syncline_lane_bytes,
    .lane_open = syncline_lane_open,
    .lane_close = syncline_lane_close,
    .start = syncline_start,
    .start_in_place = syncline_start_in_place,
    .start_part = syncline_start_part,
    .poll = syncline_poll,
    .wait = syncline_wait,
    .abort = syncline_abort,
    .abort_text = syncline_abort_text,
    .called = syncline_called,
};

#else

#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "stress_core.h"

extern const struct core core_of_0, core_of_1, core_of_2, core_of_3, core_of_4;
static const struct core *const cores[] = {&core_of_0, &core_of_1, &core_of_2, &core_of_3, &core_of_4};

enum { MAX_SIZE = 5, NUM_LANES = 4, NUM_GROUPS = 2, DEPTH = 4, NUM_SLOTS = 3, CHUNK_BYTES = 1024, MESSAGE_BYTES = 256 };
enum { MAX_NUMEL = 6000, MAX_IN_PLACE_NUMEL = 80000, STRIDE = MAX_IN_PLACE_NUMEL * 8 };
enum { BARRIER, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECV, IN_PLACE, SCATTER_IN_PLACE };
enum { TO_FIRST = SCATTER_IN_PLACE + 1, TO_FIRST_IN_PLACE, NUM_KINDS };
enum { SUM, MEAN, MAX, MIN, PRODUCT, NUM_OPS };
enum { F32, F64, F16, BF16, I8, U8, I16, I32, I64, NUM_DTYPES };
enum { DONE, PENDING, ABORTED, MISMATCH, DISAGREED };

static const size_t itemsizes[NUM_DTYPES] = {4, 8, 2, 2, 1, 1, 2, 4, 8};
static const int group_of_lane[NUM_LANES] = {0, 0, 1, 0}; /* the last is the second thread's */
static const uint64_t A_LONG_TIME = UINT64_C(60000000000);

static int size, num_rounds;
static uint64_t seed;
static char *group_memory[NUM_GROUPS], *lane_memory[NUM_LANES], *in_place_memory[NUM_LANES][DEPTH];

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    _Exit(1);
}

static uint64_t mixed(uint64_t x) { /* splitmix64 */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t next(uint64_t *state) { return mixed((*state)++); }

/* ------------------------------------------------------------------ numbers */

static void put(void *to, int dtype, double value) {
    float f = (float)value;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    int64_t i = (int64_t)value;
    uint16_t half;
    switch (dtype) {
    case F32: memcpy(to, &f, 4); break;
    case F64: memcpy(to, &value, 8); break;
    case F16: /* whole numbers up to 2048 */
        half = (uint16_t)(value == 0 ? 0 : (bits - 0x38000000) >> 13);
        memcpy(to, &half, 2);
        break;
    case BF16: /* whole numbers up to 256 */
        half = (uint16_t)(bits >> 16);
        memcpy(to, &half, 2);
        break;
    default: memcpy(to, &i, itemsizes[dtype]); /* little end first */
    }
}

/* What rank `rank` puts in, small enough for sums and products to be exact. */
static double value(uint64_t key, int rank, size_t i) { return (double)(mixed(key + i * 31 + (uint64_t)rank) % 4); }

static double reduced(uint64_t key, size_t i, int op, int dtype) {
    double result = value(key, 0, i);
    for (int r = 1; r < size; r++) {
        double x = value(key, r, i);
        if (op == SUM || op == MEAN) result += x;
        if (op == PRODUCT) result *= x;
        if (op == MAX) result = result > x ? result : x;
        if (op == MIN) result = result < x ? result : x;
    }
    if (op != MEAN) return result;
    return dtype == F32 ? (double)((float)result / (float)size) : result / size;
}

/* ------------------------------------------------------------------ one call */

struct call {
    int kind, dtype, op, src, lane, slot;
    size_t numel, itemsize, shift;
    uint64_t key, terms;
    bool is_aliased, is_disputed;
};

struct pending {
    struct call call;
    char *in, *out; /* as allocated */
    char *from, *to;
    size_t span_from, span_to;
    int queue, queue_of_recv;
    int64_t ticket, ticket_of_recv;
};

static bool is_in_place(int kind) { return kind == IN_PLACE || kind == SCATTER_IN_PLACE || kind == TO_FIRST_IN_PLACE; }

static bool is_to_first(int kind) { return kind == TO_FIRST || kind == TO_FIRST_IN_PLACE; }

static struct call drawn(uint64_t *state, int lane, int slot) {
    struct call c = {.lane = lane, .slot = slot};
    c.kind = (int)(next(state) % (NUM_KINDS - 1));
    if (c.kind >= RECV) c.kind++; /* a message is sent and received in one */
    c.dtype = (int)(next(state) % NUM_DTYPES);
    c.itemsize = itemsizes[c.dtype];
    bool has_mean = c.dtype == F32 || c.dtype == F64;
    do c.op = (int)(next(state) % NUM_OPS);
    while (c.op == MEAN && !has_mean);
    uint64_t how_much = next(state);
    c.numel = how_much % 8 == 0 ? 0 : how_much % 8 < 5 ? next(state) % 40 : next(state) % MAX_NUMEL;
    if (is_in_place(c.kind) && how_much % 5 == 0) c.numel = next(state) % MAX_IN_PLACE_NUMEL;
    c.src = (int)(next(state) % (uint64_t)size);
    c.shift = next(state) % 3 == 0 ? 1 : 0;
    c.is_aliased = next(state) & 1;
    c.key = next(state);
    bool may_have_terms = c.kind == ALL_REDUCE || c.kind == ALL_GATHER;
    uint64_t which_terms = next(state);
    if (may_have_terms && which_terms % 3) c.terms = which_terms | 1;
    c.is_disputed = c.terms && which_terms % 3 == 1;
    return c;
}

static size_t span_from(const struct call *c, int rank) { return c->numel * (size_t)rank / (size_t)size; }

static struct pending begun(const struct core *core, struct lane *lane, int rank, const struct call *call) {
    struct pending p = {.call = *call};
    const struct call *c = &p.call;
    size_t in_numel = c->kind == REDUCE_SCATTER ? c->numel * (size_t)size : c->numel;
    size_t out_numel = c->kind == ALL_GATHER ? c->numel * (size_t)size : c->numel;
    uint64_t code = (uint64_t)c->kind | (uint64_t)c->itemsize << 40;
    bool is_reduction = c->kind == ALL_REDUCE || c->kind == REDUCE_SCATTER || c->kind >= IN_PLACE;
    if (is_reduction) code |= (uint64_t)c->dtype << 8 | (uint64_t)c->op << 16;
    if (c->kind == BROADCAST) code |= (uint64_t)c->src << 24;
    if (c->is_disputed && rank % 2) { /* the others give other terms, or call something else */
        if (c->key % 2) p.call.terms += 2;
        else p.call.numel /= 2, p.call.terms += 4;
    }
    if (c->kind == BARRIER) {
        p.ticket = core->start(lane, BARRIER, NULL, NULL, 0, 0);
        return p;
    }
    if (is_to_first(c->kind)) { /* a part, whose bounds are the same on all ranks */
        p.span_from = c->numel / 3;
        p.span_to = c->numel - c->numel / 5;
    }
    if (is_in_place(c->kind)) {
        char *base = in_place_memory[c->lane][c->slot], *own = base + (size_t)rank * STRIDE;
        for (size_t i = 0; i < c->numel; i++) put(own + i * c->itemsize, c->dtype, value(c->key, rank, i));
        p.to = own;
        if (c->kind == IN_PLACE) p.span_to = c->numel;
        if (c->kind == SCATTER_IN_PLACE) {
            p.span_from = span_from(c, rank);
            p.span_to = span_from(c, rank + 1);
            p.to = own + p.span_from * c->itemsize;
            if (!c->is_aliased) p.to = p.out = malloc((p.span_to - p.span_from) * c->itemsize + 1);
        }
        p.ticket = core->start_in_place(lane, code, base, STRIDE, (uint64_t)c->slot + 1, c->numel, p.to, p.span_from,
                                        p.span_to);
        return p;
    }
    if (c->numel) {
        p.in = malloc(in_numel * c->itemsize + 1);
        p.from = p.in + c->shift;
        for (size_t i = 0; i < in_numel; i++) put(p.from + i * c->itemsize, c->dtype, value(c->key, rank, i));
        bool is_same = c->kind == BROADCAST || c->kind == TO_FIRST || (c->kind == ALL_REDUCE && c->is_aliased);
        p.to = p.from;
        if (!is_same) {
            p.out = malloc(out_numel * c->itemsize + 1);
            p.to = p.out + c->shift;
        }
    }
    if (c->kind == TO_FIRST) {
        p.ticket = core->start_part(lane, code, p.to, c->numel, p.span_from, p.span_to);
        return p;
    }
    if (c->kind != SEND) {
        p.ticket = core->start(lane, code, p.from, p.to, c->numel, c->terms);
        return p;
    }
    int after = (rank + 1) % size, before = (rank + size - 1) % size;
    p.queue = 1 + after;
    p.queue_of_recv = 1 + size + before;
    p.ticket = core->start(lane, code | (uint64_t)after << 24, p.from, NULL, c->numel, 0);
    code = (code & ~UINT64_C(0xff)) | RECV;
    p.ticket_of_recv = core->start(lane, code | (uint64_t)before << 24, NULL, p.to, c->numel, 0);
    return p;
}

static void check(const struct pending *p, int rank) {
    const struct call *c = &p->call;
    char expected[8];
    int before = (rank + size - 1) % size;
    size_t numel = c->kind == ALL_GATHER ? c->numel * (size_t)size : c->kind == BARRIER ? 0 : c->numel;
    if (c->kind == SCATTER_IN_PLACE) numel = p->span_to - p->span_from;
    if (c->is_disputed) { /* nothing is written; memory that is nobody's input holds nothing that could be looked at */
        for (size_t i = 0; p->to == p->from && i < numel; i++) {
            put(expected, c->dtype, value(c->key, rank, i));
            if (memcmp(expected, p->to + i * c->itemsize, c->itemsize) != 0) fail("rank %d: a disputed call wrote", rank);
        }
        return;
    }
    for (size_t i = 0; i < numel; i++) {
        double x = 0;
        switch (c->kind) {
        case ALL_REDUCE:
        case IN_PLACE: x = reduced(c->key, i, c->op, c->dtype); break;
        case SCATTER_IN_PLACE: x = reduced(c->key, i + p->span_from, c->op, c->dtype); break;
        case REDUCE_SCATTER: x = reduced(c->key, i + (size_t)rank * c->numel, c->op, c->dtype); break;
        case ALL_GATHER: x = value(c->key, (int)(i / c->numel), i % c->numel); break;
        case BROADCAST: x = value(c->key, c->src, i); break;
        case SEND: x = value(c->key, before, i); break;
        case TO_FIRST: /* nothing else is written */
        case TO_FIRST_IN_PLACE:
            x = value(c->key, rank, i);
            if (rank == 0 && i >= p->span_from && i < p->span_to) x = reduced(c->key, i, c->op, c->dtype);
            break;
        default: break;
        }
        put(expected, c->dtype, x);
        if (memcmp(expected, p->to + i * c->itemsize, c->itemsize) != 0)
            fail("rank %d, lane %d: kind %d, dtype %d, op %d, %zu elements: element %zu is wrong", rank, c->lane,
                 c->kind, c->dtype, c->op, c->numel, i);
    }
}

static void discard(struct pending *p) {
    free(p->in);
    free(p->out);
}

/* ------------------------------------------------------------------ one rank */

struct rank {
    int rank;
    const struct core *core;
    struct group *groups[NUM_GROUPS];
    struct lane *lanes[NUM_LANES];
    /* What the third thread is to wait for as well. */
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct lane *also_lane;
    int also_queue;
    int64_t also_ticket; /* 0: nothing; -1: the end */
};

static void wait_for(struct rank *r, struct lane *lane, int queue, int64_t ticket, int expected, uint64_t *own) {
    if (ticket == 0) fail("rank %d: no memory", r->rank);
    if (ticket < 0 && expected == DISAGREED) fail("rank %d: ranks that disagree got through", r->rank);
    if (ticket < 0) return; /* done at once */
    if (next(own) % 8 == 0)
        for (int n = 0; n < 20; n++)
            if (r->core->poll(lane, queue, (uint64_t)ticket) == DONE) return;
    int outcome = r->core->wait(lane, queue, (uint64_t)ticket, A_LONG_TIME);
    if (outcome != expected) fail("rank %d: the outcome of a wait is %d", r->rank, outcome);
}

static void *also_waits(void *argument) {
    struct rank *r = argument;
    uint64_t own = seed + 77;
    for (;;) {
        pthread_mutex_lock(&r->mutex);
        while (r->also_ticket == 0) pthread_cond_wait(&r->changed, &r->mutex);
        struct lane *lane = r->also_lane;
        int queue = r->also_queue;
        int64_t ticket = r->also_ticket;
        if (ticket > 0) r->also_ticket = 0;
        pthread_mutex_unlock(&r->mutex);
        if (ticket < 0) return NULL;
        wait_for(r, lane, queue, ticket, DONE, &own);
    }
}

static void let_also_wait(struct rank *r, struct lane *lane, int queue, int64_t ticket) {
    pthread_mutex_lock(&r->mutex);
    r->also_lane = lane;
    r->also_queue = queue;
    r->also_ticket = ticket;
    pthread_cond_signal(&r->changed);
    pthread_mutex_unlock(&r->mutex);
}

/* Start up to DEPTH calls on each lane, the same on all ranks; wait for them in an order of one's own. */
static void talk(struct rank *r, int first_lane, int num_lanes, uint64_t stream, bool is_observed) {
    uint64_t common = mixed(seed + stream), own = mixed(seed + stream + 1000 * (uint64_t)(r->rank + 1));
    struct pending pending[NUM_LANES * DEPTH];
    for (int round = 0; round < num_rounds; round++) {
        int num = 0;
        for (int slot = 0; slot < DEPTH; slot++)
            for (int lane = first_lane; lane < first_lane + num_lanes; lane++) {
                struct call call = drawn(&common, lane, slot);
                if (next(&common) % 4 == 0) continue;
                pending[num++] = begun(r->core, r->lanes[lane], r->rank, &call);
            }
        while (num) {
            int at = (int)(next(&own) % (uint64_t)num);
            struct pending *p = &pending[at];
            struct lane *lane = r->lanes[p->call.lane];
            int expected = p->call.is_disputed ? DISAGREED : DONE;
            if (is_observed && p->ticket > 0 && expected == DONE) let_also_wait(r, lane, p->queue, p->ticket);
            wait_for(r, lane, p->queue, p->ticket, expected, &own);
            if (p->call.kind == SEND) wait_for(r, lane, p->queue_of_recv, p->ticket_of_recv, DONE, &own);
            check(p, r->rank);
            discard(p);
            *p = pending[--num];
        }
    }
}

static void *talks_on_its_own_lane(void *argument) {
    talk(argument, NUM_LANES - 1, 1, 2, false);
    return NULL;
}

/* All lanes of group 1 are at rest. Rank 0 calls a barrier, the others something else. */
static void meet_in_different_calls(struct rank *r) {
    struct lane *lane = r->lanes[2];
    float x = 1;
    uint64_t sum_of_f32 = ALL_REDUCE | UINT64_C(4) << 40, pairs[2 * MAX_SIZE];
    int64_t ticket = r->rank ? r->core->start(lane, sum_of_f32, &x, &x, 1, 0) : r->core->start(lane, BARRIER, NULL, NULL, 0, 0);
    if (ticket <= 0) fail("rank %d: ranks that called different things got through", r->rank);
    int outcome = r->core->wait(lane, 0, (uint64_t)ticket, A_LONG_TIME);
    if (outcome != MISMATCH) fail("rank %d: the outcome of a mismatch is %d", r->rank, outcome);
    if (r->core->called(lane, pairs) != size) fail("not all ranks' calls are told");
    for (int peer = 0; peer < size; peer++)
        if (pairs[2 * peer] != (peer ? sum_of_f32 : BARRIER) || pairs[2 * peer + 1] != (peer ? 1 : 0))
            fail("rank %d: rank %d's call is told wrongly", r->rank, peer);
}

/* All are at work on two lanes of group 0 when the last rank ends it. */
static void *works_until_the_end(void *argument) {
    struct rank *r = argument;
    static const char text[] = "enough";
    uint64_t state = mixed(seed + 5);
    for (int n = 0;; n++) {
        struct call call = drawn(&state, 0, 0);
        if (call.kind == SEND) call.kind = BARRIER;
        struct pending p = begun(r->core, r->lanes[0], r->rank, &call);
        if (r->rank == size - 1 && n == 20 && r->core->abort(r->groups[0], text, sizeof text) != 1)
            fail("the first to abort was not the first");
        int outcome = p.ticket < 0 ? DONE : r->core->wait(r->lanes[0], 0, (uint64_t)p.ticket, A_LONG_TIME);
        if (outcome == DISAGREED && p.call.is_disputed) outcome = DONE;
        if (outcome == DONE) check(&p, r->rank);
        else if (outcome != ABORTED) fail("rank %d: the outcome of an abort is %d", r->rank, outcome);
        /* An aborted rank leaves its memory alone: a peer may still be at it. */
        if (!is_in_place(p.call.kind) || outcome == DONE) discard(&p);
        else free(p.out);
        if (outcome == ABORTED) break;
    }
    char told[65536];
    int64_t bytes = r->core->abort_text(r->groups[0], told);
    if (bytes != sizeof text || memcmp(told, text, sizeof text) != 0) fail("rank %d: another text", r->rank);
    if (r->core->abort(r->groups[0], "late", 4) != 0) fail("two ranks were the first to abort");
    return NULL;
}

static pthread_barrier_t all_ranks;

static void *runs(void *argument) {
    struct rank *r = argument;
    pthread_t own_lane, observer;
    for (int g = 0; g < NUM_GROUPS; g++) {
        r->groups[g] = r->core->group_open(group_memory[g], r->rank, size, r->rank == 0 ? 0 : 5000, r->rank % 3);
        if (!r->groups[g]) fail("no group");
    }
    for (int l = 0; l < NUM_LANES; l++) {
        r->lanes[l] = r->core->lane_open(r->groups[group_of_lane[l]], lane_memory[l], NUM_SLOTS, CHUNK_BYTES,
                                         MESSAGE_BYTES);
        if (!r->lanes[l]) fail("no lane");
    }
    pthread_create(&own_lane, NULL, talks_on_its_own_lane, r);
    pthread_create(&observer, NULL, also_waits, r);
    talk(r, 0, NUM_LANES - 1, 1, true);
    pthread_join(own_lane, NULL);
    let_also_wait(r, NULL, 0, -1);
    pthread_join(observer, NULL);
    pthread_barrier_wait(&all_ranks);
    meet_in_different_calls(r);
    works_until_the_end(r);
    pthread_barrier_wait(&all_ranks);
    for (int g = 0; g < NUM_GROUPS; g++) r->core->group_close(r->groups[g]); /* lanes may be closed later */
    for (int l = 0; l < NUM_LANES; l++) r->core->lane_close(r->lanes[l]);
    return NULL;
}

static char *shared(size_t bytes) {
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("no memory");
    return memory;
}

int main(int num_arguments, char **arguments) {
    if (num_arguments != 4) fail("stress RANKS ROUNDS SEED");
    size = atoi(arguments[1]);
    num_rounds = atoi(arguments[2]);
    seed = strtoull(arguments[3], NULL, 10);
    if (size < 2 || size > MAX_SIZE) fail("2 to %d ranks", MAX_SIZE);
    for (int g = 0; g < NUM_GROUPS; g++) group_memory[g] = shared(cores[0]->group_bytes(size));
    for (int l = 0; l < NUM_LANES; l++) {
        lane_memory[l] = shared(cores[0]->lane_bytes(size, NUM_SLOTS, CHUNK_BYTES, MESSAGE_BYTES));
        for (int slot = 0; slot < DEPTH; slot++) in_place_memory[l][slot] = shared((size_t)size * STRIDE);
    }
    pthread_barrier_init(&all_ranks, NULL, (unsigned)size);
    static struct rank ranks[MAX_SIZE];
    pthread_t threads[MAX_SIZE];
    for (int i = 0; i < size; i++) {
        ranks[i].rank = i;
        ranks[i].core = cores[i];
        pthread_mutex_init(&ranks[i].mutex, NULL);
        pthread_cond_init(&ranks[i].changed, NULL);
        pthread_create(&threads[i], NULL, runs, &ranks[i]);
    }
    for (int i = 0; i < size; i++) pthread_join(threads[i], NULL);
    puts("all right");
    return 0;
}

#endif
