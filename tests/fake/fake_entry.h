/* fake_entry.h - the begin and end of each entry point of the fake driver. */
#ifndef SW_TEST_FAKE_ENTRY_H
#define SW_TEST_FAKE_ENTRY_H

#include "sim.h"

/* Begin an entry point: count the call, let it fail if told so, and check that a context is
 * current. */
#define ENTER(name)                     \
    do {                                \
        int result_ = 0;                \
        if (!sim_enter(name, &result_)) \
            return result_;             \
    } while (0)
#define LEAVE(value)          \
    do {                      \
        int value_ = (value); \
        sim_leave();          \
        return value_;        \
    } while (0)
#define ENTER_CONTEXT(name)     \
    ENTER(name);                \
    if (!sim_current_context()) \
    LEAVE(SW_CU_INVALID_CONTEXT)

/* Replace a handle that the caller gave by its stream. */
#define NAMED_STREAM(stream)              \
    do {                                  \
        (stream) = sim_stream(stream);    \
        if (!(stream))                    \
            LEAVE(SW_CU_INVALID_HANDLE);  \
    } while (0)

/* Begin a call that a capture into a graph forbids; cuda.h calls it potentially unsafe. */
#define FORBIDDEN_IN_CAPTURES(name)           \
    do {                                      \
        if (sim_capture_forbids(name))        \
            LEAVE(SW_CU_CAPTURE_UNSUPPORTED); \
    } while (0)
#define ENTER_CONTEXT_APART(name) \
    ENTER_CONTEXT(name);          \
    FORBIDDEN_IN_CAPTURES(name)

/* The same for a call that may wait for all work of the GPU. */
#define ENTER_DEVICE_WIDE(name)          \
    ENTER_CONTEXT_APART(name);           \
    if (sim.strict & SIM_STRICT_DEVICE)  \
    sim_wait_for_device(name)

/* The same for a call that enqueues an operation there. */
#define QUEUED_STREAM(stream)      \
    do {                           \
        NAMED_STREAM(stream);      \
        sim_wait_for_room(stream); \
    } while (0)

#endif
