/* Collectives between processes over shared memory.
 *
 * The library exports plain C symbols, which Python loads with ctypes. It does not depend on torch or Python. The
 * caller maps the memory, zeroed, and passes addresses.
 *
 * A group is N processes. Its memory holds an abort word and, for each rank, a doorbell: a futex that wakes up the rank
 * if it may be asleep. A lane is a separate sequence of a group's collectives. A collective is a sequence of chunks.
 * Every chunk passes through one slot of a ring, and all ranks step through the slots in the same order:
 *
 *     fill      the rank writes its chunk to its cell of the slot            slot.arrived += 1
 *     reduce    all have arrived: the rank reduces its part for the others   slot.reduced += 1   (some operations)
 *     consume   the rank reads the results from the others' cells            slot.consumed += 1
 *
 * A slot is filled again once all ranks have consumed it. The counters `arrived` and `consumed` only grow, so that no
 * rank reads a counter after a reset: the n-th use of a slot is complete when its counter has reached n * N. The
 * increment of a counter publishes earlier writes (release). A rank that has seen the counter may read them (acquire).
 * The algorithm relies on nothing else, on any processor.
 *
 * Tensors in memory that all ranks have mapped are reduced in place. Their chunk is empty, and the ranks claim pieces
 * of the work (slot.claimed). A rank that does not wait takes its own part. A rank that waits also takes the parts of
 * ranks that are still computing. Each sum runs in rank order on any rank, so all ranks and all runs get the same bits.
 *
 * A reduction to rank 0 is an all_reduce of a part of a tensor, whose result only rank 0 gets. The others keep their
 * values. The ranks compare the length of the whole tensor, so that different tensors are found at their first parts.
 *
 * If the ranks make different calls, the lane cannot be used any more. There is one exception: calls with terms (see
 * syncline_start). Each rank compares the first chunks of all ranks before it fills anything else. If all calls have
 * terms, but the calls or the terms differ, the operation ends after this chunk. Then no tensor is written, the outcome
 * on every rank is DISAGREED, and the lane can still be used.
 *
 * Only syncline_wait blocks, and not longer than its timeout.
 */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "isa.h"

#define ABI 7

enum { RING_EVERY = 4, LEAST_SPIN_NANOSECONDS = 4000, SHORT_NANOSECONDS = 200000 };
enum { BRIEF_BYTES = 64 * 1024, BRIEF_LOOKS = 100, MAX_DISAGREED = 64 };
enum { LINE_BYTES = 128, MAX_RANKS = 256, ABORT_BYTES = 65536, MESSAGE_SLOTS = 4 };
enum { PIECE_BYTES = 256 * 1024, STRIP_BYTES = 16 * 1024, BLOCK_NUMEL = 1024, SPLIT_RANKS = 4, SPLIT_BYTES = 16384 };

enum { OP_SUM, OP_MEAN, OP_MAX, OP_MIN, OP_PRODUCT };
enum { DTYPE_F32, DTYPE_F64, DTYPE_F16, DTYPE_BF16, DTYPE_I8, DTYPE_U8, DTYPE_I16, DTYPE_I32, DTYPE_I64, NUM_DTYPES };
enum kind {
    BARRIER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    BROADCAST,
    SEND,
    RECV,
    ALL_REDUCE_IN_PLACE,
    REDUCE_SCATTER_IN_PLACE,
    REDUCE,
    REDUCE_IN_PLACE
};
enum outcome { DONE = 0, PENDING = 1, ABORTED = 2, MISMATCH = 3, DISAGREED = 4 };

/* ------------------------------------------------------------------ kernels */

typedef void (*reduce_fn)(void *target, const void *const *sources, int num_sources, size_t numel, int op);

#define KERNELS "reduce.h"
#include "each_isa.h"

static const struct {
    const char *name;
    const reduce_fn *table;
} instruction_sets[] = {
    {"baseline", reduce_table_baseline},
#if defined(__x86_64__)
    {"avx2", reduce_table_avx2},
    {"avx512", reduce_table_avx512},
#endif
};

static int num_supported;
static const reduce_fn *best_kernels;
static pthread_once_t kernels_once = PTHREAD_ONCE_INIT;

static void choose_kernels(void) {
    num_supported = count_instruction_sets();
    best_kernels = instruction_sets[num_supported - 1].table;
}

static bool is_supported(int isa) {
    pthread_once(&kernels_once, choose_kernels);
    return isa >= 0 && isa < num_supported;
}

static const size_t itemsizes[NUM_DTYPES] = {4, 8, 2, 2, 1, 1, 2, 4, 8};

static bool is_aligned(const void *pointer, size_t itemsize) { return ((uintptr_t)pointer & (itemsize - 1)) == 0; }

/* Sources are aligned to their items; the target need not be. */
static void reduce(void *target, const void *const *sources, int num_sources, size_t numel, int dtype, int op) {
    size_t itemsize = itemsizes[dtype];
    reduce_fn kernel = best_kernels[dtype];
    if (is_aligned(target, itemsize)) {
        kernel(target, sources, num_sources, numel, op);
        return;
    }
    _Alignas(64) char aligned[BLOCK_NUMEL * 8];
    const void *shifted[MAX_RANKS];
    for (size_t from = 0; from < numel; from += BLOCK_NUMEL) {
        size_t n = numel - from < BLOCK_NUMEL ? numel - from : BLOCK_NUMEL;
        for (int s = 0; s < num_sources; s++) shifted[s] = (const char *)sources[s] + from * itemsize;
        kernel(aligned, shifted, num_sources, n, op);
        memcpy((char *)target + from * itemsize, aligned, n * itemsize);
    }
}

/* ------------------------------------------------------------------ shared memory */

typedef _Atomic uint64_t counter; /* only grows, unless a comment says that it is reset */

struct doorbell {
    _Alignas(LINE_BYTES) _Atomic uint32_t num_rings; /* a futex */
};

struct group_memory {
    _Alignas(LINE_BYTES) _Atomic uint32_t abort_state; /* 0; 1 while the text is being written; then 2 */
    uint32_t abort_bytes;
    _Alignas(LINE_BYTES) counter sleeping[MAX_RANKS / 64]; /* one bit per rank that waits for its doorbell */
    _Alignas(LINE_BYTES) char abort_text[ABORT_BYTES];
    struct doorbell doorbells[]; /* by rank */
};

