/* hosts.c - the box of messages, and ranks that join over it; see hosts.h. */
#include "hosts.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "platform/thread.h"

static bool is_looked_at(uint32_t tag)
{
    return hosts_message_is(SW_MESSAGE_END, tag) || hosts_message_is(SW_MESSAGE_PROBE, tag);
}

/* A last word or a probe arrives without anybody's waiting for it, while others look at its place;
 * so does nothing for who has closed. Under the lock. */
static void deliver(box *b, message *m)
{
    for (pending_work *w = b->works; w && m->data && is_looked_at(m->tag); w = w->next) {
        if (!w->data || w->from != m->from || w->to != m->to || w->tag != m->tag ||
            b->closed[m->to])
            continue;
        _Atomic uint32_t *to = w->data;
        for (size_t i = 0; i < m->size_bytes / sizeof(uint32_t); ++i)
            atomic_store_explicit(&to[i], ((const uint32_t *)m->data)[i], memory_order_relaxed);
        free(m->data);
        m->data = NULL;
        w->has_come = true;
    }
}

/* Under the lock. */
static pending_work *new_work(box *b)
{
    pending_work *made = calloc(1, sizeof *made);
    made->next = b->works;
    b->works = made;
    return made;
}

static sw_status box_send(void *context, int rank, uint32_t tag, const void *data, size_t bytes,
                          void **work, sw_error *err)
{
    wire_end *end = context;
    box *b = end->box;
    sw_status status = SW_OK;
    pthread_mutex_lock(&b->lock);
    b->broken |= b->is_open && b->wire.breaks_after && ++b->sent > b->wire.breaks_after;
    if (b->broken) {
        status = sw_error_set(err, SW_E_COMM, -1, "the wire broke");
    } else {
        int i = 0;
        while (i < HOSTS_BOX && b->messages[i].data)
            ++i;
        check(i < HOSTS_BOX, "the box is full");
        b->messages[i] = (message){
            .from = end->rank, .to = rank, .tag = tag, .data = malloc(bytes), .size_bytes = bytes};
        memcpy(b->messages[i].data, data, bytes);
        b->probed |= hosts_message_is(SW_MESSAGE_PROBE, tag);
        deliver(b, &b->messages[i]);
        *work = new_work(b);
    }
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
    if (b->wire.lingers && hosts_message_is(SW_MESSAGE_PROBE, tag))
        sw_thread_sleep_ns(200 * 1000 * 1000);
    return status;
}

static sw_status box_receive(void *context, int rank, uint32_t tag, void *data, size_t bytes,
                             void **work, sw_error *err)
{
    wire_end *end = context;
    (void)err;     /* nothing moves before it is waited for */
    sigset_t late; /* of a test; the engine's threads block all signals */
    sigemptyset(&late);
    sigaddset(&late, SIGUSR1);
    pthread_sigmask(SIG_UNBLOCK, &late, NULL);
    end->carrier = pthread_self();
    end->has_carrier = true;
    pthread_mutex_lock(&end->box->lock);
    pending_work *made = new_work(end->box);
    made->from = rank;
    made->to = end->rank;
    made->tag = tag;
    made->data = data;
    made->size_bytes = bytes;
    for (int i = 0; i < HOSTS_BOX && is_looked_at(tag); ++i)
        if (end->box->messages[i].data)
            deliver(end->box, &end->box->messages[i]);
    pthread_mutex_unlock(&end->box->lock);
    *work = made;
    return SW_OK;
}

static bool take(box *b, const pending_work *work)
{
    for (int i = 0; i < HOSTS_BOX; ++i) {
        message *m = &b->messages[i];
        if (!m->data || m->from != work->from || m->to != work->to || m->tag != work->tag)
            continue;
        check(m->size_bytes <= work->size_bytes, "a message has room");
        check(m->size_bytes == work->size_bytes || b->wire.packs ||
                  hosts_message_is(SW_MESSAGE_FRAME, m->tag),
              "unless it is packed or a frame, just this room");
        memcpy(work->data, m->data, m->size_bytes);
        free(m->data);
        m->data = NULL;
        return true;
    }
    return false;
}

static sw_status box_wait(void *context, void *argument, sw_error *err)
{
    const wire_end *end = context;
    box *b = end->box;
    pending_work *work = argument;
    sw_status status = SW_OK;
    pthread_mutex_lock(&b->lock);
    ++b->waiting[end->rank];
    while (work->data && !work->has_come && status == SW_OK &&
           ((b->wire.silent && b->is_open) || !take(b, work))) {
        if (b->closed[end->rank] || (b->broken && !b->wire.in_part))
            status = sw_error_set(err, SW_E_COMM, -1, "the wire broke");
        else
            pthread_cond_wait(&b->changed, &b->lock);
    }
    --b->waiting[end->rank];
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
    return status;
}

