/* What the C++ runtime does with a thread that Python ends while the thread is inside C++ code.
 *
 * Up to Python 3.13, a daemon thread that asks for the interpreter's lock while Python shuts down is ended by
 * pthread_exit. If a C++ destructor asked, for instance at the return from a wait of torch, the C++ runtime calls
 * std::terminate, which aborts the process: the exit status is then 134, whatever the program did. From Python 3.14 on,
 * Python lets such threads sleep. `syncline_let_threads_sleep` does so for earlier versions.
 */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

typedef void (*terminate_handler)(void);

static pthread_t ending; /* the thread that shuts Python down */
static terminate_handler previous;
static const void *(*current_exception_type)(void);

static void sleep_or_terminate(void) {
    if (!pthread_equal(pthread_self(), ending) && current_exception_type() == NULL)
        for (;;)
            pause();
    previous();
    abort();
}

/* Let a thread other than the caller's sleep forever instead of calling std::terminate, if no C++ exception is the
 * cause. Call this once, at the end of the process. The arguments are std::set_terminate and
 * __cxa_current_exception_type, because this library is not linked with the C++ runtime.
 */
__attribute__((visibility("default"))) void syncline_let_threads_sleep(
    terminate_handler (*set_terminate)(terminate_handler), const void *(*exception_type)(void)) {
    ending = pthread_self();
    current_exception_type = exception_type;
    previous = set_terminate(sleep_or_terminate);
}