struct slot {
    _Alignas(LINE_BYTES) counter arrived;
    _Alignas(LINE_BYTES) counter consumed;
    /* Not every use of a slot needs these counters. The last rank to consume sets them to 0, before it fills the slot
     * again and therefore before any rank reads them. */
    _Alignas(LINE_BYTES) counter reduced;
    _Alignas(LINE_BYTES) counter claimed; /* pieces of an operation in place */
    _Alignas(LINE_BYTES) counter done;
};

struct header { /* header of a cell: the call of its rank */
    _Alignas(LINE_BYTES) uint64_t code;
    uint64_t numel;
    uint64_t chunk;
    uint64_t buffer;
    uint64_t terms; /* 0 from the second chunk on */
};

struct channel { /* messages from one rank to another */
    _Alignas(LINE_BYTES) counter sent;
    _Alignas(LINE_BYTES) counter received;
};

/* A lane's memory: slots, cells by (slot, rank), channels by (src, dst) with their cells. */

/* ------------------------------------------------------------------ private memory */

struct operation {
    uint64_t code;
    enum kind kind;
    int dtype, op, peer; /* peer: src of a broadcast, the other side of a message */
    bool is_split;       /* each rank reduces its part of a chunk, then all copy all parts */
    size_t itemsize, numel, chunk_numel;
    size_t whole_numel; /* of the tensor of which this is a part */
    uint64_t num_chunks, num_filled, num_reduced, num_consumed;
    uint64_t num_taken; /* pieces of an operation in place, taken by this rank */
    const char *in;
    char *out;
    char *base; /* in place: rank 0's tensor; the others are at multiples of stride */
    size_t stride;
    size_t from, to; /* in place, in elements: what is reduced; of a reduce_scatter, this rank's span of it */
    uint64_t buffer;
    uint64_t terms; /* 0: none */
    bool has_disagreed;
};

struct queue { /* operations in the order in which they were started */
    struct operation *operations;
    uint64_t capacity; /* a power of two */
    uint64_t num_started, num_filled, num_reduced;
    _Atomic uint64_t num_completed;
};

struct group {
    _Atomic int num_holders; /* number of references: the caller's and one per lane */
    struct group_memory *memory;
    int rank, size;
    uint64_t most_spin_nanoseconds; /* 0 if the ranks do not have a processor each */
    int most_yields;
    _Atomic uint64_t spin_nanoseconds; /* how long a wait spins at present */
    _Atomic int num_yields;            /* how often it yields at present */
};

struct lane {
    struct group *group;
    pthread_mutex_t mutex; /* guards the fields below */
    struct slot *slots;
    char *cells, *channels;
    int num_slots;
    size_t chunk_bytes, cell_bytes, message_bytes, channel_bytes;
    uint64_t fill_at, reduce_at, consume_at; /* chunks of all collectives so far */
    struct queue collectives, *sends, *receives; /* the latter by peer */
    uint64_t num_pending_messages;
    int num_unrung;    /* counters completed for which no rank was woken yet; 0 while the lane is not locked */
    bool is_undecided; /* whether the chunk filled last has terms and was not compared yet */
    _Atomic int num_disagreed; /* length of the next list */
    uint64_t disagreed[MAX_DISAGREED]; /* tickets of collectives on which the ranks disagreed, until a wait for them */
    bool is_mismatched;
    const struct header *mismatch[2]; /* for a message: this rank's header and the peer's */
    struct header mine;
    struct lane *next; /* in the list of all lanes of this process */
};

static struct lane *all_lanes;
static pthread_mutex_t all_lanes_mutex = PTHREAD_MUTEX_INITIALIZER;

static size_t round_up(size_t bytes) { return (bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES; }
static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* ------------------------------------------------------------------ doorbells */

static long futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout) {
    return syscall(SYS_futex, (uint32_t *)word, operation, value, timeout, NULL, 0);
}

static void ring_rank(struct group_memory *memory, int rank) {
    atomic_fetch_add(&memory->doorbells[rank].num_rings, 1);
    futex(&memory->doorbells[rank].num_rings, FUTEX_WAKE, INT32_MAX, NULL);
}

/* Wake up sleeping ranks. Call this after the event that they wait for was published. The loads of `sleeping` here and
 * the stores before are sequentially consistent. So is a sleeper's store to `sleeping`, which a fence separates from
 * its last look. So one of the two sees the other's store. */
static void ring_all(struct group *group) {
    for (int word = 0; word < (group->size + 63) / 64; word++) {
        if (atomic_load(&group->memory->sleeping[word]) == 0) continue;
        uint64_t ranks = atomic_exchange(&group->memory->sleeping[word], 0);
        for (; ranks; ranks &= ranks - 1) ring_rank(group->memory, word * 64 + __builtin_ctzll(ranks));
    }
}

static void ring_if_asleep(struct group *group, int rank) {
    counter *word = &group->memory->sleeping[rank / 64];
    uint64_t bit = UINT64_C(1) << (rank % 64);
    if ((atomic_load(word) & bit) && (atomic_fetch_and(word, ~bit) & bit)) ring_rank(group->memory, rank);
}

static uint64_t now_nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static bool is_aborted(const struct group *group) { return atomic_load(&group->memory->abort_state) == 2; }

/* ------------------------------------------------------------------ slots and cells */

static struct slot *slot_of(struct lane *lane, uint64_t at) { return &lane->slots[at % (uint64_t)lane->num_slots]; }

/* Return the value of a slot's counter once all ranks have finished its use for chunk `at`. */
static uint64_t all_of(const struct lane *lane, uint64_t at) {
    return (at / (uint64_t)lane->num_slots + 1) * (uint64_t)lane->group->size;
}

static char *cell_of(struct lane *lane, uint64_t at, int rank) {
    uint64_t slot = at % (uint64_t)lane->num_slots;
    return lane->cells + (slot * (uint64_t)lane->group->size + (uint64_t)rank) * lane->cell_bytes;
}

static char *data_of(struct lane *lane, uint64_t at, int rank) {
    return cell_of(lane, at, rank) + sizeof(struct header);
}

static void ring_for_events(struct lane *lane) {
    if (lane->num_unrung) ring_all(lane->group);
    lane->num_unrung = 0;
}

