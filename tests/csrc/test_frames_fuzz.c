/* test_frames_fuzz.c - messages between hosts of any bytes: descriptions of operations, the frames
 * of carriers, end messages and packets. They are refused with a sentence, or what they say holds.
 *
 * A carrier is made without its thread. It writes its own frame, and gets back what it wrote, as if
 * the other host had sent it, after the changes of the input's script (fuzz.h). So most of an input
 * is valid, and each change reaches the code that reads it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "comm/hier_carrier_state.h"
#include "fuzz.h"
#include "kernels/compress_kernels.h"
#include "kernels/crc32c.h"
#include "kernels/kernels.h"

enum {
    HOSTS_MAX = 5,
    HEAD_BYTES = 32, /* of a frame: its `bytes`, `state` and `host`, then the part's first rank */
    AT_BYTES = 4,
    AT_STATE = 8,
    AT_HOST = 20,
    AT_RANK = HEAD_BYTES + 4,
    NUMEL = 6,
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static bool is_told(const sw_error *err)
{
    return err->status > SW_OK && err->status <= SW_E_DEVICE &&
           memchr(err->message, '\0', sizeof err->message);
}

/* ---- parts ---- */

static void try_part(fuzz_script *script)
{
    sw_part part, again;
    sw_descriptor descriptor;
    sw_op op = {.kind = SW_OP_ALL_REDUCE, .label = "a bucket", .numel = 64, .round = 2, .step = 1};
    uint8_t bytes[SW_PART_MOST_BYTES] = {0}, written[SW_PART_MOST_BYTES];
    size_t used, used_again;
    sw_error err;
    sw_descriptor_fill(&descriptor, &op, SW_FORM_POOL);
    sw_part_begin(&part, 1, &descriptor, 8);
    descriptor.numel += fuzz_take(script) % 2;
    sw_part_begin(&again, 2, &descriptor, 8);
    sw_part_merge(&part, &again);
    size_t size = fuzz_edit(script, 4, bytes, sw_part_write(&part, bytes), sizeof bytes);
    uint8_t *exact = malloc(size + 1);
    if (!exact)
        return;
    exact = sw_size_max(size, 1) ? realloc(exact, size ? size : 1) : exact;
    memcpy(exact, bytes, size);
    if (sw_part_read(&part, exact, size, &used)) {
        fuzz_require(used <= size && part.lowest.rank >= 0, "a part longer than its bytes");
        fuzz_require(sw_part_check(&part, 3, &err) == SW_OK || is_told(&err), "a dispute");
        fuzz_require(sw_part_read(&again, written, sw_part_write(&part, written), &used_again),
                     "a part that is written is read");
        sw_part_merge(&again, &part);
        (void)!sw_part_check(&again, 3, &err);
    }
    free(exact);
}

/* ---- packets ---- */

static void try_packet(fuzz_script *script)
{
    const sw_kernel_table *tables[8];
    size_t count = sw_kernels_available(tables, 8), numel = 1 + fuzz_take(script), used = 0;
    size_t most = sw_packet_most_bytes(numel), outcome = 0;
    float *source = calloc(numel, sizeof *source), *out = calloc(numel, sizeof *out);
    uint8_t *packet = malloc(most);
    sw_error err;
    if (!source || !out || !packet)
        exit(1);
    for (size_t i = 0; i < numel; ++i)
        source[i] = i % 7 ? (float)i * 0.01f : i % 2 ? 1e30f : 0.0f;
    size_t size = sw_packet_fill(packet, source, numel);
    fuzz_require(sw_packet_open(out, packet, numel, &used, &err) == SW_OK && used == size &&
                     memcmp(out, source, numel * sizeof *out) == 0,
                 "a packet opens");
    (void)fuzz_edit(script, 6, packet, size, most);
    if (sw_packet_open(out, packet, numel, &used, &err) == SW_OK)
        fuzz_require(used <= most, "a packet larger than the most");
    else
        fuzz_require(err.status == SW_E_COMM && is_told(&err), "a packet is refused");
    for (size_t t = 0; t < count; ++t) { /* the record alone, not one byte beyond */
        uint64_t bytes = used > SW_PACKET_HEAD_BYTES ? used - SW_PACKET_HEAD_BYTES : 1;
        uint8_t *record = malloc(bytes);
        if (!record)
            exit(1);
        memcpy(record, packet + SW_PACKET_HEAD_BYTES, sw_size_min(bytes, most - 8));
        bool is_read = tables[t]->compress->exact_unpack(source, record, bytes, numel);
        outcome += is_read;
        free(record);
    }
    fuzz_require(outcome == 0 || outcome == count, "tables agree on a record");
    free(source);
    free(out);
    free(packet);
}

