/* crew.c - see crew.h. One mutex suffices, since an item takes far longer than a lock. */
#include "platform/crew.h"

#include <stdlib.h>

/* Takes items until none is left. The mutex is held at the start and at the end. */
static void take_items_locked(sw_crew *crew)
{
    while (crew->next < crew->items) {
        size_t item = crew->next++;
        sw_crew_fn *work = crew->work;
        void *context = crew->context;
        sw_error err;
        pthread_mutex_unlock(&crew->mutex);
        sw_status status = work(context, item, &err);
        pthread_mutex_lock(&crew->mutex);
        crew->done++;
        if (status != SW_OK) {
            if (crew->failure.status == SW_OK)
                crew->failure = err;
            crew->done += crew->items - crew->next; /* no thread will start them */
            crew->next = crew->items;
        }
    }
    if (crew->done == crew->items)
        pthread_cond_signal(&crew->finished);
}

static void *help(void *argument)
{
    sw_crew *crew = argument;
    pthread_mutex_lock(&crew->mutex);
    while (!crew->ends) {
        take_items_locked(crew);
        if (!crew->ends)
            pthread_cond_wait(&crew->called, &crew->mutex);
    }
    pthread_mutex_unlock(&crew->mutex);
    return NULL;
}

sw_status sw_crew_init(sw_crew *crew, int helper_count, const char *name, sw_error *err)
{
    *crew = (sw_crew){.helper_count = helper_count};
    crew->helpers = calloc((size_t)helper_count + 1, sizeof *crew->helpers);
    if (!crew->helpers)
        SW_FAIL(err, SW_E_MEMORY, "crew '%s': no memory for %d threads", name, helper_count);
    pthread_mutex_init(&crew->mutex, NULL);
    pthread_cond_init(&crew->called, NULL);
    pthread_cond_init(&crew->finished, NULL);
    for (int i = 0; i < helper_count; ++i) {
        sw_status status = sw_thread_start(&crew->helpers[i], help, crew, name, err);
        if (status != SW_OK) {
            sw_crew_fini(crew);
            return status;
        }
    }
    return SW_OK;
}

sw_status sw_crew_run(sw_crew *crew, sw_crew_fn *work, void *context, size_t items, sw_error *err)
{
    pthread_mutex_lock(&crew->mutex);
    crew->work = work;
    crew->context = context;
    crew->items = items;
    crew->next = crew->done = 0;
    crew->failure.status = SW_OK;
    pthread_cond_broadcast(&crew->called);
    take_items_locked(crew);
    while (crew->done < crew->items)
        pthread_cond_wait(&crew->finished, &crew->mutex);
    sw_status status = crew->failure.status;
    if (err && status != SW_OK)
        *err = crew->failure;
    crew->items = crew->next = crew->done = 0;
    pthread_mutex_unlock(&crew->mutex);
    return status;
}

void sw_crew_fini(sw_crew *crew)
{
    pthread_mutex_lock(&crew->mutex);
    crew->ends = true;
    pthread_cond_broadcast(&crew->called);
    pthread_mutex_unlock(&crew->mutex);
    for (int i = 0; i < crew->helper_count; ++i)
        sw_thread_join(&crew->helpers[i]);
    pthread_cond_destroy(&crew->finished);
    pthread_cond_destroy(&crew->called);
    pthread_mutex_destroy(&crew->mutex);
    free(crew->helpers);
}