/* Sleepers are woken at the end of an operation, and after a few chunks within one, because a rank that is woken for
 * each chunk falls asleep again at once. The function `progress` rings for the rest when it can do no more. */
static bool count_up(struct lane *lane, counter *count, uint64_t all, bool ends_operation) {
    bool is_last = atomic_fetch_add(count, 1) + 1 == all;
    if (is_last && (++lane->num_unrung == RING_EVERY || ends_operation)) ring_for_events(lane);
    return is_last;
}

static struct operation *operation_at(struct queue *queue, uint64_t number) {
    return &queue->operations[number & (queue->capacity - 1)];
}

static size_t chunk_from(const struct operation *o, uint64_t chunk) { return (size_t)chunk * o->chunk_numel; }

static size_t chunk_numel(const struct operation *o, uint64_t chunk) {
    size_t from = chunk_from(o, chunk);
    return from >= o->numel ? 0 : least(o->numel - from, o->chunk_numel);
}

/* Return the first element of rank `part`'s part of `numel` elements. If `part` is `size`, return `numel`. */
static size_t part_from(size_t numel, int part, int size) {
    size_t each = (numel + (size_t)size - 1) / (size_t)size;
    return least(each * (size_t)part, numel);
}

/* ------------------------------------------------------------------ fill */

static void copy_in(struct lane *lane, const struct operation *o, char *data) {
    size_t numel = chunk_numel(o, o->num_filled), from = chunk_from(o, o->num_filled) * o->itemsize;
    size_t bytes = numel * o->itemsize;
    int size = lane->group->size, rank = lane->group->rank;
    if (bytes == 0) return;
    switch (o->kind) {
    case ALL_REDUCE:
    case REDUCE:
    case ALL_GATHER: memcpy(data, o->in + from, bytes); break;
    case BROADCAST:
        if (o->peer == rank) memcpy(data, o->in + from, bytes);
        break;
    case REDUCE_SCATTER: /* a part for each rank, one after the other */
        for (int r = 0; r < size; r++)
            memcpy(data + (size_t)r * o->chunk_numel * o->itemsize, o->in + (size_t)r * o->numel * o->itemsize + from,
                   bytes);
        break;
    default: break;
    }
}

static bool fill(struct lane *lane) {
    struct queue *queue = &lane->collectives;
    if (queue->num_filled == queue->num_started || lane->is_undecided) return false;
    uint64_t at = lane->fill_at;
    struct slot *slot = slot_of(lane, at);
    if (at >= (uint64_t)lane->num_slots &&
        atomic_load_explicit(&slot->consumed, memory_order_acquire) < all_of(lane, at - (uint64_t)lane->num_slots))
        return false;
    struct operation *o = operation_at(queue, queue->num_filled);
    int rank = lane->group->rank;
    struct header *header = (struct header *)cell_of(lane, at, rank);
    header->code = o->code;
    header->numel = o->whole_numel;
    header->chunk = o->num_filled;
    header->buffer = o->buffer;
    header->terms = o->num_filled ? 0 : o->terms;
    lane->is_undecided = header->terms != 0;
    copy_in(lane, o, (char *)(header + 1));
    bool is_last_chunk = ++o->num_filled == o->num_chunks;
    if (is_last_chunk) queue->num_filled++;
    lane->fill_at++;
    count_up(lane, &slot->arrived, all_of(lane, at), is_last_chunk);
    return true;
}

/* ------------------------------------------------------------------ reduce */

static bool all_called_the_same(struct lane *lane, uint64_t at) {
    const struct header *mine = (const struct header *)cell_of(lane, at, lane->group->rank);
    for (int r = 0; r < lane->group->size; r++) {
        const struct header *other = (const struct header *)cell_of(lane, at, r);
        if (other->code != mine->code || other->numel != mine->numel || other->chunk != mine->chunk ||
            other->buffer != mine->buffer || other->terms != mine->terms)
            return false;
    }
    return true;
}

static bool all_have_terms(struct lane *lane, uint64_t at) {
    for (int r = 0; r < lane->group->size; r++)
        if (!((const struct header *)cell_of(lane, at, r))->terms) return false;
    return true;
}

/* End an operation on which the ranks disagree. No rank has filled more than its first chunk. */
static void give_up(struct lane *lane, struct operation *o) {
    o->has_disagreed = true;
    o->is_split = false;
    if (o->num_chunks > 1) {
        o->num_chunks = 1;
        lane->collectives.num_filled++;
    }
}

/* Set `sources` to the chunks of all ranks. For this rank, use its tensor, which is still in the cache, if aligned. */
static void gather_sources(struct lane *lane, uint64_t at, const void **sources, size_t offset_bytes,
                           const char *own, size_t itemsize) {
    for (int r = 0; r < lane->group->size; r++) sources[r] = data_of(lane, at, r) + offset_bytes;
    if (is_aligned(own, itemsize)) sources[lane->group->rank] = own;
}

static void reduce_own_part(struct lane *lane, const struct operation *o, uint64_t at) {
    int size = lane->group->size, rank = lane->group->rank;
    size_t numel = chunk_numel(o, o->num_reduced);
    size_t from = part_from(numel, rank, size), to = part_from(numel, rank + 1, size);
    if (from == to) return;
    const void *sources[MAX_RANKS];
    for (int r = 0; r < size; r++) sources[r] = data_of(lane, at, r) + from * o->itemsize;
    reduce(data_of(lane, at, rank) + from * o->itemsize, sources, size, to - from, o->dtype, o->op);
}

static void reduce_strips(const struct operation *o, int size, int rank, size_t from, size_t numel) {
    /* Strips fit into the first-level cache. Each is summed into one tensor, then copied to those that need it too. */
    bool is_for_first = o->kind == REDUCE_IN_PLACE;
    if (is_for_first) rank = 0;
    const void *sources[MAX_RANKS];
    size_t strip_numel = STRIP_BYTES / o->itemsize;
    for (size_t end = from + numel; from < end; from += strip_numel) {
        size_t n = least(end - from, strip_numel);
        for (int r = 0; r < size; r++) sources[r] = o->base + (size_t)r * o->stride + from * o->itemsize;
        char *target = o->base + (size_t)rank * o->stride + from * o->itemsize;
        reduce(target, sources, size, n, o->dtype, o->op);
        for (int r = 0; r < size && !is_for_first; r++)
            if (r != rank) memcpy(o->base + (size_t)r * o->stride + from * o->itemsize, target, n * o->itemsize);
    }
}