/* ---- a carrier without a thread ---- */

typedef struct scene {
    sw_hier hier;
    sw_carrier carrier;
    sw_fabric inside;
    sw_page *page; /* aligned */
    sw_arena pages, memory;
    uint8_t *pages_base[1], *memory_base[HOSTS_MAX];
    int members[1];
    fuzz_script *script;
    sw_transfer *receives;
} scene;

typedef struct receive { /* a work of the wire: it fills the buffer when it is waited for */
    scene *of;
    int rank;
    uint32_t message;
    uint8_t *data; /* NULL: a send */
    size_t size_bytes;
} receive;

static sw_status begin(void *context, int rank, uint32_t tag, void *data, size_t size_bytes,
                       void **work)
{
    receive *made = malloc(sizeof *made);
    if (!made)
        exit(1);
    *made = (receive){context, rank, tag >> 28, data, size_bytes};
    *work = made;
    return SW_OK;
}

static sw_status wire_send(void *context, int rank, uint32_t tag, const void *data,
                           size_t size_bytes, void **work, sw_error *err)
{
    volatile uint8_t last = size_bytes ? ((const uint8_t *)data)[size_bytes - 1] : 0;
    (void)last;
    (void)err;
    return begin(context, rank, tag, NULL, size_bytes, work);
}

static sw_status wire_receive(void *context, int rank, uint32_t tag, void *data, size_t size_bytes,
                              void **work, sw_error *err)
{
    (void)err;
    return begin(context, rank, tag, data, size_bytes, work);
}

static void put(uint8_t *frame, size_t at, uint32_t value)
{
    memcpy(frame + at, &value, sizeof value);
}

/* What the host before hop `at` would have sent, changed. */
static void receive_frame(scene *s, int at, uint8_t *in)
{
    const sw_hop *hop = &s->hier.spread.hops[at];
    const uint8_t *own = s->carrier.hops[at].out;
    size_t room = s->carrier.frame_bytes;
    uint8_t *frame = calloc(1, room);
    uint32_t size;
    if (!frame)
        exit(1);
    memcpy(&size, own + AT_BYTES, sizeof size);
    memcpy(frame, own, size);
    put(frame, AT_HOST, (uint32_t)hop->from);
    put(frame, AT_RANK, (uint32_t)sw_host_carrier(&s->hier.map, hop->from));
    uint8_t form = fuzz_take(s->script);
    if (form % 8 == 1) { /* it ends */
        sw_error reason;
        sw_error_set(&reason, SW_E_MEMORY, 3, "no memory there");
        put(frame, AT_STATE, SW_MEMBER_ENDED);
        memcpy(frame + HEAD_BYTES, &reason, sizeof reason);
        size = HEAD_BYTES + sizeof reason;
        put(frame, AT_BYTES, size);
    }
    size_t made = fuzz_edit(s->script, form >> 3 & 3, frame, size, room);
    if (form >> 5 & 1) /* a cut, or a longer one, that says so */
        put(frame, AT_BYTES, (uint32_t)made);
    memcpy(in, frame, room);
    free(frame);
}

static sw_status wire_wait(void *context, void *work, sw_error *err)
{
    scene *s = context;
    receive *of = work;
    (void)err;
    if (of->data && of->message == SW_MESSAGE_FRAME) {
        for (int i = 0; i < s->hier.spread.hop_count; ++i)
            if (of->data == s->carrier.hops[i].in)
                receive_frame(s, i, of->data);
    } else if (of->data) {
        for (size_t i = 0; i < of->size_bytes; ++i)
            of->data[i] = fuzz_take(s->script);
    }
    free(of);
    return SW_OK;
}

static void wire_drop(void *context, void *work)
{
    (void)context;
    free(work);
}