/* What is sent to it afterwards stays in the box. */
static bool box_close(void *context, bool gently)
{
    wire_end *end = context;
    (void)gently;
    pthread_mutex_lock(&end->box->lock);
    check(!end->box->closed[end->rank], "a wire is closed once");
    end->box->closed[end->rank] = true;
    pthread_cond_broadcast(&end->box->changed);
    while (end->box->waiting[end->rank] > 0) /* however late a busy machine runs it */
        pthread_cond_wait(&end->box->changed, &end->box->lock);
    pthread_mutex_unlock(&end->box->lock);
    return true;
}

static void box_drop(void *context, void *work)
{
    const wire_end *end = context;
    check(end->box->closed[end->rank] && work, "works are dropped after the wire is closed");
}

static void box_release(void *context)
{
    wire_end *end = context;
    check(!end->box->released[end->rank], "a wire is released once");
    end->box->released[end->rank] = true;
}

static int size_of_host(const scene *s, int host, int world_size)
{
    int count = 0;
    for (int r = 0; r < world_size; ++r)
        count += s->host_of[r] == host;
    return count;
}

sw_comm *hosts_join(rank_context *self, scene *s, wire_end *end, sw_wire *wire)
{
    int host = s->host_of[self->rank], local = 0;
    const sw_identity own = {.pid = 4711 + self->rank, .host = "a host"};
    sw_comm *inside, *comm = NULL;
    for (int r = 0; r < self->rank; ++r)
        local += s->host_of[r] == host;
    *end = (wire_end){.box = &s->box, .rank = self->rank};
    *wire = (sw_wire){.context = end,
                      .send = box_send,
                      .receive = box_receive,
                      .wait = box_wait,
                      .close = box_close,
                      .drop = box_drop,
                      .release = box_release,
                      .slow_bytes_per_s = s->box.wire.packs ? UINT64_MAX : 0,
                      .radix = s->box.wire.radix};
    if (!check(sw_local_comm_create(s->hosts[host], local, &inside, &self->err) == SW_OK, "inside"))
        return NULL;
    inside->timeout_ns = INT64_C(30000) * 1000000;
    check(sw_hier_comm_create(inside, self->rank, self->world_size, s->host_of, &own,
                              s->host_count > 1 ? wire : NULL, &comm, &self->err) == SW_OK,
          "a communicator over hosts: %s", self->err.message);
    if (comm)
        comm->timeout_ns = s->timeout_ns;
    ranks_meet(self);
    pthread_mutex_lock(&s->box.lock); /* from here on it may break, or be silent */
    s->box.sent = s->box.is_open ? s->box.sent : 0;
    s->box.is_open = true;
    pthread_mutex_unlock(&s->box.lock);
    ranks_meet(self);
    return comm;
}

float hosts_mean(const scene *s, int world_size, size_t i, int step)
{
    float total = 0;
    for (int h = 0; h < s->host_count; ++h) {
        float sum = 0;
        bool first = true;
        for (int r = 0; r < world_size; ++r) {
            if (s->host_of[r] != h)
                continue;
            sum = first ? ranks_value(r, i, step) : sum + ranks_value(r, i, step);
            first = false;
        }
        total = h == 0 ? sum : total + sum;
    }
    return total * (float)(1.0 / world_size);
}

void hosts_run(rank_body *body, const int *host_of, int world_size, const sw_slices *slices,
               hosts_wire wire)
{
    scene s = {.host_of = host_of,
               .slices = slices,
               .timeout_ns = (wire.silent ? INT64_C(300) : INT64_C(30000)) * 1000000,
               .box = {.wire = wire}};
    sw_error err;
    pthread_mutex_init(&s.box.lock, NULL);
    pthread_cond_init(&s.box.changed, NULL);
    for (int r = 0; r < world_size; ++r)
        s.host_count = host_of[r] >= s.host_count ? host_of[r] + 1 : s.host_count;
    for (int h = 0; h < s.host_count; ++h)
        check(sw_local_group_create(size_of_host(&s, h, world_size), &s.hosts[h], &err) == SW_OK,
              "a host");
    ranks_run_bare(body, world_size, &s);
    for (int h = 0; h < s.host_count; ++h)
        sw_local_group_destroy(s.hosts[h]);
    for (int i = 0; i < HOSTS_BOX; ++i)
        free(s.box.messages[i].data);
    for (int r = 0; r < world_size && s.host_count > 1; ++r)
        check(s.box.released[r], "the wire of rank %d was released", r);
    while (s.box.works) {
        pending_work *next = s.box.works->next;
        free(s.box.works);
        s.box.works = next;
    }
    pthread_cond_destroy(&s.box.changed);
    pthread_mutex_destroy(&s.box.lock);
}