static uint64_t num_pieces(const struct operation *o) {
    return ((o->to - o->from) * o->itemsize + PIECE_BYTES - 1) / PIECE_BYTES;
}

/* Take pieces until there are none, or until this rank has taken `limit` of them. */
static void take_pieces(struct lane *lane, struct operation *o, struct slot *slot, uint64_t limit) {
    uint64_t num = num_pieces(o);
    size_t piece_numel = PIECE_BYTES / o->itemsize;
    while (o->num_taken < limit && atomic_load_explicit(&slot->claimed, memory_order_relaxed) < num) {
        uint64_t piece = atomic_fetch_add_explicit(&slot->claimed, 1, memory_order_relaxed);
        if (piece >= num) break;
        o->num_taken++;
        size_t from = o->from + (size_t)piece * piece_numel;
        reduce_strips(o, lane->group->size, lane->group->rank, from, least(piece_numel, o->to - from));
        if (atomic_fetch_add(&slot->done, 1) + 1 == num) ring_all(lane->group);
    }
}

static void reduce_own_span(struct lane *lane, const struct operation *o) {
    const void *sources[MAX_RANKS];
    if (o->from == o->to) return;
    for (int r = 0; r < lane->group->size; r++) sources[r] = o->base + (size_t)r * o->stride + o->from * o->itemsize;
    reduce(o->out, sources, lane->group->size, o->to - o->from, o->dtype, o->op);
}

/* Return whether a rank must not consume before all ranks have reduced. */
static bool has_two_phases(const struct operation *o) { return o->is_split || o->kind == REDUCE_SCATTER_IN_PLACE; }

static bool reduce_next(struct lane *lane) {
    struct queue *queue = &lane->collectives;
    uint64_t at = lane->reduce_at;
    if (at == lane->fill_at || lane->is_mismatched) return false;
    struct slot *slot = slot_of(lane, at);
    if (atomic_load_explicit(&slot->arrived, memory_order_acquire) < all_of(lane, at)) return false;
    struct operation *o = operation_at(queue, queue->num_reduced);
    if (!all_called_the_same(lane, at)) {
        /* If the list is full, the disagreement cannot be recorded for a later wait. */
        if (!all_have_terms(lane, at) || lane->num_disagreed == MAX_DISAGREED) {
            lane->is_mismatched = true;
            return false;
        }
        give_up(lane, o);
    }
    if (((const struct header *)cell_of(lane, at, lane->group->rank))->terms) lane->is_undecided = false;
    if (o->is_split) reduce_own_part(lane, o, at);
    if (o->kind == REDUCE_SCATTER_IN_PLACE) reduce_own_span(lane, o);
    bool is_last_chunk = ++o->num_reduced == o->num_chunks;
    if (is_last_chunk) queue->num_reduced++;
    lane->reduce_at++;
    if (has_two_phases(o)) count_up(lane, &slot->reduced, (uint64_t)lane->group->size, is_last_chunk);
    return true;
}

/* ------------------------------------------------------------------ consume */

static void copy_out(struct lane *lane, const struct operation *o, uint64_t at) {
    int size = lane->group->size, rank = lane->group->rank;
    size_t numel = chunk_numel(o, o->num_consumed), from = chunk_from(o, o->num_consumed) * o->itemsize;
    size_t bytes = numel * o->itemsize;
    const void *sources[MAX_RANKS];
    if (bytes == 0 || o->has_disagreed) return;
    switch (o->kind) {
    case REDUCE:
        if (rank != 0) break; /* fall through */
    case ALL_REDUCE:
        if (!o->is_split) {
            gather_sources(lane, at, sources, 0, o->in + from, o->itemsize);
            reduce(o->out + from, sources, size, numel, o->dtype, o->op);
            break;
        }
        for (int r = 0; r < size; r++) {
            size_t begin = part_from(numel, r, size) * o->itemsize, end = part_from(numel, r + 1, size) * o->itemsize;
            memcpy(o->out + from + begin, data_of(lane, at, r) + begin, end - begin);
        }
        break;
    case REDUCE_SCATTER:
        gather_sources(lane, at, sources, (size_t)rank * o->chunk_numel * o->itemsize,
                       o->in + (size_t)rank * o->numel * o->itemsize + from, o->itemsize);
        reduce(o->out + from, sources, size, numel, o->dtype, o->op);
        break;
    case ALL_GATHER:
        for (int r = 0; r < size; r++) {
            char *target = o->out + (size_t)r * o->numel * o->itemsize + from;
            if (r != rank)
                memcpy(target, data_of(lane, at, r), bytes);
            else if (target != o->in + from)
                memmove(target, o->in + from, bytes);
        }
        break;
    case BROADCAST:
        if (o->peer != rank) memcpy(o->out + from, data_of(lane, at, o->peer), bytes);
        break;
    default: break;
    }
}

static bool consume(struct lane *lane, bool is_waiting) {
    struct queue *queue = &lane->collectives;
    uint64_t at = lane->consume_at;
    if (at == lane->reduce_at) return false;
    struct slot *slot = slot_of(lane, at);
    struct operation *o = operation_at(queue, atomic_load_explicit(&queue->num_completed, memory_order_relaxed));
    if (has_two_phases(o)) {
        if (atomic_load_explicit(&slot->reduced, memory_order_acquire) < (uint64_t)lane->group->size) return false;
    } else if (o->kind == ALL_REDUCE_IN_PLACE || o->kind == REDUCE_IN_PLACE) {
        /* A rank that does not wait takes only its own part. More work would delay the rank that arrives last. */
        uint64_t num = num_pieces(o), size = (uint64_t)lane->group->size;
        take_pieces(lane, o, slot, is_waiting ? num : (num + size - 1) / size);
        if (atomic_load_explicit(&slot->done, memory_order_acquire) < num) return false;
    }
    copy_out(lane, o, at);
    bool is_operation_complete = ++o->num_consumed == o->num_chunks;
    lane->consume_at++;
    if (count_up(lane, &slot->consumed, all_of(lane, at), is_operation_complete)) {
        atomic_store_explicit(&slot->reduced, 0, memory_order_relaxed);
        atomic_store_explicit(&slot->claimed, 0, memory_order_relaxed);
        atomic_store_explicit(&slot->done, 0, memory_order_relaxed);
    }
    if (is_operation_complete) {
        if (o->has_disagreed)
            lane->disagreed[lane->num_disagreed++] = atomic_load_explicit(&queue->num_completed, memory_order_relaxed) + 1;
        atomic_fetch_add(&queue->num_completed, 1);
    }
    return true;
}