static void *room(size_t count, size_t size)
{
    void *made = calloc(count, size);
    if (!made)
        exit(1);
    return made;
}

/* The operation that all hosts have posted: one of those whose data is in frames, or none. */
static sw_op operation_of(scene *s, uint8_t form)
{
    sw_op op = {.dtype = SW_DTYPE_FLOAT32, .numel = NUMEL, .label = "an operation"};
    op.kind = form % 5 == 0   ? SW_OP_BARRIER
              : form % 5 == 1 ? SW_OP_ALL_GATHER
              : form % 5 == 2 ? SW_OP_BROADCAST
                              : SW_OP_ALL_REDUCE;
    op.redop = form % 5 == 4 ? SW_REDOP_MAX : SW_REDOP_MEAN;
    if (op.kind == SW_OP_ALL_GATHER || op.kind == SW_OP_BROADCAST) {
        op.dtype = SW_DTYPE_UINT8;
        op.numel = form >> 4 & 1 ? SW_HIER_INLINE_BYTES : 24; /* beside frames, or in them */
    }
    op.root = form % s->hier.map.host_count;
    return op;
}

static void scene_init(scene *s, fuzz_script *script, int hosts, int host, int radix, uint8_t form)
{
    static const sw_wire plain = {
        .send = wire_send, .receive = wire_receive, .wait = wire_wait, .drop = wire_drop};
    sw_wire *wire = room(1, sizeof *wire);
    int host_of[HOSTS_MAX];
    sw_hier *hier = &s->hier;
    sw_carrier *carrier = &s->carrier;
    sw_error err;
    for (int g = 0; g < hosts; ++g)
        host_of[g] = g;
    *wire = plain;
    wire->context = s;
    s->script = script;
    if (sw_host_map_init(&hier->map, host_of, hosts, &err) != SW_OK ||
        sw_dissemination_init(&hier->spread, host, hosts, radix, &err) != SW_OK ||
        posix_memalign((void **)&s->page, 128, sizeof *s->page) != 0)
        exit(1);
    memset(s->page, 0, sizeof *s->page);
    s->members[0] = host;
    s->pages_base[0] = (uint8_t *)s->page;
    s->pages = (sw_arena){.base = s->pages_base, .size_bytes = sizeof *s->page, .world_size = 1};
    hier->comm.world_size = hosts;
    hier->comm.rank = host;
    hier->inside = &s->inside.comm;
    hier->host = host;
    hier->local_count = 1;
    hier->members = s->members;
    hier->pages = &s->pages;
    hier->owner_pid = -1;
    pthread_mutex_init(&hier->lock, NULL);
    const sw_op op = operation_of(s, form);
    size_t bytes = sw_size_max(op.numel * sw_dtype_size_bytes(op.dtype), 64);
    for (int g = 0; g < hosts; ++g)
        s->memory_base[g] = NULL;
    s->memory_base[host] = room((size_t)hosts, bytes); /* a mirror of all ranks, or a bounce */
    s->memory = (sw_arena){.base = s->memory_base, .size_bytes = bytes, .world_size = hosts};
    hier->mirror = &s->memory;
    hier->pending[1] = (sw_hier_pending){.op = op, .arena = &s->memory};
    sw_descriptor_fill(&s->page->ring[1], &op, SW_FORM_SLOT);
    atomic_store(&s->page->posted, 1);
    carrier->hier = hier;
    carrier->bridge = (sw_bridge){.wire = wire,
                                  .map = &hier->map,
                                  .host = host,
                                  .sent = &s->page->sent,
                                  .received = &s->page->received,
                                  .awaiting = &s->page->awaiting};
    carrier->frame_bytes = sw_carrier_frame_bytes(carrier);
    carrier->hops = room((size_t)hier->spread.hop_count, sizeof *carrier->hops);
    carrier->peers = room((size_t)hier->spread.peer_count, sizeof *carrier->peers);
    carrier->next.memory = room(1, 1); /* reserved to the byte: a sanitizer sees a write beyond */
    carrier->next.capacity = 1;
    carrier->next.packs = room((size_t)hosts / 8 + 1, 1);
    carrier->hosts = room((size_t)hosts, sizeof *carrier->hosts);
    carrier->source = room((size_t)hosts, sizeof *carrier->source);
    carrier->destination = room((size_t)hosts, sizeof *carrier->destination);
    for (int i = 0; i < hier->spread.hop_count; ++i) {
        carrier->hops[i].out = room(1, carrier->frame_bytes);
        carrier->hops[i].in = room(1, carrier->frame_bytes);
    }
}

