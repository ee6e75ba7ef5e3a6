/* Threads that divide the work of one call. They are started for the call, and end with it. */

#ifndef SYNCLINE_PARTS_H
#define SYNCLINE_PARTS_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>

enum { MAX_THREADS = 64 };
#ifndef THREAD_NUMEL
#define THREAD_NUMEL (1 << 20) /* to start a thread takes as long as to encode 2^18 values */
#endif

struct found;

/* A part of the work of a call: it handles the items `from` to `to`. */
struct part {
    void (*run)(struct part *part);
    const void *kernels; /* those of one instruction set */
    void *work;
    size_t from, to;
    struct found *found; /* only in syncline_select */
};

static void *run_part(void *argument) {
    struct part *part = argument;
    part->run(part);
    return NULL;
}

/* Divide the work into at most `num_threads` parts, of at least THREAD_NUMEL values each. Return their number. */
static int divide(struct part *parts, struct part whole, size_t num_items, size_t numel, int num_threads) {
    size_t most = numel / THREAD_NUMEL, num_parts = num_threads < 1 ? 1 : (size_t)num_threads;
    if (num_parts > MAX_THREADS) num_parts = MAX_THREADS;
    if (num_parts > most) num_parts = most;
    if (num_parts < 1) num_parts = 1;
    size_t each = (num_items + num_parts - 1) / num_parts;
    for (size_t i = 0; i < num_parts; i++) {
        parts[i] = whole;
        parts[i].from = i * each < num_items ? i * each : num_items;
        parts[i].to = (i + 1) * each < num_items ? (i + 1) * each : num_items;
    }
    return (int)num_parts;
}

/* Run all parts, each but the first in a thread of its own. The threads end before this returns. */
static void run_parts(struct part *parts, int num_parts) {
    pthread_t threads[MAX_THREADS];
    bool is_started[MAX_THREADS] = {false};
    sigset_t all, before;
    if (num_parts > 1) { /* signals go to the threads of the program */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        for (int i = 1; i < num_parts; i++)
            is_started[i] = pthread_create(&threads[i], NULL, run_part, &parts[i]) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    parts[0].run(&parts[0]);
    for (int i = 1; i < num_parts; i++) {
        if (is_started[i])
            pthread_join(threads[i], NULL);
        else
            parts[i].run(&parts[i]);
    }
}

static void run_all(struct part whole, size_t num_items, size_t numel, int num_threads) {
    struct part parts[MAX_THREADS];
    run_parts(parts, divide(parts, whole, num_items, numel, num_threads));
}

#endif