/* ------------------------------------------------------------------ messages */

static struct channel *channel_of(struct lane *lane, int src, int dst) {
    return (struct channel *)(lane->channels + (size_t)(src * lane->group->size + dst) * lane->channel_bytes);
}

static struct header *message_of(struct lane *lane, struct channel *channel, uint64_t at) {
    size_t cell_bytes = sizeof(struct header) + lane->message_bytes;
    return (struct header *)((char *)(channel + 1) + at % MESSAGE_SLOTS * cell_bytes);
}

/* Record that a chunk of a message was sent or received; the last one completes the message. */
static void chunk_has_passed(struct lane *lane, struct queue *queue, struct operation *o) {
    if (++o->num_filled < o->num_chunks) return;
    lane->num_pending_messages--;
    atomic_fetch_add(&queue->num_completed, 1);
}

static bool send_next(struct lane *lane, int dst) {
    struct queue *queue = &lane->sends[dst];
    uint64_t completed = atomic_load_explicit(&queue->num_completed, memory_order_relaxed);
    if (completed == queue->num_started) return false;
    struct channel *channel = channel_of(lane, lane->group->rank, dst);
    uint64_t at = atomic_load_explicit(&channel->sent, memory_order_relaxed);
    if (at - atomic_load_explicit(&channel->received, memory_order_acquire) == MESSAGE_SLOTS) return false;
    struct operation *o = operation_at(queue, completed);
    struct header *header = message_of(lane, channel, at);
    *header = (struct header){.code = o->code, .numel = o->numel, .chunk = o->num_filled};
    size_t bytes = chunk_numel(o, o->num_filled) * o->itemsize;
    if (bytes) memcpy(header + 1, o->in + chunk_from(o, o->num_filled) * o->itemsize, bytes);
    atomic_store(&channel->sent, at + 1);
    ring_if_asleep(lane->group, dst);
    chunk_has_passed(lane, queue, o);
    return true;
}

static bool receive_next(struct lane *lane, int src) {
    struct queue *queue = &lane->receives[src];
    uint64_t completed = atomic_load_explicit(&queue->num_completed, memory_order_relaxed);
    if (completed == queue->num_started || lane->is_mismatched) return false;
    struct channel *channel = channel_of(lane, src, lane->group->rank);
    uint64_t at = atomic_load_explicit(&channel->received, memory_order_relaxed);
    if (at == atomic_load_explicit(&channel->sent, memory_order_acquire)) return false;
    struct operation *o = operation_at(queue, completed);
    struct header *header = message_of(lane, channel, at);
    if (header->code >> 8 << 8 != o->code >> 8 << 8 || header->numel != o->numel || header->chunk != o->num_filled) {
        lane->mine = (struct header){.code = o->code, .numel = o->numel, .chunk = o->num_filled};
        lane->mismatch[0] = &lane->mine;
        lane->mismatch[1] = header;
        lane->is_mismatched = true;
        return false;
    }
    size_t bytes = chunk_numel(o, o->num_filled) * o->itemsize;
    if (bytes) memcpy(o->out + chunk_from(o, o->num_filled) * o->itemsize, header + 1, bytes);
    atomic_store(&channel->received, at + 1);
    ring_if_asleep(lane->group, src);
    chunk_has_passed(lane, queue, o);
    return true;
}

/* ------------------------------------------------------------------ progress */

/* Do all work that is possible now without waiting, and return whether there was any. The lane is locked. A rank that
 * waits also does work that other ranks could do. */
static bool progress(struct lane *lane, bool is_waiting) {
    bool has_moved = false, moves = true;
    while (moves) {
        /* After an abort nothing new begins, but operations at which all ranks have arrived are completed. */
        bool may_begin = !is_aborted(lane->group);
        moves = may_begin && fill(lane);
        moves |= reduce_next(lane);
        moves |= consume(lane, is_waiting);
        if (lane->num_pending_messages)
            for (int r = 0; r < lane->group->size; r++) {
                moves |= may_begin && send_next(lane, r);
                moves |= receive_next(lane, r);
            }
        has_moved |= moves;
    }
    ring_for_events(lane);
    return has_moved;
}

static bool is_idle(struct lane *lane) {
    return lane->consume_at == lane->fill_at && lane->collectives.num_filled == lane->collectives.num_started &&
           lane->num_pending_messages == 0;
}

/* Do work on all other lanes, because peers that wait for this rank there may keep it waiting here. Return whether
 * there was any. `has_foreign` is set if lanes of other groups are pending; their doorbells do not wake this rank. */
static bool progress_others(struct lane *here, bool *has_foreign) {
    bool has_moved = false;
    *has_foreign = false;
    pthread_mutex_lock(&all_lanes_mutex);
    for (struct lane *lane = all_lanes; lane; lane = lane->next) {
        if (lane == here) continue;
        pthread_mutex_lock(&lane->mutex); /* never held for longer than copying takes */
        if (!is_idle(lane) && !is_aborted(lane->group)) {
            has_moved |= progress(lane, true);
            *has_foreign |= lane->group != here->group && !is_idle(lane);
        }
        pthread_mutex_unlock(&lane->mutex);
    }
    pthread_mutex_unlock(&all_lanes_mutex);
    return has_moved;
}

static struct queue *queue_of(struct lane *lane, int number) {
    if (number == 0) return &lane->collectives;
    number--;
    return number < lane->group->size ? &lane->sends[number] : &lane->receives[number - lane->group->size];
}

static bool has_completed(struct queue *queue, uint64_t ticket) {
    return atomic_load_explicit(&queue->num_completed, memory_order_acquire) >= ticket;
}