static void scene_fini(scene *s)
{
    sw_carrier *carrier = &s->carrier;
    for (int i = 0; i < s->hier.spread.hop_count; ++i) {
        sw_carrier_hop *hop = &carrier->hops[i];
        sw_transfer *left[] = {&hop->frame_out, &hop->frame_in, &hop->payload_out,
                               &hop->payload_in};
        for (size_t k = 0; k < sizeof left / sizeof *left; ++k)
            sw_bridge_drop(&carrier->bridge, left[k]);
        free(hop->out);
        free(hop->in);
    }
    free((void *)(uintptr_t)carrier->bridge.wire);
    free(carrier->hops);
    free(carrier->peers);
    free(carrier->next.packs);
    free(carrier->next.memory);
    free(carrier->hosts);
    free(carrier->source);
    free(carrier->destination);
    free(s->memory_base[s->hier.host]);
    free(s->page);
    pthread_mutex_destroy(&s->hier.lock);
    sw_host_map_fini(&s->hier.map);
    sw_dissemination_fini(&s->hier.spread);
    free(s);
}

static void try_frames(fuzz_script *script)
{
    int hosts = 2 + fuzz_take(script) % (HOSTS_MAX - 1), host = fuzz_take(script) % hosts;
    int radix = 2 + fuzz_take(script) % 4;
    uint32_t count = 0;
    sw_error err = {0};
    scene *s = room(1, sizeof *s);
    scene_init(s, script, hosts, host, radix, fuzz_take(script));
    sw_status status = sw_carrier_expect_frames(&s->carrier, &err);
    if (status == SW_OK)
        status = sw_carrier_agree(&s->carrier, 1, &count, &err);
    fuzz_require(status == SW_OK ? count == 1 : err.status == status && is_told(&err),
                 "carriers agree on the operation, or a sentence says why not");
    scene_fini(s);
}

/* ---- end messages ---- */

static void try_end(fuzz_script *script)
{
    scene *s = room(1, sizeof *s);
    sw_error reason;
    scene_init(s, script, 2, 0, 2, 0);
    sw_end_message *end = &s->carrier.peers[0].end[fuzz_take(script) % SW_HIER_ENDS];
    end->magic = 0x5357454f;
    sw_error_set(&end->reason, SW_E_OS, 5, "its disk failed");
    (void)fuzz_edit(script, 3, (uint8_t *)end, sizeof *end, sizeof *end);
    if (fuzz_take(script) % 8) /* the sender's checksum is right */
        end->crc = sw_crc32c(0, end, offsetof(sw_end_message, crc));
    if (sw_carrier_received_end(&s->carrier, 0, &reason))
        fuzz_require(is_told(&reason), "the reason of an end");
    scene_fini(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_script script = {data, size};
    static void (*const tries[])(fuzz_script *) = {try_part,   try_packet, try_end,
                                                   try_frames, try_frames, try_frames};
    tries[fuzz_take(&script) % (sizeof tries / sizeof *tries)](&script);
    return 0;
}

#ifndef SW_LIBFUZZER
int main(int argc, char **argv)
{
    static const fuzz_seed seeds[] = {FUZZ_SEED("\x00\x01\x08\x00\x02\x07"),
                                      FUZZ_SEED("\x01\x50\x08\x00\x02\x07"),
                                      FUZZ_SEED("\x02\x00\x04\x00\x02\x05\x01"),
                                      FUZZ_SEED("\x03\x00\x00\x00\x00\x08\x04\x00"),
                                      FUZZ_SEED("\x04\x02\x01\x00\x01\x01\x00\x00"),
                                      FUZZ_SEED("\x05\x03\x01\x03\x13\x08\x0c")};
    const fuzz_plan plan = {.target = LLVMFuzzerTestOneInput,
                            .seeds = seeds,
                            .seed_count = sizeof seeds / sizeof *seeds,
                            .quick = 40000,
                            .thorough = 300000};
    return fuzz_main(argc, argv, &plan);
}
#endif
