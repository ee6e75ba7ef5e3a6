/* The native core of one rank of the stress program: its functions, by the names that core.c gives them. */

#ifndef STRESS_CORE_H
#define STRESS_CORE_H

#include <stddef.h>
#include <stdint.h>

struct group;
struct lane;

struct core {
    size_t (*group_bytes)(int size);
    struct group *(*group_open)(void *memory, int rank, int size, uint64_t spin_nanoseconds, int num_yields);
    void (*group_close)(struct group *group);
    size_t (*lane_bytes)(int size, int num_slots, size_t chunk_bytes, size_t message_bytes);
    struct lane *(*lane_open)(struct group *group, void *memory, int num_slots, size_t chunk_bytes,
                              size_t message_bytes);
    void (*lane_close)(struct lane *lane);
    int64_t (*start)(struct lane *lane, uint64_t code, const void *in, void *out, size_t numel, uint64_t terms);
    int64_t (*start_in_place)(struct lane *lane, uint64_t code, void *base, size_t stride, uint64_t buffer,
                              size_t numel, void *out, size_t from, size_t to);
    int64_t (*start_part)(struct lane *lane, uint64_t code, void *tensor, size_t numel, size_t from, size_t to);
    int (*poll)(struct lane *lane, int queue_number, uint64_t ticket);
    int (*wait)(struct lane *lane, int queue_number, uint64_t ticket, uint64_t timeout_nanoseconds);
    int (*abort)(struct group *group, const char *text, size_t bytes);
    int64_t (*abort_text)(struct group *group, char *text);
    int (*called)(struct lane *lane, uint64_t *pairs);
};

#endif