/* Return whether the ranks disagreed on a collective that has completed. The lane is locked. */
static bool has_disagreed(struct lane *lane, uint64_t ticket, bool forget) {
    for (int i = 0; i < lane->num_disagreed; i++)
        if (lane->disagreed[i] == ticket) {
            if (forget) lane->disagreed[i] = lane->disagreed[--lane->num_disagreed];
            return true;
        }
    return false;
}

static enum outcome outcome_of(struct lane *lane, struct queue *queue, uint64_t ticket, bool forget) {
    if (queue != &lane->collectives || !lane->num_disagreed) return DONE;
    pthread_mutex_lock(&lane->mutex);
    bool have_disagreed = has_disagreed(lane, ticket, forget);
    pthread_mutex_unlock(&lane->mutex);
    return have_disagreed ? DISAGREED : DONE;
}

/* Do the work that is possible now, and return the state of an operation. If another thread works on the lane, that is
 * enough, except in two cases. A last look before sleeping has to do the work itself. So has a look after an abort,
 * because operations that the aborting rank has completed are still completed here. The load of the abort (acquire)
 * synchronizes with its store (release). So this thread sees what the aborting thread had published before the abort,
 * and what that thread had seen of other ranks; of later events it may see any. */
static enum outcome look(struct lane *lane, struct queue *queue, uint64_t ticket, bool is_last, bool *has_moved) {
    *has_moved = false;
    if (has_completed(queue, ticket)) return DONE;
    bool is_mismatched = false, was_aborted = is_aborted(lane->group);
    if (is_last || was_aborted ? !pthread_mutex_lock(&lane->mutex) : !pthread_mutex_trylock(&lane->mutex)) {
        *has_moved = progress(lane, true);
        is_mismatched = lane->is_mismatched;
        pthread_mutex_unlock(&lane->mutex);
        /* Another thread of this rank may sleep until this work is done. */
        if (*has_moved) ring_if_asleep(lane->group, lane->group->rank);
    }
    if (has_completed(queue, ticket)) return DONE;
    if (is_mismatched) return MISMATCH;
    return was_aborted ? ABORTED : PENDING;
}

/* ------------------------------------------------------------------ exported functions */

EXPORT uint32_t syncline_abi(void) { return ABI; }

EXPORT const char *syncline_isa(int isa) { return is_supported(isa) ? instruction_sets[isa].name : NULL; }

/* Run a kernel, for tests. Return 0, or -1 if this processor lacks the instruction set. */
EXPORT int syncline_reduce(int isa, void *target, const void *const *sources, int num_sources, size_t numel, int dtype,
                           int op) {
    if (!is_supported(isa)) return -1;
    instruction_sets[isa].table[dtype](target, sources, num_sources, numel, op);
    return 0;
}

EXPORT size_t syncline_group_bytes(int size) {
    return sizeof(struct group_memory) + (size_t)size * sizeof(struct doorbell);
}

EXPORT struct group *syncline_group_open(void *memory, int rank, int size, uint64_t spin_nanoseconds, int num_yields) {
    pthread_once(&kernels_once, choose_kernels);
    struct group *group = calloc(1, sizeof *group);
    if (!group || size > MAX_RANKS) {
        free(group);
        return NULL;
    }
    group->num_holders = 1;
    group->memory = memory;
    group->rank = rank;
    group->size = size;
    group->spin_nanoseconds = group->most_spin_nanoseconds = spin_nanoseconds;
    group->num_yields = group->most_yields = num_yields;
    return group;
}

/* Close a group. Its lanes may be closed later. */
EXPORT void syncline_group_close(struct group *group) {
    if (atomic_fetch_sub(&group->num_holders, 1) == 1) free(group);
}

static size_t cell_bytes(size_t chunk_bytes) { return sizeof(struct header) + round_up(chunk_bytes); }

static size_t channel_bytes(size_t message_bytes) {
    return sizeof(struct channel) + MESSAGE_SLOTS * (sizeof(struct header) + message_bytes);
}

EXPORT size_t syncline_lane_bytes(int size, int num_slots, size_t chunk_bytes, size_t message_bytes) {
    size_t n = (size_t)size;
    return (size_t)num_slots * sizeof(struct slot) + (size_t)num_slots * n * cell_bytes(chunk_bytes) +
           n * n * channel_bytes(message_bytes);
}

EXPORT void syncline_lane_close(struct lane *lane) {
    pthread_mutex_lock(&all_lanes_mutex);
    for (struct lane **at = &all_lanes; *at; at = &(*at)->next)
        if (*at == lane) {
            *at = lane->next;
            break;
        }
    pthread_mutex_unlock(&all_lanes_mutex);
    free(lane->collectives.operations);
    for (int r = 0; r < lane->group->size; r++) {
        if (lane->sends) free(lane->sends[r].operations);
        if (lane->receives) free(lane->receives[r].operations);
    }
    free(lane->sends);
    free(lane->receives);
    pthread_mutex_destroy(&lane->mutex);
    syncline_group_close(lane->group);
    free(lane);
}

/* Open a lane. chunk_bytes and message_bytes must be multiples of LINE_BYTES. */
EXPORT struct lane *syncline_lane_open(struct group *group, void *memory, int num_slots, size_t chunk_bytes,
                                       size_t message_bytes) {
    struct lane *lane = calloc(1, sizeof *lane);
    if (!lane) return NULL;
    size_t n = (size_t)group->size;
    lane->group = group;
    atomic_fetch_add(&group->num_holders, 1);
    pthread_mutex_init(&lane->mutex, NULL);
    lane->num_slots = num_slots;
    lane->chunk_bytes = chunk_bytes;
    lane->message_bytes = message_bytes;
    lane->cell_bytes = cell_bytes(chunk_bytes);
    lane->channel_bytes = channel_bytes(message_bytes);
    lane->slots = memory;
    lane->cells = (char *)(lane->slots + num_slots);
    lane->channels = lane->cells + (size_t)num_slots * n * lane->cell_bytes;
    lane->sends = calloc(n, sizeof *lane->sends);
    lane->receives = calloc(n, sizeof *lane->receives);
    pthread_mutex_lock(&all_lanes_mutex);
    lane->next = all_lanes;
    all_lanes = lane;
    pthread_mutex_unlock(&all_lanes_mutex);
    if (!lane->sends || !lane->receives) {
        syncline_lane_close(lane);
        return NULL;
    }
    return lane;
}

static bool make_room(struct queue *queue) {
    uint64_t completed = atomic_load_explicit(&queue->num_completed, memory_order_relaxed);
    if (queue->capacity && queue->num_started - completed < queue->capacity) return true;
    uint64_t capacity = queue->capacity ? 2 * queue->capacity : 16;
    struct operation *larger = calloc(capacity, sizeof *larger);
    if (!larger) return false;
    for (uint64_t i = completed; i < queue->num_started; i++) larger[i & (capacity - 1)] = *operation_at(queue, i);
    free(queue->operations);
    queue->operations = larger;
    queue->capacity = capacity;
    return true;
}

static uint64_t start(struct lane *lane, int queue_number, const struct operation *o, bool *is_done) {
    uint64_t ticket = 0;
    pthread_mutex_lock(&lane->mutex);
    struct queue *queue = queue_of(lane, queue_number);
    if (make_room(queue)) {
        *operation_at(queue, queue->num_started) = *o;
        ticket = ++queue->num_started;
        if (queue_number) lane->num_pending_messages++;
        if (!is_aborted(lane->group)) progress(lane, false);
    }
    *is_done = ticket && has_completed(queue, ticket);
    /* Ranks in step arrive within a microsecond of each other. Waiting here for so long avoids a second call. */
    if (ticket && !*is_done && lane->group->most_spin_nanoseconds && o->numel * o->itemsize <= BRIEF_BYTES)
        for (int i = 0; i < BRIEF_LOOKS && !*is_done && !lane->is_mismatched && !is_aborted(lane->group); i++) {
            pause_briefly();
            progress(lane, false);
            *is_done = has_completed(queue, ticket);
        }
    if (*is_done && o->terms) *is_done = !has_disagreed(lane, ticket, false);
    pthread_mutex_unlock(&lane->mutex);
    return ticket;
}

/* Decode a call. `code` contains kind, dtype, op, a peer and the bytes per element, from the lowest bits up. */
static struct operation decoded(const struct lane *lane, uint64_t code, size_t numel) {
    struct operation o = {.code = code,
                          .kind = (enum kind)(code & 0xff),
                          .dtype = (int)(code >> 8 & 0xff),
                          .op = (int)(code >> 16 & 0xff),
                          .peer = (int)(code >> 24 & 0xffff),
                          .itemsize = (size_t)(code >> 40 & 0xff),
                          .numel = numel,
                          .whole_numel = numel};
    size_t capacity_bytes = lane->chunk_bytes;
    if (o.kind == SEND || o.kind == RECV) {
        capacity_bytes = lane->message_bytes;
        o.code = code & ~(UINT64_C(0xffff) << 24); /* the two sides name different peers */
    }
    if (o.kind == REDUCE_SCATTER) capacity_bytes /= (size_t)lane->group->size;
    bool is_in_place =
        o.kind == ALL_REDUCE_IN_PLACE || o.kind == REDUCE_SCATTER_IN_PLACE || o.kind == REDUCE_IN_PLACE;
    o.is_split = (o.kind == ALL_REDUCE || o.kind == REDUCE) && lane->group->size >= SPLIT_RANKS && numel * o.itemsize >= SPLIT_BYTES;
    o.chunk_numel = is_in_place || o.itemsize == 0 ? (numel ? numel : 1) : capacity_bytes / o.itemsize;
    o.num_chunks = numel ? (numel + o.chunk_numel - 1) / o.chunk_numel : 1;
    return o;
}

/* Begin an operation, and do the work that is possible at once.
 *
 * numel: elements of the tensor, or of one rank's part if the operation has parts. terms: for a collective, a number on
 * which the ranks have to agree as well; 0 if they have agreed before. Returns a ticket above 0 to wait for; the
 * negative ticket if the operation is done already; 0 if memory is exhausted.
 */
EXPORT int64_t syncline_start(struct lane *lane, uint64_t code, const void *in, void *out, size_t numel,
                              uint64_t terms) {
    struct operation o = decoded(lane, code, numel);
    o.in = in;
    o.out = out;
    o.terms = terms;
    int queue = 0;
    if (o.kind == SEND) queue = 1 + o.peer;
    if (o.kind == RECV) queue = 1 + lane->group->size + o.peer;
    bool is_done;
    int64_t ticket = (int64_t)start(lane, queue, &o, &is_done);
    return is_done ? -ticket : ticket;
}

/* Begin an operation on tensors in memory that all ranks have mapped; see syncline_start. Rank r's tensor is at base +
 * r * stride. `buffer` identifies the memory and is the same on every rank. In a reduce_scatter, this rank gets the
 * elements from `from` to `to` in `out`, which may be their place in its own tensor. The ranks' spans must not overlap.
 * In a reduction to rank 0, `from` and `to` are the part that is reduced. An all_reduce reduces all elements.
 */
EXPORT int64_t syncline_start_in_place(struct lane *lane, uint64_t code, void *base, size_t stride, uint64_t buffer,
                                       size_t numel, void *out, size_t from, size_t to) {
    struct operation o = decoded(lane, code, numel);
    o.base = base;
    o.stride = stride;
    o.buffer = buffer;
    o.out = out;
    o.from = from;
    o.to = o.kind == ALL_REDUCE_IN_PLACE ? numel : to;
    bool is_done;
    int64_t ticket = (int64_t)start(lane, 0, &o, &is_done);
    return is_done ? -ticket : ticket;
}

/* Begin the reduction to rank 0 of the elements from `from` to `to` of a tensor with `numel` elements; see
 * syncline_start. */
EXPORT int64_t syncline_start_part(struct lane *lane, uint64_t code, void *tensor, size_t numel, size_t from,
                                   size_t to) {
    struct operation o = decoded(lane, code, to - from);
    o.whole_numel = numel;
    o.in = o.out = (char *)tensor + from * o.itemsize;
    bool is_done;
    int64_t ticket = (int64_t)start(lane, 0, &o, &is_done);
    return is_done ? -ticket : ticket;
}

/* Do the work that is possible now, and return whether an operation is done or has failed. Never blocks. */
EXPORT int syncline_poll(struct lane *lane, int queue_number, uint64_t ticket) {
    bool has_moved, has_foreign;
    struct queue *queue = queue_of(lane, queue_number);
    enum outcome outcome = look(lane, queue, ticket, false, &has_moved);
    if (outcome == PENDING && !has_moved) progress_others(lane, &has_foreign);
    return outcome == DONE ? outcome_of(lane, queue, ticket, false) : outcome;
}

/* Adapt the patience of later waits to one that slept. A short one should not have slept. A long one spun for nothing:
 * its peers are late, or other programs use the processors, and spinning takes time from both. */
static void has_slept(struct group *group, uint64_t nanoseconds) {
    uint64_t spin = atomic_load_explicit(&group->spin_nanoseconds, memory_order_relaxed) / 2;
    if (spin < LEAST_SPIN_NANOSECONDS) spin = LEAST_SPIN_NANOSECONDS;
    if (nanoseconds < SHORT_NANOSECONDS) {
        spin = group->most_spin_nanoseconds;
        atomic_store_explicit(&group->num_yields, group->most_yields, memory_order_relaxed);
    }
    if (group->most_spin_nanoseconds) atomic_store_explicit(&group->spin_nanoseconds, spin, memory_order_relaxed);
}

/* Yield the processor. If it comes back late, other programs use it, and a rank that sleeps gets it sooner when it is
 * woken up. Then later waits yield less. */
static void yield_processor(struct group *group, uint64_t now) {
    sched_yield();
    int num_yields = atomic_load_explicit(&group->num_yields, memory_order_relaxed);
    if (now_nanoseconds() - now > SHORT_NANOSECONDS)
        atomic_store_explicit(&group->num_yields, num_yields / 4, memory_order_relaxed);
}

static enum outcome wait_for(struct lane *lane, struct queue *queue, uint64_t ticket, uint64_t timeout_nanoseconds) {
    struct group *group = lane->group;
    _Atomic uint32_t *doorbell = &group->memory->doorbells[group->rank].num_rings;
    counter *sleeping = &group->memory->sleeping[group->rank / 64];
    uint64_t bit = UINT64_C(1) << (group->rank % 64);
    uint64_t began = 0, stalled_from = 0;
    int num_looks = 0, num_yields = 0;
    bool has_moved, has_foreign;
    for (;;) {
        enum outcome outcome = look(lane, queue, ticket, false, &has_moved);
        if (outcome != PENDING) return outcome;
        if (has_moved) {
            num_looks = num_yields = 0;
            stalled_from = 0;
            continue;
        }
        if (group->most_spin_nanoseconds && (++num_looks & 31)) {
            pause_briefly();
            continue;
        }
        uint64_t now = now_nanoseconds();
        if (!began) began = now;
        if (!stalled_from) stalled_from = now;
        if (now - began >= timeout_nanoseconds) return look(lane, queue, ticket, true, &has_moved);
        if (now - stalled_from < atomic_load_explicit(&group->spin_nanoseconds, memory_order_relaxed)) continue;
        if (progress_others(lane, &has_foreign)) continue;
        if (num_yields++ < atomic_load_explicit(&group->num_yields, memory_order_relaxed)) {
            yield_processor(group, now);
            continue;
        }
        uint32_t num_rings = atomic_load(doorbell);
        atomic_fetch_or(sleeping, bit);
        atomic_thread_fence(memory_order_seq_cst); /* the loads of the next look are only acquire loads */
        outcome = look(lane, queue, ticket, true, &has_moved);
        if (outcome != PENDING) return outcome;
        if (has_moved || progress_others(lane, &has_foreign)) continue;
        uint64_t left = timeout_nanoseconds - (now - began);
        if (has_foreign && left > 1000000) left = 1000000;
        struct timespec timeout = {.tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u)};
        futex(doorbell, FUTEX_WAIT, num_rings, &timeout);
        has_slept(group, now_nanoseconds() - stalled_from);
        num_looks = num_yields = 0;
        stalled_from = 0;
    }
}

/* Wait for an operation. Return 0 if it is done, 1 if the time is up, 2 if the group was aborted, 3 if the ranks made
 * different calls (see syncline_called), 4 if they disagreed on its terms (only the first wait returns this). Spin
 * first, then yield the processor, then sleep. */
EXPORT int syncline_wait(struct lane *lane, int queue_number, uint64_t ticket, uint64_t timeout_nanoseconds) {
    struct queue *queue = queue_of(lane, queue_number);
    enum outcome outcome = wait_for(lane, queue, ticket, timeout_nanoseconds);
    return outcome == DONE ? outcome_of(lane, queue, ticket, true) : outcome;
}

/* End the group: every wait on it returns 2. If the group was aborted before, keep its text and return 0, else return
 * 1. */
EXPORT int syncline_abort(struct group *group, const char *text, size_t bytes) {
    struct group_memory *memory = group->memory;
    uint32_t expected = 0;
    if (!atomic_compare_exchange_strong(&memory->abort_state, &expected, 1)) return 0;
    memory->abort_bytes = (uint32_t)least(bytes, ABORT_BYTES);
    memcpy(memory->abort_text, text, memory->abort_bytes);
    atomic_store(&memory->abort_state, 2);
    for (int r = 0; r < group->size; r++) ring_rank(memory, r);
    return 1;
}

/* Copy the text of the abort to `text`, and return its length; -1 if there was no abort. */
EXPORT int64_t syncline_abort_text(struct group *group, char *text) {
    if (!is_aborted(group)) return -1;
    memcpy(text, group->memory->abort_text, group->memory->abort_bytes);
    return group->memory->abort_bytes;
}

/* After a mismatch, write each rank's call as a pair (code, numel); for a message, only those of this rank and the
 * peer. Return the number of pairs. */
EXPORT int syncline_called(struct lane *lane, uint64_t *pairs) {
    pthread_mutex_lock(&lane->mutex);
    int num = lane->mismatch[0] ? 2 : lane->group->size;
    for (int i = 0; i < num; i++) {
        const struct header *header =
            lane->mismatch[0] ? lane->mismatch[i] : (const struct header *)cell_of(lane, lane->reduce_at, i);
        pairs[2 * i] = header->code;
        pairs[2 * i + 1] = header->numel;
    }
    pthread_mutex_unlock(&lane->mutex);
    return num;
}
